"""Whole models raised to the table's last opset: same results, nothing lost, or a named refusal."""

import pathlib

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.reference.op_run import RuntimeImplementationError

from onnxamp.errors import AmpError
from onnxamp.evidence.synthesis import synthesize
from onnxamp.model import io, types
from onnxamp.model.opset import HIGHEST, OpsetError, raise_opset
from onnxamp.model.units import all_nodes, all_values

MODELS = pathlib.Path(__file__).parents[2] / "models"


def raised(source: str | onnx.ModelProto, version: int = HIGHEST) -> ir.Model:
    model = io.load(source)
    types.infer(model)
    raise_opset(model, version)
    return model


NESTED = """
<ir_version: 8, opset_import: ["": 11, "local": 1, "com.microsoft": 1], metadata_props: ["made": "here"]>
g (float[2,3,1] x, bool c) => (float[2,1] y)
{
    h = local.spread(x)
    [branch] y = If (c) <
        then_branch = then () => (float[2,1] a) { [sum] s = ReduceSum<axes = [1]>(h) [gelu] k = com.microsoft.Gelu(s) a = Identity(k) },
        else_branch = els () => (float[2,1] b) { [flat] t = Squeeze<axes = [2]>(h) [rows] u = Softmax(t) b = ReduceMean<axes = [1]>(u) }
    >
}
<domain: "local", opset_import: ["": 11]> spread (v) => (w)
{ t = Unsqueeze<axes = [3]>(v) p = Softmax<axis = 3>(t) q = Add(p, t) w = Squeeze<axes = [3]>(q) }
"""


@pytest.mark.parametrize("condition", [True, False])
def test_bodies_functions_and_contrib_nodes_stay(condition: bool) -> None:
    proto = onnx.parser.parse_model(NESTED)
    proto.graph.node[0].metadata_props.add(key="noted", value="yes")
    proto.graph.node[1].attribute[1].g.node[1].doc_string = "a softmax"
    model = raised(proto)
    later = ir.to_proto(model)
    onnx.checker.check_model(later, full_check=True)
    names = {node.name for node in all_nodes(model.graph)}
    assert {"branch", "sum", "gelu", "flat", "rows"} <= names
    assert {value.name for value in all_values(model.graph)} >= set("xchyskatub")
    assert later.metadata_props == proto.metadata_props
    assert later.graph.node[0].metadata_props == proto.graph.node[0].metadata_props
    (softmax,) = [node for node in all_nodes(model.graph) if node.op_type == "Softmax"]
    assert (softmax.name, softmax.doc_string) == ("rows", "a softmax")
    assert {entry.domain: entry.version for entry in later.opset_import} == {
        "": HIGHEST,
        "local": 1,
        "com.microsoft": 1,
    }
    assert [function.name for function in later.functions] == ["spread"]
    assert {entry.domain: entry.version for entry in later.functions[0].opset_import} == {"": HIGHEST}
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3, 1), "c": np.array(condition)}
    one, other = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for m in (proto, later)
    )
    assert np.array_equal(one, other)


def test_an_attribute_that_a_function_passes_on_is_refused() -> None:
    text = """<ir_version: 8, opset_import: ["": 12, "local": 1]> g (float[2,1] x) => (float[2] y) { y = local.f<k = [1]>(x) }
        <domain: "local", opset_import: ["": 12]> f <k> (v) => (w) { [inner] w = Squeeze<axes: ints = @k>(v) }"""
    with pytest.raises(OpsetError, match=r"Squeeze 'inner' .* 'axes' is a parameter of a function"):
        raised(onnx.parser.parse_model(text))


def test_names_that_are_taken_are_avoided() -> None:
    text = """<ir_version: 8, opset_import: ["": 12]> g (float[2,1] x) => (float[2] y, float[2,1] z)
        { [n] y = Squeeze<axes = [1]>(x) ["n/axes"] "y/axes" = Neg(x) z = Neg("y/axes") }"""
    model = raised(onnx.parser.parse_model(text.replace('"n/axes"', "n_axes").replace('"y/axes"', "w")))
    nodes = [node.name for node in all_nodes(model.graph) if node.name]
    assert len(set(nodes)) == len(nodes)
    model = io.load(onnx.parser.parse_model(text.replace('"n/axes"', "n_axes").replace('"y/axes"', "w")))
    model.graph[1].name, model.graph[1].outputs[0].name = "n/axes", "y/axes"
    types.infer(model)
    raise_opset(model, HIGHEST)
    values = [value.name for value in all_values(model.graph)]
    assert sorted(values) == sorted({"x", "y", "z", "y/axes", "y/axes_2"})


