"""Forms that a model can have and a rewriter can trip over, converted whole and run."""

import os
import pathlib
import resource
import types
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxamp
from onnxamp.conversion import mixed
from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model import io, tensors
from onnxamp.model.io import load
from onnxamp.model.traffic import Traffic
from onnxamp.model.units import type_graph
from onnxamp.policy.plan import Options

Run = Callable[[onnx.ModelProto, Mapping[str, object]], dict[str, object]]


def parsed(text: str, opset: int = 19, **fields: object) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {fields.get("ir", 10)}, opset_import: ["" : {opset}]> {text}')


def converted(source: object, tmp_path: pathlib.Path, **options: object) -> onnx.ModelProto:
    """Convert, write, check, read."""
    path = tmp_path / "converted.onnx"
    onnxamp.convert(source, **{"target": "any", **options}).save(path, overwrite=True)  # type: ignore[arg-type]
    onnx.checker.check_model(os.fspath(path), full_check=True)
    return onnx.load(path)


def types_of(model: onnx.ModelProto, judge: types.ModuleType) -> dict[str, int]:
    (_, seen), *_ = judge.scopes(judge.inferred(model).graph)
    return dict(seen)


TRAFFIC = """g (float[2,4] x, bool c) => (float[2,4] y, float[4,4] w) <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
{ k = Constant<value = float[4,4] {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}>() a = MatMul(x, k) b = MatMul(a, w) d = Softmax(b)
  e = If (c) <then_branch = t () => (float[2,4] p) { p = MatMul(d, w) }, else_branch = f () => (float[2,4] q) { q = Add(d, k) }>
  u = Clip(e) y = Exp(u) }"""


@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
@pytest.mark.parametrize("weights", ["cast", "convert"])
@pytest.mark.parametrize("io", ["keep", "low"])
def test_modelled_traffic_is_that_of_the_file(level: str, weights: str, io: str) -> None:
    source = load(parsed(TRAFFIC, opset=17))
    result = mixed(source, Options(level=level, weights=weights, io=io, target="any"))
    written = Traffic(type_graph(result.model), {}).bytes(lambda unit: unit.dtype)
    assert written == result.plan.traffic.result
    assert result.summary.casts["low"] > 0 or io == "low"


def test_ranges_count_on_a_converted_model() -> None:
    source = parsed("g (float[2,4] x) => (float[2,4] y) { h = MatMul(x, x) y = Relu(h) }".replace("[2,4]", "[4,4]"))
    plain = onnxamp.convert(source)
    seen = onnxamp.convert(source, ranges={"h": 9e4})
    assert onnxamp.convert(seen.model, ranges={"h": 9e4}).summary == seen.summary
    for model, ranges in ((plain.model, {"h": 9e4}), (seen.model, None), (seen.model, {"h": 8e4})):
        with pytest.raises(UsageError, match="other calibrated ranges"):
            onnxamp.convert(model, ranges=ranges)


def test_an_overridable_input_keeps_its_type(tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run) -> None:
    source = parsed("g (float[2,4] x, float[4,4] w) => (float[2,4] y) { y = MatMul(x, w) }")
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path)
    assert [v.type for v in result.graph.input] == [v.type for v in source.graph.input]
    x, w = np.ones((2, 4), np.float32), np.full((4, 4), 2, np.float32)
    np.testing.assert_array_equal(run_low(result, {"x": x})["y"], x)
    np.testing.assert_array_equal(run_low(result, {"x": x, "w": w})["y"], x @ w)


