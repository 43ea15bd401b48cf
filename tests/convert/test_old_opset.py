"""Opset 5, where a Cast names its type in words, through everything that reads or writes a Cast."""

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnxamp
from onnxamp.errors import UnsupportedError, UsageError


@pytest.fixture
def source() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["": 5]> g (float[2,4] x, float[4,4] w) => (float[2,4] y) { h = MatMul(x, w) y = MatMul(h, w) }'
    )
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) / 4
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("form", ["path", "proto", "ir"])
def test_a_cast_that_names_its_type(source: onnx.ModelProto, tmp_path: pathlib.Path, form: str) -> None:
    onnxamp.convert(source, level="O1").save(tmp_path / "low.onnx")
    low = onnx.load(tmp_path / "low.onnx")
    onnx.checker.check_model(low, full_check=True)
    given = {"path": tmp_path / "low.onnx", "proto": low, "ir": ir.from_proto(low)}[form]
    emulated = ir.to_proto(onnxamp.emulate(given))
    onnx.checker.check_model(emulated, full_check=True)
    assert {node.attribute[0].s for node in emulated.graph.node if node.op_type == "Cast"} == {b"FLOAT", b"FLOAT16"}
    assert len(onnxamp.diff(source, given).casts) == sum(node.op_type == "Cast" for node in low.graph.node) > 0
    with pytest.raises(UnsupportedError, match="casts from opset 6 on"):
        onnxamp.verify(source, given)


@pytest.mark.parametrize("call", [onnxamp.convert, onnxamp.emulate])
def test_what_is_no_model(call: object) -> None:
    with pytest.raises(UsageError, match="not a NoneType"):
        call(None)  # type: ignore[operator]
