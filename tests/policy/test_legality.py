"""Schemas, targets, and the units of one node that belong together."""

from __future__ import annotations

import json
import pathlib

import onnx.defs
import onnx.parser
import onnx_ir as ir
import pytest

from onnxamp.conversion import convert
from onnxamp.model.signatures import signature
from onnxamp.passes.emulate import emulate
from onnxamp.policy import targets
from onnxamp.policy.operators import OPERATORS
from onnxamp.policy.options import TARGETS

CONV = """g (float[1,1,4,4] x) => (float[1,1,4,4] y) <float[1,1,1,1] w = {2}> { h = Conv(x, w) y = Relu(h) }"""
NORM = """g (float[1,2,4,4] x) => (float[1,2,4,4] y) <float[2] s = {1,2}, float[2] v = {1,1e6}>
{ y = BatchNormalization(x, s, s, s, v) }"""
SMALL_NORM = NORM.replace("1e6", "3")


@pytest.mark.parametrize(
    ("text", "options", "node", "expected"),
    [
        (CONV, {"opset": 17, "dtype": "bf16"}, "h", ("fp32", "AMP202", {"operator": "Conv", "since": 11, "opset": 22})),
        (CONV, {"opset": 22, "dtype": "bf16"}, "h", ("bf16", "AMP002", {"operator": "Conv"})),
        (CONV, {"opset": 17}, "h", ("fp16", "AMP002", {"operator": "Conv"})),
        (
            "g (float[1,4] x) => (float[1,4] y) { y = com.microsoft.Unknown(x) }",
            {},
            "y",
            ("fp32", "AMP203", {"operator": "com.microsoft.Unknown"}),
        ),
        (
            "g (float[4,4] x) => (float[4,4] y) { y = LogSoftmax(x) }",
            {"dtype": "bf16", "level": "O3"},
            "y",
            (
                "fp32",
                "AMP301",
                {"operator": "LogSoftmax", "target": "ort-cuda", "runtime": targets.table("ort-cuda").runtime},
            ),
        ),
        (
            "g (float[4,4] x) => (float[4,4] y) { y = LogSoftmax(x) }",
            {"dtype": "bf16", "level": "O3", "target": "any"},
            "y",
            ("bf16", "AMP009", {}),
        ),
        (
            "g (float[1,1,4,4] x) => (y) <float[1,1,2,2] w = {1,2,3,4}> { y = ConvTranspose(x, w) }",
            {"dtype": "bf16", "target": "tensorrt", "opset": 22},
            "y",
            ("fp32", "AMP301", None),
        ),
        # a kernel without end serves the version that it names only
        (
            "g (float[1,1,4,4] x) => (y) { y = MaxPool<kernel_shape=[2,2]>(x) }",
            {"level": "O3", "opset": 21},
            "y",
            ("fp16", "AMP009", {}),
        ),
        (
            "g (float[1,1,4,4] x) => (y) { y = MaxPool<kernel_shape=[2,2]>(x) }",
            {"level": "O3", "opset": 22},
            "y",
            ("fp32", "AMP301", None),
        ),
        # a function without kernel is written out
        ("g (float[1,4] x) => (y) { y = Mish(x) }", {"level": "O3", "opset": 18}, "y", ("fp16", "AMP009", {})),
        (
            "g (float[1,4] x) => (y) { y = Mish(x) }",
            {"level": "O3", "opset": 18, "target": "ort-cpu"},
            "y",
            ("fp32", "AMP301", None),
        ),
        # the CPU has hardly any 16-bit kernels
        (CONV, {"target": "ort-cpu", "level": "O3"}, "y", ("fp32", "AMP301", None)),
    ],
)
def test_decision(plan_of, text, options, node, expected):
    plan = plan_of(text, **options)
    (decision,) = [d for n, d in plan.nodes.items() if n.outputs[0].name == node]
    assert (decision.precision, decision.code) == expected[:2]
    assert expected[2] is None or decision.evidence == expected[2]