def test_below_ir_4_initializers_are_constants(tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run) -> None:
    source = parsed("g (float[2,4] x, float[4,4] w) => (float[2,4] y) { y = MatMul(x, w) }", opset=8, ir=3)
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path)
    assert {v.name: judge.element(v.type) for v in result.graph.input} == {
        "x": TensorProto.FLOAT,
        "w": TensorProto.FLOAT16,
    }
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(run_low(result, {"x": x})["y"], x)


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 19, "local" : 1]>
    g (float[2,4] x, bool c) => (float[2,4] y) <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        a = local.Linear <alpha = 2.0> (x, w)  b = local.Linear (a, w)  y = local.Choose(c, b) }
    <domain: "local", opset_import: ["" : 19]> Linear <alpha: float = 0.5> (v, m) => (r) {
        s = Constant <value_float: float = @alpha> ()  t = MatMul(v, m)  r = Mul(t, s) }
    <domain: "local", opset_import: ["" : 19, "local" : 1]> Choose (c, v) => (r) {
        r = If (c) <then_branch = t () => (p) { p = Relu(v) }, else_branch = e () => (q) { z = Neg(v)  q = Exp(z) }> }"""


def test_functions_are_specialised(tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run) -> None:
    source = onnx.parser.parse_model(FUNCTIONS)
    result = converted(source, tmp_path)
    assert not result.functions
    assert judge.heavy(result) == (2, 2)
    for c in (True, False):
        feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4) / 8, "c": np.array(c)}
        np.testing.assert_allclose(run_low(result, feeds)["y"], judge.run(source, feeds)["y"], rtol=2e-3)
    untouched = onnx.ModelProto.FromString(io.to_proto(onnxamp.convert(source, level="O0").model).SerializeToString())
    assert str(untouched.functions) == str(source.functions)


def test_a_table_of_strings_stays(tmp_path: pathlib.Path, run_low: Run) -> None:
    """Labels of a classifier: strings have no size of their own."""
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]> g (float[N, 4] x) => (string[N] label) {
        h = MatMul(x, w)  i = ArgMax<axis = 1, keepdims = 0>(h)  label = Gather(names, i) }""")
    names = np.array(["a", "b", "c", "long name"], object)
    source.graph.initializer.extend(
        [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"), numpy_helper.from_array(names, "names")]
    )
    result = converted(source, tmp_path)
    assert numpy_helper.to_array(result.graph.initializer[1]).tolist() == names.tolist()
    assert run_low(result, {"x": np.eye(4, dtype=np.float32)[[3, 0]]})["label"].tolist() == ["long name", "a"]


def test_a_layer_normalization_that_a_runtime_wrote_before_opset_17(judge: types.ModuleType) -> None:
    """ONNX Runtime's optimizer writes it at any opset; what follows it has types all the same."""
    source = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]> g (float[N, 4] x) => (float[N, 4] y) {
        h = MatMul(x, w)  n = LayerNormalization <axis = -1> (h, scale, bias)  y = MatMul(n, w) }""")
    held = {"w": np.eye(4, dtype=np.float32), "scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    source.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items())
    assert judge.heavy(io.to_proto(onnxamp.convert(source).model)) == (2, 2)


def test_a_function_for_another_opset_is_refused() -> None:
    source = onnx.parser.parse_model(FUNCTIONS)
    source.functions[0].opset_import[0].version = 13
    with pytest.raises(UnsupportedError, match=r"function cannot be inlined.*Linear.*13"):
        onnxamp.convert(source)


@pytest.mark.parametrize("opset", [1, 5])
def test_casts_before_opset_6_name_their_type(opset: int, tmp_path: pathlib.Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    value = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", TensorProto.FLOAT, [2, 4]), value("w", TensorProto.FLOAT, [4, 4])],
        [value("y", TensorProto.FLOAT, [2, 4])],
        [weight],
    )
    source = helper.make_model(graph, ir_version=3, opset_imports=[helper.make_opsetid("", opset)])
    result = converted(source, tmp_path)
    assert [node.op_type for node in result.graph.node] == ["Cast", "MatMul", "Cast"]
    assert [node.attribute[0].s for node in result.graph.node if node.op_type == "Cast"] == [b"FLOAT16", b"FLOAT"]


def test_external_weights_stay_external(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((512, 512), np.float32)
    source = parsed("g (float[2,512] x) => (float[2,512] y) { y = MatMul(x, w) }")
    source.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    (tmp_path / "in").mkdir()
    onnx.save(source, tmp_path / "in" / "m.onnx", save_as_external_data=True, location="w.bin")
    for name in ("a", "b"):
        onnxamp.convert(tmp_path / "in" / "m.onnx").save(tmp_path / f"{name}.onnx")
    raw = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    assert raw.graph.initializer[0].data_location == TensorProto.EXTERNAL
    np.testing.assert_array_equal(
        numpy_helper.to_array(onnx.load(tmp_path / "a.onnx").graph.initializer[0]), weight.astype(np.float16)
    )
    onnx.checker.check_model(os.fspath(tmp_path / "a.onnx"), full_check=True)
    (tmp_path / "again").mkdir()
    onnxamp.convert(tmp_path / "a.onnx").save(tmp_path / "again" / "a.onnx")
    assert (tmp_path / "again" / "a.onnx").read_bytes() == (tmp_path / "a.onnx").read_bytes()


def test_large_external_data_need_little_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 128 MiB, converted in blocks of 1 MiB."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1 << 20)
    (tmp_path / "in").mkdir()
    rows = 1 << 13
    source = parsed(f"g (float[2,{rows}] x) => (float[2,4096] y) {{ y = MatMul(x, w) }}")
    tensor = source.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[rows, 4096])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    with open(tmp_path / "in" / "w.bin", "wb") as file:
        file.truncate(rows * 4096 * 4)
    (tmp_path / "in" / "m.onnx").write_bytes(source.SerializeToString())
    onnxamp.convert(
        parsed("g (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }")
    )  # what is loaded once does not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    onnxamp.convert(tmp_path / "in" / "m.onnx").save(tmp_path / "out.onnx")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 48 << 10  # KiB
    (data,) = tmp_path.glob("*.data")
    assert data.stat().st_size == rows * 4096 * 2
    data.unlink()


def test_unnamed_nodes_get_no_name_and_make_no_clash(tmp_path: pathlib.Path) -> None:
    source = parsed(
        "g (float[2,4] x) => (float[2,4] y) { a = Softmax(x)  b = MatMul(a, w)  c = Softmax(b)  y = MatMul(c, w) }"
    )
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path)
    assert all(not node.name for node in result.graph.node if node.op_type in ("Softmax", "MatMul"))
    names = [node.name for node in result.graph.node if node.name]
    assert len(names) == len(set(names)) == sum(node.op_type == "Cast" for node in result.graph.node)


def test_an_unknown_operator_keeps_its_types(tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 19, "my" : 1]> g (float[2,4] x) => (float[2,4] y)
        <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[2,4] b> {
        a = MatMul(x, w)  b = my.Op(a, w)  y = MatMul(b, w) }"""
    source = onnx.parser.parse_model(text)
    result = converted(source, tmp_path)
    nodes = {node.op_type: node for node in result.graph.node}
    made = {node.output[0]: node for node in result.graph.node}
    custom = nodes["Op"]
    assert made[custom.input[0]].op_type == "Cast"
    assert custom.input[1] == "w"
    kinds = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    assert kinds == {"w": TensorProto.FLOAT, "w__fp16": TensorProto.FLOAT16}


