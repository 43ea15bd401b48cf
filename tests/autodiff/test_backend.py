"""Every node test of onnx with float inputs and operators that have a gradient: central differences in float64."""

from __future__ import annotations

import dataclasses
import warnings
import zlib

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from onnxamp import autodiff
from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.registry import RULES, ZERO_GRADIENT
from onnxamp.model.preparation import prepared
from onnxamp.model.types import infer
from onnxamp.passes.integers import FoldIntegers
from onnxamp.passes.norms import DecomposeBatchNorm

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE

# Tests whose samples move away from 0, to stay where the function is defined.
UPWARDS = ("test_acosh",)
# Tests whose gradient cannot be compared, by the start of the name, with the reason.
EXCEPTIONS = {
    "test_affine_grid_2d_align_corners_expanded": "a rank inside depends on sizes that an If computes",
    "test_affine_grid_2d_expanded": "the same",
    "test_affine_grid_3d_align_corners_expanded": "the same",
    "test_affine_grid_3d_expanded": "the same",
    "test_affine_grid": "the reference evaluator computes in float32; test_rules_sampling has the operator",
    "test_attention_23_boolmask_fullymasked_row_nan_robustness_expanded": "a Softmax of nothing but -inf, whose NaN is selected away",
    "test_attention_23_fullymasked_qk_matmul_output_mode3_zero_expanded": "the same",
    "test_attention_24_fullymasked_qk_matmul_output_mode3_zero_expanded": "the same",
    "test_attention_4d_causal_nonpad_negative_offset_structural_empty_expanded": "the same",
    "test_attention_causal_boolmask_nan_robustness_expanded": "the same",
    "test_attention_local_window_gqa_rank4_mask_expanded": "the same",
    "test_basic_deform_conv": "the reference evaluator samples with its own GridSample, in float32; test_rules_sampling has the operator",
    "test_deform_conv": "the same",
    "test_bernoulli": "random",
    "test_causal_conv_with_state_s": "the reference evaluator computes SiLU in float32; the expanded tests are compared",
    "test_dropout_default_old": "opset 11; gradients need 13",
    "test_dropout_random_old": "opset 11",
    "test_dynamicquantizelinear": "opset 11",
    "test_loop11": "opset 11",
    "test_scan9": "opset 9",
    "test_scan_sum": "opset 8",
    "test_shrink": "opset 9; test_rules_elementwise has the operator",
    "test_group_normalization_e": "the reference evaluator computes in float32; the expanded tests are compared",
    "test_linear_attention": "defined with a state in float32; the expanded tests, all in float64, are compared",
    "test_maxpool_with_argmax_2d_precomputed_strides": "storage_order 1, which is refused",
    "test_mod_float_edge_cases": "infinite and undefined remainders",
    "test_mvn": "the reference evaluator mixes float32 and float64",
    "test_resize_downsample_scales_cubic_align_corners": "the reference evaluator aligns the length before it is rounded down, ONNX "
    "Runtime and PyTorch the whole one; test_rules_composite has such factors",
    "test_resize_downsample_scales_linear_align_corners": "the same",
}
# Expanded forms that are compared although the operator's own tests are not.
COMPARED = ("test_causal_conv_with_state_s", "test_group_normalization_e", "test_linear_attention", "test_mvn")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]

    @property
    def operators(self) -> set[str]:
        return {node.op_type for node in self.model.graph.node}


def is_tensor(info: onnx.ValueInfoProto) -> bool:
    return info.type.HasField("tensor_type")


def elements(infos) -> list[int]:
    return [info.type.tensor_type.elem_type for info in infos]


def collect(node_tests) -> list[Case]:
    """Those with float inputs, float outputs, and operators that have a gradient or a derivative of zero."""
    result = []
    for test in node_tests:
        graph = test.model.graph
        if not all(is_tensor(info) for info in (*graph.input, *graph.output)):
            continue
        if not all({FLOAT, DOUBLE} & set(elements(infos)) for infos in (graph.input, graph.output)):
            continue
        data = test.data_sets[0][0]
        arrays = [numpy_helper.to_array(x) if isinstance(x, TensorProto) else np.asarray(x) for x in data]
        case = Case(test.name, test.model, dict(zip([info.name for info in graph.input], arrays, strict=False)))
        if covered(case):
            result.append(case)
    return result


