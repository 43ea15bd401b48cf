"""Gradients in the form that a compiler of inference graphs takes, against the form that they are built in."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp import autodiff
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.layer_norm_statistics import LayerNormStatisticsPass
from onnxamp.passes.scatters import ScatterRowsPass
from onnxamp.passes.weight_gradients import WeightGradientPass

# (what, x, w, attributes, convolutions that give a weight's gradient)
CONVOLUTIONS = [
    ("3 x 3", "2,3,9,7", "4,3,3,3", "pads=[1,1,1,1]", 1),
    ("strides that leave a rest", "2,3,10,8", "4,3,3,3", "strides=[2,3], pads=[1,1,1,1]", 1),
    ("dilations and uneven pads", "2,3,12,11", "4,3,2,3", "dilations=[2,1], pads=[1,0,2,1]", 1),
    ("strides and dilations", "2,3,13,12", "4,3,3,2", "strides=[2,2], dilations=[2,3]", 1),
    ("one element with strides", "2,3,9,8", "4,3,1,1", "strides=[2,2]", 1),
    ("one dimension", "2,3,9", "4,3,3", "strides=[2], pads=[1,1]", 1),
    ("three dimensions", "2,3,5,6,5", "4,3,2,2,3", "pads=[0,1,0,1,0,1]", 1),
    ("a free batch", "N,3,9,7", "4,3,3,3", "pads=[1,1,1,1]", 0),
    ("groups", "2,4,9,7", "4,2,3,3", "group=2", 0),
    ("one element: no products of taps", "2,3,9,7", "4,3,1,1", "strides=[1,1]", 0),
]


def gradients(body: str, inputs: str, tensors: dict[str, np.ndarray], opset: int, wrt: list[str]) -> ir.Model:
    source = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]>\ng ({inputs}) => (float l) {{\n{body}\n}}'
    )
    source.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in tensors.items())
    return autodiff.gradient_model(source, of="l", wrt=wrt)


def check(
    model: ir.Model, changed: ir.passes.InPlacePass, feeds: dict[str, np.ndarray], modified: bool = True
) -> ir.Model:
    """The model after the pass, whose results are those from before."""
    other = model.clone()
    assert changed(other).modified == modified
    proto = ir.to_proto(other)
    onnx.checker.check_model(proto, full_check=True)
    config = SessionConfig("cpu", threads=1)
    expected, found = run(open_session(model, config), feeds), run(open_session(proto, config), feeds)
    assert len(expected) > 1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-4, err_msg=name)
    return other


@pytest.mark.parametrize(
    ("x", "w", "attributes", "count"), [case[1:] for case in CONVOLUTIONS], ids=[c[0] for c in CONVOLUTIONS]
)
def test_weight_gradients_as_convolutions(x, w, attributes, count):
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal([int(size) for size in w.split(",")], np.float32)}
    body = f"y = Conv<{attributes}>(x, w)\ns = Mul(y, y)\nl = ReduceSum<keepdims=0>(s)"
    model = gradients(body, f"float[{x}] x", tensors, 17, ["w"])
    feeds = {"x": rng.standard_normal([2 if size == "N" else int(size) for size in x.split(",")], np.float32)}
    after = check(model, WeightGradientPass(), feeds, bool(count))
    operators = [node.op_type for node in after.graph]
    assert operators.count("Conv") == 1 + count
    assert ("Gemm" in operators) == (not count and "MatMul" not in operators)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("axis", [-1, 1])
def test_statistics_of_layer_norm(opset, axis):
    rng = np.random.default_rng(0)
    shape = (4,) if axis == -1 else (3, 4)
    tensors = {name: rng.standard_normal(shape, np.float32) for name in ("scale", "bias")}
    body = f"y = LayerNormalization<axis={axis}>(x, scale, bias)\ns = Mul(y, y)\nt = Mul(s, y)\nl = ReduceSum<keepdims=0>(t)"
    model = gradients(body, "float[N,3,4] x", tensors, opset, ["x", "scale", "bias"])
    after = check(model, LayerNormStatisticsPass(), {"x": rng.standard_normal((2, 3, 4), np.float32)})
    assert [len(node.outputs) for node in after.graph if node.op_type == "LayerNormalization"] == [1]


def test_statistics_of_layer_norm_without_the_mean():
    """The second output is left out, the third is not."""
    rng = np.random.default_rng(0)
    text = "g (float[N,4] x, float[4] s) => (float[N,4] y, float[N,1] v) { y, , v = LayerNormalization(x, s) }"
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> {text}'))
    feeds = {"x": rng.standard_normal((2, 4), np.float32), "s": rng.standard_normal(4, np.float32)}
    check(model, LayerNormStatisticsPass(), feeds)


@pytest.mark.parametrize("shape", [(5, 4), (5,), (5, 2, 3)])
def test_sums_of_rows(shape):
    rng = np.random.default_rng(0)
    body = "r = Gather(w, i)\ns = Mul(r, r)\nl = ReduceSum<keepdims=0>(s)"
    model = gradients(body, "int64[N,M] i", {"w": rng.standard_normal(shape, np.float32)}, 17, ["w"])
    after = check(model, ScatterRowsPass(), {"i": np.array([[0, 3, 3], [4, 0, 3]])})
    operators = [node.op_type for node in after.graph]
    assert (operators.count("ScatterND"), operators.count("ScatterElements")) == (0, 1)


def test_other_scatters_stay():
    text = """<ir_version: 10, opset_import: ["" : 17]> g (float[5,4] x, int64[2,1] i, float[2,4] u) => (float[5,4] y) {
        y = ScatterND(x, i, u)
    }"""
    assert not ScatterRowsPass()(ir.from_proto(onnx.parser.parse_model(text))).modified
