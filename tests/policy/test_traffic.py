"""The traffic model on graphs small enough to count by hand, and the sizes of unknown dimensions."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxamp.model import dimensions
from onnxamp.model.traffic import Traffic

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }", 6 + 6),
        ("g (float[2,3] x) => (float[2,3] y) { y = Add(x, x) }", 6 + 6 + 6),
        ("g (float[2,3] x) => (float[2,3] y) <float[3] b = {1,2,3}> { y = Add(x, b) }", 6 + 3 + 6),
        ("g (float[2,3] x) => (float[2,2] y) <float[3,2] w = {1,2,3,4,5,6}> { y = MatMul(x, w) }", 6 + 6 + 4),
        (
            "g (float[2,3] x, bool c) => (float[2,3] y) { t = Neg(x) y = If (c) <then_branch = a () => (float[2,3] p)"
            " { p = Relu(t) }, else_branch = b () => (float[2,3] q) { q = Abs(t) }> }",
            12 + 12 + 12 + 6,
        ),
        ("g (float[batch,seq,3] x) => (float[batch,seq,3] y) { y = Relu(x) }", 2 * 64 * 3),
    ],
)
def test_bytes(graph_of, text, elements):
    graph = graph_of(text)
    model = Traffic(graph, {})
    outside = 1 if "bool c" in text else 0  # the condition is read as well
    assert model.bytes(lambda unit: FLOAT) == 4 * elements + outside
    low = model.bytes(lambda unit: HALF if unit.node is not None else FLOAT)
    ends = sum(model.elements(value) for value in graph.readers if value.name == "x") + sum(
        model.elements(value) for value in graph.model.graph.outputs
    )
    assert low == 2 * elements + outside + 6 * ends


def test_shape_reads_nothing_and_integers_count(graph_of):
    graph = graph_of("g (float[2,3] x) => (int64[2] y) { y = Shape(x) }")
    assert Traffic(graph, {}).bytes(lambda unit: FLOAT) == 2 * 8
    graph = graph_of("g (float[2,3] x, int64[5] i) => (float[5,3] y) { y = Gather(x, i) }")
    assert Traffic(graph, {}).bytes(lambda unit: FLOAT) == 4 * (6 + 15) + 8 * 5


def test_one_cast_a_value_and_type(graph_of):
    graph = graph_of(
        "g (float[4] x) => (float[4] y, float[4] z) { a = Neg(x) b = Relu(a) c = Abs(a) y = Exp(b) z = Exp(c) }"
    )
    low = {"Relu", "Abs"}
    model = Traffic(graph, {})
    found = model.bytes(lambda unit: HALF if unit.node is not None and unit.node.op_type in low else FLOAT)
    # a is cast once for two readers, b and c once each
    assert found == 4 * (8 + 8 + 8) + 2 * (8 + 8) + 3 * 4 * 6


def test_constants_are_cast_only_where_said(graph_of):
    graph = graph_of("g (float[2] x) => (float[2] y) <float[2] b = {1,2}> { y = Add(x, b) }")
    model = Traffic(graph, {})
    stored = model.bytes(lambda unit: HALF)
    assert model.bytes(lambda unit: HALF, lambda read: read.value.name == "b") == stored + 2 * 6


def test_negative_dimensions_are_unknown(graph_of):
    graph = graph_of("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    graph.model.graph.inputs[0].shape = ir.Shape([-1, -1, 3])
    model = Traffic(graph, {})
    assert model.elements(graph.model.graph.inputs[0]) == 1 * 64 * 3


def test_a_made_up_size_leaves_no_value_empty(graph_of):
    text = """g (float[n,1,samples] x, float[8,1,256] w) => (float[n,8,f] z)
    { y = Conv <strides = [128]> (x, w) z = Relu(y) }"""
    graph = graph_of(text)
    model = Traffic(graph, {})
    assert model.dims["samples"] == dimensions.ALTERNATIVES[0]
    assert model.elements(graph.model.graph.outputs[0].producer().outputs[0]) > 0
    assert Traffic(graph, {"samples": 300}).dims["samples"] == 300
    hopeless = graph_of(
        "g (float[n,m] x) => (float[a,b] z) { e = Constant <value_ints=[9000]>() "
        " f = Constant <value_ints=[2000000000]>() o = Constant <value_ints=[1]>() y = Slice(x, e, f, o) z = Relu(y) }"
    )
    assert Traffic(hopeless, {}).dims["m"] == 64


def test_given_dimensions(graph_of):
    graph = graph_of("g (float[batch,seq] x) => (float[batch,seq] y) { y = Relu(x) }")
    model = Traffic(graph, {"seq": 10})
    assert model.dims == {"seq": 10, "batch": 1}
    assert model.bytes(lambda unit: FLOAT) == 4 * 20


@pytest.mark.parametrize(
    ("text", "names", "size"),
    [
        ("batch", ("batch",), 3),
        ("2*batch + 1", ("batch",), 7),
        ("floor(p2o.Dim.1/2 - 1/2) + 1", ("p2o.Dim.1",), 10),
        ("Max(0, floor(height/64) - 1)", ("height",), 0),
        ("a/b/c_dim_1", ("a/b/c_dim_1",), 5),
        ("128", (), 128),
        ("?", ("?",), 7),
        ("batch*batch", ("batch",), 9),
        ("batch/0", ("batch",), 64),  # from here on what has no value: the default
        ("9**9**9", (), 64),
        ("9**9**9*0", (), 64),
        ("(0-9)**batch**(1/2)", ("batch",), 64),
        ("+".join("1" * 5000), ("+".join("1" * 5000),), 64),
        ("Max()", ("Max()",), 64),
        ("Min(batch)", ("Min(batch)",), 64),
        ("floor(1, 2)", ("floor(1, 2)",), 64),
        ("floor()", ("floor()",), 64),
    ],
)
def test_dimension_expressions(text, names, size):
    sizes = {"batch": 3, "p2o.Dim.1": 20, "height": 10, "a/b/c_dim_1": 5, "?": 7}
    assert dimensions.names(text) == names
    assert dimensions.Sizes(sizes).size(ir.SymbolicDim(text), 1) == size
