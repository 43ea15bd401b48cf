"""Emulation against numpy and ml_dtypes, and what ONNX Runtime must not optimize away."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from onnxamp.conversion import convert, widen
from onnxamp.dtypes import LOW
from onnxamp.errors import UnsupportedError
from onnxamp.ort.session import OPTIMIZATION, SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LOW_TYPES = list(NUMPY)


def model(text: str, opset: int = 20) -> ir.Model:
    return ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}'))


def emulated(source: ir.Model) -> ir.Model:
    """The emulation, after checks that hold for every model."""
    before = ir.to_proto(source).SerializeToString()
    result = emulate(source)
    assert ir.to_proto(source).SerializeToString() == before, "the source changed"
    proto = ir.to_proto(result)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.SerializeToString() == ir.to_proto(emulate(source)).SerializeToString(), "not deterministic"
    for ours, theirs in ((result.graph.inputs, source.graph.inputs), (result.graph.outputs, source.graph.outputs)):
        assert [(v.name, v.type, v.shape) for v in ours] == [(v.name, v.type, v.shape) for v in theirs]
    for node in result.graph.all_nodes():  # only Cast, and the interface, touch 16 bits
        if node.op_type not in ("Cast", "SequenceMap"):
            assert not any(v is not None and v.dtype in LOW for v in (*node.inputs, *node.outputs)), node
    return result


def evaluate(source: ir.Model, feeds: dict[str, object], optimization: str = "all") -> dict[str, object]:
    return run(open_session(source, SessionConfig(provider="cpu", optimization=optimization, threads=1)), feeds)


def count(source: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in source.graph.all_nodes())


@pytest.mark.parametrize("optimization", OPTIMIZATION)
@pytest.mark.parametrize("low", LOW_TYPES)
def test_the_runtime_keeps_the_pairs(low: str, optimization: str) -> None:
    """Overflow of one factor and rounding of another, in chains that optimizers like to merge."""
    source = model(f"""g ({low}[N] x, {low}[1,2,4,4] image, {low}[2,2,3,3] w)
        => ({low}[N] big, {low}[N] fine, {low}[1,2,2,2] conv)
        {{
            a = Mul(x, x)  b = Mul(a, a)  big = Sqrt(b)
            s = Add(x, x)  t = Add(s, x)  u = Sub(t, s)  fine = Identity(u)
            c = Conv(image, w)  r = Relu(c)  d = Add(r, r)  conv = Sub(d, r)
        }}""")
    dtype = NUMPY[low]
    rng = np.random.default_rng(0)
    x = np.array([1e3, 300.0, 1.001, 77.7] if low == "float16" else [1e12, 300.0, 1.001, 77.7]).astype(dtype)
    image, w = rng.integers(-8, 8, (1, 2, 4, 4)) / 8, rng.integers(-8, 8, (2, 2, 3, 3)) / 8
    got = evaluate(emulated(source), {"x": x, "image": image.astype(dtype), "w": w.astype(dtype)}, optimization)

    def rounded(value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return value.astype(np.float32).astype(dtype).astype(np.float32)

    x32 = rounded(x)
    with np.errstate(over="ignore"):
        big = rounded(np.sqrt(rounded(rounded(x32 * x32) ** 2)))
    double = rounded(x32 + x32)
    taps = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(2, 3))
    relu = np.maximum(rounded(np.einsum("nchwij,ocij->nohw", taps, w)), 0)
    assert np.isinf(big[0])
    np.testing.assert_array_equal(np.asarray(got["big"], np.float32), big)
    np.testing.assert_array_equal(np.asarray(got["fine"], np.float32), rounded(rounded(double + x32) - double))
    np.testing.assert_array_equal(np.asarray(got["conv"], np.float32), rounded(rounded(relu + relu) - relu))


ELEMENTWISE = {
    "Add(x, y)": lambda x, y: x + y,
    "Sub(x, y)": lambda x, y: x - y,
    "Mul(x, y)": lambda x, y: x * y,
    "Div(x, y)": lambda x, y: x / y,
    "Sqrt(x)": lambda x, y: np.sqrt(x),
    "Reciprocal(x)": lambda x, y: 1 / x,
    "Max(x, y)": lambda x, y: np.maximum(x, y),
    "Neg(x)": lambda x, y: -x,
    "Floor(x)": lambda x, y: np.floor(x),
    "Where(less, x, y)": lambda x, y: np.where(x < y, x, y),
    "Concat <axis = 0> (x, y)": lambda x, y: np.concatenate([x, y]),
    "LeakyRelu <alpha = 0.3> (x)": lambda x, y: np.where(x < 0, np.float32(0.3) * x, x),
    # Bounds as attributes are fp32: what Clip gives has to be rounded before it is read.
    "Mul(clipped, y)": lambda x, y: (
        np.clip(x, np.float32(0.3), np.float32(2.7)).astype(np.float16).astype(np.float32) * y
    ),
}


@pytest.mark.parametrize(
    ("expression", "low"),
    # Clip with attributes is older than bfloat16.
    [(e, low) for e in ELEMENTWISE for low in LOW_TYPES if not ("clipped" in e and low == "bfloat16")],
)
def test_elementwise(expression: str, low: str) -> None:
    """Every result is the fp32 result rounded once to nearest even; subnormals and overflow included."""
    dtype, opset = NUMPY[low], 7 if "clipped" in expression else 20
    before = "less = Less(x, y)" if "less" in expression else ""
    before = "clipped = Clip <min = 0.3, max = 2.7> (x)" if "clipped" in expression else before
    source = model(f"g ({low}[N] x, {low}[N] y) => ({low}[M] z) {{ {before} z = {expression} }}", opset)
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-12, 8, (2, 4000))
    x, y = (rng.choice([-1, 1], (2, 4000)) * 2.0**exponents).astype(dtype)
    if "Sqrt" in expression:
        x = np.abs(x)
    got = evaluate(emulated(source), {"x": x, "y": y})["z"]
    with np.errstate(all="ignore"):
        want = ELEMENTWISE[expression](x.astype(np.float32), y.astype(np.float32)).astype(np.float32).astype(dtype)
    assert np.asarray(got).dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(np.float32))


@pytest.mark.parametrize("low", LOW_TYPES)
@pytest.mark.parametrize("expression", ["MatMul(x, w)", "Gemm <transB = 0> (x, w)", "ReduceSum(x, axes)", "Softmax(x)"])
def test_sums_accumulate_in_fp32(expression: str, low: str) -> None:
    dtype = NUMPY[low]
    source = model(f"""g ({low}[8,300] x, {low}[300,5] w) => ({low}[A,B] z)
        <int64[1] axes = {{1}}> {{ z = {expression} }}""")
    rng = np.random.default_rng(2)
    x, w = (rng.uniform(0, 1, shape).astype(dtype) for shape in ((8, 300), (300, 5)))
    got = np.asarray(evaluate(emulated(source), {"x": x, "w": w})["z"], np.float64)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    exp = np.exp(x64)
    exact = {"M": x64 @ w64, "G": x64 @ w64, "R": x64.sum(1, keepdims=True), "S": exp / exp.sum(1, keepdims=True)}[
        expression[0]
    ]
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert np.abs(got / exact - 1).max() <= eps / 2 * 1.01  # one rounding; a low accumulator would err by many
    assert np.abs(got / exact - 1).max() > eps / 16  # and there is one


def test_subgraphs_round_inside() -> None:
    source = model("""g (bool b, int64 n, bfloat16[2] x, float[2] z) => (bfloat16[2] y, bfloat16[2] last, bfloat16[K,2] all)
        {
            zl = Cast <to = 16> (z)
            y = If (b) <then_branch = t () => (bfloat16[2] o1) { o1 = Mul(x, zl) },
                        else_branch = e () => (bfloat16[2] o2) { o2 = Identity(x) }>
            last, all = Loop (n, b, x) <body = body (int64 i, bool c, bfloat16[2] s) => (bool go, bfloat16[2] t, bfloat16[2] u)
                <bfloat16[2] w = {16257, 16448}> { go = Identity(c)  t = Mul(s, w)  u = Add(t, zl) }>
        }""")
    bf16 = ml_dtypes.bfloat16
    x, z = np.array([1.1, 2.3]).astype(bf16), np.array([1.2345, -0.777], np.float32)
    got = evaluate(emulated(source), {"b": np.array(True), "n": np.array(3), "x": x, "z": z})
    state, zl, w, rows = x, z.astype(bf16), np.array([16257, 16448], np.uint16).view(bf16), []
    for _ in range(3):
        state = state * w  # one bfloat16 operation of ml_dtypes is the fp32 one rounded
        rows.append(state + zl)
    np.testing.assert_array_equal(got["y"], x * zl)
    np.testing.assert_array_equal(got["last"], state)
    np.testing.assert_array_equal(got["all"], np.stack(rows))


def test_the_result_of_a_call_keeps_its_declared_shape() -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 20, "l": 1]> g (float16[2, 4] x) => (float16[2, 4] y) { y = l.f(x) }'
        ' <domain: "l", opset_import: ["": 20]> f (p) => (q) { d = Exp(p) q = Neg(d) }'
    )
    emulated(ir.from_proto(parser.parse_model(text)))


def test_scan_and_functions_round_inside() -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "local": 1]>
        g (float16[3,2] x, float16[2] s) => (float16[2] last, float16[3,2] y)
        { last, y = Scan <num_scan_inputs = 1, body = body (float16[2] a, float16[2] e) => (float16[2] b, float16[2] f)
            { b = local.twice(a, e)  f = Identity(b) }> (s, x) }
        <domain: "local", opset_import: ["": 20]> twice (a, e) => (b) { t = Mul(a, e)  b = Mul(t, e) }"""
    rng = np.random.default_rng(3)
    x, s = rng.uniform(0.5, 2, (3, 2)).astype(np.float16), np.array([1.3, 0.7], np.float16)
    got = evaluate(emulated(ir.from_proto(parser.parse_model(text))), {"x": x, "s": s})
    rows = []
    for row in x:
        s = s * row * row
        rows.append(s)
    np.testing.assert_array_equal(got["last"], s)
    np.testing.assert_array_equal(got["y"], np.stack(rows))


