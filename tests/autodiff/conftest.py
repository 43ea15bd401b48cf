"""One-operator cases: their model, central differences of it in float64, and the gradient graph's answer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import scipy.special
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_grid_sample import GridSample as ReferenceGridSample
from onnx.reference.ops.op_loop import Loop as ReferenceLoop
from onnx.reference.ops.op_max_pool import MaxPool as ReferenceMaxPool
from onnx.reference.ops.op_scan import Scan as ReferenceScan
from operator_case import Case

from onnxamp import autodiff
from onnxamp.model.types import infer


def samples(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(map(ord, case.id)))
    result = {}
    for position, item in enumerate(case.inputs):
        if isinstance(item, tuple):
            size = int(np.prod(item))
            grid = (np.arange(size) + 0.5 + 0.2 * rng.random(size)) / max(size, 1)
            array = case.low + (case.high - case.low) * rng.permutation(grid)
            result[f"x{position}"] = array.reshape(item)
    return result


def build(case: Case, elem: int, symbolic: str) -> onnx.ModelProto:
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    names, inputs, initializers = [], [], []
    for position, item in enumerate(case.inputs):
        name = f"x{position}" if item is not None else ""
        names.append(name)
        if isinstance(item, tuple):
            shape: list[Any] = list(item)
            if symbolic == "all":
                shape = [f"d{size}" if size > 1 else size for size in item]
            elif symbolic == "sequence":
                shape = ["T", "B", item[2]] if position == 0 else [item[0], "B", item[2]] if position > 4 else shape
            elif symbolic in ("batch", "space") and position == 0:
                shape = [
                    f"d{axis}" if axis == 0 or (axis > 1 and symbolic == "space") else size
                    for axis, size in enumerate(item)
                ]
            inputs.append(helper.make_tensor_value_info(name, elem, shape))
        elif item is not None:
            array = np.asarray(item)
            initializers.append(
                numpy_helper.from_array(array.astype(dtype) if array.dtype == np.float64 else array, name)
            )
    outputs = list(case.outputs) if isinstance(case.outputs, list) else [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, name="n", domain=case.domain, **case.attributes)
    graph = helper.make_graph(
        [node],
        "case",
        inputs,
        [
            onnx.ValueInfoProto(name=name) if shape is None else helper.make_tensor_value_info(name, elem, shape)
            for name, shape in itertools.zip_longest([name for name in outputs if name], case.shapes)
        ],
        initializers,
    )
    opsets = [helper.make_opsetid("", case.opset)]
    if case.domain:
        opsets.append(helper.make_opsetid(case.domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def differentiate(model: onnx.ModelProto, case: Case) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """The gradient graph: seeds are inputs, gradients are outputs."""
    module = ir.from_proto(model)
    infer(module)
    graph = module.graph
    seeds = {}
    for value in list(graph.outputs):
        if value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or (case.seeded not in (None, value.index())):
            continue
        seed = ir.Value(name=f"seed_{value.name}", type=value.type, shape=value.shape)
        graph.inputs.append(seed)
        seeds[value] = seed
    wrt = [value for value in graph.inputs if str(value.name).startswith("x")]
    wrt = [value for value in wrt if int(str(value.name)[1:]) not in case.frozen]
    gradients = autodiff.backward(graph, seeds, wrt)
    names = []
    for value in wrt:
        g = gradients[value]
        assert g.dtype == value.dtype
        out = ir.node("Identity", [g], name=f"out_{value.name}")
        out.outputs[0].name = f"d{value.name}"
        out.outputs[0].type, out.outputs[0].shape = value.type, value.shape
        graph.append(out)
        graph.outputs.append(out.outputs[0])
        names.append(f"d{value.name}")
    proto = ir.to_proto(module)
    onnx.checker.check_model(proto, full_check=True)
    assert idle_constants(module) <= idle_constants(ir.from_proto(model)), (
        "constants of the backward half that nothing reads"
    )
    return proto, names, [str(seed.name) for seed in seeds.values()]


def idle_constants(model: ir.Model) -> set[str]:
    """Names of the initializers, those of bodies included, that no node reads."""
    return {
        name
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if not value.uses() and not value.is_graph_output()
    }


class Erf(OpRun):
    """The reference evaluator's own Erf computes in float32."""

    op_domain = ""

    def _run(self, x):
        return (scipy.special.erf(x).astype(x.dtype),)