def in_double(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The case in float64, inputs that are no floats as constants, and the values of its float inputs, off all kinks."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    graph = model.graph
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    feeds = {}
    for info in list(graph.input):
        array = case.feeds[info.name]
        if info.type.tensor_type.elem_type in (FLOAT, DOUBLE) and not only_settings(graph, info.name):
            info.type.tensor_type.elem_type = DOUBLE
            feeds[info.name] = moved(array.astype(np.float64), rng, 1.0 if case.name.startswith(UPWARDS) else -1.0)
        else:
            graph.input.remove(info)
            graph.initializer.append(numpy_helper.from_array(array, info.name))
    for info in graph.output:
        if info.type.tensor_type.elem_type == FLOAT:
            info.type.tensor_type.elem_type = DOUBLE
    del graph.value_info[:]
    widen(graph)
    for imported in model.opset_import:
        if imported.domain == "" and 13 <= imported.version < 18 and is_same_at(graph, imported.version, 18):
            imported.version = 18
    return model, feeds


def is_same_at(graph: onnx.GraphProto, opset: int, later: int) -> bool:
    """Whether all operators are the same in a later opset."""
    versions = [[onnx.defs.get_schema(node.op_type, v).since_version for v in (opset, later)] for node in graph.node]
    return all(one == other for one, other in versions)


def only_settings(graph: onnx.GraphProto, name: str) -> bool:
    """Whether an input is read only where an operator has no gradient for it, such as the scales of Resize."""
    reads = [(node.op_type, list(node.input).index(name)) for node in graph.node if name in node.input]
    rules = [(RULES.get(("", op)), position) for op, position in reads]
    return bool(rules) and all(rule is not None and rule.lacks(position) for rule, position in rules)


def moved(x: np.ndarray, rng: np.random.Generator, way: float) -> np.ndarray:
    """Each element a little nearer to 0 (or farther from it), or a little off it: no two are equal and none is at a kink."""
    shift = 1e-2 + 2e-2 * rng.random(x.shape)
    return np.asarray(np.where(x == 0, shift, x * (1 + way * shift)))


def needs_float(graph: onnx.GraphProto, name: str) -> bool:
    """Whether an operator takes a constant in float32 only."""
    for node in graph.node:
        if name in node.input:
            parameters = onnx.defs.get_schema(node.op_type).inputs
            if parameters[min(list(node.input).index(name), len(parameters) - 1)].type_str == "tensor(float)":
                return True
    return False


def widen(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        if tensor.data_type == FLOAT and not needs_float(graph, tensor.name):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = numpy_helper.from_array(np.zeros(1))
            node.attribute.append(onnx.helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == FLOAT and node.op_type == "Cast":
                attribute.i = DOUBLE
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == FLOAT:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float64)))
            elif attribute.name == "value_float":
                number = np.asarray(attribute.f, np.float64)
                attribute.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(number)))
            elif attribute.type == onnx.AttributeProto.GRAPH:
                for info in (*attribute.g.input, *attribute.g.output):
                    if info.type.tensor_type.elem_type == FLOAT:
                        info.type.tensor_type.elem_type = DOUBLE
                widen(attribute.g)