@pytest.mark.parametrize(
    ("text", "target", "operands"),
    [
        # CUDA registers one type for all operands, the schema takes any mixture
        (NORM, "ort-cuda", {"T": "fp32", "T1": "fp32", "T2": "fp32"}),
        (NORM, "any", {"T": "fp16", "T1": "fp16", "T2": "fp32"}),
        (SMALL_NORM, "ort-cuda", {"T": "fp16", "T1": "fp16", "T2": "fp16"}),
        (SMALL_NORM, "any", {"T": "fp16", "T1": "fp16", "T2": "fp16"}),
    ],
)
def test_operands_of_one_node(plan_of, text, target, operands):
    plan = plan_of(text, level="O3", target=target)
    (decision,) = plan.nodes.values()
    assert decision.operands == operands
    codes = {unit.variable: plan.decisions[unit].code for units in plan.graph.of.values() for unit in units}
    assert codes["T2"] == ("AMP210" if text is NORM else "AMP009")
    assert codes["T"] == ("AMP302" if operands["T"] == "fp32" else "AMP009")


def test_resize_scales_stay_fp32_constants(plan_of):
    text = """g (float[1,1,4,4] x) => (y) <float[4] s = {1,1,2,2}, float[8] roi = {0,0,0,0,1,1,1,1}>
    { y = Resize<mode="nearest">(x, roi, s) }"""
    plan = plan_of(text, level="O3", weights="cast")
    (decision,) = plan.nodes.values()
    assert decision.operands == {"T1": "fp16", "T2": "fp32", "tensor(float)": "fp32"}
    reads = [read for unit in plan.graph.units for read in unit.reads if read.value.name in ("s", "roi")]
    assert len(reads) == 2
    assert not any(plan.casts(read) for read in reads)


def test_control_flow_is_one_label(plan_of):
    text = """g (float[4,4] x, bool c) => (float[4,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>
    { h = MatMul(x, w)
      y = If (c) <then_branch = a () => (float[4,4] t) { t = Relu(h) }, else_branch = b () => (float[4,4] e) { e = MatMul(h, w) }> }"""
    plan = plan_of(text)
    assert {node.op_type: decision.precision for node, decision in plan.nodes.items()} == {
        "MatMul": "fp16",
        "If": "fp16",
        "Relu": "fp16",
    }
    assert plan_of(text.replace('"" : 17', '"" : 13'), opset=13, dtype="bf16").nodes  # If takes bf16 from opset 16 only
    low = plan_of(text, opset=13, dtype="bf16", level="O3")
    assert {decision.precision for node, decision in low.nodes.items() if node.op_type == "If"} == {"fp32"}


def test_many_states_of_a_loop(plan_of):
    """Each state has a label of its own; sets of 24 states would be too many to list."""
    count = 24
    names = [f"v{i}" for i in range(count)]
    states = ", ".join(f"float[4,4] {n}_in" for n in names)
    outs = ", ".join(f"float[4,4] {n}_out" for n in names)
    steps = " ".join(f"{n}_out = {'Softmax' if i % 2 else 'Relu'}({n}_in)" for i, n in enumerate(names))
    text = f"""g (float[4,4] x, int64 n, bool c) => (float[4,4] y) <float[4,4] w = {{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}}>
    {{ h = MatMul(x, w) {", ".join(names)} = Loop (n, c, {", ".join("h" for _ in names)})
      <body = b (int64 i, bool k, {states}) => (bool k_out, {outs}) {{ k_out = Identity(k) {steps} }}>
      s = Sum({", ".join(names)}) y = MatMul(s, w) }}"""
    plan = plan_of(text)
    (operands,) = [d.operands for node, d in plan.nodes.items() if node.op_type == "Loop"]
    assert len(operands) == count
    assert operands["state[0]"] == "fp16"


def test_source_types_stay(plan_of):
    text = "g (float16[4,4] x) => (float[4,4] y) { a = Relu(x) c = Cast<to=1>(a) y = Softmax(c) }"
    for level in ("O1", "O2", "O3"):
        plan = plan_of(text, level=level, dtype="bf16")
        found = {node.op_type: decision for node, decision in plan.nodes.items()}
        assert (found["Relu"].precision, found["Relu"].code) == ("fp16", "AMP010")


@pytest.mark.parametrize("name", ["ort-cuda", "ort-cpu"])
def test_kernel_tables_are_whole(name):
    path = pathlib.Path(targets.__file__).parent / f"{name}.json"
    content = json.loads(path.read_text())
    assert len(content["kernels"]) > 200
    assert all(since <= (until or since) for rows in content["kernels"].values() for since, until, _ in rows)
    assert targets.table(name).tested


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_was_not_tested_says_so(name):
    text = '<ir_version: 9, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }'
    warnings = convert(onnx.parser.parse_model(text), target=name, io="low").warnings
    assert any("was not tested" in text for text in warnings) == (name in ("tensorrt", "openvino", "cann"))