def test_sequences_in_the_interface() -> None:
    source = model("""g (seq(float16[N]) s, int64 i) => (seq(float16[N]) t, float16[N] u)
        { e = SequenceAt(s, i)  f = Mul(e, e)  t = SequenceInsert(s, f)  u = SequenceAt(t, i) }""")
    item = np.array([1.01, 300], np.float16)
    got = evaluate(emulated(source), {"s": [item], "i": np.array(0)})
    with np.errstate(over="ignore"):
        square = item * item
    np.testing.assert_array_equal(got["t"][1], square)
    np.testing.assert_array_equal(got["u"], item)
    with pytest.raises(UnsupportedError, match="'s'"):
        emulate(model("g (seq(float16[N]) s, int64 i) => (float16[N] u) { u = SequenceAt(s, i) }", opset=15))


def test_interface_corner_cases() -> None:
    """Input as output, one value as two readers, overridable and output initializers, moves as outputs, casts."""
    source = model("""g (float16[2] x, float16[2] w, float[2] z) =>
        (float16[2] x, float16[2] same, float16[2] k, float16[2] cast, float16[2] like, float16[2] sum, int64[1] shape)
        <float16[2] w = {15360, 16384}, float16[2] k = {1, 31743}, float16[2] v = {15361, 16385}>
        {
            same = Identity(x)  cast = Cast <to = 10> (z)  like = CastLike(z, x)
            p = Mul(x, w)  q = Add(p, k)  sum = Mul(q, v)  shape = Shape(cast)
            unused = Exp(q)
        }""")
    x, z = np.array([0.1, 3], np.float16), np.array([1e5, 1.2345], np.float32)
    result = emulated(source)
    got = evaluate(result, {"x": x, "z": z})
    k, v, w = (np.array(bits, np.uint16).view(np.float16) for bits in ((1, 31743), (15361, 16385), (15360, 16384)))
    with np.errstate(over="ignore"):
        want = {"x": x, "same": x, "k": k, "cast": z.astype(np.float16), "like": z.astype(np.float16)}
        want["sum"] = (x * w + k) * v
    assert set(want) | {"shape"} == set(got)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    with np.errstate(over="ignore"):
        overridden = (x * v + k) * v
    np.testing.assert_array_equal(evaluate(result, {"x": x, "z": z, "w": v})["sum"], overridden)
    assert result.graph.initializers["v"].dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(result.graph.initializers["v"].const_value.numpy(), v.astype(np.float32))


