"""Single rules of the rewriting passes, on plans made by hand."""

import json
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import onnxamp
from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model import io, types
from onnxamp.model.constants import constant_tensor
from onnxamp.model.units import Unit, all_nodes, type_graph
from onnxamp.passes.annotate import AnnotatePass, recorded_plan, refuse_other_options
from onnxamp.passes.casts import InsertCastsPass
from onnxamp.passes.constants import ConvertConstantsPass, float_constants
from onnxamp.passes.retype import RetypePass
from onnxamp.policy import codes
from onnxamp.policy.plan import Clamp, Decision, Options, Plan


def loaded(text: str, opset: int = 19) -> ir.Model:
    graph = onnx.parser.parse_graph(text)
    model = io.load(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)]))
    types.infer(model)
    return model


def planned(model: ir.Model, low: Callable[[Unit], bool], options: Options | None = None, dtype: str = "fp16") -> Plan:
    """A plan that makes the units that `low` picks 16-bit."""
    graph = type_graph(model)
    decisions = {
        unit: Decision(dtype if low(unit) else "fp32", codes.LEVEL_O3, {"a": 1} if low(unit) else {})
        for unit in graph.units
    }
    return Plan(graph, options or Options(dtype=dtype), decisions)


def rewrite(model: ir.Model, plan: Plan) -> None:
    for step in (RetypePass, ConvertConstantsPass, InsertCastsPass, AnnotatePass):
        step(plan)(model)
    onnx.checker.check_model(io.to_proto(model), full_check=True)


def operators(*names: str) -> Callable[[Unit], bool]:
    return lambda unit: unit.node is not None and unit.node.op_type in names


