"""Levels, interface, dissolving, masks and the order of authority."""

from __future__ import annotations

import math

import pytest

from onnxamp.errors import UsageError
from onnxamp.policy.plan import Options

NET = """g (float[4,4] x) => (float[4,4] y)
<float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
{ h = MatMul(x, w) a = Relu(h) s = Softmax(a) b = Add(s, h) y = MatMul(b, w) }"""


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", {"h": "AMP001", "a": "AMP001", "s": "AMP001", "b": "AMP001", "y": "AMP001"}),
        ("OD", {"h": "AMP002", "a": "AMP008", "s": "AMP101", "b": "AMP008", "y": "AMP002"}),
        ("O1", {"h": "AMP002", "a": "AMP005", "s": "AMP101", "b": "AMP006", "y": "AMP002"}),
        ("auto", {"h": "AMP002", "a": "AMP005", "s": "AMP101", "b": "AMP006", "y": "AMP002"}),
        ("O2", {"h": "AMP002", "a": "AMP003", "s": "AMP101", "b": "AMP003", "y": "AMP002"}),
        ("O3", dict.fromkeys("hasby", "AMP009")),
    ],
)
def test_levels(codes_of, level, expected):
    found = codes_of(NET, level=level)
    assert {node: code for node, (_, code) in found.items()} == expected
    low = {"AMP002", "AMP003", "AMP005", "AMP009"}
    assert all((precision == "fp16") == (code in low) for precision, code in found.values())


def test_dtype_bf16(codes_of):
    assert {precision for precision, _ in codes_of(NET, level="O3", dtype="bf16").values()} == {"bf16"}


@pytest.mark.parametrize(
    ("io", "types"),
    [
        ("keep", ("fp32", "fp32")),
        ("low", ("fp16", "fp16")),
        (("x=fp16",), ("fp16", "fp32")),
        (("*=low", "y=fp32"), ("fp16", "fp32")),
        (("re:[xy]=low",), ("fp16", "fp16")),
    ],
)
def test_interface(plan_of, io, types):
    plan = plan_of(NET, io=io)
    ends = [plan.decisions[unit].precision for unit in plan.graph.units if unit.node is None]
    assert tuple(ends) == types


@pytest.mark.parametrize("io", ["high", ("x=fp8",), ("x=bf16",), ("=low",)])
def test_bad_interface(io):
    with pytest.raises(UsageError, match="io"):
        Options(io=io)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_region_without_heavy_dissolves(codes_of, level):
    text = """g (float[64,64] x) => (float[64,64] y) { l = Cast<to=10>(x) z = Relu(l) q = Cast<to=1>(z)
    a = Softmax(x) b = Softmax(a) y = Transpose(b) }"""
    assert codes_of(text, level=level)["y"][0] == "fp32"
    low_input = codes_of(
        "g (float[8,8] x) => (float[8,8] y) { a = Neg(x) b = Relu(a) y = Exp(b) }", level=level, io=("x=low",)
    )
    assert low_input["a"][0] == low_input["b"][0] == "fp16"


def test_dissolved_code(codes_of):
    found = codes_of(
        "g (float[8,8] x) => (float[8,8] y) { a = Exp(x) c = ReduceMax(a) b = Neg(c) y = Log(b) }", level="O2"
    )
    assert {precision for precision, _ in found.values()} == {"fp32"}


def test_options_are_canonical():
    options = Options(level="auto", keep="a*", io=["x=fp16"], dim=(("batch", 4),), policy=(("n", "fp32"),))
    assert options.level == "O1"
    assert options.keep == ("a*",)
    assert Options.from_json(options.to_json()) == options
    assert Options(level="O0").casts_weights is False
    assert Options(level="O1").casts_weights is True
    assert Options(level="O2", weights="cast").casts_weights is True


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": "O4"},
        {"dtype": "fp8"},
        {"target": "gpu"},
        {"weights": "keep"},
        {"dim": (("n", 0),)},
        {"level": "O0", "lower": ("*",)},
        {"level": "O0", "io": "low"},
    ],
)
def test_bad_options(wrong):
    with pytest.raises(UsageError):
        Options(**wrong)


