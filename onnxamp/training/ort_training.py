"""The engine ort-training: gradients by ONNX Runtime's own builder, with its fused kernels.

It takes the place of `autodiff.backward` and of nothing else: loss, accumulation, reduce, update and the trainer are the same.
The builder differentiates a scalar, so it is given Σ y·s with the gradients s of the values y that the loss reads as inputs;
what it returns replaces the forward nodes in front of y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.errors import UnsupportedError, few
from onnxamp.ort import gradient_builder
from onnxamp.passes.emulate import emulate
from onnxamp.training import dropout
from onnxamp.training.fragment import FLOAT, IR_VERSION, OPSET, Fragment

LOSS = "ort_training/loss"
# The registry of onnxruntime-training 1.19.2, found by asking it for each operator.
_DIFFERENTIABLE = (
    "Abs Add AveragePool Cast Clip Concat Conv ConvTranspose Cos Div Dropout Erf Exp Expand Flatten Gather GatherElements "
    "GatherND Gelu Gemm GlobalAveragePool GRU Identity LayerNormalization LeakyRelu Log LogSoftmax LSTM MatMul Max MaxPool "
    "Min Mul Neg Pad Pow Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize ScatterElements "
    "ScatterND Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where"
)
_CONTRIB = "BiasGelu FastGelu QuickGelu SimplifiedLayerNormalization"
# They end the way: what they give is no float, or does not depend on values.
_STOPS = "Shape Size Equal Greater GreaterOrEqual Less LessOrEqual IsNaN IsInf ArgMax ArgMin ConstantOfShape NonZero"
_KNOWN = {("", name) for name in (*_DIFFERENTIABLE.split(), "BatchNormalization")} | {
    ("com.microsoft", name) for name in _CONTRIB.split()
}
_STOPPING = {("", name) for name in _STOPS.split()}


def check(graph: ir.Graph) -> None:
    """Find what the runtime of this engine cannot run, whoever differentiates it.

    Raises:
        UnsupportedError: An opset above 22, or Dropout: its masks are integer arithmetic of 32 bits without sign, which ONNX
            Runtime 1.19.2 has no kernels for.
    """
    opset = graph.opset_imports.get("", 1)
    if opset > OPSET + 1:
        raise UnsupportedError(
            f"The model has opset {opset}, and onnxruntime-training 1.19.2 knows them up to {OPSET}: leave out --engine ort-training."
        )
    op = Fragment(graph)
    nodes = [n for n in graph if n.op_type == "Dropout" and n.domain == "" and dropout.ratio(op, n) > 0]
    if nodes:
        named = ", ".join(repr(node.name) for node in nodes[:5])
        raise UnsupportedError(
            f"onnxruntime-training 1.19.2 has no kernels for the masks of Dropout ({named}): leave out --engine ort-training, or "
            "export the model without Dropout."
        )


def rounded(model: ir.Model) -> ir.Model:
    """An FP32 model that rounds each 16-bit result of `model`, in opset 21 at most.

    Operators of opset 22 differ from those before in the types that they take, bf16 among them, and in nothing else.
    """
    model = emulate(model)
    if model.graph.opset_imports.get("", 1) == OPSET + 1:
        model.graph.opset_imports[""] = OPSET
    return model


def backward(model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    """What `autodiff.backward` does, of values that are inputs of the model.

    1. Nodes between `wrt` and the keys of `seeds` get what the builder asks for: LayerNormalization its further outputs,
       LSTM and GRU become LSTMTraining and GRUTraining, one a direction; BatchNormalization is written out.
    2. The forward nodes in front of the keys of `seeds` are replaced by ONNX Runtime's: the same values, in an FP32 model in
       fused operators where it has a gradient for them.
    3. Backward nodes follow.

    Raises:
        UnsupportedError: Operators on the way that the builder has no gradient for (all of them, with node names), or what
            the builder itself refuses.
    """
    graph = model.graph
    graph.sort()
    opset = graph.opset_imports.get("", 1)
    if opset > OPSET:
        raise UnsupportedError(
            f"The model has opset {opset}, and onnxruntime-training 1.19.2 knows them up to {OPSET}."
        )
    path = _path(graph, seeds, wrt)
    _check(path)
    for node in path:
        _complete(graph, node)
    graph.sort()
    inside = _ancestors(graph, seeds)
    fixed = _fixed(graph)  # what others read of these stays: ONNX Runtime may fold its own
    reached = _reached(inside, wrt)
    kept = [
        value
        for node in inside
        if node not in fixed
        for value in node.outputs
        if value in seeds or any(user not in inside for user, _ in value.uses())
    ]
    joint, names = _surrogate(model, list(seeds), kept)
    rounded = any(value.dtype in LOW for node in inside for value in node.outputs)
    data = gradient_builder.differentiate(
        ir.to_proto(joint).SerializeToString(), LOSS, [str(value.name) for value in reached], fuse=not rounded
    )
    built = ir.from_proto(onnx.ModelProto.FromString(data))
    return _adopt(graph, built.graph, inside, kept, dict(zip(names, seeds.values(), strict=True)), reached)


def _path(graph: ir.Graph, ends: Mapping[ir.Value, object], wrt: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes between, in order."""
    ancestors = set(_ancestors(graph, ends))
    marked = set(wrt)
    path = []
    for node in graph:
        if node in ancestors and any(value in marked for value in node.inputs):
            if (node.domain, node.op_type) in _STOPPING:
                continue
            marked.update(value for value in node.outputs if value.dtype is None or value.dtype.is_floating_point())
            path.append(node)
    return path


