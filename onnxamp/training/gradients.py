"""grad.onnx and eval.onnx: from the model in mixed precision to sums of losses, weights and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.autodiff import backward
from onnxamp.errors import UsageError
from onnxamp.training import batch_norm, dropout, fragment, ort_training
from onnxamp.training.accumulation import Accumulation
from onnxamp.training.fragment import BOOL, FLOAT, INT64, Fragment
from onnxamp.training.joint_plan import JointPlan
from onnxamp.training.losses import AnyLoss, LossModel, ModelOutput
from onnxamp.training.manifest import GraphPorts, Labels, Port
from onnxamp.training.objective import Objective, objective
from onnxamp.training.parameters import Entry, demote, promote
from onnxamp.training.recompute import Recomputed, recompute

_RESERVED = ("labels", "weights")


@dataclasses.dataclass(frozen=True)
class Task:
    """What both graphs are made of.

    Attributes:
        model: The model in mixed precision; each graph is made of a copy.
        loss: The loss.
        predictions: Names of the outputs that it reads.
        outputs: Names of the user's outputs.
        rows: Name of the input that counts rows.
        parameters: Names of the initializers that train.
        low: Read low copies of parameters that are cast (O2, O3).
        trained_norms: Names of the nodes of BatchNormalization that use batch statistics.
        labels: The inputs that a loss model compares outputs with.
        engine: Who differentiates: ``native`` or ``ort-training``.
        norms_by_window: Running statistics move once per window instead of once per micro-batch.
        memory_budget: Bytes that activations may take, or None; the rest is computed again.
        dims: Sizes of free dimensions, for that.
        drops_micro: A micro-batch with a gradient that is not finite is left out (overflow policy ``micro``).
    """

    model: ir.Model
    loss: AnyLoss
    predictions: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: str
    parameters: tuple[str, ...]
    low: bool
    trained_norms: frozenset[str] = frozenset()
    drops_micro: bool = False
    engine: str = "native"
    labels: tuple[Labels, ...] = ()
    norms_by_window: bool = False
    memory_budget: int | None = None
    dims: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class GradGraph:
    """grad.onnx and what it trains.

    Attributes:
        model: The graph.
        ports: Its ports.
        entries: The parameters that have a gradient.
        statistics: Names and shapes of running statistics.
        labels: What the loss expects.
        recomputed: What is computed twice to save memory, if that was asked for.
    """

    model: ir.Model
    ports: GraphPorts
    entries: tuple[Entry, ...]
    statistics: tuple[tuple[str, tuple[int, ...]], ...]
    labels: tuple[Labels, ...]
    recomputed: Recomputed | None = None


class _Graph:
    """A copy of the task's model that becomes one of the two graphs."""

    def __init__(self, task: Task, outputs: Sequence[str]) -> None:
        self.task = task
        self.model = task.model.clone()
        graph = self.model.graph
        values = {str(value.name): value for value in graph.outputs}
        graph.outputs[:] = [values[name] for name in outputs]
        self.predictions = [values[name] for name in task.predictions]
        self.inputs: list[Port] = []
        self.results: list[Port] = []
        labels = {one.name for one in task.labels}
        for value in graph.inputs:
            if not isinstance(task.loss, (ModelOutput, LossModel)) and value.name in _RESERVED:
                raise UsageError(f"The model has an input {value.name!r}, which is the loss's name: rename the input.")
            self.inputs.append(_port(value, "labels" if value.name in labels else "data"))
        self.rows = next(value for value in graph.inputs if value.name == task.rows)
        self.entries = [promote(graph, graph.initializers[name], task.low) for name in task.parameters]
        _make_room(graph)
        self.op = Fragment(graph)

    def add_parameters(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for value, arena in ((entry.master, "master"), (entry.low, "low")):
                if value is not None:
                    self.inputs.append(_port(value, "tensor", f"{arena}/{entry.name}"))

    def take(self, name: str, dtype: ir.DataType, shape: Sequence[int | str], kind: str, ref: str = "") -> ir.Value:
        value = self.op.input(name, dtype, shape)
        if value.name != name:
            raise UsageError(f"The model has a value called {name!r}, which training needs: rename it.")
        self.inputs.append(_port(value, kind, ref))
        return value

    def give(self, value: ir.Value, name: str, kind: str, ref: str = "", alias: str | None = None) -> None:
        result = self.op.output(value, name)
        self.results.append(_port(result, kind, ref, alias))

    def objective(self) -> Objective:
        """The loss."""
        self.op.section("loss")
        return objective(self.op, self.task.loss, self.predictions, self.rows, self.take)

    def finish(self, file: str) -> tuple[ir.Model, GraphPorts]:
        graph = self.model.graph
        graph.sort()
        RemoveUnusedNodesPass()(self.model)
        unused = {str(value.name) for value in graph.inputs if not value.uses() and not value.is_graph_output()}
        graph.inputs[:] = [value for value in graph.inputs if value.name not in unused]
        self.model.ir_version = fragment.IR_VERSION
        self.model.producer_name, self.model.producer_version = (
            "onnxamp",
            None,
        )  # not the version of the model's own producer
        order = {value.name: index for index, value in enumerate(graph.inputs)}
        inputs = sorted((port for port in self.inputs if port.name not in unused), key=lambda port: order[port.name])
        return self.model, GraphPorts(file, tuple(inputs), tuple(self.results))


def eval_graph(task: Task, statistics: Sequence[str] = (), file: str = "eval.onnx") -> tuple[ir.Model, GraphPorts]:
    """Outputs of the model, Σ loss·w and Σ w, in inference form."""
    built = _Graph(task, task.outputs)
    graph = built.model.graph
    for value in graph.outputs:
        built.results.append(_port(value, "output"))
    for name in statistics:
        initializer = graph.initializers.pop(name)
        value = built.take(f"stat/{name}", FLOAT, _static(initializer.shape), "tensor", f"statistics/{name}")
        initializer.replace_all_uses_with(value)
    built.add_parameters(built.entries)
    terms = built.objective()
    built.give(terms.loss_sum, "amp.loss_sum", "result", "loss_sum")
    built.give(terms.weight_sum, "amp.weight_sum", "result", "weight_sum")
    return built.finish(file)


def grad_graph(task: Task) -> GradGraph:
    """Forward, loss, backward, accumulation."""
    built = _Graph(task, list(dict.fromkeys(task.predictions)))
    graph = built.model.graph
    accumulation = Accumulation(built, task.drops_micro)
    scale = built.take("amp.loss_scale", FLOAT, (), "tensor", "scalars/loss_scale")
    divisor = built.take("amp.seed_divisor", FLOAT, (), "tensor", "scalars/seed_divisor")
    _drop(built, accumulation)
    norms = _with_batch_statistics(built)
    terms = built.objective()
    built.op.section("loss")
    seeds = terms.seeds(built.op.Div(scale, divisor))
    wrt = [value for entry in built.entries for value in (entry.master, entry.low) if value is not None]
    written = None
    if task.engine == "native":
        slopes = backward(graph, seeds, wrt)
    else:
        written = [batch_norm.write_out(built.op, norm) for norm in norms]
        slopes = ort_training.backward(built.model, seeds, wrt)
    entries = [entry for entry in built.entries if entry.master in slopes or entry.low in slopes]
    for entry in built.entries:
        if entry not in entries:  # ArgMin or a comparison may read what has no gradient: it has its value all the same
            demote(graph, entry, task.model.graph.initializers[entry.name])
    built.op = Fragment(graph)  # sees the names that backward gave, and the constants
    built.add_parameters(entries)
    gradients = {entry.name: _total(built.op, entry, slopes) for entry in entries}
    accumulation.judge(terms, list(gradients.values()))
    for name, value in gradients.items():
        accumulation.gradient(name, value)
    statistics = _running(built, norms, accumulation, written)
    accumulation.window(terms)
    empty = built.op.is_zero(terms.weight_sum)
    mean = built.op.Div(terms.loss_sum, built.op.select(empty, 1.0, terms.weight_sum))
    built.give(built.op.select(empty, 0.0, mean), "amp.loss", "result", "loss")
    recomputed = None
    if task.memory_budget is not None:
        graph.sort()
        RemoveUnusedNodesPass()(built.model)
        recomputed = recompute(
            built.model, [terms.loss_sum, terms.weight_sum], scale, task.memory_budget, dict(task.dims)
        )
    target = built.model.metadata_props.get("onnxamp.target")
    if target is not None and task.engine == "native":
        JointPlan(target)(built.model)
    model, ports = built.finish("grad.onnx")
    return GradGraph(model, ports, tuple(entries), statistics, task.labels or terms.labels, recomputed)


def _with_batch_statistics(built: _Graph) -> list[batch_norm.Trained]:
    """Put stand-ins in the place of the BatchNormalizations that use batch statistics; the graph's outputs become its predictions."""
    task, graph = built.task, built.model.graph
    norms = [
        batch_norm.replace(built.op, node)
        for node in list(graph)
        if node.op_type == "BatchNormalization" and node.domain == "" and node.name in task.trained_norms
    ]
    graph.sort()
    # Others than before, if the last node was replaced.
    read = dict(zip(dict.fromkeys(task.predictions), graph.outputs, strict=True))
    built.predictions = [read[name] for name in task.predictions]
    graph.outputs.clear()
    built.op = Fragment(graph)  # knows nothing of nodes that are gone
    return norms


def _total(op: Fragment, entry: Entry, slopes: dict[ir.Value, ir.Value]) -> ir.Value:
    """The FP32 gradient of a parameter: the sum of those of its master and its low copy."""
    op.section(f"accumulate/{entry.name}")
    parts = [op.cast(slopes[value], FLOAT) for value in (entry.master, entry.low) if value in slopes]
    total = parts[0] if len(parts) == 1 else op.Add(*parts)
    total.shape = ir.Shape(entry.shape)
    return total


def _make_room(graph: ir.Graph) -> None:
    """Rename inner values that have the name of one of the loss's inputs."""
    taken = {value.name for value in graph.inputs} | set(graph.initializers)
    for node in graph.all_nodes():
        taken.update(value.name for value in node.outputs)
    inner = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for value in inner:
        if value.name in _RESERVED and not value.is_graph_output():
            name = f"{value.name}_"
            while name in taken:
                name += "_"
            taken.add(name)
            if value.const_value is not None:  # a renamed initializer renames its tensor, which is the user's
                value.const_value = ir.Tensor(value.const_value.numpy(), value.const_value.dtype)
            value.name = name


def _drop(built: _Graph, accumulation: Accumulation) -> None:
    """Replace Dropout by masks from counters."""
    op, graph = built.op, built.model.graph
    nodes = [node for node in graph if node.op_type == "Dropout" and node.domain == "" and dropout.ratio(op, node) > 0]
    if not nodes:
        return
    op.section("dropout")
    seed = built.take("amp.seed", INT64, (), "tensor", "counters/seed")
    step = built.take("amp.step", INT64, (), "tensor", "counters/step")
    masks = dropout.Masks(op, seed, step, built.rows, accumulation.dropped)
    for node in nodes:
        result, mask = dropout.drop(op, masks, node)
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        if mask is not None:
            node.outputs[1].replace_all_uses_with(mask, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    for value, ref in ((masks.row_offset, "row_offset"), (masks.micro_step, "micro_step")):
        if value is not None:
            built.inputs.append(_port(value, "host", ref))
    graph.sort()


def _running(
    built: _Graph,
    norms: Sequence[batch_norm.Trained],
    accumulation: Accumulation,
    written: Sequence[tuple[ir.Value, ir.Value]] | None,
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Running statistics: the committed ones in the first micro-batch, those of the window after it.

    By window, they move once: to momentum · committed + (1 − momentum) · mean of the micro-batches' statistics.

    Nodes that share statistics (a module that is used twice) update them one after the other.
    """
    op, graph = built.op, built.model.graph
    before: dict[str, ir.Value] = {}
    current: dict[str, ir.Value] = {}
    for norm, results in zip(norms, written or [batch_norm.write_out(op, norm) for norm in norms], strict=True):
        for name, value in zip(norm.running, results, strict=True):
            if name not in current:
                initializer = graph.initializers.pop(name)
                shape = _static(initializer.shape)
                committed = built.take(f"stat/{name}", FLOAT, shape, "tensor", f"statistics/{name}")
                initializer.replace_all_uses_with(committed)  # a frozen node may share them
                work = built.take(f"stat_work/{name}", FLOAT, shape, "tensor", f"statistics_work/{name}")
                before[name] = op.Where(accumulation.first, committed, work)
                current[name] = committed if built.task.norms_by_window else before[name]
            after = op.Add(op.Mul(current[name], norm.momentum), op.Mul(value, 1 - norm.momentum))
            after.shape = current[name].shape
            current[name] = after
    for name, value in current.items():
        if built.task.norms_by_window:  # the mean of what each micro-batch alone would have made of the committed ones
            op.section(f"statistics/{name}")
            value = op.Add(before[name], op.Div(op.Sub(value, before[name]), accumulation.number()))
        accumulation.statistics(name, before[name], value)
    return tuple((name, _static(value.shape)) for name, value in current.items())


def _static(shape: ir.Shape | None) -> tuple[int, ...]:
    assert shape is not None
    return tuple(int(size) for size in shape.numpy())


def _port(value: ir.Value, kind: str, ref: str = "", alias: str | None = None) -> Port:
    shape = tuple(
        dim if isinstance(dim, int) else (str(dim.value) if dim.value is not None else f"{value.name}_{index}")
        for index, dim in enumerate(value.shape or ())
    )
    assert value.dtype is not None
    return Port(str(value.name), value.dtype.numpy().name if value.dtype != BOOL else "bool", shape, kind, ref, alias)