MASK = """g (float[4,4] q, float[4,4] m, bool[4,4] c) => (float[4,4] y)
<float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float one = {1}, float big = {-1e9}, float[4] row = {0,0,-1e9,-1e30},
 float[2,2] rows = {-1e9,-1e9,-1e9,-1e9},
 float other = {1e9}, int64[1] zero = {0}, float[4] tri = {1,0,0,1}>
{ h = MatMul(q, w) BODY p = Softmax(s) y = MatMul(p, w) }"""


@pytest.mark.parametrize(
    ("body", "clamped", "codes"),
    [
        ("s = Where(c, h, big)", {"big"}, {}),
        ("s = Add(h, row)", {"row"}, {}),
        ("a = Sub(one, m) b = Mul(a, big) t = Relu(h) s = Add(t, b)", {"big"}, {}),
        ("a = Where(c, one, big) b = Transpose(a) s = Add(h, b)", {"big"}, {}),
        ("a = Where(c, one, big) k = Add(a, row) s = Add(h, k)", None, {"k": "AMP117"}),
        ("s = Mul(h, other)", set(), {"s": "AMP210"}),
        ("a = Where(c, h, big) s = Relu(a) z = Add(h, big)", set(), {"a": "AMP210", "z": "AMP210"}),
        ("a = Where(c, h, big) s = Add(a, h) low = ReduceMin(a) z = Abs(low)", set(), {"a": "AMP210", "s": "AMP117"}),
        ("s = Where(c, h, big) z = Identity(s)", set(), {"s": "AMP210"}),
        ("a = Sub(h, one) s = Mul(a, other)", set(), {"s": "AMP210"}),
        ("a = Sub(one, h) s = Mul(a, other)", set(), {"s": "AMP210"}),
        ("a = Sub(m, one) b = Mul(a, other) s = Add(h, b)", set(), {"b": "AMP210"}),
        ("f = Cast<to=1>(c) a = Sub(one, f) u = Unsqueeze(a, zero) b = Mul(u, big) s = Add(h, b)", {"big"}, {}),
        ("f = Cast<to=1>(c) a = Sub(f, one) b = Mul(a, other) s = Add(h, b)", {"other"}, {}),
        ("f = Cast<to=1>(c) g = Mul(f, tri) a = Sub(one, g) b = Mul(a, big) s = Add(h, b)", {"big"}, {}),
        ("f = Cast<to=1>(c) b = Mul(f, big) s = Add(h, b)", {"big"}, {}),
        ("f = Cast<to=1>(c) t = Trilu(rows) k = Mul(t, f) s = Add(h, k)", {"rows"}, {}),
        ("t = Trilu(rows) k = Mul(t, h) s = Add(h, k)", set(), {"t": "AMP210", "k": "AMP210", "s": "AMP210"}),
    ],
)
def test_masks(plan_of, codes_of, body, clamped, codes):
    text = MASK.replace("BODY", body)
    plan = plan_of(text, target="any")
    if clamped is not None:
        assert {value.name for value in plan.clamped} == clamped
    assert all(clamp.limit == 65504 / 2 and clamp.extreme >= 1e9 * 0.99 for clamp in plan.clamped.values())
    found = codes_of(text, target="any")
    assert {node: found[node][1] for node in codes} == codes


def test_a_mask_that_is_an_output_is_not_clamped(plan_of):
    text = MASK.replace("(float[4,4] y)", "(float[4,4] y, float[4,4] s)").replace("BODY", "s = Where(c, h, big)")
    plan = plan_of(text, target="any")
    assert plan.clamped == {}
    assert {d.code for node, d in plan.nodes.items() if node.op_type == "Where"} == {"AMP210"}