@pytest.mark.parametrize(
    ("body", "target", "said"),
    [
        (
            "y = MatMul(x, w)",
            "ort-cpu",
            "1 of 1 heavy nodes (MatMul) stay fp32 because ort-cpu has no fp16 kernel of them (AMP301)",
        ),
        ("y = com.microsoft.FusedGemm(x, w)", "ort-cuda", "or the file from before a runtime's optimizer fused it"),
        ("h = com.example.Own(x) y = MatMul(h, w)", "ort-cuda", "the types of what they read are not known (AMP204)"),
        (
            "h = com.example.Own(x) k = MatMul(x, w) l = MatMul(k, w) y = MatMul(h, l)",
            "ort-cuda",
            None,
        ),  # two of three are lowered
        ("y = MatMul(x, w)", "ort-cuda", None),
    ],
)
def test_heavy_nodes_without_a_form_are_said(body, target, said):
    imports = '"": 17, "com.microsoft": 1, "com.example": 1'
    weight = "<float[2,2] w = {1,2,3,4}>"
    text = f"<ir_version: 9, opset_import: [{imports}]> g (float[2,2] x) => (float[2,2] y) {weight} {{ {body} }}"
    found = [text for text in convert(onnx.parser.parse_model(text), target=target).warnings if "heavy nodes" in text]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(("interface", "other"), [("keep", "low"), ("low", "keep")])
def test_a_costly_conversion_names_the_other_interface(interface, other):
    """Where the neighbours of inputs and outputs stay fp32, or go low, borders of the other type are Casts for nothing."""
    body = {"keep": "h = Softmax(x) y = MatMul(h, h)", "low": "y = MatMul(x, x)"}[interface]
    target = {"keep": "ort-cuda", "low": "ort-cpu"}[interface]
    text = f'<ir_version: 9, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] y) {{ {body} }}'
    warnings = convert(onnx.parser.parse_model(text), target=target, io=interface).warnings
    (found,) = [text for text in warnings if "more bytes" in text]
    assert f"--io {other}" in found
    assert f"--io {interface}" not in found


def supports(name: str, op: str, opset: int, types: dict[str, ir.DataType], inputs: list[ir.DataType]) -> bool:
    values = [ir.Value(name=f"i{k}", type=ir.TensorType(kind)) for k, kind in enumerate(inputs)]
    node = ir.Node("", op, values, num_outputs=1)
    signed = signature("", op, opset)
    assert signed is not None
    return targets.table(name).supports(node, signed, types)


def test_all_type_parameters_in_one_row():
    half, f, i32, i64 = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
    assert supports("ort-cuda", "OneHot", 17, {"T3": half}, [i64, i64, f])
    assert supports("ort-cuda", "OneHot", 17, {"T3": half}, [i32, i32, f])
    assert not supports("ort-cuda", "OneHot", 17, {"T3": half}, [i32, i64, f])
    assert supports("ort-cuda", "Pow", 17, {"T": half, "T1": f}, [f, f])
    assert not supports("ort-cuda", "Pow", 13, {"T": half, "T1": ir.DataType.BFLOAT16}, [f, f])


def test_every_standard_float_operator_has_a_row():
    known = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and any("tensor(float16)" in c.allowed_type_strs for c in schema.type_constraints)
    }
    without = {"DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "Shape", "Size"}
    assert known - without - set(OPERATORS) == set()
    assert len(known) > 150


@pytest.mark.parametrize(
    "operator", ["Constant", "If", "Shape", "Resize", "Pow", "Sub", "Softmax", "Cast", "DequantizeLinear"]
)
@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
def test_an_operator_of_another_domain_is_another_operator(operator, level):
    """It is unknown, whatever its name, and says nothing of the standard one."""
    body = f"h = MatMul(x, w) t = custom.{operator}(h) y = Relu(t)"
    text = f"""<ir_version: 9, opset_import: ["" : 17, "custom" : 1]> g (float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {{1,2,3,4}}, float[2,2] t> {{ {body} }}"""
    result = convert(onnx.parser.parse_model(text), level=level, target="any")
    codes = {f"{node.domain}.{node.op_type}": d.code for node, d in result.plan.nodes.items()}
    assert codes[f"custom.{operator}"] == "AMP203"
    emulate(result.model)
