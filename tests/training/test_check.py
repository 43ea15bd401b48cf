"""`onnxamp check` says of a model what `build` does with it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from onnxamp import training
from onnxamp.cli import cli


def model(inputs="float[n, 8] x", shape="float[n, 3] y", drop=""):
    """One weight is an initializer, one lies in a Constant node."""
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({shape} ) {{ h = MatMul(x, w1) a = Relu(h) {drop} }}'
    proto = onnx.parser.parse_model(text.replace(" ) {", ") {"))
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((8, 16)).astype(np.float32))
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w1"], value=weight))
    proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((16, 3)).astype(np.float32), "w2"))
    for index, node in enumerate(proto.graph.node):
        node.name = f"n{index}"
    return proto


@pytest.fixture
def check(tmp_path):
    def run(proto):
        onnx.save(proto, tmp_path / "model.onnx")
        result = CliRunner().invoke(cli, ["check", str(tmp_path / "model.onnx"), "--json"], standalone_mode=False)
        return json.loads(result.output)

    return run


def test_the_parameters_and_bytes_are_those_of_build(check):
    proto = model(drop="y = MatMul(a, w2)")
    found = check(proto)
    names = {row["name"] for row in found["trainable"]}
    assert names == {"w1", "w2"}
    assert list(found["memory"]) == ["O0", "OD", "O1", "O2", "O3"]
    for level, row in found["memory"].items():
        bundle = training.build(proto, loss="cross_entropy", optimizer="adamw", level=level)
        tensors = bundle.manifest.tensors
        assert {tensor.name for tensor in tensors if tensor.arena == "master"} == names
        size = {"master": 4, "gradient": 4, "exp_avg": 4, "exp_avg_sq": 4, "low": 2}
        total = sum(size[t.arena] * int(np.prod(t.shape)) for t in tensors if t.name in names and t.arena in size)
        assert row["state"] == total, level


def test_dropout_whose_masks_do_not_follow_rows(check):
    free = model(drop="d = Dropout(a) y = MatMul(d, w2)")
    assert check(free)["dropout"] == []
    fixed = model("float[4, 8] x", "float[4, 3] y", "d = Dropout(a) y = MatMul(d, w2)")
    (remark,) = check(fixed)["dropout"]
    assert "taken for rows" in remark
    turned = model(
        "float[n, 5, 8] x", "float[5, n, 3] y", "t = Transpose<perm = [1, 0, 2]>(a) d = Dropout(t) y = MatMul(d, w2)"
    )
    (remark,) = check(turned)["dropout"]
    assert "n4" in remark
    assert "does not count rows" in remark
