"""Each numerical rule on the smallest graph that shows it, between heavy nodes, so that nothing dissolves."""

from __future__ import annotations

import pytest

from onnxamp.policy import plan
from onnxamp.policy.rules import BINDING, NUMERICAL

HEAD = """g (float[4,4] x, int64[4] n) => (float[4,4] y)
<float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[1,4] freq = {1,2,3,4},
 float two = {2}, float half = {0.5}, float one = {1},
 int64[1] last = {-1}, int64[4] shape = {1,1,4,4}, int64[2] back = {4,4}, int64[4] grid = {1,4,2,2},
 int64[4] flat = {4,4,1,1}, int64[4] big = {4,4,100,100}>
{ h = MatMul(x, w)
"""
TAIL = "\n y = MatMul(r, w) }"

# (name, opset, body from h to r, expected codes of nodes by output name)
CASES = [
    ("softmax operator", 17, "r = Softmax(h)", {"r": "AMP101"}),
    ("exponential", 17, "r = Exp(h)", {"r": "AMP101"}),
    (
        "layer norm, Pow and Div",
        17,
        """m = ReduceMean<axes=[-1]>(h) d = Sub(h, m) s = Pow(d, two) v = ReduceMean<axes=[-1]>(s)
        e = Constant<value_float=1e-5>() a = Add(v, e) q = Sqrt(a) r = Div(d, q)""",
        dict.fromkeys("mdsvaqr", "AMP102"),
    ),
    (
        "layer norm, Mul and Reciprocal",
        18,
        """m = ReduceMean(h, last) d = Sub(h, m) s = Mul(d, d) v = ReduceMean(s, last)
        e = Constant<value_float=1e-3>() a = Add(v, e) q = Sqrt(a) i = Reciprocal(q) r = Mul(d, i)""",
        dict.fromkeys("mdsvaqir", "AMP102"),
    ),
    (
        "layer norm, scale folded into the inverse deviation",
        18,
        """m = ReduceMean(h, last) d = Sub(h, m) s = Mul(d, d) v = ReduceMean(s, last)
        e = Constant<value_float=1e-3>() a = Add(v, e) q = Sqrt(a) i = Reciprocal(q) k = Mul(i, w) r = Mul(d, k)""",
        dict.fromkeys("mdsvaqik", "AMP102"),
    ),
    (
        "layer norm from sums, mean of squares less square of mean",
        17,
        """k = Constant<value_float=0.25>() t = ReduceSum(h, last) m = Mul(t, k) s = Mul(h, h) v = ReduceSum(s, last) e = Mul(v, k)
        o = Mul(m, m) a = Sub(e, o) z = Constant<value_float=0.0>() b = Max(z, a) p = Constant<value_float=1e-6>() c = Add(b, p)
        q = Sqrt(c) i = Reciprocal(q) l = Mul(i, w) d = Sub(h, m) n_ = Mul(d, l) f = Add(n_, w) r = Relu(f)""",
        {
            **dict.fromkeys(("t", "m", "s", "v", "e", "o", "a", "b", "c", "q", "i", "l", "d", "n_"), "AMP102"),
            "r": "AMP003",
        },
    ),
    (
        "RMS norm from a sum",
        17,
        """s = Mul(h, h) t = ReduceSum(s, last) k = Constant<value_float=0.25>() v = Mul(t, k) q = Sqrt(v) r = Div(h, q)""",
        dict.fromkeys("stvqr", "AMP103"),
    ),
    (
        "RMS norm",
        17,
        """s = Mul(h, h) v = ReduceMean<axes=[-1]>(s) e = Constant<value_float=1e-6>() a = Add(v, e) q = Sqrt(a)
        i = Div(one, q) r = Mul(h, i)""",
        dict.fromkeys("svaqir", "AMP103"),
    ),
    (
        "instance norm over two axes",
        17,
        """f = Reshape(h, shape) m = ReduceMean<axes=[2,3]>(f) d = Sub(f, m) s = Mul(d, d) v = ReduceMean<axes=[2,3]>(s)
        e = Constant<value_float=1e-3>() a = Add(v, e) q = Sqrt(a) o = Div(d, q) r = Reshape(o, back)""",
        {**dict.fromkeys("mdsvaqo", "AMP104")},
    ),
    (
        "softmax written out",
        17,
        "t = ReduceMax<axes=[-1]>(h) d = Sub(h, t) p = Exp(d) s = ReduceSum(p, last) r = Div(p, s)",
        dict.fromkeys("dpsr", "AMP105"),
    ),
    (
        "log-sum-exp written out",
        17,
        "d = Sub(h, one) p = Exp(d) s = ReduceSum(p, last) l = Log(s) r = Sub(h, l)",
        dict.fromkeys("dpsl", "AMP106"),
    ),
    (
        "log-sum-exp with an epsilon in front",
        17,
        """e = Constant<value_float=1e-6>() d = Sub(h, one) p = Exp(d) s = ReduceSum(p, last) a = Add(e, s) l = Log(a)
        r = Sub(h, l)""",
        dict.fromkeys("dpsl", "AMP106"),
    ),
    (
        "L2 normalization",
        17,
        "v = ReduceL2<axes=[-1]>(h) e = Constant<value_float=1e-12>() a = Add(v, e) r = Div(h, a)",
        dict.fromkeys("var", "AMP107"),
    ),
    (
        "variance alone",
        17,
        "m = ReduceMean<axes=[-1]>(h) d = Sub(h, m) s = Mul(d, d) v = ReduceMean<axes=[-1]>(s) r = Add(h, v)",
        {**dict.fromkeys("mdsv", "AMP108"), "r": "AMP116"},
    ),
    (
        "epsilon under a logarithm",
        17,
        "e = Constant<value_float=1e-10>() c = Relu(h) a = Max(c, e) r = Log(a)",
        dict.fromkeys("car", "AMP109"),
    ),
    (
        "operand of a logarithm",
        17,
        "s = Sigmoid(h) r = Log(s)",
        {"s": "AMP109", "r": "AMP101"},
    ),
    (
        "position angles",
        17,
        "c = Cast<to=1>(n) f = Unsqueeze(c, last) z = MatMul(f, freq) q = Cos(z) r = Mul(h, q)",
        {**dict.fromkeys("cfz", "AMP110"), "q": "AMP101"},
    ),
    (
        "arithmetic between ids",
        17,
        "c = Cast<to=1>(n) k = Constant<value_float=100.0>() a = Mul(c, k) b = Add(a, c) r = Add(h, b)",
        dict.fromkeys("ab", "AMP110"),
    ),
    (
        "floats that become integers",
        17,
        "a = Floor(h) i = Cast<to=7>(a) b = Cast<to=1>(i) r = Add(h, b)",
        dict.fromkeys("ai", "AMP110"),
    ),
    (
        "long pooling",
        17,
        "f = Reshape(h, flat) b = Expand(f, big) p = GlobalAveragePool(b) s = Squeeze(p) u = Add(s, w) r = Relu(u)",
        {"p": "AMP111"},
    ),
    (
        "coordinates",
        17,
        """f = Reshape(h, shape) a = Neg(h) c = Tanh(a) q = Reshape(c, grid) o = GridSample(f, q) m = ReduceMax<keepdims=0>(o)
        r = Add(h, m)""",
        {**dict.fromkeys("acq", "AMP112"), "o": "AMP101"},
    ),
    ("weight that becomes zero", 17, "k = Constant<value_float=1e-9>() r = Mul(h, k)", {"r": "AMP113"}),
    ("weight that loses", 17, "k = Constant<value_float=3.5e-7>() r = Mul(h, k)", {"r": "AMP114"}),
    ("square", 17, "s = Mul(h, h) r = Add(h, s)", {"s": "AMP116", "r": "AMP116"}),
    (
        "tanh GELU",
        17,
        """three = Constant<value_float=3.0>() k = Constant<value_float=0.044715>() p = Pow(h, three) a = Mul(p, k)
        b = Add(h, a) t = Tanh(b) u = Add(t, one) r = Mul(h, u)""",
        {"p": "AMP101", **dict.fromkeys("abt", "AMP116"), "r": "AMP003"},
    ),
    ("sum until a heavy operator", 17, "s = ReduceSum(h, last) r = Add(h, s)", {"s": "AMP101", "r": "AMP116"}),
    (
        "division by the own sum restores",
        17,
        "a = Abs(h) s = ReduceSum(a, last) b = Div(a, s) r = Relu(b)",
        {"b": "AMP116"},
    ),
    (
        "a mean from a sum restores",
        17,
        "s = ReduceSum(h, last) k = Constant<value_float=0.25>() m = Mul(s, k) q = Constant<value_float=4>() d = Div(s, q) "
        "b = Add(m, d) r = Add(h, b)",
        {"m": "AMP116", "d": "AMP116", "r": "AMP003"},
    ),
    (
        "a sum times another number does not",
        17,
        "s = ReduceSum(h, last) k = Constant<value_float=0.9>() m = Mul(s, k) r = Add(h, m)",
        {"m": "AMP116", "r": "AMP116"},
    ),
    (
        "nor does one of a number of elements that is unknown",
        17,
        "t = Reshape(h, n) s = ReduceSum(t, last) k = Constant<value_float=0.25>() m = Mul(s, k) r = Add(h, m)",
        {"m": "AMP116", "r": "AMP116"},
    ),
    (
        "large factor",
        17,
        "k = Constant<value_float=4096.0>() a = Mul(h, k) r = Relu(a)",
        {"a": "AMP118", "r": "AMP116"},
    ),
    (
        "large offset",
        17,
        "k = Constant<value_float=20000.0>() a = Add(h, k) r = Sub(a, k)",
        {"a": "AMP118", "r": "AMP118"},
    ),
    (
        "island of the source",
        17,
        "l = Cast<to=10>(h) f = Cast<to=1>(l) a = Relu(f) r = Neg(a)",
        {"f": "AMP119", "a": "AMP119"},
    ),
    (
        "distance, product as a node",
        17,
        """s = Pow(h, two) t = ReduceSum(s, last) p = MatMul(h, w) q = Mul(p, two) a = Sub(t, q) b = Add(a, freq) r = Sqrt(b)""",
        {"p": "AMP120", "q": "AMP120", "a": "AMP116", "b": "AMP116"},
    ),
    (
        "distance, both squares first, product of a multiple",
        17,
        """c = Neg(h) t = ReduceSumSquare<axes=[-1]>(h) u = Add(t, freq) m = Mul(c, two) p = MatMul(m, w) a = Add(u, p) r = Sqrt(a)""",
        {"p": "AMP120"},
    ),
    (
        "distance, squares as the third operand",
        17,
        "t = ReduceSumSquare<axes=[-1]>(h) p = Gemm<alpha=-2.0>(h, w, t) r = Sqrt(p)",
        {"p": "AMP120"},
    ),
    (
        "distance, one product of what PyTorch concatenates",
        17,
        """s = Mul(h, h) t = ReduceSum(s, last) m = Mul(h, two) c = Concat<axis=-1>(m, t)
        k = Concat<axis=0>(w, freq) p = MatMul(c, k) r = Sqrt(p)""",
        {"p": "AMP120"},
    ),
    (
        "sum of squares that meets the product of something else",
        17,
        "s = Pow(h, two) t = ReduceSum(s, last) q = Sqrt(t) p = MatMul(q, w) v = MatMul(x, w) r = Add(t, v)",
        {"s": "AMP101", "r": "AMP116"},
    ),
    ("constant out of range", 17, "k = Constant<value_float=1e6>() r = Min(h, k)", {"r": "AMP210"}),
    (
        "copies of a constant out of range",
        17,
        "k = Constant<value_float=1e6>() a = Max(h, k) b = Transpose(a) r = Relu(b)",
        dict.fromkeys("abry", "AMP210"),
    ),
    (
        "floats computed from a shape",
        17,
        "s = Shape(h) c = Cast<to=1>(s) a = Mul(c, half) i = Cast<to=7>(a) r = Expand(h, s)",
        {"c": "AMP209", "a": "AMP209", "i": "AMP209"},
    ),
    (
        "a piece of a weight, bounds from a shape",
        17,
        """s = Shape<start=0, end=1>(h) z = Constant<value_ints=[0]>() p = Slice(w, z, s) m = Constant<value_int=-1>() i = Add(s, m)
        q = Gather(w, i) a = Add(h, p) r = Add(a, q)""",
        {"p": "AMP003", "q": "AMP003", "r": "AMP003"},
    ),
    (
        "floats that a shape is computed from",
        17,
        "m = ReduceMax<keepdims=0>(h) a = Abs(m) i = Cast<to=7>(a) u = Unsqueeze(i, last) t = Tile(m, u) r = Add(h, m)",
        {"m": "AMP209", "a": "AMP209"},
    ),
]
assert len({case[0] for case in CASES}) == len(CASES) == 43


