"""16-bit models taken back to fp32, against the source with rounded weights, strict emulation, and written-out graphs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

import onnxamp
from onnxamp.dtypes import BY_NAME, LOW
from onnxamp.errors import UnsupportedError
from onnxamp.evidence.synthesis import synthesize
from onnxamp.model import io
from onnxamp.ort.session import SessionConfig, open_session, run

MODELS = sorted((pathlib.Path(__file__).parents[2] / "models").glob("[cgl]*.onnx"))
CASES = sorted((pathlib.Path(__file__).parents[1] / "convert" / "cases").glob("*.onnx"))
OPTIONS: list[dict[str, str]] = [{}, {"level": "O1"}, {"level": "O3", "io": "low"}, {"dtype": "bf16", "target": "any"}]


def widened(model: onnx.ModelProto | ir.Model, keep_io: bool = False) -> onnx.ModelProto:
    """The model in fp32, after checks that hold for every model."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    before = proto.SerializeToString()
    result = ir.to_proto(onnxamp.widen(proto, keep_io=keep_io))
    assert proto.SerializeToString() == before, "the source changed"
    onnx.checker.check_model(result)
    again = ir.to_proto(onnxamp.widen(result, keep_io=keep_io))
    assert again.SerializeToString() == result.SerializeToString(), "not idempotent"
    assert b"onnxamp." not in result.SerializeToString()
    return result


def low_values(proto: onnx.ModelProto) -> set[str]:
    """Names of the 16-bit values."""
    model = ir.from_proto(proto)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph.all_nodes() for value in node.outputs]
    return {value.name or "" for value in values if value.dtype in LOW}


