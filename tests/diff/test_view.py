"""The page of a diff, read from its data."""

from __future__ import annotations

import base64
import collections
import json
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxamp import convert
from onnxamp.comparison import conversion_page, diff_page
from onnxamp.comparison.compare import Comparison
from onnxamp.comparison.measure import measured
from onnxamp.comparison.view import page_of

MODELS = pathlib.Path(__file__).parents[2] / "models"


def items(text: str, view: str = "g0") -> Iterator[dict[str, Any]]:
    """All boxes of a view, of folds and bodies too."""
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed is not None
    todo = [json.loads(zlib.decompress(base64.b64decode(packed.group(1))))[view]["graph"]]
    while todo:
        for item in todo.pop()["items"]:
            if "fold" in item:
                todo.append(item["level"])
            else:
                yield item
                todo += [level for _, level in item.get("bodies", [])]


@pytest.mark.parametrize("name", ["gpt", "loop"])
def test_every_node_is_a_box_once(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    result = convert(path, target="any")
    boxes = list(items(conversion_page(path, result)))
    wanted = [n.name for n in result.model.graph.all_nodes() if n.op_type != "Constant"]
    ports = [b for b in boxes if b.get("io")]
    assert sorted(b["name"] for b in boxes if not b.get("io")) == sorted(wanted)
    assert ports
    ids = [b.get("id", b["name"]) for b in boxes]
    assert len(set(ids)) == len(ids)
    casts = [b for b in boxes if b.get("cast")]
    assert len(casts) == sum("onnxamp.cast" in n.metadata_props for n in result.model.graph.all_nodes())
    assert all(b["s"] == "added" for b in casts)
    assert all(b["rule"].startswith("AMP") for b in boxes if b.get("s") == "retyped")


def test_nodes_of_one_model_only_and_hostile_names() -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [bad]) for n in "xy"]

    def model(ops: list[str]) -> onnx.ModelProto:
        names = ["x", *(f"v{op}" for op in ops[:-1]), "y"]
        nodes = [helper.make_node(op, [names[k]], [names[k + 1]], bad + op) for k, op in enumerate(ops)]
        graph = helper.make_graph(nodes, bad, info[:1], info[1:])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    text = diff_page(model(["Relu", "Exp", "Tanh"]), model(["Relu", "Neg", "Tanh"]))
    assert "<img" not in text
    statuses = {b["name"].removeprefix(bad): b.get("s", "same") for b in items(text) if not b.get("io")}
    assert statuses == {"Relu": "same", "Exp": "removed", "Neg": "added", "Tanh": "same"}


def test_numbers_belong_to_the_node_that_was_measured() -> None:
    """Nodes without names, a body's node named as one of the main graph, and the worst of two results."""
    text = """
        g (float[4] x, bool c) => (float[4] y, float[4] z, float[4] w) {
            a = Exp(x)
            p, q = Split<num_outputs=2, axis=0>(a)
            y = Concat<axis=0>(q, p)
            z = Mul(y, y)
            w = If(c) <then_branch = t () => (float[4] t1) { t1 = Mul(y, x) },
                       else_branch = e () => (float[4] e1) { e1 = Mul(x, x) }>
        }
    """
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["": 18]>' + text)
    for node in model.graph.node[-1].attribute[0].g.node:
        node.name = "z"
    model.graph.node[3].name = "z"
    comparison = Comparison(model, ir.to_proto(convert(model, target="any").model))
    data = {"x": np.full(4, 1.3, np.float32), "c": np.array(True)}
    result = measured(comparison, comparison.result(), data)
    boxes = [box for box in items(page_of(comparison, result)) if not box.get("io") and not box.get("cast")]
    assert collections.Counter((box["name"], "heat" in box) for box in boxes) == {
        ("a", True): 1, ("p", True): 1, ("y", True): 1, ("z", True): 1, ("w", True): 1, ("z", False): 1, ("e1", False): 1,
    }  # fmt: skip
