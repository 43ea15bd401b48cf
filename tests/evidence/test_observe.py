"""Statistics of values against numpy, on both sides of a 16-bit type's limits."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp.dtypes import BF16, FP16
from onnxamp.evidence.observe import Observed, observe


def _model(nodes, weights=(), low=TensorProto.FLOAT16):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(value, name) for name, value in weights],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


@pytest.mark.parametrize(("limits", "dtype"), [(FP16, np.float16), (BF16, ml_dtypes.bfloat16)])
def test_counts_follow_the_rounding_of_the_type(limits, dtype):
    rng = np.random.default_rng(0)
    edges = np.array([limits.max, limits.smallest, limits.tiny], np.float64)
    values = np.concatenate([edges * factor for factor in (0.2, 0.5, 0.501, 0.999, 1, 1.001, 1.2)])
    drawn = np.exp(rng.uniform(math.log(limits.smallest / 8), math.log(min(limits.max * 8, 3e38)), 4000))
    with np.errstate(over="ignore"):
        values = np.concatenate([values, drawn, -drawn, [0.0, np.nan, np.inf, -np.inf]]).astype(np.float32)
        values = values[np.abs(values) != np.inf]
        values = np.append(values, np.float32([np.inf, -np.inf]))
        rounded = values.astype(dtype).astype(np.float32)
    row = Observed("v", "n", "Add", False, limits.name)
    row.add(values, limits, 0)
    finite = np.isfinite(values)
    magnitude = np.abs(values)
    assert row.count == values.size
    assert (row.nan, row.inf) == (1, 2)
    assert row.overflow == (np.isinf(rounded) & finite).sum()
    assert row.flushed == ((rounded == 0) & (values != 0)).sum()
    assert row.flushed + row.subnormal == ((magnitude < limits.tiny) & (values != 0)).sum()
    assert row.zeros == 1
    assert row.absmax == magnitude[finite].max()
    assert row.bad


def test_values_are_measured_before_their_rounding():
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], "down", to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["low", "factor"], ["big"], "planted"),
        helper.make_node("Cast", ["big"], ["y"], "up", to=TensorProto.FLOAT),
    ]
    model = _model(nodes, [("factor", np.float16(1000))])
    x = np.array([[1, 2, 70, 100], [0, -66, 3, 1e-9]], np.float32)
    rows = {row.value: row for row in observe(model, [{"x": x[:1]}, {"x": x[1:]}], FP16)}
    assert rows["big"].overflow == 3
    assert rows["big"].absmax == 100_000
    assert rows["big"].batch == 0
    assert rows["low"].flushed == 1
    assert (rows["big"].node, rows["big"].precision, rows["big"].bad) == ("planted", "fp16", True)
    assert rows["y"].inf == 3


def test_infinite_masks_are_expected():
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["masked"], "mask_it"),
        helper.make_node("Softmax", ["masked"], ["p"], "softmax"),
        helper.make_node("Log", ["p"], ["y"], "log"),
    ]
    mask = np.array([0, 0, -np.inf, -np.inf], np.float32)
    rows = observe(_model(nodes, [("mask", mask)]), [{"x": np.ones((1, 4), np.float32)}], FP16)
    assert [row.inf for row in rows] == [2, 0, 2]
    assert [row.bad for row in rows] == [False, False, True]
