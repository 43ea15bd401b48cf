"""Time of `convert` by the number of nodes, on graphs made to show a quadratic step.

    python benchmarks/convert_speed.py [--write]

`heavy`: MatMul, Add, Relu, Softmax in a chain. `free`: a chain without heavy node. `fan`: one value with a consumer for each node. Imports
and the making of the graphs are not timed; each figure is processor time, the best of five: what else the machine does can
only add. `--write` puts the table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import platform
import time

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxamp

RESULTS = pathlib.Path(__file__).parent / "results" / "convert_speed.md"


def model(nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto], output: str) -> onnx.ModelProto:
    """A model of [8, 16] values."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [8, 16])], [value(output, TensorProto.FLOAT, [8, 16])], initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def chain(size: int, operators: list[str]) -> onnx.ModelProto:
    """`size` nodes in a row, taking turns among `operators`; MatMul and Add have a weight each."""
    rng = np.random.default_rng(0)
    nodes, initializers, last = [], [], "x"
    for number in range(size):
        kind = operators[number % len(operators)]
        operands = [last]
        if kind in ("MatMul", "Add"):
            shape = (16, 16) if kind == "MatMul" else (16,)
            initializers.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 4, f"w{number}"))
            operands.append(f"w{number}")
        last = f"v{number}"
        nodes.append(helper.make_node(kind, operands, [last], name=f"n{number}"))
    return model(nodes, initializers, last)


def fan(size: int) -> onnx.ModelProto:
    """One MatMul whose result `size` nodes read, half of them in fp32; a Sum of all."""
    weight = numpy_helper.from_array(np.eye(16, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], name="m")]
    for number in range(size):
        nodes.append(helper.make_node(("Exp", "Relu")[number % 2], ["m"], [f"v{number}"], name=f"n{number}"))
    nodes.append(helper.make_node("Sum", [f"v{number}" for number in range(size)], ["y"], name="sum"))
    return model(nodes, [weight], "y")


GRAPHS = {
    "heavy": lambda size: chain(size, ["MatMul", "Add", "Relu", "Softmax"]),
    "free": lambda size: chain(size, ["Add", "Relu", "Neg", "Abs"]),
    "fan": fan,
}


def seconds(source: onnx.ModelProto) -> float:
    """The best of five conversions."""
    times = []
    for _ in range(5):
        gc.collect()  # the model before this one
        start = time.process_time()
        onnxamp.convert(source)
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    lines = ["| graph | 1,000 nodes | 5,000 | 20,000 | 20,000 / 5,000 |", "|---|---|---|---|---|"]
    for name, make in GRAPHS.items():
        times = [seconds(make(size)) for size in (1000, 5000, 20000)]
        lines.append(f"| {name} | {times[0]:.2f} s | {times[1]:.2f} s | {times[2]:.2f} s | {times[2] / times[1]:.1f} |")
        print(lines[-1], flush=True)
    if write:
        head = f"# Time of convert (O2, fp16)\n\n{__doc__.splitlines()[0]}\n\n{platform.machine()}, Python {platform.python_version()}.\n"
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(head + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