def _fixed(graph: ir.Graph) -> set[ir.Node]:
    """The nodes whose results depend on no input."""
    varying = set(graph.inputs)
    fixed = set()
    for node in graph:
        bodies = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        if bodies or any(value in varying for value in node.inputs):
            varying.update(node.outputs)
        else:
            fixed.add(node)
    return fixed


def _ancestors(graph: ir.Graph, ends: Mapping[ir.Value, object]) -> dict[ir.Node, None]:
    """The nodes that compute `ends`, in order."""
    wanted = set(ends)
    found = []
    for node in reversed(list(graph)):
        if any(value in wanted for value in node.outputs):
            found.append(node)
            wanted.update(value for value in node.inputs if value is not None)
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    inner = attribute.as_graph().all_nodes()
                    wanted.update(value for each in inner for value in each.inputs if value is not None)
    return dict.fromkeys(reversed(found))


def _reached(nodes: Mapping[ir.Node, object], wrt: Sequence[ir.Value]) -> list[ir.Value]:
    return [value for value in wrt if any(user in nodes for user, _ in value.uses())]


def _check(path: Sequence[ir.Node]) -> None:
    bad = [node for node in path if (node.domain, node.op_type) not in _KNOWN]
    if bad:
        named = few([f"{node.op_type} {node.name!r}" for node in bad], 8)
        raise UnsupportedError(
            f"onnxruntime-training 1.19.2 has no gradient for {named}: leave out --engine ort-training."
        )


def _complete(graph: ir.Graph, node: ir.Node) -> None:
    """Give a node the optional inputs and outputs that its gradient reads."""
    if node.op_type == "LayerNormalization":
        while len(node.outputs) < 3:
            node.resize_outputs(len(node.outputs) + 1)
        for value in node.outputs[1:]:
            if not value.name:
                value.name = f"{node.outputs[0].name}/statistics{value.index()}"
            value.type = ir.TensorType(FLOAT)
    elif node.op_type in ("LSTM", "GRU"):
        _write_out_recurrent(graph, node)
    elif node.op_type == "BatchNormalization":
        _write_out_norm(graph, node)