@pytest.mark.parametrize("opset", [10, 12])
def test_a_constant_of_the_source_stays_though_nothing_reads_it_any_more(opset: int) -> None:
    """Resize 13 may leave its roi out: one that an earlier row put in front goes, the source's own keeps its name."""
    operands = "x, scales" if opset == 10 else "x, roi, scales"
    model = raised(
        onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[1,1,2,2] x) => (float[1,1,4,4] y)
            {{ scales = Constant<value = float[4] {{1, 1, 2, 2}}>() roi = Constant<value = float[0] {{}}>() y = Resize({operands}) }}"""
        )
    )
    assert [value.name for value in all_values(model.graph)] == ["x", "scales", "roi", "y"]


def test_what_is_in_its_newest_version_stays_byte_for_byte() -> None:
    source = onnx.load(MODELS / "gpt.onnx")
    later = ir.to_proto(raised(source))
    kept = {node.SerializeToString() for node in later.graph.node}
    same = [node for node in source.graph.node if node.op_type in ("MatMul", "Gather", "LayerNormalization", "Concat")]
    assert len(same) > 20
    assert {node.SerializeToString() for node in same} <= kept


@pytest.mark.parametrize("name", ["cnn", "gpt", "loop", "lstm", "paddle_mobilenet"])
def test_the_models_give_the_same_results(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    samples, _ = synthesize(io.load(str(path)), 1)
    model = raised(str(path))
    assert model.opset_imports[""] == HIGHEST
    before = io.load(str(path))
    assert {node.name for node in all_nodes(before.graph)} <= {node.name for node in all_nodes(model.graph)}
    assert {value.name for value in all_values(before.graph)} <= {value.name for value in all_values(model.graph)}
    one, other = (
        onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, samples[0])
        for content in (path.read_bytes(), ir.to_proto(model).SerializeToString())
    )
    for a, b in zip(one, other, strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


# What cannot be raised, and why.
REFUSED = {
    "test_scan_sum": "its version 9 changed in directions, operands",
    "test_upsample_nearest": "its scales are not constant",
}
# Tests whose evaluation by the reference is random or needs files.
NO_RESULT = ("test_training_dropout", "test_bernoulli", "test_image_decoder")


def _value(data: object) -> object:
    if isinstance(data, onnx.TensorProto):
        return numpy_helper.to_array(data)
    if isinstance(data, onnx.SequenceProto):
        return numpy_helper.to_list(data)
    if isinstance(data, onnx.OptionalProto):
        return numpy_helper.to_optional(data)
    return data if data is None or isinstance(data, list) else np.asarray(data)


def _compare(one: object, other: object) -> None:
    if isinstance(one, list):
        assert isinstance(other, list)
        for a, b in zip(one, other, strict=True):
            _compare(a, b)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    else:
        assert one == other


def test_node_tests_of_onnx_give_the_same_results(node_tests: list[TestCase]) -> None:
    """Those of the last opset or later need no raising."""
    same = 0
    refused: dict[str, str] = {}
    for case in node_tests:
        opset = max((entry.version for entry in case.model.opset_import if not entry.domain), default=HIGHEST)
        if opset >= HIGHEST or case.name.startswith(NO_RESULT):
            continue
        feeds = {i.name: _value(data) for i, data in zip(case.model.graph.input, case.data_sets[0][0], strict=False)}
        try:
            later = ir.to_proto(raised(case.model))
        except AmpError as problem:
            refused[case.name] = str(problem)
            continue
        try:
            one = onnx.reference.ReferenceEvaluator(case.model).run(None, feeds)
        except RuntimeImplementationError:  # an operator that the reference lacks
            continue
        other = onnx.reference.ReferenceEvaluator(later).run(None, feeds)
        assert {node.name for node in case.model.graph.node} <= {node.name for node in later.graph.node}
        assert case.model.graph.input == later.graph.input
        _compare(one, other)
        same += 1
    assert refused.keys() == REFUSED.keys()
    assert all(reason in refused[name] for name, reason in REFUSED.items())
    assert same == 878
