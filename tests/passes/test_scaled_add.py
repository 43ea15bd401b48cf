"""A sum with a scaled tensor becomes one node that gives the same bits; everything else stays as it is."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.ort.session import SessionConfig, loads, open_session, run
from onnxamp.passes.scaled_add import ScaledAddPass

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
PLAIN = SessionConfig("cpu", optimization="none", threads=1)

# (what, body from x, y, z: float[N], s: float, p: float[1] and the constant c to r, nodes left)
CASES = [
    ("input scale", "q = Mul(y, s)\nr = Add(x, q)", "Unsqueeze GatedAdd"),
    ("scale first", "q = Mul(s, y)\nr = Add(x, q)", "Unsqueeze GatedAdd"),
    ("constant scale", "q = Mul(y, c)\nr = Add(q, x)", "GatedAdd"),
    ("difference", "q = Mul(y, s)\nr = Sub(x, q)", "Neg Unsqueeze GatedAdd"),
    ("difference by a constant", "q = Mul(y, c)\nr = Sub(x, q)", "GatedAdd"),
    ("two products", "p1 = Mul(x, c)\nq = Mul(y, s)\nr = Add(p1, q)", "Mul Unsqueeze GatedAdd"),
    ("a chain", "q = Mul(y, c)\nt = Add(x, q)\nu = Mul(t, s)\nr = Add(z, u)", "GatedAdd Unsqueeze GatedAdd"),
    ("reverse difference", "q = Mul(y, s)\nr = Sub(q, x)", "Mul Sub"),
    ("product read twice", "q = Mul(y, s)\nt = Add(x, q)\nr = Mul(t, q)", "Mul Add Mul"),
    ("no scalar", "q = Mul(y, z)\nr = Add(x, q)", "Mul Add"),
    ("broadcast by one element", "q = Mul(y, p)\nr = Add(x, q)", "Mul Add"),
    ("scalars alone", "q = Mul(s, c)\nt = Add(s, q)\nr = Mul(x, t)", "Mul Add Mul"),
    ("broadcast summand", "q = Mul(y, c)\nr = Add(s, q)", "Mul Add"),
]


@pytest.mark.parametrize(("body", "left"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_fused_sums_have_the_same_bits(body, left):
    inputs = "float[N] x, float[N] y, float[N] z, float s, float[1] p"
    source = onnx.parser.parse_model(f"{HEAD}g ({inputs}) => (float[N] r) <float c = {{0.3}}> {{\n{body}\n}}")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(source))
    modified = ScaledAddPass()(model).modified
    assert " ".join(node.op_type for node in model.graph) == left
    assert modified is ("GatedAdd" in left)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(1003, np.float32) for name in "xyz"}
    feeds |= {"s": np.array(-1.7, np.float32), "p": np.array([0.1], np.float32)}
    want = run(open_session(source, PLAIN), feeds)["r"]
    np.testing.assert_array_equal(run(open_session(model, PLAIN), feeds)["r"], want)


def test_a_runtime_without_the_operator_is_told_apart():
    model = onnx.parser.parse_model(f"{HEAD}g (float[4] x) => (float[4] y) {{ y = Abs(x) }}")
    assert loads(model, PLAIN)
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model.graph.node[0].op_type, model.graph.node[0].domain = "NoSuchOperator", "com.microsoft"
    assert not loads(model, PLAIN)