def differentiate(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """The gradient graph, the inputs that can have a gradient, and those that have one."""
    module = prepared(model)
    if FoldIntegers()(module).modified:
        infer(module)
    DecomposeBatchNorm()(module)
    graph = module.graph
    outputs = list(graph.outputs)
    seeds = {}
    for value in outputs:
        if value.dtype in FLOATS:
            seeds[value] = ir.Value(name=f"seed_{value.name}", type=value.type, shape=value.shape)
            graph.inputs.append(seeds[value])
    wrt = [value for value in graph.inputs if not str(value.name).startswith("seed_")]
    slopes = autodiff.backward(graph, seeds, wrt, opset_imports=dict(module.opset_imports))
    for value, g in slopes.items():
        node = ir.node("Identity", [g])
        node.outputs[0].name, node.outputs[0].type = f"slope_{value.name}", value.type
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return ir.to_proto(module), [str(value.name) for value in wrt], [str(value.name) for value in slopes]


def check(case: Case, run_reference) -> list[float]:
    """Compare along three directions: each difference, in parts of the gradient's norm or of 1."""
    model, feeds = in_double(case)
    proto, wrt, given = differentiate(model)
    names = [info.name for info in model.graph.output if info.type.tensor_type.elem_type == DOUBLE]
    forward = run_reference(model)
    rng = np.random.default_rng(3)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        values = forward(names, feeds)
        finite = [np.isfinite(y) for y in values]
        seeds = {
            f"seed_{name}": rng.standard_normal(np.shape(y)) * here
            for name, y, here in zip(names, values, finite, strict=True)
        }
        results = run_reference(proto)([f"slope_{name}" for name in given], {**feeds, **seeds})
        slopes = dict(zip(given, results, strict=True))

        def loss(name: str, x: np.ndarray) -> float:
            outputs = forward(names, {**feeds, name: x})
            kept = [np.where(here, y, 0.0) for y, here in zip(outputs, finite, strict=True)]
            return sum(float((y * seed).sum()) for y, seed in zip(kept, seeds.values(), strict=True))

        differences = []
        for name in wrt:
            x = feeds[name]
            g = np.asarray(slopes.get(name, np.zeros_like(x)))
            assert g.shape == x.shape, f"{name}: {g.shape}, not {x.shape}"
            for _ in range(3 if x.size > 1 else 1):
                direction = rng.standard_normal(x.shape)
                direction /= max(np.linalg.norm(direction), 1e-30)
                step = 1e-5
                difference = (loss(name, x + step * direction) - loss(name, x - step * direction)) / (2 * step)
                scale = max(1.0, float(np.linalg.norm(g)))
                along = float((g * direction).sum())
                np.testing.assert_allclose(along, difference, rtol=1e-5, atol=1e-6 * scale, err_msg=f"of {name}")
                differences.append(abs(along - difference) / scale)
    return differences


def covered(case: Case) -> bool:
    known = {op for domain, op in (*RULES, *ZERO_GRADIENT) if domain == ""} | {"Constant"}
    return case.operators <= known and any(("", op) in RULES for op in case.operators)


def exception(name: str) -> str | None:
    if "_expanded" in name and name.startswith(COMPARED):
        return None
    return next((reason for start, reason in EXCEPTIONS.items() if name.startswith(start)), None)


def of_each_operator(cases: list[Case]) -> list[Case]:
    """The smallest test of each operator."""
    smallest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: (sum(x.size for x in case.feeds.values()), case.name)):
        if len(case.operators) == 1:
            smallest.setdefault(min(case.operators), case)
    return list(smallest.values())


def test_gradients(node_tests, run_reference, request, record_property):
    """All take minutes and run with --backend-all; else the smallest test of each operator and one of forty others."""
    cases = collect(node_tests)
    unused = set(EXCEPTIONS)
    compared = []
    for case in cases:
        if exception(case.name) is None:
            compared.append(case)
        else:
            unused -= {start for start in EXCEPTIONS if case.name.startswith(start)}
    assert not unused
    operators = {op for case in compared for op in case.operators if ("", op) in RULES}
    assert (len(cases), len(compared), len(operators)) == (1225, 1165, 126)
    if not request.config.getoption("backend_all"):
        chosen = {case.name for case in of_each_operator(compared)}
        compared = [case for case in compared if case.name in chosen or zlib.crc32(case.name.encode()) % 40 == 0]
        assert len(compared) == 152
    wrong, differences = {}, []
    for case in compared:
        try:
            differences += check(case, run_reference)
        except Exception as problem:
            wrong[case.name] = " ".join(str(problem).split())[:300]
    assert not wrong
    for name, value in (("tests", len(compared)), ("comparisons", len(differences)), ("largest", max(differences))):
        record_property(name, value)  # with --junitxml they are kept


def test_linear_attention(node_tests, run_reference):
    """Defined with a state in float32, it has the gradient of its expanded form in float64, but for rounding."""
    cases = {case.name: case for case in collect(node_tests)}
    model, feeds = in_double(cases["test_linear_attention_gated_delta_gqa"])
    expanded, _ = in_double(cases["test_linear_attention_gated_delta_gqa_expanded"])
    rng = np.random.default_rng(0)
    for info in model.graph.output:
        feeds[f"seed_{info.name}"] = rng.standard_normal([dim.dim_value for dim in info.type.tensor_type.shape.dim])
    results = []
    for each in (model, expanded):
        proto, _, given = differentiate(each)
        results.append(dict(zip(given, run_reference(proto)([f"slope_{name}" for name in given], feeds), strict=True)))
    assert len(results[0]) == 5
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], rtol=1e-4, atol=1e-5)
