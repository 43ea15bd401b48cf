"""Mutate small models and convert them: each ends in a valid model or in one sentence of the right class, and no file outside is read.

    python benchmarks/fuzz.py MODEL_OR_FOLDER... [--count 5000] [--seed 0] [--only N]

A mutation changes one to three places of the protobuf message, or bytes of the file. Checked of every one: `convert` returns or raises an
`AmpError` that is no defect of onnxamp and reads as one sentence; what it returns passes `onnx.checker` if the source did. Prints what
was found; exit code 1 if something was. `--only N` runs mutation N alone, with its traceback.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import sys
import tempfile
import traceback

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import judge
import onnx
from onnx import TensorProto

import onnxamp
from onnxamp.errors import AmpError, InternalError
from onnxamp.model import io

SECRET = b"this must not be read 0123456789"
OPERATORS = [
    "Relu",
    "Add",
    "MatMul",
    "Cast",
    "Softmax",
    "Identity",
    "If",
    "Loop",
    "Resize",
    "Nothing",
    "Constant",
    "Split",
]


def mutate(model: onnx.ModelProto, rng: random.Random) -> str:
    """Change one place of `model`; what was changed."""
    graph = rng.choice(list(graphs(model.graph)))
    nodes, tensors = list(graph.node), list(graph.initializer)
    change = rng.choice(CHANGES)
    try:
        change(model, graph, nodes, tensors, rng)
    except (IndexError, ValueError, TypeError):
        return "nothing"
    return change.__name__


def graphs(graph: onnx.GraphProto):
    """The graph and all bodies inside."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def drop_node(model, graph, nodes, tensors, rng):
    graph.node.remove(rng.choice(nodes))


def repeat_node(model, graph, nodes, tensors, rng):
    graph.node.add().CopyFrom(rng.choice(nodes))


def shuffle_nodes(model, graph, nodes, tensors, rng):
    rng.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def other_operator(model, graph, nodes, tensors, rng):
    rng.choice(nodes).op_type = rng.choice(OPERATORS)


def other_domain(model, graph, nodes, tensors, rng):
    rng.choice(nodes).domain = rng.choice(["", "ai.onnx", "com.microsoft", "nowhere", "ai.onnx.ml"])


def rename_operand(model, graph, nodes, tensors, rng):
    node = rng.choice(nodes)
    others = [name for other in nodes for name in (*other.input, *other.output)]
    node.input[rng.randrange(len(node.input))] = rng.choice([*others, "", "lost"])


def rename_result(model, graph, nodes, tensors, rng):
    node = rng.choice(nodes)
    others = [name for other in nodes for name in (*other.input, *other.output)]
    node.output[rng.randrange(len(node.output))] = rng.choice([*others, "", "new"])


def fewer_operands(model, graph, nodes, tensors, rng):
    del rng.choice([node for node in nodes if node.input]).input[-1]


def more_operands(model, graph, nodes, tensors, rng):
    node = rng.choice(nodes)
    node.input.append(node.input[0])


def drop_attribute(model, graph, nodes, tensors, rng):
    node = rng.choice([node for node in nodes if node.attribute])
    node.attribute.remove(rng.choice(list(node.attribute)))


def odd_attribute(model, graph, nodes, tensors, rng):
    attribute = rng.choice([attribute for node in nodes for attribute in node.attribute])
    if rng.random() < 0.5:
        attribute.i = rng.choice([-1, 0, 1, 7, 10, 16, 99, 2**40])
    else:
        attribute.type = rng.randrange(16)


def other_type(model, graph, nodes, tensors, rng):
    value = rng.choice([*graph.input, *graph.output, *graph.value_info])
    value.type.tensor_type.elem_type = rng.randrange(26)


def no_type(model, graph, nodes, tensors, rng):
    rng.choice([*graph.input, *graph.output]).ClearField("type")


def other_shape(model, graph, nodes, tensors, rng):
    value = rng.choice([*graph.input, *graph.output, *graph.value_info])
    dims = value.type.tensor_type.shape.dim
    if rng.random() < 0.3:
        value.type.tensor_type.ClearField("shape")
    else:
        rng.choice(list(dims)).dim_value = rng.choice([-1, 0, 1, 3, 2**31, 2**62])


def tensor_shape(model, graph, nodes, tensors, rng):
    tensor = rng.choice(tensors)
    tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([-1, 0, 1, 5, 2**31, 2**62])


def tensor_type(model, graph, nodes, tensors, rng):
    rng.choice(tensors).data_type = rng.randrange(28)


def tensor_data(model, graph, nodes, tensors, rng):
    tensor = rng.choice(tensors)
    data = bytearray(tensor.raw_data)
    tensor.raw_data = bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.5 else rng.randbytes(len(data))


