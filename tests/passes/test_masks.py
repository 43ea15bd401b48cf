"""Masks by Casts are the masks of Sign and Where."""

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.masks import MaskPass

# (what, body from x and g: float[N] to a, operators after the pass). "back" stands before a node of the backward half.
CASES = [
    ("sign of a Relu", "y = Relu(x)\nback a = Sign(y)", "Relu Cast Cast"),
    ("another sign", "back a = Sign(x)", "Sign"),
    (
        "Clip",
        "y = Clip(x, low, high)\np = GreaterOrEqual(x, low)\nq = LessOrEqual(x, high)\nr = And(p, q)\ng2 = Add(g, y)\n"
        "back a = Where(r, g2, zero)",
        "Clip GreaterOrEqual LessOrEqual And Add Cast Mul",
    ),
    (
        "Clip of one bound",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\nback a = Where(p, t, zero)",
        "Clip GreaterOrEqual Mul Cast Mul",
    ),
    ("no Clip", "p = GreaterOrEqual(x, low)\nback a = Where(p, g, zero)", "GreaterOrEqual Where"),
    (
        "another bound",
        "y = Clip(x, low)\np = GreaterOrEqual(x, high)\nt = Mul(y, g)\nback a = Where(p, t, zero)",
        "Clip GreaterOrEqual Mul Where",
    ),
    (
        "no zero",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\nback a = Where(p, t, high)",
        "Clip GreaterOrEqual Mul Where",
    ),
    (
        "a rounded gradient",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\nh = Cast<to=10>(t)\nk = Cast<to=1>(h)\nback a = Where(p, k, zero)",
        "Clip GreaterOrEqual Mul Cast Cast Where",
    ),
    ("a sign of the model's own", "y = Relu(x)\na = Sign(y)", "Relu Sign"),
    (
        "a mask of the model's own beside a Clip",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\na = Where(p, t, zero)",
        "Clip GreaterOrEqual Mul Where",
    ),
    (
        "the gradient of such a mask",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Mul(y, g)\nm = Where(p, t, zero)\nback of m b = Where(p, g, zero)\n"
        "a = Add(m, b)",
        "Clip GreaterOrEqual Mul Where Where Add",
    ),
]


def _parsed(body):
    """The model of `body`, whose backward nodes are those of y unless they say otherwise."""
    lines = [re.fullmatch(r"(back )?(?:of (\w+) )?(.*)", line).groups() for line in body.splitlines()]
    statements = "\n".join(statement for _, _, statement in lines)
    text = '<ir_version: 10, opset_import: ["" : 21]>\ng (float[N] x, float[N] g) => (float[N] a) '
    text += f"<float low = {{-1}}, float high = {{1}}, float zero = {{0}}> {{\n{statements}\n}}"
    model = onnx.parser.parse_model(text)
    for node, (back, of, _) in zip(model.graph.node, lines, strict=True):
        if back:
            node.metadata_props.add(key="onnxamp.backward", value=of or "y")
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize(("body", "operators"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_masks_keep_their_numbers(body, operators):
    source = _parsed(body)
    model = ir.from_proto(source)
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


X = np.array([-np.inf, -2, -2, 0, 0, 0, np.nan, np.inf], np.float32)
G = np.array([3, np.inf, np.nan, np.inf, np.nan, 3, 3, -np.inf], np.float32)
# (what, body, what differs: x, g, result before and after the pass)
UNBOUNDED = [
    (
        "Clip",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Add(g, zero)\nback a = Where(p, t, zero)",
        [(-2, np.inf, 0, np.nan), (-2, np.nan, 0, np.nan)],
    ),
    (
        "a mask of the model's own",
        "y = Clip(x, low)\np = GreaterOrEqual(x, low)\nt = Log(x)\na = Where(p, t, zero)",
        [],
    ),
    ("Relu", "y = Relu(x)\nback s = Sign(y)\nback a = Mul(g, s)", [(np.nan, 3, np.nan, 3)]),
]


@pytest.mark.parametrize(("body", "differing"), [case[1:] for case in UNBOUNDED], ids=[case[0] for case in UNBOUNDED])
def test_masks_of_what_is_not_finite(body, differing):
    """They differ where the docstring says, and nowhere else."""
    source = _parsed(body)
    model = ir.from_proto(source)
    assert MaskPass()(model).modified == bool(differing)
    config = SessionConfig("cpu", threads=1)
    want, got = (run(open_session(each, config), {"x": X, "g": G})["a"] for each in (source, model))
    rows = [row for row in zip(X, G, want, got, strict=True) if not np.array_equal(*row[2:], equal_nan=True)]
    np.testing.assert_array_equal(rows, differing)
