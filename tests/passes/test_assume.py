"""A selection by a known condition becomes its branch, with the same numbers as the selection."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxamp.passes.assume import AssumePass

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[4] a, float[4] b, float s, bool ok) => (float[4] y, float[4] z, float[4] kept, float[4] wide, bool other) {
    sum = Add(a, b)
    difference = Sub(a, b)
    y = Where(ok, sum, difference)
    inner = Where(ok, difference, a)
    z = Mul(inner, y)
    kept = Where(ok, a, b)
    wide = Where(ok, s, b)
    other = Not(ok)
}"""


@pytest.mark.parametrize("value", [True, False])
def test_the_branch_replaces_the_selection(value):
    source = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT))
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(4, np.float32) for name in "ab"} | {"s": np.array(3, np.float32)}
    expected = ReferenceEvaluator(source).run(None, {**feeds, "ok": np.array(value)})
    model = ir.from_proto(source)
    AssumePass("ok", value)(model)
    result = ir.to_proto(model)
    onnx.checker.check_model(result)
    for got, wanted in zip(
        ReferenceEvaluator(result).run(None, {**feeds, "ok": np.array(value)}), expected, strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    # One selection broadcasts a scalar and must stay, so the input stays too.
    assert [node.op_type for node in result.graph.node].count("Where") == 1
    assert [output.name for output in result.graph.output] == ["y", "z", "kept", "wide", "other"]


def test_an_input_that_nobody_reads_any_more_goes():
    text = TEXT.replace("    wide = Where(ok, s, b)\n    other = Not(ok)\n", "").replace(
        ", float[4] wide, bool other", ""
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    AssumePass("ok", True)(model)
    assert [value.name for value in model.graph.inputs] == ["a", "b", "s"]
    assert "Where" not in [node.op_type for node in model.graph]


@pytest.mark.parametrize("value", [True, False])
def test_a_sum_with_a_selected_zero_is_the_other_summand(value):
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[4] a, float[4] b, bool first) => (float[4] y, float[4] z) <float zero = {0}> {
        before = Where(first, zero, a)
        half = Mul(b, b)
        y = Add(before, half)
        inner = Add(half, before)
        z = Neg(inner)
    }"""
    source = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(source)
    AssumePass("first", value)(model)
    result = ir.to_proto(model)
    onnx.checker.check_model(result)
    operators = [node.op_type for node in result.graph.node]
    assert operators == (["Mul", "Neg"] if value else ["Where", "Mul", "Add", "Add", "Neg"])
    feeds = {
        "a": np.full(4, np.nan if value else 3, np.float32),
        "b": np.arange(4, dtype=np.float32),
        "first": np.array(value),
    }
    expected = ReferenceEvaluator(source).run(None, feeds)
    kept = {name: feeds[name] for name in [value.name for value in model.graph.inputs]}
    for got, wanted in zip(ReferenceEvaluator(result).run(None, kept), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
