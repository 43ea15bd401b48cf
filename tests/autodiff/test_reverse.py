"""The reverse walk: fan-in, pruning, broadcasting that only the run decides, types, names, errors."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxamp import autodiff
from onnxamp.autodiff import gradient_model
from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model.types import infer
from onnxamp.model.units import all_values


def parse(text, opset=18):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "test" : 1]> {text}')


def run(model, feeds, names=None):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = names or [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def operators(model):
    return [node.op_type for node in model.graph if "onnxamp.backward" in node.metadata_props]


def test_fan_in_is_summed_once():
    model = gradient_model(
        parse("g (float[2] x) => (float y) { a = Mul(x, x) b = Add(a, x) c = Add(b, a) y = ReduceSum<keepdims=0>(c) }")
    )
    x = np.array([2.0, -3.0], np.float32)
    np.testing.assert_allclose(run(model, {"x": x})["grad/x"], 4 * x + 1)


def test_only_the_path_is_differentiated():
    text = """g (float[2, 3] x, float[3] w) => (float y)
        { s = Softmax(x) i = ArgMax<axis=1, keepdims=0>(x) f = Cast<to=1>(i) t = ReduceSum<keepdims=0>(f)
          a = Mul(s, w) b = ReduceSum<keepdims=0>(a) y = Add(b, t) }"""
    model = gradient_model(parse(text), wrt=["w"])
    assert [value.name for value in model.graph.outputs] == ["y", "grad/w"]
    assert "Softmax" not in operators(model)
    assert not any(value.name == "grad/s" for node in model.graph for value in node.outputs)


def test_one_shared_transpose_and_no_expand():
    text = """g (float[2, 3] x, float[4, 3] w, float[5, 3] v) => (float y)
        { t = Transpose<perm=[1, 0]>(w) a = MatMul(x, t) u = Transpose<perm=[1, 0]>(v) b = MatMul(x, u)
          c = ReduceMean<keepdims=0>(a) d = ReduceSum<keepdims=0>(b) y = Add(c, d) }"""
    model = gradient_model(parse(text))
    assert "Transpose" not in operators(model)  # Gemm transposes; the weight's own layout is the one that is wanted
    assert run(
        model, {"x": np.ones((2, 3), np.float32), "w": np.ones((4, 3), np.float32), "v": np.ones((5, 3), np.float32)}
    )["grad/w"].shape == (4, 3)
    model = gradient_model(parse("g (float[2, 3] x) => (float y) { a = Mul(x, x) y = ReduceMean<keepdims=0>(a) }"))
    assert "Expand" not in operators(model)


@pytest.mark.parametrize(("m", "n"), [(1, 4), (4, 4), (1, 1), (4, 1)])
def test_broadcast_that_only_the_run_decides(m, n):
    """Dimensions M and N are unknown: either may be 1."""
    text = """g (float[2, M] x, float[N] b, float[K, 1] c) => (float y)
        { a = Mul(x, b) d = Add(a, c) s = Mul(d, d) y = ReduceSum<keepdims=0>(s) }"""
    model = gradient_model(parse(text))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, m)), "b": rng.standard_normal(n), "c": rng.standard_normal((1, 1))}
    got = run(model, {name: value.astype(np.float32) for name, value in feeds.items()})
    g = 2 * (feeds["x"] * feeds["b"] + feeds["c"])
    for name, full in (("x", g * feeds["b"]), ("b", g * feeds["x"]), ("c", g)):
        want = full
        shape = feeds[name].shape
        want = want.sum(tuple(range(want.ndim - len(shape))))
        want = want.sum(tuple(i for i, size in enumerate(shape) if size == 1), keepdims=True)
        assert got[f"grad/{name}"].shape == shape
        np.testing.assert_allclose(got[f"grad/{name}"], want, rtol=1e-4, atol=1e-5)


def test_equal_names_are_equal_sizes():
    text = "g (float[N, 3] x, float[N, 3] z) => (float y) { a = Mul(x, z) y = ReduceSum<keepdims=0>(a) }"
    assert not {"NonZero", "ReduceSum"} & set(operators(gradient_model(parse(text))))


LOW = """g (float[N, 8] x, float[8, 4] w, float[4] b) => (float y)
    {{ xl = Cast<to={to}>(x) wl = Cast<to={to}>(w) bl = Cast<to={to}>(b) h = MatMul(xl, wl) a = Add(h, bl)
       r = LeakyRelu<alpha=0.1>(a) l = LogSoftmax(r) p = Clip(l, lo) f = Cast<to=1>(p) y = ReduceMean<keepdims=0>(f) }}"""


@pytest.mark.parametrize(("to", "opset"), [(10, 18), (16, 18), (16, 22)])
def test_gradients_have_the_type_of_their_values(to, opset):
    proto = parse(LOW.format(to=to), opset)
    kind = ir.DataType(to)
    bound = onnx.helper.make_tensor("lo", to, [], [-1.5])
    proto.graph.initializer.append(bound)
    model = gradient_model(proto, wrt=["x", "w", "b"])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    values = {value.name: value for node in model.graph for value in node.outputs}
    assert all(values[f"grad/{name}"].dtype == ir.DataType.FLOAT for name in "xwbf")
    assert all(
        values[f"grad/{name}"].dtype == kind for name in ("xl", "wl", "bl", "a", "r", "l")
    )  # that of h is that of a
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    assert all(value.dtype == kind for value in gemm.inputs)
    for node in model.graph:
        if node.op_type in ("Less", "LessOrEqual", "GreaterOrEqual") and "onnxamp.backward" in node.metadata_props:
            assert node.inputs[0].dtype == (ir.DataType.FLOAT if to == 16 else kind)
    if to == 10:
        rng = np.random.default_rng(0)
        feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (5, 8)), ("w", (8, 4)), ("b", (4,)))}
        text = LOW.format(to=1)
        single = parse(text)
        single.graph.initializer.append(onnx.helper.make_tensor("lo", 1, [], [-1.5]))
        want, got = (run(m, feeds) for m in (gradient_model(single, wrt=["x", "w", "b"]), model))
        for name in "xwb":
            np.testing.assert_allclose(got[f"grad/{name}"], want[f"grad/{name}"], rtol=0.03, atol=2e-3)


def test_metadata_and_names():
    proto = parse(
        "g (float[2, 3] x, float[3, 4] w) => (float y) { h = MatMul(x, w) r = Relu(h) y = ReduceSum<keepdims=0>(r) }"
    )
    proto.graph.node[0].name = "layer"
    proto.graph.node[0].metadata_props.add(key="onnxamp.precision", value="fp16")
    proto.graph.node[0].metadata_props.add(key="onnxamp.code", value="AMP101")
    model = gradient_model(proto)
    mine = [node for node in model.graph if node.metadata_props.get("onnxamp.backward") == "layer"]
    assert {node.op_type for node in mine} == {"Gemm"}
    assert all(node.metadata_props["onnxamp.precision"] == "fp16" for node in mine)
    assert all(node.metadata_props["onnxamp.code"] == "AMP101" for node in mine)
    names = [value.name for node in model.graph for value in node.outputs]
    assert {"grad/x", "grad/w", "grad/h"} <= set(names)
    assert len(names) == len(set(names))
    again = gradient_model(proto)
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(model).SerializeToString()


def test_initializers_become_inputs_with_their_values_and_the_source_stays():
    proto = parse("g (float[2] x) => (float y) <float[2] w = {1, 2}> { a = Mul(x, w) y = ReduceSum<keepdims=0>(a) }")
    before = proto.SerializeToString()
    model = gradient_model(proto, wrt=["*"])
    assert proto.SerializeToString() == before
    assert [value.name for value in model.graph.inputs] == ["x", "w"]
    x = np.array([3.0, 4.0], np.float32)
    got = run(model, {"x": x})
    np.testing.assert_array_equal(got["grad/w"], x)
    np.testing.assert_array_equal(got["grad/x"], [1, 2])


def test_below_ir_4_where_every_initializer_is_an_input():
    text = (
        "g (float[2] x, float[2] w) => (float y) <float[2] w = {2, 3}> { a = Mul(x, w) y = ReduceSum<keepdims=0>(a) }"
    )
    source = parse(text)
    source.ir_version = 3
    found = run(gradient_model(source), {"x": np.array([4, 5], np.float32)})
    np.testing.assert_array_equal(found["grad/w"], [4, 5])
    np.testing.assert_array_equal(found["grad/x"], [2, 3])


def test_a_name_that_is_taken_is_not_lost():
    text = 'g (float[2] x) => (float y) { "grad/x" = Mul(x, x) y = ReduceSum<keepdims=0>("grad/x") }'.replace('"', "")
    text = text.replace("grad/x", "gradx")
    proto = parse(text)
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = "grad/x" if name == "gradx" else name
    x = np.array([3.0, 4.0], np.float32)
    np.testing.assert_array_equal(run(gradient_model(proto), {"x": x})["grad/x"], 2 * x)


def test_values_in_bodies_give_way_to_a_gradient():
    text = """g (float[2] x, bool c) => (float y)
        { r = If (c) <then_branch = t () => (float[2] e) { gx = Sin(x) e = Mul(gx, x) },
                      else_branch = n () => (float[2] o) { o = Sin(x) }> y = ReduceSum<keepdims=0>(r) }"""
    proto = parse(text)
    then = next(a.g for node in proto.graph.node for a in node.attribute if a.name == "then_branch")
    then.node[0].output[0] = then.node[1].input[0] = "grad/x"
    x = np.array([0.5, 1.5], np.float32)
    model = gradient_model(proto)
    names = [value.name for value in all_values(model.graph)]
    assert sorted(names) == sorted({*names})
    got = run(model, {"x": x, "c": np.array(True)})["grad/x"]
    np.testing.assert_allclose(got, np.sin(x) + x * np.cos(x), rtol=1e-6)


@pytest.mark.parametrize("where", ["input", "initializer", "output"])
def test_a_name_of_the_interface_that_a_gradient_would_take(where):
    """An output above all: a model that gradient_model made. What takes no name of theirs still works."""
    proto = parse("g (float[2] x, float[2] v) => (float y, float[2] z) { z = Mul(x, v) y = ReduceSum<keepdims=0>(z) }")
    if where == "output":
        proto = ir.to_proto(gradient_model(proto, "y", ["x"]))
    else:
        proto.graph.input[1].name = proto.graph.node[0].input[1] = "grad/x"
    if where == "initializer":
        del proto.graph.input[1]
        proto.graph.initializer.append(onnx.helper.make_tensor("grad/x", 1, [2], [1.0, 2.0]))
    with pytest.raises(UsageError, match="The gradient of 'x' would be called 'grad/x'"):
        gradient_model(proto, "y")
    other = "v" if where == "output" else "grad/x"
    assert f"grad/{other}" in [value.name for value in gradient_model(proto, "y", [other]).graph.outputs]


def test_missing_rules_are_reported_all_at_once():
    text = """g (float[2, 2] x, float[2, 2] z) => (float y)
        { a = test.First(x) b = test.Second(a) c = test.First(b) e = test.Third(z) d = Add(c, e) y = ReduceSum<keepdims=0>(d) }"""
    proto = parse(text)
    for index, node in enumerate(proto.graph.node):
        node.name = f"n{index}"
    for name in "abce":
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, [2, 2]))
    with pytest.raises(UnsupportedError) as caught:
        gradient_model(proto, wrt=["x"])
    text = str(caught.value)
    assert "test::First (n0, n2)" in text
    assert "test::Second (n1)" in text
    assert "Third" not in text


@pytest.mark.parametrize(
    ("inputs", "body", "words"),
    [
        (
            "float[2, 3] x, float[3] w, int64[2] i",
            "a = SoftmaxCrossEntropyLoss(x, i, w)",
            "weights of SoftmaxCrossEntropyLoss",
        ),
        ("float[2, 3] x, float w", "t = Constant<value = bool {1}>() a = Dropout(x, w, t)", "ratio of Dropout"),
        ("float[2, 3] x, float[2] w", "a = Resize(x, , w)", "scales of Resize"),
        ("float[2, 3] x, float[3] w", "a, d = SimplifiedLayerNormalization(x, w) a2 = Identity(d)", "its deviation"),
        ("float[2, 3] x, float[4] w", "q, a, z = DynamicQuantizeLinear(w)", "DynamicQuantizeLinear"),
    ],
)
def test_a_gradient_without_a_rule_is_refused_not_left_out(inputs, body, words):
    last = "a2" if "a2" in body else "a"
    text = f"g ({inputs}) => (float y) {{ {body} y = ReduceSum<keepdims=0>({last}) }}"
    with pytest.raises(UnsupportedError, match=words):
        gradient_model(parse(text), wrt=["w"])


def test_unknown_dimensions_name_the_node_from_which_nothing_follows():
    text = "g (float[2, 3] x, float[4, 1, 5] w) => (float y) { a = Add(x, w) b = Relu(a) c = ReduceMax(b) y = Identity(c) }"
    proto = parse(text)
    proto.graph.node[0].name = "sum"
    with pytest.raises(UnsupportedError, match=r"inference ends at Add 'sum' of \[2,3\] and \[4,1,5\]"):
        gradient_model(proto, wrt=["w"])


def test_a_pattern_leaves_out_what_only_such_operands_read():
    text = (
        """g (float[2, 3] x) => (float y) <float[2] s = {2, 2}> { a = Resize(x, , s) y = ReduceSum<keepdims=0>(a) }"""
    )
    assert [value.name for value in gradient_model(parse(text)).graph.outputs] == ["y", "grad/x"]


def test_a_users_rule():
    @autodiff.gradient("Cube", domain="test")
    def cube(op, node, g):
        x = node.inputs[0]
        return [op.Mul(op.Mul(g, 3.0), op.Mul(x, x))]

    text = "g (float[3] x) => (float y) { a = test.Cube(x) y = ReduceSum<keepdims=0>(a) }"
    proto = parse(text)
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("a", 1, [3]))
    model = gradient_model(proto)
    assert operators(model).count("Mul") == 3
    assert model.graph.outputs[1].name == "grad/x"


SCALAR = "g (float[2] x, int64[2] i) => (float y, float[2] v) { v = Mul(x, x) y = ReduceSum<keepdims=0>(v) }"


@pytest.mark.parametrize(
    ("of", "wrt", "words"),
    [
        (None, ["*"], "has 2 outputs"),
        ("z", ["*"], "no output 'z'"),
        ("v", ["*"], "not a scalar"),
        ("y", ["nothing*"], "'nothing*'"),
        ("y", ["i"], "'i'"),
        ("y", ["re:("], "not a regular expression"),
    ],
)
def test_wrong_arguments(of, wrt, words):
    with pytest.raises(UsageError, match="(?s)" + __import__("re").escape(words)):
        gradient_model(parse(SCALAR), of, wrt)


def test_an_exact_name_that_does_not_reach_the_output():
    text = "g (float[2] x, float[2] z) => (float y, float[2] v) { v = Mul(z, z) y = ReduceSum<keepdims=0>(x) }"
    with pytest.raises(UsageError, match="'z' has no gradient"):
        gradient_model(parse(text), "y", ["z"])
    model = gradient_model(parse(text), "y", ["*"])
    assert [value.name for value in model.graph.outputs] == ["y", "v", "grad/x"]


def test_old_opsets_are_refused_with_the_remedy():
    proto = parse("g (float[2] x) => (float y) { y = ReduceSum<keepdims=0>(x) }", 12)
    with pytest.raises(UnsupportedError, match="opset 13"):
        gradient_model(proto)


def test_seeds_of_several_outputs_and_of_a_value_in_the_middle():
    model = ir.from_proto(parse("g (float[2] x) => (float[2] y) { a = Mul(x, x) y = Mul(a, x) }"))
    infer(model)
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    seeds = {}
    for name in ("a", "y"):
        seed = ir.Value(name=f"s{name}", type=values[name].type, shape=values[name].shape)
        graph.inputs.append(seed)
        seeds[values[name]] = seed
    (x,) = (value for value in graph.inputs if value.name == "x")
    gradients = autodiff.backward(graph, seeds, [x, values["a"]])
    graph.outputs[:] = [gradients[x], gradients[values["a"]]]
    feeds = {"x": np.array([2.0, 3.0]), "sa": np.array([1.0, 10.0]), "sy": np.array([5.0, 7.0])}
    got = list(run(model, {name: value.astype(np.float32) for name, value in feeds.items()}).values())
    np.testing.assert_allclose(got[1], feeds["sa"] + feeds["sy"] * feeds["x"])
    np.testing.assert_allclose(got[0], 2 * feeds["x"] * got[1] + feeds["sy"] * feeds["x"] ** 2)


@pytest.mark.parametrize("taken", [True, False])
def test_if(taken):
    text = """g (float[2, 3] x, float[3] w, bool c) => (float y)
        { r = If(c) <then_branch = t () => (float[2, 3] a) { p = Mul(x, w) a = Tanh(p) },
                     else_branch = e () => (float[2, 3] b) { b = Mul(x, x) }>
          s = Mul(r, r) y = ReduceSum<keepdims=0>(s) }"""
    model = gradient_model(parse(text))
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3)), rng.standard_normal(3)
    got = run(model, {"x": x.astype(np.float32), "w": w.astype(np.float32), "c": np.array(taken)})
    if taken:
        g = 2 * np.tanh(x * w) * (1 - np.tanh(x * w) ** 2)
        want = g * w, (g * x).sum(0)
    else:
        want = 4 * x**3, np.zeros(3)
    np.testing.assert_allclose(got["grad/x"], want[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["grad/w"], want[1], rtol=1e-4, atol=1e-6)