class Gelu(OpRun):
    """Its own Gelu computes in float32."""

    op_domain = ""

    def _run(self, x, approximate=None):
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2))),)


class GatherElements(OpRun):
    """Its own GatherElements takes at most 64 choices."""

    op_domain = ""

    def _run(self, data, indices, axis=None):
        return (np.take_along_axis(data, indices, axis or 0),)


class MaxPool(ReferenceMaxPool):
    """Its own MaxPool gives no indices where all strides are 1."""

    op_domain = ""

    def _run(self, x, **attributes):
        return self._max_pool(x, **attributes)


class GridSample(ReferenceGridSample):
    """Its own GridSample rounds the places to float32."""

    op_domain = ""

    def _gs_denormalize_coordinates(self, n, dims, align_corners):
        return np.asarray(
            [self._gs_denormalize(v, dim, align_corners) for v, dim in zip(n, dims, strict=True)], np.float64
        )


class Loop(ReferenceLoop):
    """Its own Loop takes an absent condition for a false one and joins stacked outputs instead of stacking them."""

    op_domain = ""

    def _run(self, count, condition, *states, context=None, **kwargs):
        names, results = self.body.input_names, self.body.output_names
        stacks = [[] for _ in results[1 + len(states) :]]
        states, step = list(states), 0
        going = True if condition is None else bool(np.asarray(condition).item())
        while going and (count is None or step < int(np.asarray(count).item())):
            given = dict(zip(names, [np.asarray(step, np.int64), np.asarray(True), *states], strict=True))
            outputs = self._run_body({**(context or {}), **given})
            going, states = bool(np.asarray(outputs[0]).item()), list(outputs[1 : 1 + len(states)])
            for stack, value in zip(stacks, outputs[1 + len(states) :], strict=True):
                stack.append(value)
            step += 1
        return (*states, *(np.stack(stack) if stack else np.empty((0,)) for stack in stacks))


class Scan(ReferenceScan):
    """Its own Scan knows neither directions nor axes."""

    op_domain = ""

    def __init__(self, onnx_node, run_params):
        names = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
        self.kept = {name: [] for name in names}
        plain = onnx.NodeProto()
        plain.CopyFrom(onnx_node)
        del plain.attribute[:]
        for attribute in onnx_node.attribute:
            if attribute.name in names:
                self.kept[attribute.name] = list(attribute.ints)
            else:
                plain.attribute.append(attribute)
        super().__init__(plain, run_params)

    def _run(self, *args, context=None, **kwargs):
        count = len(args) - self.num_scan_inputs
        in_axes, in_ways, out_axes, out_ways = self.kept.values()
        moved = []
        for index, value in enumerate(args[count:]):
            value = np.moveaxis(value, in_axes[index] if in_axes else 0, 0)
            moved.append(value[::-1] if in_ways and in_ways[index] else value)
        results = list(super()._run(*args[:count], *moved, context=context, **kwargs))
        for index, value in enumerate(results[count:]):
            value = value[::-1] if out_ways and out_ways[index] else value
            results[count + index] = np.moveaxis(value, 0, out_axes[index] if out_axes else 0)
        return tuple(results)


OPERATORS = [Erf, GatherElements, Gelu, GridSample, Loop, MaxPool, Scan]


def evaluate(model: onnx.ModelProto, runner: str):
    if runner == "reference":
        return ReferenceEvaluator(model, new_ops=OPERATORS).run
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {value.name for value in session.get_inputs()}
    return lambda names, feeds: session.run(names, {name: x for name, x in feeds.items() if name in inputs})