@pytest.mark.parametrize(("name", "opset", "body", "expected"), CASES, ids=[case[0] for case in CASES])
def test_rule(codes_of, name, opset, body, expected):
    found = codes_of(HEAD + body + TAIL, opset=opset, target="any")
    wanted = {node: ("fp16" if code == "AMP003" else "fp32", code) for node, code in expected.items()}
    assert {node: found[node] for node in expected} == wanted
    assert found["h"] == ("fp16", "AMP002")


def test_an_operator_of_another_domain_is_not_the_standard_one_of_its_name(codes_of):
    text = HEAD.replace("float two = {2}", "float two = {2}, float[4,4] o")
    text += "s = Shape(h) c = Cast<to=1>(s) o = com.microsoft.Gather(c, h) m = Mul(o, half) r = Add(h, m)" + TAIL
    assert codes_of(text, target="any")["m"][1] != "AMP209"


def test_a_product_of_something_else_is_no_distance(codes_of):
    (body,) = [case[2] for case in CASES if case[0].startswith("sum of squares that meets")]
    found = codes_of(HEAD + body + TAIL, target="any")
    assert found["p"] == found["v"] == ("fp16", "AMP002")


def test_a_default_is_no_constant(codes_of):
    """A caller may replace it, and the number of elements summed with it."""
    (body,) = [case[2] for case in CASES if case[0] == "a mean from a sum restores"]
    text = HEAD.replace("int64[4] n", "int64[4] n, int64[1] last") + body + TAIL
    assert codes_of(text, target="any")["r"] == ("fp32", "AMP116")


@pytest.mark.parametrize("rule", NUMERICAL + BINDING, ids=lambda rule: rule.__name__)
def test_every_rule_decides_some_case(plan_of, monkeypatch, rule):
    """Without the rule some case comes out differently: no rule is there for nothing, and no case passes by another's work."""
    needs_more = {"observed_ranges", "quantized_heavy", "integer_sums", "mask_sums"}  # have tests of their own
    if rule.__name__ in needs_more:
        return
    changed = []
    for name, opset, body, _ in CASES:
        before = plan_of(HEAD + body + TAIL, opset=opset, target="any")
        with monkeypatch.context() as patch:
            patch.setattr(plan, "NUMERICAL", tuple(r for r in NUMERICAL if r is not rule))
            patch.setattr(plan, "BINDING", tuple(r for r in BINDING if r is not rule))
            after = plan_of(HEAD + body + TAIL, opset=opset, target="any")
        if [d.code for d in before.nodes.values()] != [d.code for d in after.nodes.values()]:
            changed.append(name)
    assert changed
