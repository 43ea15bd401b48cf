"""Types and shapes: every operator's, from whichever source knows them, and never from a stale declaration."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxamp.model import dimensions, io, types
from onnxamp.model.units import all_nodes, type_graph

FLOAT, INT64 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)


def inferred(text: str, *, domains: tuple[str, ...] = (), weights: dict[str, np.ndarray] | None = None) -> ir.Model:
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    opsets = [helper.make_opsetid("", 19), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = io.load(helper.make_model(graph, ir_version=10, opset_imports=opsets))
    types.infer(model)
    return model


def found(model: ir.Model) -> dict[str, tuple[ir.TypeProtocol | None, list[int | str | None] | None]]:
    """Type and shape by name."""
    values = [value for node in all_nodes(model.graph) for value in node.outputs]
    return {
        value.name or "": (
            value.type,
            None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape],
        )
        for value in values
    }


def test_names_of_dimensions_go_through() -> None:
    got = found(
        inferred("g (float[n,4] x) => (float[n,8] y) { a = Relu(x)  b = Concat <axis = 1> (a, a)  y = Neg(b) }")
    )
    assert got == {"a": (FLOAT, ["n", 4]), "b": (FLOAT, ["n", 8]), "y": (FLOAT, ["n", 8])}


def test_a_size_that_follows_by_arithmetic_is_a_number() -> None:
    """Flattened as PyTorch's exporter writes it: the target is made of a part of the shape, and the rest is 3·4."""
    body = "s = Shape(x)  a = Slice(s, zero, two)  t = Concat<axis = 0>(a, rest)  b = Reshape(x, t)  y = Relu(b)"
    header = "g (float[n,16,3,4] x) => (float[p,q,r] y) <int64[1] zero = {0}, int64[1] two = {2}, int64[1] rest = {-1}>"
    assert found(inferred(f"{header} {{ {body} }}"))["b"] == (FLOAT, ["n", 16, 12])


def test_a_dimension_whose_name_is_a_number_stays_free() -> None:
    """The source may call a free dimension 3; NonZero brings the inference that gives sizes as names."""
    model = inferred('g (float["3",4] x) => (float["3",4] y, int64[2,k] z) { a = Relu(x)  y = Neg(a)  z = NonZero(a) }')
    assert found(model)["a"] == (FLOAT, ["3", 4])
    assert [getattr(dim, "value", dim) for dim in model.graph.inputs[0].shape or ()] == ["3", 4]


def test_unknown_dimensions_stay_apart() -> None:
    got = found(
        inferred(
            "g (bool[n] c, bool[n] d, float[n] x) => (float[p] y, float[q] z) { y = Compress(x, c)  z = Compress(x, d) }"
        )
    )
    assert got["y"][1] == ["p"]
    assert got["z"][1] == ["q"]
    model = inferred(
        "g (bool[n] c, bool[n] d, float[n] x) => (float y) { a = Compress(x, c)  b = Compress(x, d)  y = Concat <axis = 0> (a, b) }"
    )
    a, b = (value.shape for node in list(model.graph)[:2] for value in node.outputs)
    assert a is not None
    assert b is not None
    assert a[0] != b[0]


def test_sequences_keep_their_type() -> None:
    got = found(
        inferred(
            "g (float[4,2] x) => (float[2,2] y) { s = SplitToSequence(x, n)  y = SequenceAt(s, i) }",
            weights={"n": np.array(2), "i": np.array(0)},
        )
    )
    assert got["s"][0] == ir.SequenceType(FLOAT)
    assert got["y"][0] == FLOAT


def test_contrib_operators_keep_types_flowing() -> None:
    text = """g (float[2,4] x) => (float[2,4] y, float[2,4] z) {
        a = com.microsoft.FusedMatMul <alpha = 2.0> (x, w)  b = com.microsoft.BiasGelu(a, v)  c = com.microsoft.QuickGelu(b)
        y = Relu(c)  q, s, p = DynamicQuantizeLinear(y)  z = com.microsoft.DequantizeLinear(q, s, p) }"""
    weights = {"w": np.ones((4, 4), np.float32), "v": np.ones(4, np.float32)}
    model = inferred(text, domains=("com.microsoft",), weights=weights)
    kinds = {name: kind for name, (kind, _) in found(model).items()}
    assert {kinds[name] for name in "abcyz"} == {FLOAT}
    assert kinds["q"] == ir.TensorType(ir.DataType.UINT8)


def test_a_quantized_product_has_the_type_of_its_zero_point() -> None:
    text = """g (int8[2,4] x) => (int8[2,3] y, float[2,3] z) {
        a = com.microsoft.QGemm(x, s, p, w, s, p, , s, p)  b = com.microsoft.QGemm(x, s, p, w, s, p)
        y = Identity(a)  z = Identity(b) }"""
    weights = {"w": np.ones((4, 3), np.int8), "s": np.float32(1), "p": np.int8(0)}
    got = found(inferred(text, domains=("com.microsoft",), weights=weights))
    assert got["a"] == (ir.TensorType(ir.DataType.INT8), [2, 3])
    assert got["b"] == (FLOAT, [2, 3])


def test_behind_a_custom_operator_only_declarations_count() -> None:
    text = "g (float[2] x) => (float[2] y) <{}> {{ a = my.Op(x)  b = Relu(a)  y = my.Op(b) }}"
    untyped = inferred(text.format(""), domains=("my",))
    assert found(untyped)["a"] == (None, None)
    assert found(untyped)["b"][0] is None
    units = type_graph(untyped).units
    assert {unit.fixed for unit in units if unit.node is not None} <= {"unknown operator", "untyped"}
    declared = inferred(text.format("float[2] a"), domains=("my",))
    assert found(declared)["b"] == (FLOAT, [2])


