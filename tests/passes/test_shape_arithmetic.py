"""Shape arithmetic and sequences of exporters, folded: the same results with fewer nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.model.constants import add_initializer
from onnxamp.model.types import infer
from onnxamp.passes.blocked import BlockedConvPass
from onnxamp.passes.expands import PlainExpands
from onnxamp.passes.integers import FoldIntegers, settle
from onnxamp.passes.norms import DecomposeBatchNorm
from onnxamp.passes.reshapes import ConstantReshapes
from onnxamp.passes.scaled_add import ScaledAddPass
from onnxamp.passes.sequences import FoldSequences
from onnxamp.passes.single_sizes import SingleSizes

CASES = {
    "sizes out of a shape": (
        FoldIntegers,
        """g (float[B, 6, 4] x) => (float[B, 3, 2, 4] y)
        { s = Shape(x) one = Constant<value = int64[1] {1}>() two = Constant<value = int64[1] {2}>() i = Constant<value = int64 {2}>()
          z = Constant<value = int64[1] {0}>() channels = Slice(s, one, two, z) half = Div(channels, two) width = Gather(s, i)
          w = Unsqueeze(width, z) batch = Slice(s, z, one) to = Concat<axis=0>(batch, half, two, w) y = Reshape(x, to) }""",
        ["Shape", "Slice", "Concat", "Reshape"],
    ),
    "32-bit sizes": (
        FoldIntegers,
        """g (float[B, 6, 4] x, int64 i) => (int32 y)
        { s = Shape(x) c = Cast<to=6>(s) one = Constant<value = int64 {1}>() n = Gather(c, one) j = Cast<to=6>(i) y = Mul(n, j) }""",
        ["Cast", "Mul"],
    ),
    "sizes backwards": (
        FoldIntegers,
        """g (float[B, 6, 4] x) => (int64[A] y, int64[C] z)
        { s = Shape(x) n = Constant<value = int64[1] {-1}>() o = Constant<value = int64[1] {0}>() ax = Constant<value = int64[1] {0}>()
          y_ = Slice(s, n, o, ax, n) one = Constant<value = int64 {1}>() t = Gather(s, one) u = Unsqueeze(t, ax) y = Add(y_, u)
          w = Slice(s, o, n, ax) q = Gather(w, one) z = Unsqueeze(q, ax) }""",
        ["Add", "Unsqueeze"],
    ),
    "a table up to a free size": (
        FoldIntegers,
        """g (float[B, T] x) => (int64[P] y)
        { table = Constant<value = int64[8] {9, 8, 7, 6, 5, 4, 3, 2}>()
          o = Constant<value = int64[1] {0}>() n = Constant<value = int64[1] {1}>() s = Shape<start=1>(x) y = Slice(table, o, s, o, n) }""",
        ["Shape", "Slice"],
    ),
    "one free dimension": (
        ConstantReshapes,
        """g (float[B, 6, 4] x) => (float[B, 24] y)
        { s = Shape<start=0, end=1>(x) r = Constant<value = int64[1] {24}>() to = Concat<axis=0>(s, r) y = Reshape(x, to) }""",
        ["Reshape"],
    ),
    "dimensions that are kept": (
        ConstantReshapes,
        """g (float[B, T, 4] x) => (float[B, T, 2, 2] y)
        { s = Shape<start=0, end=2>(x) r = Constant<value = int64[2] {2, 2}>() to = Concat<axis=0>(s, r) y = Reshape(x, to) }""",
        ["Reshape"],
    ),
    "two free dimensions": (
        ConstantReshapes,
        """g (float[B, 6, T] x) => (float[T, 2, 3, B] y)
        { t = Shape<start=2>(x) b = Shape<start=0, end=1>(x) r = Constant<value = int64[2] {2, 3}>() to = Concat<axis=0>(t, r, b)
          y = Reshape(x, to) }""",
        ["Shape", "Shape", "Concat", "Reshape"],
    ),
    "an expand that keeps dimensions": (
        PlainExpands,
        """g (float[B, 6, 4] x) => (float[B, 1, 4] y)
        <int64 i = {0}, int64[1] axis = {0}, int64[2] kept = {-1, -1}, int64[3] none = {-1, -1, -1}, int64[3] ones = {1, 1, 1},
         int64[1] flat = {-1}, float[1, 1, 4] token = {1, 2, 3, 4}>
        { s = Shape(x) n = Gather(s, i) u = Unsqueeze(n, axis) c = Concat<axis=0>(u, kept) t = Reshape(c, flat) e = Equal(t, none)
          w = Where(e, ones, t) y = Expand(token, w) }""",
        ["Shape", "Gather", "Unsqueeze", "Concat", "Expand"],
    ),
    "an expand by a number that may be -1": (
        PlainExpands,
        """g (float[B, 6, 4] x, int64 i) => (float[B, R, 4] y)
        <int64[1] axis = {0}, int64[2] kept = {-1, -1}, int64[3] none = {-1, -1, -1}, int64[3] ones = {1, 1, 1},
         float[1, 1, 4] token = {1, 2, 3, 4}>
        { u = Unsqueeze(i, axis) c = Concat<axis=0>(u, kept) e = Equal(c, none) w = Where(e, ones, c) z = Expand(token, w)
          y = Add(x, z) }""",
        ["Unsqueeze", "Concat", "Equal", "Where", "Expand", "Add"],
    ),
    "data divided by a size": (
        SingleSizes,
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = Shape(x) i = Constant<value = int64 {0}>() n = Gather(s, i) f = Cast<to=1>(n) y = Div(x, f) }""",
        ["Shape", "Expand", "ReduceSum", "Div"],
    ),
    "data times a size that keeps its axis": (
        SingleSizes,
        """g (float[B, 6, T] x) => (float[B, 6, T] y)
        { s = Shape<start=1>(x) a = Constant<value = int64[1] {-1}>() e = Constant<value = int64[1] {9}>() n = Slice(s, a, e)
          f = Cast<to=1>(n) y = Mul(x, f) }""",
        ["Shape", "Expand", "ReduceSum", "Mul"],
    ),
    "a size among others": (
        SingleSizes,
        """g (float[B, 6, T] x) => (float[B, 2, T] y)
        { s = Shape(x) i = Constant<value = int64 {0}>() n = Gather(s, i) z = Constant<value = int64[1] {0}>() b = Unsqueeze(n, z)
          a = Constant<value = int64[1] {2}>() e = Constant<value = int64[1] {3}>() t = Slice(s, a, e, z)
          two = Constant<value = int64[1] {2}>() to = Concat<axis=0>(b, two, t) k = Constant<value = float {7.0}>() y = Expand(k, to) }""",
        ["Shape", "Shape", "Concat", "Expand"],
    ),
    "a size in arithmetic on sizes, read as one": (
        SingleSizes,
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = Shape(x) i = Constant<value = int64 {0}>() n = Gather(s, i) f = Cast<to=1>(n) h = Constant<value = float {2.0}>()
          m = Mul(f, h) y = Div(x, m) }""",
        ["Shape", "Gather", "Cast", "Mul", "Div"],
    ),
    "a float size made a vector, read as one": (
        SingleSizes,
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = Shape(x) i = Constant<value = int64 {0}>() n = Gather(s, i) f = Cast<to=1>(n) z = Constant<value = int64[1] {0}>()
          u = Unsqueeze(f, z) y = Div(x, u) }""",
        ["Shape", "Gather", "Cast", "Unsqueeze", "Div"],
    ),
    "whether there is a size, read as one": (
        SingleSizes,
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = Shape(x) i = Constant<value = int64 {0}>() n = Gather(s, i) b = Cast<to=9>(n) f = Cast<to=1>(b) y = Div(x, f) }""",
        ["Shape", "Gather", "Cast", "Cast", "Div"],
    ),
    "the shape itself, read as one": (
        SingleSizes,
        """g (float[B, 2] x) => (float[B, 2] y) { s = Shape(x) f = Cast<to=1>(s) y = Div(x, f) }""",
        ["Shape", "Cast", "Div"],
    ),
    "chunks": (
        FoldSequences,
        """g (float[B, 6] x) => (float[B, 2] y)
        { two = Constant<value = int64 {2}>() s = SplitToSequence<axis=1>(x, two) i = Constant<value = int64 {0}>()
          j = Constant<value = int64 {-1}>() a = SequenceAt(s, i) b = SequenceAt(s, j) y = Sub(a, b) }""",
        ["Split", "Sub"],
    ),
    "stack": (
        FoldSequences,
        """g (float[B, 6] x) => (float[B, 2, 6] y)
        { a = Neg(x) s = SequenceConstruct(x, a) y = ConcatFromSequence<axis=1, new_axis=1>(s) }""",
        ["Neg", "Unsqueeze", "Unsqueeze", "Concat"],
    ),
    "pieces that are outputs": (
        FoldSequences,
        """g (float[B, 6] x) => (float[B, 3] y, float[B, 3] z, float[B, 3] u)
        { three = Constant<value = int64 {3}>() q = SplitToSequence<axis=1>(x, three) i = Constant<value = int64 {0}>()
          y = SequenceAt(q, i) z = Identity(y) u = SequenceAt(q, i) }""",
        ["Split", "Identity", "Identity", "Identity"],
    ),
    "an output and an input": (
        FoldSequences,
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = SequenceConstruct(x, x) i = Constant<value = int64 {1}>() y = SequenceAt(s, i) }""",
        ["Identity"],
    ),
    "a piece that is asked for, read as one": (
        FoldSequences,
        """g (float[B, 6] x, int64 i) => (float[B, 3] y)
        { three = Constant<value = int64 {3}>() q = SplitToSequence<axis=1>(x, three) y = SequenceAt(q, i) }""",
        ["SplitToSequence", "SequenceAt"],
    ),
    "a sequence that is read as one": (
        FoldSequences,
        """g (float[B, 6] x, int64 i) => (float[B, 6] y)
        { a = Neg(x) s = SequenceConstruct(x, a) y = SequenceAt(s, i) }""",
        ["Neg", "SequenceConstruct", "SequenceAt"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_results(name):
    make, text, expected = CASES[name]
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    model = ir.from_proto(proto)
    infer(model)
    counts = len(model.graph), len(model.graph.initializers)
    changed = make()(model).modified
    assert changed or counts == (len(model.graph), len(model.graph.initializers))
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    result = ir.to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    assert [value.name for value in result.graph.output] == [value.name for value in proto.graph.output]
    assert [node.op_type for node in result.graph.node if node.op_type != "Constant"] == expected
    assert changed == (not any(words in name for words in ("free size", "two free", "read as one", "may be -1")))
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal(
            [3 if dim.dim_param else dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
        )
    }
    feeds = {"x": feeds["x"].astype(np.float32)} | ({"i": np.asarray(1)} if len(proto.graph.input) > 1 else {})
    for one, other in zip(*(ReferenceEvaluator(m).run(None, feeds) for m in (proto, result)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_size_in_a_branch_is_counted_there():
    """And where the opset gives no single size, nothing is changed."""
    text = """g (float[B, 6] x, bool c) => (float[B, 6] y) <int64 i = {0}>
        { y = If (c) <then_branch = t () => (float[B, 6] p) { s = Shape(x) n = Gather(s, i) f = Cast<to=1>(n) p = Div(x, f) },
                      else_branch = e () => (float[B, 6] q) { q = Neg(x) }> }"""
    for opset in (14, 18):
        proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
        model = ir.from_proto(proto)
        infer(model)
        assert SingleSizes()(model).modified == (opset == 18)
    result = ir.to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    feeds = {"x": np.arange(18, dtype=np.float32).reshape(3, 6), "c": np.asarray(True)}
    for one, other in zip(*(ReferenceEvaluator(m).run(None, feeds) for m in (proto, result)), strict=True):
        np.testing.assert_array_equal(one, other)


def parsed(text, ir_version=10):
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : 18]> {text}'))


LARGE = [
    "n = Constant<value = int64[3] {64, 64, 64}>() y = ConstantOfShape(n)",
    "n = Constant<value = int64[3] {64, 64, 64}>() one = Constant<value = int64 {1}>() y = Expand(one, n)",
    "a = Constant<value = int64 {0}>() b = Constant<value = int64 {-999999}>() c = Constant<value = int64 {-2}>() y = Range(a, b, c)",
]


@pytest.mark.parametrize("body", LARGE)
@pytest.mark.parametrize("known", [False, True])
def test_large_results_are_not_even_computed(body, known, monkeypatch):
    computed = []
    monkeypatch.setattr("onnxamp.passes.integers.ReferenceEvaluator", computed.append)
    model = parsed(f"g (float[2] x) => (int64[A] y) {{ {body} }}")
    if known:
        infer(model)
    assert not FoldIntegers()(model).modified
    assert not computed


@pytest.mark.parametrize(
    "text",
    [
        """g (float[B, 0] x) => (float[B, 0] y)
        { two = Constant<value = int64 {2}>() s = SplitToSequence<axis=1>(x, two) y = ConcatFromSequence<axis=1>(s) }""",
        """g (float[B, 6] x) => (float[B, 6] y)
        { s = SequenceConstruct(x) i = Constant<value = int64 {1}>() y = SequenceAt(s, i) }""",
    ],
)
def test_pieces_that_are_not_there(text):
    model = parsed(text)
    infer(model)
    operators = [node.op_type for node in model.graph]
    assert not FoldSequences()(model).modified
    assert [node.op_type for node in model.graph] == operators


def test_a_size_that_is_not_there():
    model = parsed(
        "g (float[B, 6] x) => (int64 y) { s = Shape(x) i = Constant<value = int64 {5}>() t = Gather(s, i) y = Neg(t) }"
    )
    for value in (model.graph[2].outputs[0], model.graph[0].outputs[0]):
        value.type = ir.TensorType(ir.DataType.INT64)
    assert not FoldIntegers()(model).modified


DEFAULTS = {
    FoldIntegers: """g (float[B] x, int64 k) => (int64 y) <int64 k = {2}>
        { one = Constant<value = int64 {1}>() a = Add(k, one) y = Neg(a) }""",
    FoldSequences: """g (float[B, 6] x, int64 k) => (float[B, 3] y) <int64 k = {0}>
        { three = Constant<value = int64 {3}>() q = SplitToSequence<axis=1>(x, three) y = SequenceAt(q, k) }""",
}


@pytest.mark.parametrize("make", DEFAULTS)
@pytest.mark.parametrize("ir_version", [3, 10])
def test_a_default_is_no_constant(make, ir_version):
    """From IR 4 on an initializer that is an input may be replaced by the caller; before it was how every constant was listed."""
    model = parsed(DEFAULTS[make], ir_version)
    infer(model)
    assert make()(model).modified == (ir_version == 3)


TAKEN = [
    (FoldSequences(), "s/sizes s/0", CASES["chunks"][1]),
    (FoldSequences(), "y/axis y/1", CASES["stack"][1]),
    (ConstantReshapes(), "y/shape", CASES["one free dimension"][1]),
    (
        ScaledAddPass(),
        "y/gate",
        "g (float[B, 6] x) => (float[B, 6] y) { k = Constant<value_float=2.0>() p = Mul(x, k) y = Sub(x, p) }",
    ),
    (ScaledAddPass(), "y/axes", "g (float[B, 6] x, float k) => (float[B, 6] y) { p = Mul(x, k) y = Add(x, p) }"),
    (
        BlockedConvPass(4),
        "y/split y/joined y/blocked",
        "g (float[B, 4, 8, 8] x, float[4, 4, 3, 3] w) => (float[B, 4, 6, 6] y) { y = Conv(x, w) }",
    ),
    (
        DecomposeBatchNorm(),
        "y/const_1 y/ReduceMean_2",
        """g (float[8, 4] x, float[4] s) => (float[8, 4] y, float[4] m, float[4] v)
        { y, m, v = BatchNormalization<training_mode=1>(x, s, s, s, s) }""",
    ),
]


@pytest.mark.parametrize(("run", "names", "text"), TAKEN, ids=[names for _, names, _ in TAKEN])
def test_names_that_are_taken_are_left_alone(run, names, text):
    model = parsed(text)
    for name in names.split():
        value = add_initializer(model.graph, name, np.ones(1, np.float32))
        reader = ir.node("Neg", [value])
        model.graph.append(reader)
        model.graph.outputs.extend(reader.outputs)
    infer(model)
    assert run(model).modified
    model.graph.sort()
    onnx.checker.check_model(ir.to_proto(model), full_check=not isinstance(run, BlockedConvPass))


def test_sizes_tell_each_other():
    """A size that is folded makes a later shape static, which folds again."""
    text = """g (float[B, 6] x) => (float[B, 3] y)
        { s = Shape(x) i = Constant<value = int64 {1}>() two = Constant<value = int64 {2}>() n = Gather(s, i) half = Div(n, two)
          z = Constant<value = int64[1] {0}>() one = Constant<value = int64[1] {1}>() end = Unsqueeze(half, z)
          a = Slice(x, z, end, one) t = Shape(a) m = Gather(t, i) w = Unsqueeze(m, z) y = Slice(a, z, w, one) }"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}'))
    infer(model)
    settle(model)
    assert [node.op_type for node in model.graph if node.op_type not in ("Constant", "Shape")] == ["Slice", "Slice"]


def test_sizes_tell_each_other_through_any_number_of_layers():
    """Each layer is as long as the one before it says, after a round trip through floats that inference does not follow."""
    layers = [
        f"""s{i} = Shape<start=1>(x{i}) f{i} = Cast<to=1>(s{i}) p{i} = Pow(f{i}, two) r{i} = Sqrt(p{i}) c{i} = Ceil(r{i})
        q{i} = Round(c{i}) t{i} = Cast<to=7>(q{i}) e{i} = Sub(t{i}, one) x{i + 1} = Slice(x{i}, zero, e{i}, one)"""
        for i in range(9)
    ]
    text = f"""g (float[B, 12] x0) => (float[B, N] x9) {{ two = Constant<value = float {{2.0}}>() zero = Constant<value = int64[1] {{0}}>()
        one = Constant<value = int64[1] {{1}}>() {" ".join(layers)} }}"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}'))
    infer(model)
    settle(model)
    assert {node.op_type for node in model.graph} == {"Constant", "Slice"}
    assert model.graph.outputs[0].shape[1] == 3
    (result,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x0": np.zeros((2, 12), np.float32)})
    assert result.shape == (2, 3)