def test_interface_patterns(tmp_path: pathlib.Path, judge: types.ModuleType) -> None:
    source = parsed("""g (float[2,4] x, float[2,4] past_0, float[2,4] past_1) => (float[2,4] y, float[2,4] present) {
        a = MatMul(x, w)  present = Add(a, past_0)  y = Add(a, past_1) }""")
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path, io=["past_*=fp16", "present=low", "past_1=fp32"])
    kinds = {value.name: judge.element(value.type) for value in judge.interface(result)}
    low = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT16}
    assert low == {"past_0", "present"}
    with pytest.raises(UsageError, match="neither keep, low nor GLOB=TYPE"):
        onnxamp.convert(source, io="past_*=fp8")


def test_declared_shapes_are_written_and_guessed_ones_are_not(tmp_path: pathlib.Path) -> None:
    source = parsed(
        "g (float[n,4] x) => (float[n,4] y) <float[n,4] a> { a = MatMul(x, w)  b = MatMul(a, w)  y = Relu(b) }"
    )
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path)
    shapes = {value.name: value.type.tensor_type.HasField("shape") for value in result.graph.value_info}
    assert shapes["a"]
    assert not shapes["b"]
    kept = mixed(io.load(source), Options()).model
    assert all(value.shape is not None for node in kept.graph for value in node.outputs)