def _write_out_recurrent(graph: ir.Graph, node: ir.Node) -> None:
    """Each direction as the training form, which runs forward and keeps what its gradient reads (cell states, gates).

    A reverse direction reads its input, and gives its output, through a Gather of the steps from the last to the first.
    """
    lstm = node.op_type == "LSTM"
    operands = [*node.inputs, *[None] * (8 - len(node.inputs))]
    x, recurrence = operands[0], operands[2]
    assert x is not None and recurrence is not None and recurrence.shape is not None  # noqa: PT018 (for mypy)
    count, _, hidden = map(int, recurrence.shape.numpy())
    direction = node.attributes.get_string("direction", "forward")
    backwards = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    usual = (["sigmoid", "tanh", "tanh"] if lstm else ["sigmoid", "tanh"]) * count
    given = [name.lower() for name in node.attributes.get_strings("activations", usual)]
    if given != usual or {"activation_alpha", "activation_beta", "clip"} & set(node.attributes):
        raise _refusal(node, "other activations than its usual ones")
    if node.attributes.get_int("layout", 0) or operands[7] is not None:
        raise _refusal(node, "layout 1 or peepholes")
    if operands[4] is not None:
        raise _refusal(node, "lengths of sequences")
    if any(backwards) and not lstm:
        raise _refusal(node, "a reverse direction")  # the runtime ends the process
    op = Fragment(graph)
    op.section(f"{node.name}/directions")
    steps, batch = op.dim(x, 0), op.dim(x, 1)
    if operands[3] is None:
        operands[3] = op.constant(np.zeros((count, (8 if lstm else 6) * hidden), np.float32))
    state = op.Concat(op.constant(np.array([count])), batch, op.constant(np.array([hidden])), axis=0)
    for index in (5, 6) if lstm else (5,):
        operands[index] = operands[index] or op.Expand(op.constant(np.zeros((1, 1, 1), np.float32)), state)
    attributes: dict[str, Any] = {"hidden_size": hidden}
    attributes |= (
        {"input_forget": node.attributes.get_int("input_forget", 0)}
        if lstm
        else {"linear_before_reset": node.attributes.get_int("linear_before_reset", 0)}
    )
    last = op.Squeeze(op.Sub(steps, op.constant(np.array([1]))), [0])
    parts: list[list[ir.Value]] = []
    for index, backward in enumerate(backwards):
        of = [None if v is None else op.Slice(v, [index], [index + 1], [0]) if count > 1 else v for v in operands]
        turn = op.Range(last, op.index(-1), op.index(-1)) if backward else None
        sequence = x if turn is None else op.Gather(x, turn, axis=0)
        inputs = [sequence, *of[1:4], None, *(of[5:7] if lstm else of[5:6])]
        results = op.emit(
            f"{node.op_type}Training", inputs, attributes, outputs=5 if lstm else 3, domain="com.microsoft"
        )
        for result, like in zip(results, node.outputs, strict=False):
            result.shape = None if like.shape is None else _with(like.shape, 1 if like.index() == 0 else 0, 1)
        for result in results:
            result.type = ir.TensorType(FLOAT)  # of what is kept for the gradient too
        read = node.outputs[0].uses()
        y = results[0] if turn is None or not read else op.Gather(results[0], turn, axis=0)
        parts.append([y, *results[1:]])
    for position, old in enumerate(node.outputs):
        if old.uses():
            pieces = [part[position] for part in parts]
            new = pieces[0] if count == 1 else op.Concat(*pieces, axis=1 if position == 0 else 0)
            new.type, new.shape = ir.TensorType(FLOAT), old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _with(shape: ir.Shape, axis: int, size: int) -> ir.Shape:
    return ir.Shape([size if index == axis else dim for index, dim in enumerate(shape)])


def _refusal(node: ir.Node, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"onnxruntime-training 1.19.2 has no gradient for {node.op_type} {node.name!r} with {what}: leave out --engine ort-training."
    )