def test_mask_that_stays_fp32_keeps_its_constants(plan_of):
    text = "g (float[4,4] x) => (float[4,4] y) <float big = {-1e9}> { s = Add(x, big) y = Softmax(s) }"
    assert plan_of(text).clamped == {}


def test_infinite_masks_are_no_constants_out_of_range(codes_of):
    text = """g (float[4,4] q, bool[4,4] c) => (float[4,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
    { i = Constant<value_float=-inf>() h = MatMul(q, w) s = Where(c, h, i) p = Softmax(s) y = MatMul(p, w) }"""
    assert math.isinf(float("-inf"))
    assert codes_of(text)["s"] == ("fp16", "AMP003")


def test_calibrated_ranges(plan_of, codes_of):
    assert codes_of(NET, ranges={"h": 9000.0})["h"] == ("fp32", "AMP115")
    assert codes_of(NET, ranges={"h": 8000.0})["h"] == ("fp16", "AMP002")
    square = NET.replace("Relu(h)", "Mul(h, h)")
    assert codes_of(square)["a"] == ("fp32", "AMP116")
    assert codes_of(square, ranges={"a": 20.0})["a"] == ("fp16", "AMP003")


def test_quantized_heavy_stays_integer(codes_of):
    text = """g (float[4,4] x) => (float[4,4] y) <float s = {0.1}, uint8 z = {0}, uint8[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(w, s, z) y = MatMul(d, e) }"""
    found = codes_of(text)
    assert found["y"] == ("fp32", "AMP208")
    assert found["q"] == ("fp32", "AMP207")


def test_every_unit_has_a_decision_and_plans_repeat(plan_of):
    for level in ("O0", "OD", "O1", "O2", "O3"):
        first, second = plan_of(NET, level=level), plan_of(NET, level=level)
        assert list(first.decisions) == list(first.graph.units)
        assert list(first.decisions.values()) == list(second.decisions.values())


def test_quantized_heavy_waits_for_no_opset(codes_of):
    """In bf16 a Conv needs a later opset, which would not make this one 16-bit."""
    text = """g (float[1,1,4,4] x) => (float[1,1,4,4] y) <float s = {0.1}, uint8 z = {0}, uint8[1,1,1,1] w = {3}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(w, s, z) y = Conv(d, e) }"""
    assert codes_of(text, dtype="bf16")["y"] == ("fp32", "AMP208")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_sums_of_integers_stay_fp32_until_they_are_scaled(codes_of, level):
    """What ONNX Runtime's dynamic quantization writes; 1,000 terms of 100 * 100 are infinite in fp16."""
    text = """g (float[4,4] x) => (float[4,4] y) <uint8[4,4] b = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, uint8 zb = {8},
    float sb = {0.001}, float[4] bias = {1,2,3,4}, float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
    { h = MatMul(x, w) q, s, z = DynamicQuantizeLinear(h) i = MatMulInteger(q, b, z, zb) f = Cast<to=1>(i) t = Mul(s, sb) m = Mul(f, t)
      a = Add(m, bias) r = Relu(a) y = MatMul(r, w) }"""
    found = codes_of(text, level=level)
    assert {found[name] for name in "ftm"} == {("fp32", "AMP213")}
    assert found["h"][0] == found["y"][0] == "fp16"
    assert found["r"][0] == ("fp32" if level == "O1" else "fp16")  # at O1 the widest input decides


def test_long_sums_before_a_cast_are_followed_once(codes_of):
    """2^600 ways lead back through these sums, and none is an integer product."""
    sums = "".join(f"i{n + 1} = Add(i{n}, i{n}) " for n in range(600))
    text = f"g (int32[4] i0, float[4] x) => (float[4] y) {{ {sums} f = Cast<to=1>(i600) y = Mul(f, x) }}"
    assert codes_of(text)["y"][1] != "AMP213"