def test_a_branch_output_does_not_justify_another(tmp_path: pathlib.Path, judge: types.ModuleType) -> None:
    moves = "h = Sin(x)  i = Neg(h)  j = Neg(i)  k = Neg(j)  l = Neg(k)  m = Neg(l)"
    source = parsed(f"""g (bool c, float[8,4] x) => (float[8,4] y, float[8,4] z) {{
        o, n = If (c) <then_branch = t () => (float[8,4] p, float[8,4] q) {{ p = MatMul(x, w)  {moves}  q = Neg(m) }},
                       else_branch = e () => (float[8,4] r, float[8,4] s) {{ r = MatMul(x, w)  {moves}  s = Neg(m) }}>
        y = MatMul(o, w)  z = Neg(n) }}""")
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = converted(source, tmp_path)
    assert judge.heavy(result) == (3, 3)
    assert judge.purposeless(result, source) == []


def test_weights_are_cast_for_training() -> None:
    source = parsed("g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w)  t = Transpose(w)  y = MatMul(a, t) }")
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = mixed(io.load(source), Options(weights="cast"))
    (weight,) = result.model.graph.initializers.values()
    assert weight.dtype == ir.DataType.FLOAT
    (use,) = weight.consumers()
    assert use.op_type == "Cast"
    assert use.metadata_props["onnxamp.cast"] == "low"
    assert use.metadata_props["onnxamp.source"] == "w"


def test_the_summary_counts_what_the_file_holds(tmp_path: pathlib.Path) -> None:
    source = parsed("g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w)  b = Softmax(a)  y = MatMul(b, w) }")
    source.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    result = onnxamp.convert(source)
    assert result.summary.nodes == {"fp32": 1, "fp16": 2}
    assert result.summary.heavy == (2, 2)
    assert result.summary.casts == {"low": 2, "fp32": 2}
    assert result.summary.weights == (64, 32)
    assert sum(result.summary.islands.values()) == 1
    assert type(result.summary).of(result.model) == result.summary
    notes = {node.op_type: dict(node.metadata_props) for node in result.model.graph}
    assert notes["Softmax"]["onnxamp.precision"] == "fp32"
    assert notes["Softmax"]["onnxamp.code"].startswith("AMP")
    assert notes["MatMul"]["onnxamp.precision"] == "fp16"
    assert result.model.metadata_props["onnxamp.level"] == "O2"


def test_the_judge_tells_values_of_sibling_bodies_apart(judge: types.ModuleType) -> None:
    """Both branches call their values alike; the heavy node of the one gives the other's 16-bit Neg no purpose."""
    text = """<ir_version: 10, opset_import: ["": 17]> g (bool c, float[4,4] x) => (float[4,4] y)
        { y = If (c) <
            then_branch = t () => (float[4,4] r) { [a1] a = Cast<to = 10>(x)  [mm] b = MatMul(a, a)  [r1] r = Cast<to = 1>(b) },
            else_branch = e () => (float[4,4] r) { [a2] a = Cast<to = 10>(x)  [neg] b = Neg(a)  [r2] r = Cast<to = 1>(b) }> }"""
    model = onnx.parser.parse_model(text)
    source = onnx.ModelProto.FromString(model.SerializeToString())
    for node in source.graph.node[0].attribute[0].g.node, source.graph.node[0].attribute[1].g.node:
        for cast in (node[0], node[2]):
            cast.attribute[0].i = onnx.TensorProto.FLOAT
    for branch in model.graph.node[0].attribute:
        for cast in (branch.g.node[0], branch.g.node[2]):
            cast.metadata_props.add(key="onnxamp.cast", value="low")
    ((only,),) = judge.purposeless(model, source)
    assert only.endswith("Neg neg")


def test_the_summary_names_no_anonymous_dimension() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x, bool[n] m) => (float[k,4] y) { c = Compress<axis=0>(x, m) '
        "r = Relu(c) y = Compress<axis=0>(r, m) }"
    )
    result = onnxamp.convert(model)
    assert any(name.startswith("_d") for name in result.plan.dims)
    assert set(result.summary.dims) <= {"n", "k"}