def _write_out_norm(graph: ir.Graph, node: ir.Node) -> None:
    """y = (x − μ)·(γ/√(σ² + ε)) + β: the builder knows only the form with batch statistics."""
    x, scale, bias, mean, variance = node.inputs
    assert x is not None and scale is not None and bias is not None and mean is not None and variance is not None  # noqa: PT018 (for mypy)
    op = Fragment(graph)
    op.section(f"{node.name}/frozen")
    factor = op.Div(scale, op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
    mean, factor, bias = (op.per_channel(value, op.rank(x)) for value in (mean, factor, bias))
    y = op.Add(op.Mul(op.Sub(x, mean), factor), bias)
    node.outputs[0].replace_all_uses_with(y, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _surrogate(model: ir.Model, ends: Sequence[ir.Value], kept: Sequence[ir.Value]) -> tuple[ir.Model, list[str]]:
    """A model of Σ y·s over `ends`, and the names of its inputs s; `kept` are outputs too, so that they keep their names."""
    copy = model.clone()
    graph = copy.graph
    values = {value.name: value for node in graph for value in node.outputs}
    op = Fragment(graph)
    op.section("ort_training")
    names: list[str] = []
    parts: list[ir.Value] = []
    for end in ends:
        y = values[end.name]
        assert y.dtype is not None and y.shape is not None  # noqa: PT018 (for mypy)
        seed = op.input(
            f"ort_training/seed{len(names)}", y.dtype, [d if isinstance(d, int) else str(d.value) for d in y.shape]
        )
        names.append(str(seed.name))
        parts.append(op.sum_all(op.Mul(y, seed)))
    total = parts[0] if len(parts) == 1 else op.Sum(*parts)
    graph.outputs.clear()
    op.output(total, LOSS)
    graph.outputs.extend(values[value.name] for value in kept)
    needed = _ancestors(graph, dict.fromkeys(graph.outputs))  # onnx-ir's pass would take optional outputs away again
    graph.remove([node for node in graph if node not in needed], safe=False)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    graph.inputs[:] = [value for value in graph.inputs if value.uses()]
    copy.ir_version = IR_VERSION
    return copy, names


def _adopt(
    graph: ir.Graph,
    built: ir.Graph,
    inside: Mapping[ir.Node, object],
    kept: Sequence[ir.Value],
    seeds: Mapping[str, ir.Value],
    wrt: Sequence[ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Put the nodes of `built` in the place of `inside`."""
    results = {str(value.name): value for value in built.outputs}
    built.outputs.clear()
    own = {str(value.name): value for value in graph.inputs} | dict(seeds)
    for value in list(built.inputs):
        value.replace_all_uses_with(own[str(value.name)])
    for old in kept:
        new = results[str(old.name)]
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    staying: set[ir.Node] = set()
    for node in reversed(list(inside)):
        users = [user for value in node.outputs for user, _ in value.uses()]
        if any(user not in inside or user in staying for user in users):
            staying.add(node)
    graph.remove([node for node in inside if node not in staying], safe=False)
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    taken |= {str(value.name) for node in graph for value in node.outputs}
    called = {node.name for node in graph}

    def free(name: str, names: set[Any]) -> str:
        while name in names:
            name += "/ort_training"
        names.add(name)
        return name

    for name, value in list(built.initializers.items()):
        if name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[name])
            continue
        del built.initializers[name]
        value.name = free(name, taken)
        graph.register_initializer(value)
    nodes = list(built)
    built.remove(nodes, safe=False)
    for node in nodes:
        node.name = free(node.name or node.op_type, called)
        for value in node.outputs:
            if value.name:  # an output that is left out has none
                value.name = free(value.name, taken)
    graph.extend(nodes)
    for domain in {node.domain for node in nodes}:
        graph.opset_imports.setdefault(domain, 1)
    found = {}
    for value in wrt:
        slope = results.get(f"{value.name}_grad")
        if slope is not None:
            slope.type, slope.shape = value.type, value.shape
            found[value] = slope
    graph.sort()
    return found
