"""Values that a constant or attribute beyond the 16-bit range makes too large, up to where they are ordinary again."""

from __future__ import annotations

import pytest

HEAD = """g (float[4,4] x, int64[4] ids, bool[4,4] c, float size, int64[4,4] at) => (float[4,4] y)
<float[4,4] w = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}, float[4,4] table = {1,2,3,1e5,5,6,7,8,9,10,11,12,13,14,15,16}, float big = {1e5},
 float neg = {-1e5}, float tiny = {1e-5}, float k6e4 = {6e4},
 float k1e3_ = {5e-4}, float one = {1}, float zero = {0}, int64[2] shape = {4,4}, int64[4] pads = {0,0,1,0},
 int64[1] last = {-1},
 int64 four = {4}, float[2] offon = {0,1e5}, int64 far = {100000}, float[4,4] ws = {1e-3,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}>
{ h = MatMul(x, w)
"""
TAIL = "\n y = MatMul(r, w) }"

CARRIED = [
    "r = Gather(table, ids)",
    "s = ConstantOfShape<value=float[1] {1e5}>(shape) r = Identity(s)",
    "r = Expand(big, shape)",
    "r = OneHot(ids, four, offon)",
    "p = Pad(h, pads, big) r = Abs(p)",
    "r = Where(c, h, big)",
    "r = Where(c, h, neg)",
    "k = Concat<axis=0>(h, table) r = Transpose(k)",
    "r = ScatterElements<axis=1>(h, at, table)",
    "r = Max(h, big)",
    "r = Min(h, neg)",
    "r = Clip(h, big)",
    "t = Trilu(table) r = Mul(h, t)",
    "k = Range(zero, size, big) r = Reshape(k, shape)",
    "k = Cast<to=1>(far) r = Expand(k, shape)",
    "r = Mul(h, big)",
    "a = Mul(h, big) r = Mul(a, one)",
    "b = Add(h, big) r = MatMul(b, w)",
    "a = Mul(h, k6e4) b = Transpose(a) r = Mul(b, k6e4)",
    "a = Div(h, tiny) r = Identity(a)",
    "a = Div(h, k1e3_) b = Reshape(a, shape) r = Div(b, k1e3_)",
    "s = ReduceSum(h, last) r = Mul(s, big)",
    "s = ReduceSum(h, last) k = Transpose(s) r = Div(k, tiny)",
    "r = Gemm(h, w, table)",
    "r = Gemm<alpha=1e6>(h, w)",
    "r = LeakyRelu<alpha=-1e6>(h)",
    "r = Shrink<bias=-1e6>(h)",
    "r = Elu<alpha=1e6>(h)",
    "k = RandomUniformLike<high=1e6>(h) r = Neg(k)",
    "r = Celu<alpha=1e5>(h)",
    """f = If (one_) <then_branch = t () => (float[4,4] a) { a = Max(h, big) }, else_branch = e () => (float[4,4] b) { b = Abs(h) }>
    r = Abs(f)""",
]
ORDINARY = [
    "a = Max(h, big) r = Mul(a, tiny)",
    "a = Max(h, big) r = Tanh(a)",
    "a = Max(h, big) s = Softmax(a) r = Relu(s)",
    "a = Expand(big, shape) r = Div(h, a)",
    "a = Expand(big, shape) r = Div(a, big)",
    "a = Gather(table, ids) r = MatMul(a, ws)",
    "a = Expand(big, shape) r = Sqrt(a)",
    "a = Mul(h, big) r = Clip(a, zero, one)",
    "a = Mul(h, k6e4) b = Transpose(a) r = Mul(b, tiny)",
    "a = Mul(h, k6e4) r = Relu(a)",
    "a = Div(h, k1e3_) r = Mul(a, k1e3_)",
    "r = Min(h, big)",
    "r = Max(h, neg)",
    "r = Clip(h, neg, big)",
    "r = RandomUniformLike<seed=1e6>(h)",
    "r = BatchNormalization<epsilon=1e5>(h, k1, k1, k1, k1)",
]


def _text(body: str) -> str:
    head = HEAD.replace("bool[4,4] c", "bool[4,4] c, bool one_, float[4] k1")
    return head + body + TAIL


@pytest.mark.parametrize("level", ["OD", "O2", "O3"])
@pytest.mark.parametrize("body", CARRIED)
def test_what_reads_a_copy_of_a_large_constant_stays_fp32(codes_of, body, level):
    found = codes_of(_text(body), level=level, target="any")
    assert found["y"] == ("fp32", "AMP210")
    assert found["r"][0] == "fp32"
    assert found["h"][0] == "fp16"
    assert codes_of(_text(body), level=level, target="any", dtype="bf16")["y"][0] == "bf16"


@pytest.mark.parametrize("body", ORDINARY)
def test_what_is_ordinary_again_may_be_16_bit(codes_of, body):
    assert codes_of(_text(body), target="any")["y"] == ("fp16", "AMP002")


def test_a_loop_that_multiplies_ends(codes_of):
    """Sizes that grow with each turn are followed to the end of fp32 and no further."""
    loop = """l = Loop(four, , h) <body = b (int64 i, bool go, float[4,4] s) => (bool on, float[4,4] t)
    { on = Identity(go) u = Mul(s, big) t = Max(u, big) }> r = Identity(l)"""
    assert codes_of(_text(loop), target="any")["y"] == ("fp32", "AMP210")


def test_calibration_may_show_that_a_product_is_small(codes_of):
    assert codes_of(_text("r = Mul(h, big)"), ranges={"r": 10.0})["y"][0] == "fp16"
    assert codes_of(_text("r = Where(c, h, big)"), ranges={"r": 10.0})["y"][0] == "fp32"