def test_stale_declarations_are_corrected() -> None:
    model = inferred(
        "g (float[2,3] x) => (float[3,2] y) <float16[7] a, int64[2,3] b> { a = Transpose(x)  b = Relu(a)  y = Neg(b) }"
    )
    assert found(model) == {name: (FLOAT, [3, 2]) for name in "aby"}


def test_declared_outputs_keep_their_type() -> None:
    model = inferred("g (float[2] x) => (float[2] y) { a = my.Op(x)  y = Relu(a) }", domains=("my",))
    assert model.graph.outputs[0].type == FLOAT


def test_bodies() -> None:
    text = """g (int64 n, float[k] x) => (float[k] y, float[m, k] s) {
        c = Constant <value = bool {1}> ()
        y, s = Loop (n, c, x) <body = b (int64 i, bool ci, st) => (bool co, so, out) {
            co = Identity(ci)  so = Relu(st)  out = Sigmoid(x) }> }"""
    graph = onnx.parser.parse_graph(
        text.replace(", st)", ", float st)").replace("co, so, out)", "co, float so, float out)")
    )
    body = graph.node[1].attribute[0].g
    for value in (body.input[2], *body.output[1:]):
        value.ClearField("type")
    model = io.load(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)]))
    types.infer(model)
    assert {name: kind for name, (kind, _) in found(model).items() if name in ("so", "out", "y", "s")} == dict.fromkeys(
        ("so", "out", "y", "s"), FLOAT
    )
    (loop,) = (node for node in model.graph if node.op_type == "Loop")
    assert loop.attributes["body"].as_graph().inputs[2].type == FLOAT


def test_large_weights_are_not_serialized(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = onnx.shape_inference.infer_shapes

    def spy(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        sizes.append(proto.ByteSize())
        return original(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", spy)
    big = np.ones((4, 1000, 250), np.float32)
    graph = onnx.parser.parse_graph(
        "g (float[2,4,10,1000] x) => (float[2,4,10,250] y) { a = MatMul(x, w)  y = Add(a, c) }"
    )
    graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(big[:, :10])))
    graph.initializer.append(numpy_helper.from_array(big, "w"))
    model = io.load(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)]))
    types.infer(model)
    assert found(model)["a"] == (FLOAT, [2, 4, 10, 250])
    assert sizes
    assert max(sizes) < 1000


def test_inference_leaves_no_trace_in_the_source() -> None:
    text = (
        "g (float[n,4] x) => (float[m] y) { s = Shape(x)  i = Constant <value = int64[1] {-1}> ()  y = Reshape(x, i) }"
    )
    graph = onnx.parser.parse_graph(text)
    source = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)])
    before = source.SerializeToString(deterministic=True)
    model = io.load(source)
    types.infer(model)
    assert source.SerializeToString(deterministic=True) == before
    assert not any(value.metadata_props for node in model.graph for value in node.outputs)


@pytest.mark.parametrize("opset", [1, 5, 7, 9, 11, 13, 17, 23])
def test_shapes_of_old_opsets(opset: int) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.ones((3, 2, 3, 3), np.float32), "w"),
            numpy_helper.from_array(np.ones((12, 5), np.float32), "m"),
        ],
    )
    if opset < 9:
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    model = io.load(
        helper.make_model(graph, ir_version=3 if opset < 9 else 10, opset_imports=[helper.make_opsetid("", opset)])
    )
    types.infer(model)
    assert {name: shape for name, (_, shape) in found(model).items()} == {
        "a": [1, 3, 4, 4],
        "b": [1, 3, 2, 2],
        "c": [1, 12],
        "y": [1, 5],
    }


@pytest.mark.parametrize("maker", ["SplitToSequence", "SequenceConstruct", "Optional"])
def test_a_sequence_of_what_no_schema_describes_has_no_type(maker: str) -> None:
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20, "custom": 1]> g (float[4,4] x) => (float[4,4] y)
        {{ u = custom.Nothing(x)  s = {maker}(u)  y = Relu(x) }}"""
    )
    loaded = io.load(model)
    types.infer(loaded)
    assert {value.name: value.type for node in loaded.graph for value in node.outputs}["s"] is None
    io.to_proto(loaded).SerializeToString()


def test_a_type_that_the_operator_cannot_give_is_none() -> None:
    """Strings in front of a product: what follows from its signature alone must not be written down as its result."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> g (string[2,2] x, float[2,2] w) => (float[2,2] y)
        { a = com.microsoft.FusedMatMul(x, w)  b = com.microsoft.BiasGelu(a, w)  y = Add(b, w) }"""
    )
    onnx.checker.check_model(model, full_check=True)
    loaded = io.load(model)
    types.infer(loaded)
    kinds = {value.name: value.dtype for node in loaded.graph for value in node.outputs}
    assert kinds == {"a": None, "b": ir.DataType.FLOAT, "y": ir.DataType.FLOAT}
    onnx.checker.check_model(io.to_proto(loaded), full_check=True)


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(0, 10**9, 1), (0, 2**31 - 1, 1), (0, 10, 1), (5, 10, 1), (3, 10**9, 2), (0, 512, 4), (1, 2**63 - 1, 1)],
)
def test_a_slice_is_never_longer_than_its_axis(start: int, end: int, step: int) -> None:
    numbers = f"int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] k = {{1}}, int64[1] t = {{{step}}}"
    model = inferred(f"g (float[n,seq,4] x) => (float[a,b,c] z) <{numbers}> {{ y = Slice(x, s, e, k, t) z = Relu(y) }}")
    _, shape = found(model)["y"]
    assert shape is not None
    for length in (6, 64, 1000):
        want = len(range(length)[start:end:step])
        assert dimensions.Sizes({"seq": length}).size(ir.SymbolicDim(shape[1]), 1) == want
