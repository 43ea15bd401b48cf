"""Masks by Casts are the masks of Sign and Where."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.masks import MaskPass

# (what, body from x and g: float[N] to a, operators after the pass)
CASES = [
    ("sign of a Relu", "y = Relu(x)\na = Sign(y)", "Relu Cast Cast"),
    ("another sign", "a = Sign(x)", "Sign"),
    (
        "Clip",
        "y = Clip(x, low, high)\np = GreaterOrEqual(x, low)\nq = LessOrEqual(x, high)\nr = And(p, q)\ng2 = Add(g, y)\n"
        "a = Where(r, g2, zero)",
        "Clip GreaterOrEqual LessOrEqual And Add Cast Mul",
    ),
    (
        "Clip of one bound",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\na = Where(p, t, zero)",
        "Clip GreaterOrEqual Mul Cast Mul",
    ),
    ("no Clip", "p = GreaterOrEqual(x, low)\na = Where(p, g, zero)", "GreaterOrEqual Where"),
    (
        "another bound",
        "y = Clip(x, low)\np = GreaterOrEqual(x, high)\nt = Mul(y, g)\na = Where(p, t, zero)",
        "Clip GreaterOrEqual Mul Where",
    ),
    (
        "no zero",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\na = Where(p, t, high)",
        "Clip GreaterOrEqual Mul Where",
    ),
    (
        "a rounded gradient",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\nh = Cast<to=10>(t)\nk = Cast<to=1>(h)\na = Where(p, k, zero)",
        "Clip GreaterOrEqual Mul Cast Cast Where",
    ),
]


@pytest.mark.parametrize(("body", "operators"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_masks_keep_their_numbers(body, operators):
    text = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[N] x, float[N] g) => (float[N] a) '
    text += f"<float low = {{-1}}, float high = {{1}}, float zero = {{0}}> {{\n{body}\n}}"
    source = onnx.parser.parse_model(text)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(source))
    before = [node.op_type for node in model.graph]
    modified = MaskPass()(model).modified
    after = [node.op_type for node in model.graph]
    assert " ".join(after) == operators
    assert modified is (before != after)
    feeds = {
        "x": np.array([-np.inf, -1, -0.5, -0.0, 0, 1e-45, 1e-30, 1, 2, np.inf], np.float32),
        "g": np.linspace(-2, 3, 10, dtype=np.float32),
    }
    config = SessionConfig("cpu", threads=1)
    want, got = (run(open_session(each, config), feeds)["a"] for each in (source, model))
    np.testing.assert_array_equal(got, want)
    assert not MaskPass()(model).modified