def assert_differences(
    run, feeds: dict[str, np.ndarray], seeds: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
) -> None:
    """Central differences of Σ seed·y in float64: along every axis, or along 4 random directions of larger inputs."""
    names = [name.removeprefix("seed_") for name in seeds]
    rng = np.random.default_rng(2)

    def loss(name: str, x: np.ndarray) -> float:
        results = run(names, {**feeds, name: np.asarray(x)})
        return sum(float((np.asarray(y) * seed).sum()) for y, seed in zip(results, seeds.values(), strict=True))

    for name, g in gradients.items():
        x = feeds[name]
        assert g.shape == x.shape, f"{name}: {g.shape}, not {x.shape}"
        directions = np.eye(x.size) if x.size <= 12 else rng.standard_normal((4, x.size))
        for direction in directions.reshape(-1, *x.shape):
            step = 1e-6 * max(1.0, float(np.abs(x).max(initial=0)))
            difference = (loss(name, x + step * direction) - loss(name, x - step * direction)) / (2 * step)
            np.testing.assert_allclose((g * direction).sum(), difference, rtol=1e-5, atol=1e-5, err_msg=f"of {name}")


def by_autograd(case: Case, feeds: dict[str, np.ndarray]):
    """Outputs, a seed for each, and the gradients by PyTorch in float64."""
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in feeds.items()}
    results = case.oracle(*tensors.values())
    results = results if isinstance(results, list) else [results]
    rng = np.random.default_rng(1)
    names = case.outputs if isinstance(case.outputs, list) else [f"y{index}" for index in range(len(results))]
    names = [name for name in names if name]
    seeds = {f"seed_{name}": rng.standard_normal(tuple(y.shape)) for name, y in zip(names, results, strict=False)}
    torch.autograd.backward(results, [torch.from_numpy(seed) for seed in seeds.values()])
    values = {name: y.detach().numpy() for name, y in zip(names, results, strict=False)}
    return values, seeds, {name: tensor.grad.numpy() for name, tensor in tensors.items()}


def check(case: Case) -> None:
    """Gradients of one case, static and symbolic, in float64 by the reference evaluator and in float32 by ORT."""
    feeds = samples(case)
    rng = np.random.default_rng(1)
    expected: dict[str, np.ndarray] = {}
    seeds: dict[str, np.ndarray] = {}
    if case.oracle is not None:
        values, seeds, expected = by_autograd(case, feeds)
        if case.ort:  # the oracle is of the same operator
            single = {name: x.astype(np.float32) for name, x in feeds.items()}
            results = evaluate(build(case, TensorProto.FLOAT, "static"), "ort")(list(values), single)
            for (name, want), got in zip(values.items(), results, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"forward {name}")
    for symbolic in ["static", *case.symbolic.split()]:
        if case.oracle is None and (symbolic == "static" or "Conv" not in case.op):  # whose reference is slow
            forward = build(case, TensorProto.DOUBLE, symbolic)
            proto, names, seed_names = differentiate(forward, case)
            if not seeds:
                outputs = [name.removeprefix("seed_") for name in seed_names]
                values = evaluate(forward, case.runner)(outputs, feeds)
                seeds = {name: rng.standard_normal(y.shape) for name, y in zip(seed_names, values, strict=True)}
            got = dict(zip(names, evaluate(proto, case.runner)(names, {**feeds, **seeds}), strict=True))
            got = {name[1:]: value for name, value in got.items()}
            if not expected:
                assert_differences(evaluate(forward, case.runner), feeds, seeds, got)
                expected = got
            for name, value in got.items():
                assert value.shape == expected[name].shape
                np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=f"{name} {symbolic}")
        if case.ort:
            proto, names, _ = differentiate(build(case, TensorProto.FLOAT, symbolic), case)
            single = {name: value.astype(np.float32) for name, value in {**feeds, **seeds}.items()}
            for name, value in zip(names, evaluate(proto, "ort")(names, single), strict=True):
                want = expected[name[1:]]
                scale = max(1.0, float(np.abs(want).max(initial=0)))
                np.testing.assert_allclose(value, want, rtol=2e-4, atol=2e-5 * scale, err_msg=f"ORT {name} {symbolic}")


@pytest.fixture
def check_case():
    return check


@pytest.fixture
def run_reference():
    """What runs a model in the reference evaluator, with the operators above."""
    return lambda model: evaluate(model, "reference")