def test_number_of_casts() -> None:
    """Two Casts for each of the two results that can round, none for moves, one for each 16-bit input and move output."""
    source = model("""g (float16[2] x, float16[2] y) => (float16[2] r) <float16[2] w = {15360, 16384}>
        { a = Mul(x, w)  b = Relu(a)  c = Transpose(b)  d = Add(c, y)  e = Max(d, c)  r = Identity(e) }""")
    assert count(emulated(source), "Cast") == 2 * 2 + 2 + 1
    plain = model("g (float[2] x) => (float[2] r) { r = Mul(x, x) }")
    assert ir.to_proto(emulated(plain)) == ir.to_proto(plain)


def test_names_of_values_stay() -> None:
    """A value of the original is found under its name, rounded, in fp32; a name that is taken gets a number."""
    source = model("""g (float16[1] x) => (float16[1] r) { a = Mul(x, x) "a/exact" = Mul(a, a)  "a/low" = Add(a, "a/exact")
        r = Mul("a/low", x) }""")
    result = emulated(source)
    values = {v.name: v for node in result.graph for v in node.outputs}
    for name in ("a", "a/exact", "a/low"):
        assert values[name].dtype == ir.DataType.FLOAT
        assert values[name].producer().op_type == "Cast"


def test_unknown_operators_keep_their_types() -> None:
    source = model(
        """g (float16[2] x, float16[2] y) => (float16[2] r) { a = Mul(x, x)  b = some.where.Op(a, y)  r = Mul(b, a) }"""
    )
    b = next(node for node in source.graph if node.domain == "some.where").outputs[0]
    b.type, b.shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([2])
    source.opset_imports["some.where"] = 1
    result = emulate(source)
    node = next(node for node in result.graph if node.domain == "some.where")
    assert [v.dtype for v in (*node.inputs, *node.outputs)] == [ir.DataType.FLOAT16] * 3
    assert [v.dtype for v in next(n for n in result.graph if n.outputs[0].name == "r/exact").inputs] == [
        ir.DataType.FLOAT
    ] * 2


