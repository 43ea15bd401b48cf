"""Time `onnxamp diff` on a large pair: a chain of blocks and what onnxamp converts it to.

    python benchmarks/diff.py [--nodes 20000] [--repeat 3] [--json FILE] [--keep PAGE]

Prints the wall time (the best of the runs) of loading and matching, of the records, of the JSON, Markdown and page, the page's size, and
how long headless Chromium takes from opening the page until it is ready (left out where there is no Chromium). Then a person's way
through the page is gone, as the tests go it on small pages: search, step, open and close folds, light and dark, wide and narrow; it
stops at an error on the console, a request, or anything wider than the window.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile
import time

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxamp
from onnxamp.comparison import text
from onnxamp.comparison.compare import Comparison
from onnxamp.comparison.view import page_of

BROWSER = pathlib.Path(__file__).parents[1] / "tests" / "report" / "conftest.py"


def chain(nodes: int, width: int = 8) -> onnx.ModelProto:
    """Blocks of MatMul, Add, Softmax, Relu and a residual Add, one after the other."""
    made, value = [], "x"
    for k in range(nodes // 5):
        name = f"/layer.{k}/"
        steps = [
            ("MatMul", [value, "w"]),
            ("Add", [f"{name}0", "b"]),
            ("Softmax", [f"{name}1"]),
            ("Relu", [f"{name}2"]),
        ]
        steps.append(("Add", [f"{name}3", value]))
        made += [helper.make_node(op, reads, [f"{name}{i}"], f"{name}{op}_{i}") for i, (op, reads) in enumerate(steps)]
        value = f"{name}4"
    made[-1].output[0] = "y"
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in "xy"]
    weights = [
        numpy_helper.from_array(np.eye(width, dtype=np.float32), "w"),
        numpy_helper.from_array(np.ones(width, np.float32), "b"),
    ]
    graph = helper.make_graph(made, "chain", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@contextlib.contextmanager
def browser():
    """The tests' Chromium; None without one."""
    spec = importlib.util.spec_from_file_location("browser", BROWSER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.CHROMIUM is None:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = module.Browser(module.CHROMIUM, profile)
        yield made
        made.close()


def opened(page: pathlib.Path) -> float | None:
    """Seconds from opening the page until its script says that it is ready; None without Chromium."""
    with browser() as chromium:
        if chromium is None:
            return None
        started = time.perf_counter()
        chromium.ready(page)
        return time.perf_counter() - started


def walked(page: pathlib.Path, name: str) -> int:
    """How many ways through the page were gone."""
    with browser() as chromium:
        if chromium is None:
            return 0
        ways = [(width, dark) for width in (1280, 400) for dark in (False, True)]
        for width, dark in ways:
            chromium.walk_through(page, name, width=width, dark=dark)
        return len(ways)


def measure(folder: pathlib.Path) -> dict[str, float | None]:
    """One run over the pair in `folder`."""
    times: dict[str, float | None] = {}

    def step(name: str, call):
        started = time.perf_counter()
        result = call()
        times[name] = time.perf_counter() - started
        return result

    comparison = step("load and match", lambda: Comparison(folder / "a.onnx", folder / "b.onnx"))
    result = step("records", comparison.result)
    step("JSON", result.to_json)
    step("Markdown", lambda: text.to_markdown(result))
    page = step("page", lambda: page_of(comparison, result))
    (folder / "page.html").write_text(page, encoding="utf-8")
    times["page opens"] = opened(folder / "page.html")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="write the page here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        onnx.save(chain(arguments.nodes), folder / "a.onnx")
        onnxamp.convert(folder / "a.onnx").save(folder / "b.onnx")
        count = sum(len(onnx.load(folder / name).graph.node) for name in ("a.onnx", "b.onnx"))
        runs = [measure(folder) for _ in range(arguments.repeat)]
        size = (folder / "page.html").stat().st_size
        ways = walked(folder / "page.html", f"/layer.{arguments.nodes // 5 - 1}/Softmax_2")
        if arguments.keep:
            shutil.copy(folder / "page.html", arguments.keep)
    best = {name: None if runs[0][name] is None else min(run[name] for run in runs) for name in runs[0]}
    for name, seconds in best.items():
        print(f"{name:15}", "no Chromium" if seconds is None else f"{seconds:8.2f} s")
    print(f"{'page size':15} {size / 1e6:8.2f} MB; {count:,} nodes in both files")
    print(f"{'ways walked':15} {ways:8}")
    if arguments.json:
        found = {"nodes": arguments.nodes, "nodes_in_both": count, "seconds": best, "page_bytes": size}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