def outputs(model: onnx.ModelProto | ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = open_session(model, SessionConfig(provider="cpu", optimization="none", threads=1))
    return {name: np.asarray(array) for name, array in run(session, feeds).items()}


def shape_of(proto: onnx.ModelProto) -> list[tuple[object, ...]]:
    return [(n.op_type, n.name, tuple(n.input), tuple(n.output)) for n in proto.graph.node]


def numbers(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_conversion_is_taken_back(path: pathlib.Path, options: dict[str, str]) -> None:
    """The graph of the source, bit for bit what it computes with the rounded weights, near the strict emulation of the 16-bit file."""
    source = onnx.load(path)
    low = ir.to_proto(onnxamp.convert(source, **options).model)
    back = widened(low)
    assert list(back.graph.input) == list(source.graph.input)
    assert list(back.graph.output) == list(source.graph.output)
    assert not low_values(back)
    if source.opset_import[0].version == low.opset_import[0].version:
        assert shape_of(back) == shape_of(source)
    stored, got = numbers(low), numbers(back)
    for tensor in source.graph.initializer:
        if tensor.name in stored:
            want = stored[tensor.name]
            want = want.astype(np.float32) if want.dtype in (np.float16, ml_dtypes.bfloat16) else want
            np.testing.assert_array_equal(got[tensor.name], want)
            tensor.CopyFrom(numpy_helper.from_array(want, tensor.name))
    samples, _ = synthesize(io.load(source), 1)
    feeds = dict(samples[0])
    emulated = outputs(onnxamp.emulate(low), cast(feeds, low))
    for name, array in outputs(back, feeds).items():
        if options.get("dtype") != "bf16":  # whose opset is raised, so that other kernels run
            np.testing.assert_array_equal(array, outputs(source, feeds)[name])
        error = np.abs(array - emulated[name].astype(np.float32)).max() / np.abs(array).max()
        assert error < 16 * BY_NAME[options.get("dtype", "fp16")].eps


def cast(feeds: dict[str, np.ndarray], model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Samples in the types of the model's inputs."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return {name: array.astype(onnx.helper.tensor_dtype_to_np_dtype(kinds[name])) for name, array in feeds.items()}


def test_every_kind_of_model() -> None:
    done = 0
    for path in CASES:
        source = onnx.load(path)
        back = widened(onnxamp.convert(source).model)
        if low_values(source):
            continue
        done += 1
        assert not low_values(back), path.name
        assert list(back.graph.input) == list(source.graph.input), path.name
        assert [value.name for value in back.graph.output] == [value.name for value in source.graph.output]
        open_session(back, SessionConfig(provider="cpu", threads=1))
    assert done >= 20


def parsed(text: str, opset: int = 20, ir_version: int = 10) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}, "own": 1]> {text}')


# What a tool wrote, and what it becomes.
REWRITES = {
    "a file of another converter, which declares what is no longer true": (
        """g (float[2] x) => (float[2] y) <float16[2] w = {1, 2}, float[2] a, float[2] h>
        { x16 = Cast <to = 10> (x)  a = Mul(x16, w)  a32 = Cast <to = 1> (a)  h = Exp(a32)
          h16 = Cast <to = 10> (h)  y16 = Add(h16, w)  y = Cast <to = 1> (y16) }""",
        """g (float[2] x) => (float[2] y) { a = Mul(x, w)  h = Exp(a)  y = Add(h, w) }""",
    ),
    "bodies": (
        """g (bool b, float16[2] x) => (float16[2] y) { y = If (b)
            <then_branch = t () => (float16[2] p) { c = Constant <value = float16[2] {15360, 16384}> ()  p = Mul(x, c) },
             else_branch = e () => (float16[2] q) { u = Cast <to = 1> (x)  v = Exp(u)  q = Cast <to = 10> (v) }> }""",
        """g (bool b, float[2] x) => (float[2] y) { y = If (b)
            <then_branch = t () => (float[2] p) { c = Constant <value = float[2] {1, 2}> ()  p = Mul(x, c) },
             else_branch = e () => (float[2] q) { q = Exp(x) }> }""",
    ),
    "a branch that only casts": (
        """g (bool b, float[2] x) => (float[2] y) { n = Neg(x)  z = If (b)
            <then_branch = t () => (float16[2] p) { p = Cast <to = 10> (n) },
             else_branch = e () => (float16[2] q) { u = Cast <to = 10> (x)  q = Mul(u, u) }>  y = Cast <to = 1> (z) }""",
        """g (bool b, float[2] x) => (float[2] y) { n = Neg(x)  y = If (b)
            <then_branch = t () => (float[2] p) { p = Cast <to = 1> (n) },
             else_branch = e () => (float[2] q) { q = Mul(x, x) }> }""",
    ),
    "attributes that name a type": (
        """g (int64[1] n, float16[2,2] x) => (float16[K] a, bfloat16[2] b, float16[2,2] c, float16[2,2] d, float16[2,2] e)
        { a = ConstantOfShape <value = float16[1] {16896}> (n)  b = RandomNormal <dtype = 16, shape = [2]> ()
          c = EyeLike <dtype = 10> (x)  d = CastLike(c, x)  e = RandomUniformLike <dtype = 10> (x) }""",
        """g (int64[1] n, float[2,2] x) => (float[K] a, float[2] b, float[2,2] c, float[2,2] d, float[2,2] e)
        { a = ConstantOfShape <value = float[1] {3}> (n)  b = RandomNormal <dtype = 1, shape = [2]> ()
          c = EyeLike <dtype = 1> (x)  d = CastLike(c, x)  e = RandomUniformLike <dtype = 1> (x) }""",
    ),
    "sequences": (
        """g (seq(float16[N]) s, int64 i) => (seq(float16[N]) t)
        { e = SequenceAt(s, i)  f = Mul(e, e)  t = SequenceInsert(s, f) }""",
        """g (seq(float[N]) s, int64 i) => (seq(float[N]) t)
        { e = SequenceAt(s, i)  f = Mul(e, e)  t = SequenceInsert(s, f) }""",
    ),
    "Casts from and to other types": (
        "g (double[2] x) => (int64[2] y) { a = Cast <to = 10> (x)  b = Neg(a)  y = Cast <to = 7> (b) }",
        "g (double[2] x) => (int64[2] y) { a = Cast <to = 1> (x)  b = Neg(a)  y = Cast <to = 7> (b) }",
    ),
    "an operator that nobody knows": (
        """g (float[2] x) => (float[2] y, float16[2] z) <float16[2] w = {1, 2}, float16[2] a, float16[2] z>
        { x16 = Cast <to = 10> (x)  s = Mul(x16, w)  a = own.Thing(x16, w)  z = own.Thing(s, a)
          b = Mul(a, x16)  y = Cast <to = 1> (b) }""",
        """g (float[2] x) => (float[2] y, float[2] z) <float16[2] w__kept = {1, 2}>
        { s = Mul(x, w)  x__fp16 = Cast <to = 10> (x)  w__fp16 = Cast <to = 10> (w)
          a__fp16 = own.Thing(x__fp16, w__fp16)  a = Cast <to = 1> (a__fp16)
          s__fp16 = Cast <to = 10> (s)  z__fp16 = own.Thing(s__fp16, a__fp16)  z = Cast <to = 1> (z__fp16)
          y = Mul(a, x) }""",
    ),
    "nothing to do": (
        "g (float[2] x) => (float[2] y) { a = Cast <to = 1> (x)  y = Neg(a) }",
        "g (float[2] x) => (float[2] y) { a = Cast <to = 1> (x)  y = Neg(a) }",
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewrites(name: str) -> None:
    before, after = (parsed(text) for text in REWRITES[name])
    got = widened(before)
    assert onnx.printer.to_text(plain(got)) == onnx.printer.to_text(plain(after))
    for tensor in got.graph.initializer:
        assert tensor.data_type == onnx.TensorProto.FLOAT


def plain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Without what the two need not share: node names, declared inner types, initializers and the form of attributes' tensors."""
    result = ir.from_proto(proto)
    for node in result.graph.all_nodes():
        node.name = ""
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy()))
    result = ir.to_proto(result)
    del result.graph.value_info[:], result.graph.initializer[:]
    for node in result.graph.node:
        for attribute in node.attribute:
            del attribute.g.value_info[:]
    return result


def test_functions_are_widened_where_they_are_called() -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "own": 1]>
        g (float[2] x) => (float[2] y) { a = Cast <to = 10> (x)  b = own.scaled <kind = 10> (a)  y = Cast <to = 1> (b) }
        <domain: "own", opset_import: ["": 20]> scaled <kind> (v) => (r)
        { k = Constant <value = float16[1] {16896}> ()  c = Cast <to: int = @kind> (v)  r = Mul(c, k) }"""
    back = widened(parser.parse_model(text))
    assert [node.op_type for node in back.graph.node] == ["Constant", "Mul"]
    x = np.array([1.1, 2.3], np.float32)
    np.testing.assert_array_equal(outputs(back, {"x": x})["y"], x * 3)


KEPT: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray] | None]] = {  # no function: no runtime has own.Thing
    "g (float16[2] x) => (float16[2] y, bfloat16[2] z) { y = Sqrt(x)  z = Cast <to = 16> (y) }": (
        "Cast Sqrt Cast Cast",
        np.sqrt,
    ),
    "g (float16[2] x) => (float16[2] x, float16[2] y) { y = Neg(x) }": ("Cast Neg Cast", np.negative),
    "g (float16[2] x) => (float16[2] y) { y = own.Thing(x) }": ("Thing", None),
    "g (float16[2] x) => (float16[2] y, float16[2] z) { y = own.Thing(x)  a = Neg(y)  z = own.Thing(a) }": (
        "Thing Cast Neg Cast Thing",
        None,
    ),
    "g (float16[2] x) => (float16[2] y, float16[2] z) { a = Neg(x)  y = own.Thing(a)  z = own.Thing(x) }": (
        "Cast Neg Cast Thing Cast Thing",
        None,
    ),
}


@pytest.mark.parametrize("text", KEPT)
def test_the_interface_may_stay(text: str) -> None:
    source, (operators, function) = parsed(text), KEPT[text]
    back = widened(source, keep_io=True)
    assert list(back.graph.input) == list(source.graph.input)
    assert list(back.graph.output) == list(source.graph.output)
    assert " ".join(node.op_type for node in back.graph.node) == operators
    if function is not None:
        x = np.array([1.5, 3.25], np.float16)
        np.testing.assert_array_equal(outputs(back, {"x": x})["y"], function(x.astype(np.float32)).astype(np.float16))


@pytest.mark.parametrize("keep_io", [False, True])
def test_before_ir_4_and_opset_6(keep_io: bool) -> None:
    text = """g (float16[2] x, float16[2] w) => (float16[2] y) <float16[2] w = {15360, 16384}>
        { a = Cast <to = "FLOAT"> (x)  b = Cast <to = "FLOAT16"> (a)  y = Mul <broadcast = 1> (b, w) }"""
    back = widened(parsed(text, opset=4, ir_version=3), keep_io)
    assert [value.type.tensor_type.elem_type for value in back.graph.input] == [10 if keep_io else 1, 1]
    assert {node.op_type for node in back.graph.node} == ({"Mul", "Cast"} if keep_io else {"Mul"})
    np.testing.assert_array_equal(numbers(back)["w"], np.array([1, 2], np.float32))


REFUSED = {
    "g (float16[2] x) => (float16[2] y) { a = own.Thing(x)  y = Neg(a) }": (False, "own.Thing node .* declare"),
    "g (seq(float16[2]) s) => (seq(float16[2]) t) { t = Identity(s) }": (True, "'s' holds 16-bit tensors"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    keep_io, words = REFUSED[text]
    with pytest.raises(UnsupportedError, match=words):
        onnxamp.widen(parsed(text), keep_io=keep_io)


def test_from_bf16_to_fp16_by_the_rules() -> None:
    """A constant that bf16 holds and fp16 does not keeps its reader in fp32."""
    weights = np.array([[1e30, 1.5], [2.5, 3.5]], ml_dtypes.bfloat16)
    source = parsed("g (bfloat16[1,2] x) => (bfloat16[1,2] y) { a = MatMul(x, v)  y = MatMul(a, w) }")
    for name, array in (("w", weights), ("v", np.ones((2, 2), ml_dtypes.bfloat16))):
        source.graph.initializer.append(numpy_helper.from_array(array, name))
    result = onnxamp.convert(onnxamp.widen(source), dtype="fp16")
    got = numbers(ir.to_proto(result.model))
    assert {name: array.dtype.name for name, array in got.items()} == {"w": "float32", "v": "float16"}
    np.testing.assert_array_equal(got["w"], weights.astype(np.float32))