def arrays(model: ir.Model) -> dict[str, np.ndarray]:
    return {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


def test_a_clamped_constant_is_clamped_in_every_precision() -> None:
    model = loaded(
        "g (float[2] x) => (float[2] y, float[2] z) <float[2] m = {-1e9, 0}> { a = Add(x, m)  y = Neg(a)  z = Mul(x, m) }"
    )
    plan = planned(model, operators("Add", "Neg"))
    mask = model.graph.initializers["m"]
    plan.clamped[mask] = Clamp(32752.0, 1, -1e9)
    rewrite(model, plan)
    got = arrays(model)
    assert sorted(got) == ["m", "m__fp16"]
    np.testing.assert_array_equal(got["m"], np.array([-32752, 0], np.float32))
    np.testing.assert_array_equal(got["m__fp16"], np.array([-32752, 0], np.float16))
    for value in model.graph.initializers.values():
        assert json.loads(value.metadata_props["onnxamp.change"]) == {
            "clamped": 32752.0,
            "elements": 1,
            "extreme": -1e9,
        }
        assert value.metadata_props["onnxamp.source"] == "m"


@pytest.mark.parametrize("weights", ["convert", "cast"])
def test_an_unread_precision_is_not_made(weights: str) -> None:
    model = loaded(
        "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] v = {1, 2}> { a = Mul(x, w)  b = Add(a, v)  y = Exp(b) }"
    )
    rewrite(model, planned(model, operators("Mul"), Options(weights=weights)))
    kinds = {name: value.dtype for name, value in model.graph.initializers.items()}
    low = ir.DataType.FLOAT16 if weights == "convert" else ir.DataType.FLOAT
    assert kinds == {"w": low, "v": ir.DataType.FLOAT}
    casts = [node.inputs[0].name for node in model.graph if node.op_type == "Cast" and node.inputs[0] is not None]
    assert casts == (["x", "a"] if weights == "convert" else ["x", "w", "a"])


def test_a_constant_node_takes_the_type_of_its_reader() -> None:
    model = loaded(
        "g (float[2] x) => (float[2] y) { c = Constant <value_floats = [1.0, 2.0]> ()  a = Mul(x, c)  y = Exp(a) }"
    )
    rewrite(model, planned(model, operators("Mul")))
    node = next(node for node in model.graph if node.op_type == "Constant")
    assert list(node.attributes) == ["value"]
    np.testing.assert_array_equal(node.attributes["value"].as_tensor().numpy(), np.array([1, 2], np.float16))


@pytest.mark.parametrize("form", ["value_floats = [0.1, 2.0]", "value = float[2] w {0.1, 2}", None])
@pytest.mark.parametrize("level", ["OD", "O1"])
def test_weights_that_are_cast_stay_in_every_form(form: str | None, level: str) -> None:
    weight, node = ("<float[2] w = {0.1, 2}>", "") if form is None else ("", f"w = Constant <{form}> () ")
    source = loaded(
        f"g (float[2] x, bool b) => (float y, float z) {weight} {{ {node} y = MatMul(x, w)\n"
        "z = If (b) <then_branch = t () => (float u) { u = MatMul(w, w) },"
        " else_branch = e () => (float v) { c = Constant <value_floats = [0.1, 3.0]> () v = MatMul(x, c) }> }"
    )
    result = onnxamp.convert(source, level=level)
    assert result.summary.heavy == (3, 3)
    assert result.summary.weights == (16, 16)
    casts = [
        node.inputs[0].name
        for node in all_nodes(result.model.graph)
        if node.op_type == "Cast" and node.inputs[0] is not None and node.metadata_props["onnxamp.cast"] == "low"
    ]
    assert sorted(casts) == ["c", "w", "x"]
    back = {value.name: constant_tensor(value) for value in float_constants(onnxamp.widen(result.model).graph)}
    assert {name: tensor.numpy().tolist() for name, tensor in back.items() if tensor is not None} == {
        "w": np.array([0.1, 2], np.float32).tolist(),
        "c": np.array([0.1, 3], np.float32).tolist(),
    }


@pytest.mark.parametrize("both", [False, True])
def test_a_constant_output_keeps_its_name(both: bool) -> None:
    text = "g (float[2] x) => (float[2] y, float[2] w) <float[2] w = {1, 2}> { y = Mul(x, w) }"
    model = loaded(text)
    shared = model.graph.initializers["w"].const_value
    plan = planned(model, lambda unit: unit.variable == "output" and unit.reads[0].value.name == "w")
    if not both:
        plan.decisions.update({unit: Decision("fp16", codes.LEVEL_O3) for unit in plan.graph.units})
    rewrite(model, plan)
    assert [value.name for value in model.graph.outputs] == ["y", "w"]
    assert model.graph.outputs[1].dtype == ir.DataType.FLOAT16
    assert sorted(model.graph.initializers) == (["w", "w__fp32"] if both else ["w"])
    assert shared is not None
    assert shared.name == "w"  # it belongs to the source


def test_types_spelled_out_once_input_and_result_differ() -> None:
    text = "g (float[2,2] x) => (float[2,2] y, float[2,2] z) { y = RandomNormalLike(x)  a = Relu(x)  z = EyeLike(a) }"
    model = loaded(text)
    rewrite(model, planned(model, lambda unit: unit.variable in ("T1", "T") and unit.node is not None))
    nodes = {node.op_type: node for node in model.graph}
    assert nodes["RandomNormalLike"].attributes["dtype"].as_int() == ir.DataType.FLOAT
    assert nodes["EyeLike"].attributes["dtype"].as_int() == ir.DataType.FLOAT


def test_bf16_where_cast_does_not_know_it() -> None:
    model = loaded("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=12)
    plan = planned(model, lambda unit: unit.node is not None, dtype="bf16")
    with pytest.raises(UnsupportedError, match=r"'x' has to be cast to bf16.*has 12: raise its opset\.$"):
        rewrite(model, plan)


def test_one_value_as_input_and_output_with_two_types() -> None:
    model = loaded("g (float[2] x) => (float[2] x, float[2] y) { y = Relu(x) }")
    plan = planned(model, lambda unit: unit.variable == "output")
    with pytest.raises(UnsupportedError, match="'x' is input and output"):
        rewrite(model, plan)


def test_the_notes_give_the_plan_back() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] e = {1, 2}> { a = Relu(x)  b = Pow(a, e)  y = Neg(b) }"
    model = loaded(text)
    plan = planned(model, lambda unit: unit.variable == "T" and unit.node is not None)
    before = {node.name: (d.precision, d.code, d.evidence, d.operands) for node, d in plan.nodes.items()}
    rewrite(model, plan)
    notes = {node.op_type: node.metadata_props for node in model.graph}
    assert json.loads(notes["Pow"]["onnxamp.operands"]) == {"T": "fp16", "T1": "fp32"}
    assert json.loads(notes["Relu"]["onnxamp.evidence"]) == {"a": 1}
    assert "onnxamp.operands" not in notes["Relu"]
    again = recorded_plan(model, plan.options)
    after = {node.name: (d.precision, d.code, d.evidence, d.operands) for node, d in again.nodes.items()}
    assert {name: after[name] for name in before} == before
    refuse_other_options(model, plan.options)
    with pytest.raises(UsageError, match=r"convert the original, .*--to fp32"):
        refuse_other_options(model, Options(level="O3"))