def test_element_types_in_attributes() -> None:
    source = model("""g (float16[4,8] x, float16[8] s, int64[2] d) => (float16[4,8] n, float16[A,B] f, float16[4,8] eye)
        {
            n = LayerNormalization <stash_type = 1> (x, s)
            f = ConstantOfShape <value = float16[1] {15361}> (d)
            e = RandomNormal <dtype = 10, shape = [4, 8]> ()
            m = Mul(e, x)
            eye = EyeLike <dtype = 10> (m)
        }""")
    result = emulated(source)
    attributes = {node.op_type: node.attributes for node in result.graph}
    assert attributes["RandomNormal"]["dtype"].value == ir.DataType.FLOAT
    assert attributes["ConstantOfShape"]["value"].value.dtype == ir.DataType.FLOAT
    got = evaluate(result, {"x": np.eye(4, 8, dtype=np.float16), "s": np.ones(8, np.float16), "d": np.array([2, 3])})
    np.testing.assert_array_equal(got["f"], np.full((2, 3), np.array(15361, np.uint16).view(np.float16)))
    np.testing.assert_array_equal(got["eye"], np.eye(4, 8, dtype=np.float16))


def test_emulating_twice_adds_nothing() -> None:
    """A 16-bit value between two Casts rounds already; node names stay unique, which ONNX Runtime insists on."""
    source = model("""g (float16[2] x, float[2] z) => (float16[2] r, float[2] s)
        { a = Mul(x, x)  b = Exp(a)  r = Relu(b)  c = Cast <to = 16> (z)  s = Cast <to = 1> (c) }""")
    once = emulated(source)
    twice = emulated(once)
    assert len(twice.graph) == len(once.graph)
    feeds = {"x": np.array([0.1, 2], np.float16), "z": np.array([1.2345, 1e9], np.float32)}
    first, second = evaluate(once, feeds), evaluate(twice, feeds)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    named = model('g (float16[2] x) => (float16[2] r) { ["a/low"] a = Mul(x, x)  r = Exp(a) }')
    names = [node.name for node in emulated(named).graph if node.name]
    assert len(names) == len(set(names))


def test_a_model_without_standard_operators_gets_their_import() -> None:
    text = '<ir_version: 10, opset_import: ["com.microsoft": 1]> g (float16[2] x) => (float16[2] y) { y = com.microsoft.Gelu(x) }'
    source = ir.from_proto(onnx.parser.parse_model(text))
    for made in (emulate(source), widen(source, keep_io=True)):
        assert {node.op_type for node in made.graph} == {"Cast", "Gelu"}
        onnx.checker.check_model(ir.to_proto(made))


def test_shapes_stay_as_declared() -> None:
    """Shape inference may be wrong about values that shape arithmetic makes; a runtime would believe it."""
    source = model(
        "g (float16[N,4] x) => (float16[M] y) { a = Mul(x, x)  b = Exp(a)  s = Constant <value_ints = [-1]> ()  y = Reshape(b, s) }"
    )
    source.graph.node(0).outputs[0].shape = ir.Shape(["N", 4])
    shapes = {value.name: value.shape for node in emulated(source).graph for value in node.outputs}
    assert shapes["a"] == shapes["a/exact"] == ir.Shape(["N", 4])
    assert shapes["b"] is None


MODELS = pathlib.Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("optimization", OPTIMIZATION)
@pytest.mark.parametrize("name", ["cnn", "gpt", "loop", "lstm"])
def test_the_runtime_keeps_every_rounding_of_real_models(name: str, optimization: str, tmp_path: pathlib.Path) -> None:
    """As many Casts to 16 bits in the graph that the runtime really executes as in the emulation."""
    twin = emulate(convert(MODELS / f"{name}.onnx", target="any").model)
    config = SessionConfig(provider="cpu", optimization=optimization, optimized_path=tmp_path / "optimized.onnx")
    open_session(twin, config)

    def roundings(graph: ir.Model) -> int:
        return sum(node.op_type == "Cast" and node.attributes["to"].value in LOW for node in graph.graph.all_nodes())

    assert roundings(twin) >= 4
    assert roundings(ir.load(tmp_path / "optimized.onnx")) == roundings(twin)