def tensor_outside(model, graph, nodes, tensors, rng):
    tensor = rng.choice(tensors)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    place = rng.choice(["../secret", "/etc/hostname", "a/../../secret", "secret", "", ".", "missing"])
    tensor.external_data.add(key="location", value=place)
    for key in rng.sample(["offset", "length"], rng.randrange(3)):
        tensor.external_data.add(key=key, value=rng.choice(["0", "-1", "4096", "x", str(2**63)]))


def rename_tensor(model, graph, nodes, tensors, rng):
    rng.choice(tensors).name = rng.choice([tensor.name for tensor in tensors] + ["", "new", nodes[0].output[0]])


def drop_tensor(model, graph, nodes, tensors, rng):
    graph.initializer.remove(rng.choice(tensors))


def drop_input(model, graph, nodes, tensors, rng):
    graph.input.remove(rng.choice(list(graph.input)))


def other_output(model, graph, nodes, tensors, rng):
    rng.choice(list(graph.output)).name = rng.choice([name for node in nodes for name in (*node.input, *node.output)])


def opset(model, graph, nodes, tensors, rng):
    rng.choice(list(model.opset_import)).version = rng.choice([-1, 0, 1, 6, 9, 11, 13, 17, 22, 99])


def no_opset(model, graph, nodes, tensors, rng):
    del model.opset_import[:]


def ir_version(model, graph, nodes, tensors, rng):
    model.ir_version = rng.choice([0, 1, 3, 8, 13, 99])


def metadata(model, graph, nodes, tensors, rng):
    place = rng.choice([model, *nodes])
    key = rng.choice(["precision", "code", "evidence", "cast", "source", "version", "options", "summary", "level"])
    place.metadata_props.add(
        key=f"onnxamp.{key}", value=rng.choice(["fp16", "low", "{", "[]", "null", "O2", "AMP002", ""])
    )


PARAMETERS = ("model", "graph", "nodes", "tensors", "rng")
CHANGES = [
    value
    for value in list(globals().values())
    if getattr(value, "__code__", None) is not None and value.__code__.co_varnames[:5] == PARAMETERS
]


def one(number: int, seed: int, sources: list[pathlib.Path], folder: pathlib.Path) -> tuple[str, str]:
    """Run mutation `number`: what came of it (``valid``, ``refused`` or a finding), and the words for it."""
    rng = random.Random(seed * 1_000_003 + number)
    source = rng.choice(sources)
    path = folder / "inner" / "m.onnx"
    if rng.random() < 0.2:
        data = bytearray(source.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        what = "bytes"
    else:
        model = onnx.load(source)
        what = ", ".join(mutate(model, rng) for _ in range(rng.randrange(1, 4)))
        path.write_bytes(model.SerializeToString())
    level, dtype = rng.choice(["O1", "O2", "O3"]), rng.choice(["fp16", "bf16"])
    what = f"{number}: {source.name} {level} {dtype} ({what})"
    try:
        result = onnxamp.convert(path, level=level, dtype=dtype, target=rng.choice(["ort-cuda", "any"]))
    except AmpError as problem:
        text = str(problem)
        if isinstance(problem, InternalError) or not text.endswith(".") or "\n" in text:
            return "bad error", f"{what}: {type(problem).__name__} {text[:200]}"
        return "refused", what
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{pathlib.Path(place.filename).name}:{place.lineno}"
        return "traceback", f"{what}: {type(problem).__name__} at {where}: {str(problem)[:150]}"
    try:
        data = io.to_proto(result.model).SerializeToString()
    except AmpError:
        return "refused", what
    except Exception as problem:
        return "traceback", f"{what}: on saving, {type(problem).__name__}: {str(problem)[:150]}"
    if SECRET in data:
        return "read outside", what
    out = folder / "inner" / "out.onnx"
    out.write_bytes(data)
    if judge.valid(path) and not judge.valid(out):
        return "invalid output", what
    return "valid", what


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("models", nargs="+", type=pathlib.Path)
    arguments.add_argument("--count", type=int, default=5000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", type=int)
    chosen = arguments.parse_args()
    sources = sorted(path for place in chosen.models for path in ([place] if place.is_file() else place.glob("*.onnx")))
    sources = [path for path in sources if path.stat().st_size < 200_000]
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "inner").mkdir()
        (folder / "secret").write_bytes(SECRET)
        (folder / "inner" / "secret").write_bytes(b"0" * 4096)
        for number in range(chosen.count) if chosen.only is None else [chosen.only]:
            outcome, words = one(number, chosen.seed, sources, folder)
            found[outcome] += 1
            if outcome not in ("valid", "refused"):
                print(f"{outcome} {words}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items())))
    return int(bool(set(found) - {"valid", "refused"}))


if __name__ == "__main__":
    sys.exit(main())
