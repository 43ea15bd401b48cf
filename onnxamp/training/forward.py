"""The model as training starts from it: typed, inlined, in inference form, with the value that the loss reads as an output."""

from __future__ import annotations

import dataclasses
import os

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model import io, types
from onnxamp.model.inlining import inline_float_functions
from onnxamp.model.naming import unique
from onnxamp.passes.expands import PlainExpands
from onnxamp.passes.integers import settle
from onnxamp.passes.merged import RestoreTensors
from onnxamp.passes.reshapes import ConstantReshapes
from onnxamp.passes.resizes import PlainResizes
from onnxamp.passes.single_sizes import SingleSizes
from onnxamp.training.loss_model import join
from onnxamp.training.losses import (
    NLL,
    AnyLoss,
    BinaryCrossEntropyWithLogits,
    CrossEntropy,
    Loss,
    LossModel,
    ModelOutput,
    Sum,
)
from onnxamp.training.manifest import Labels


@dataclasses.dataclass(frozen=True)
class Forward:
    """A model ready for the AMP passes.

    Attributes:
        model: A private copy.
        predictions: Names of the outputs that the loss reads (or that are the loss), in its order.
        outputs: Names of the user's outputs; the predictions may be others.
        rows: Name of the input whose first dimension counts rows.
        loss: The loss, with the class axis that the model shows.
        notes: What a user should know.
        labels: The inputs that a loss model compares outputs with.
    """

    model: ir.Model
    loss: AnyLoss
    predictions: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: str
    notes: tuple[str, ...]
    labels: tuple[Labels, ...] = ()


def prepare(source: ir.Model, loss: AnyLoss, output: str | None = None) -> Forward:
    """A private copy of `source` in the form that training needs.

    1. It is in `training_form`.
    2. The values that the loss reads are graph outputs. A final Softmax (cross-entropy) or Sigmoid (binary cross-entropy) is
       left out: these losses read logits.
    3. The class dimension of three-dimensional logits is that of this Softmax, else the one that `class_axis` finds.
    4. A loss model is joined, and its results are graph outputs.

    Raises:
        UsageError: There is no such output, or several to choose from; a loss model does not fit.
        UnsupportedError: The opset is below 13, or the model has no input with a dimension.
    """
    model = training_form(source)
    graph = model.graph
    outputs = tuple(str(value.name) for value in graph.outputs)
    counted = rows(graph)
    notes: list[str] = []
    labels: tuple[Labels, ...] = ()
    predictions: tuple[ir.Value, ...]
    if isinstance(loss, LossModel):
        path = f" {os.fspath(loss.model)}" if isinstance(loss.model, (str, os.PathLike)) else ""
        joined = join(model, training_form(loss.model, f"the loss model{path}"))
        predictions, labels = joined.outputs, joined.labels
    elif isinstance(loss, Sum):
        if output is not None:
            raise UsageError("Each loss of a sum names its own output: leave out the other one.")
        found = [_prediction(graph, part.loss, part.output) for part in loss.parts]
        predictions = tuple(value for value, _, _ in found)
        notes = list(dict.fromkeys(note for _, _, more in found for note in more))
        parts = [dataclasses.replace(part, loss=one) for part, (_, one, _) in zip(loss.parts, found, strict=True)]
        loss = Sum(tuple(parts))
    elif isinstance(loss, ModelOutput):
        predictions = (_model_output(graph, output or loss.output),)
    else:
        value, loss, notes = _prediction(graph, loss, output)
        predictions = (value,)
    for value in predictions:
        if not value.is_graph_output():
            graph.outputs.append(value)
    return Forward(model, loss, tuple(str(v.name) for v in predictions), outputs, counted, tuple(notes), labels)


def training_form(source: str | os.PathLike[str] | onnx.ModelProto | ir.Model, called: str = "the model") -> ir.Model:
    """A private copy of `source` as training and `onnxamp check` see it.

    1. Float functions are inlined, tensors are those of the module (what the exporter merged is apart), constants lifted to initializers,
       integer constants folded, all values typed.
    2. Initializers are not inputs: what could be overridden is fixed.
    3. BatchNormalization and Dropout are in inference form, whatever mode they were exported in.
    4. Every node has a name of its own, which ONNX does not ask for: the second ``bn`` is ``bn_2``.

    Args:
        source: The model; never changed.
        called: What errors call it.

    Raises:
        UnsupportedError: The opset is below 13.
    """
    model = io.load(source)
    opset = model.opset_imports.get("", 0)
    if opset < 13:
        raise UnsupportedError(f"Training needs opset 13 or later and {called} has {opset}: export it again.")
    _name_free_sizes(model)
    types.infer(model)
    inline_float_functions(model)
    RestoreTensors()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _fix_initializers(model.graph)
    _name_nodes(model)
    for node in model.graph:
        if node.op_type == "BatchNormalization" and node.domain == "":
            _inference_batch_norm(node)
        elif node.op_type == "Dropout" and node.domain == "" and len(node.inputs) > 2:
            node.resize_inputs(2)
    types.infer(model)
    settle(model)
    if PlainExpands()(model).modified:
        types.infer(model)
        settle(model)
    ConstantReshapes()(model)
    PlainResizes()(model)
    if SingleSizes()(model).modified:
        types.infer(model)
    return model


def _name_nodes(model: ir.Model) -> None:
    """Give every node, those in bodies included, a name that no other has; the first of a name keeps it."""
    taken: set[str] = set()
    unnamed = []
    for graph in model.graphs():
        for index, node in enumerate(graph):
            if node.name:
                node.name = unique(node.name, taken)
            else:
                unnamed.append((index, node))
    for index, node in unnamed:
        node.name = unique(f"{node.op_type}_{index}", taken)


def _name_free_sizes(model: ir.Model) -> None:
    """Give sizes that an exporter left open without a name (-1, ``?``) one each: two of them need not be equal.

    A first dimension is the batch, which all inputs share. Shapes of other values that say so are inferred again.
    """

    def unnamed(dim: int | ir.SymbolicDim) -> bool:
        return dim < 0 if isinstance(dim, int) else dim.value in (None, "", "?", "-1", "None")

    graph = model.graph
    known = {
        dim.value for value in graph.inputs if value.shape for dim in value.shape if isinstance(dim, ir.SymbolicDim)
    }
    batch = "batch" if "batch" not in known else "batch_size"
    for value in graph.inputs:
        if value.shape is not None:
            sizes = [
                (batch if axis == 0 else f"{value.name}_{axis}") if unnamed(dim) else dim
                for axis, dim in enumerate(value.shape)
            ]
            value.shape = ir.Shape(sizes)
    for value in (*graph.outputs, *(value for node in graph for value in node.outputs)):
        if value.shape is not None and any(unnamed(dim) for dim in value.shape):
            value.shape = None


def _fix_initializers(graph: ir.Graph) -> None:
    free = [value for value in graph.inputs if not value.is_initializer()]
    if len(free) < len(graph.inputs):
        graph.inputs[:] = free


def _inference_batch_norm(node: ir.Node) -> None:
    for value in node.outputs[1:]:
        if value.uses() or value.is_graph_output():
            raise UnsupportedError(
                f"The running statistics that BatchNormalization {node.name!r} computes are read in the graph: "
                "export the model in inference form."
            )
    node.resize_outputs(1)
    node.attributes.pop("training_mode", None)


def _output(graph: ir.Graph, wanted: str | None) -> ir.Value:
    """The output of that name, or the only one."""
    names = [str(value.name) for value in graph.outputs]
    if wanted is None:
        if len(names) != 1:
            raise UsageError(
                f"The model has {len(names)} outputs: say which one the loss reads, of {', '.join(names)}."
            )
        wanted = names[0]
    if wanted not in names:
        raise UsageError(f"The model has no output {wanted!r}: it has {', '.join(names)}.")
    return graph.outputs[names.index(wanted)]


def _model_output(graph: ir.Graph, wanted: str | None) -> ir.Value:
    value = _output(graph, wanted)
    if value.shape is None or any(dim != 1 for dim in value.shape):
        raise UsageError(f"The output {value.name!r} is not a scalar, so it cannot be the loss: choose a loss for it.")
    return value


def _prediction(graph: ir.Graph, loss: Loss, output: str | None) -> tuple[ir.Value, Loss, list[str]]:
    """The value that a loss reads for an output, the loss with its class dimension, and what to say about them."""
    logits, final, notes = _logits(_output(graph, output), loss)
    if isinstance(loss, (CrossEntropy, NLL)) and loss.axis is None and len(logits.shape or ()) == 3:
        found = (
            class_axis(logits)
            if final is None
            else (final.attributes.get_int("axis", -1) % 3, f"{final.op_type} runs over it")
        )
        if found is not None:
            axis, why = found
            loss = dataclasses.replace(loss, axis=axis)
            name = "cross_entropy" if isinstance(loss, CrossEntropy) else "nll"
            notes.append(f"Dimension {axis} of {logits.name!r} is taken for the classes of {name}: {why}.")
    return logits, loss, notes


_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
# Operators of one value that keep its dimensions, elementwise or by cutting.
_KEEPING = frozenset(
    {
        "Identity",
        "Cast",
        "Neg",
        "Tanh",
        "Sigmoid",
        "Clip",
        "Relu",
        "LeakyRelu",
        "Softplus",
        "Exp",
        "Log",
        "Slice",
        "Dropout",
    }
    | {"BatchNormalization"}
)


def class_axis(logits: ir.Value) -> tuple[int, str] | None:
    """The class dimension of (batch, tokens, classes) or (batch, classes, positions), and why; None if nothing tells.

    1. What makes the logits tells: the last dimension of a product with a weight matrix, dimension 1 of a convolution; looked
       for through elementwise operators (a bias, a soft cap), Slices and Transposes.
    2. Of two dimensions the one of a fixed size, if the other is free.
    """
    value, axes = logits, [0, 1, 2]  # axes: where the dimensions of the logits are in `value`
    while (node := value.producer()) is not None and node.domain == "":
        source = node.inputs[0]
        if node.op_type in _ARITHMETIC:
            source = next((v for v in node.inputs if v is not None and not v.is_initializer()), None)
        elif node.op_type == "Transpose" and "perm" in node.attributes:
            perm = list(node.attributes["perm"].as_ints())
            axes = [perm[axis] for axis in axes]
        elif node.op_type == "MatMul" and node.inputs[1] is not None and len(node.inputs[1].shape or ()) == 2:
            return axes.index(2), f"it is what {node.name!r} projects to"
        elif node.op_type == "Reshape" and (product := _projection(source, value)) is not None:
            return axes.index(2), f"it is what {product.name!r} projects to"
        elif node.op_type in ("Conv", "ConvTranspose"):
            return axes.index(1), f"it is the channels of {node.name!r}"
        elif node.op_type not in _KEEPING:
            break
        if source is None or len(source.shape or ()) != 3:
            break
        value = source
    assert logits.shape is not None
    fixed = [axis for axis in (1, 2) if isinstance(logits.shape[axis], int)]
    return (fixed[0], "its size is fixed and the other's is not") if len(fixed) == 1 else None


def _projection(flat: ir.Value | None, value: ir.Value) -> ir.Node | None:
    """The product of a matrix [rows, classes] that is reshaped to `value`, with all classes in its last dimension."""
    if (
        flat is None
        or flat.shape is None
        or len(flat.shape) != 2
        or value.shape is None
        or flat.shape[1] != value.shape[-1]
    ):
        return None
    node = flat.producer()
    if node is not None and node.op_type == "Add":
        node = next((made for v in node.inputs if v is not None and (made := v.producer()) is not None), None)
    return node if node is not None and node.op_type in ("MatMul", "Gemm") else None


def _logits(value: ir.Value, loss: Loss) -> tuple[ir.Value, ir.Node | None, list[str]]:
    """The value that the loss reads, in front of a final Softmax or Sigmoid if the loss has its own, and that node."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type == "Identity":
        before = node.inputs[0]
        assert before is not None
        node = before.producer()
    if node is None or node.domain != "":
        return value, None, []
    if node.op_type == "Reshape" and len(value.shape or ()) == 2:
        # onnx's version converter turns a Softmax below opset 13 into Flatten, Softmax, Reshape; of a matrix these do nothing.
        inner = node.inputs[0].producer() if node.inputs[0] is not None else None
        if inner is not None and inner.op_type in ("Softmax", "LogSoftmax") and inner.inputs[0] is not None:
            flat = inner.inputs[0].producer()
            if flat is not None and flat.op_type == "Flatten" and flat.attributes.get_int("axis", 1) == 1:
                node = inner
    if isinstance(loss, NLL) and node.op_type == "LogSoftmax":
        return value, node, []
    if isinstance(loss, NLL) and node.op_type == "Softmax":
        raise UsageError(
            f"The output {value.name!r} is a Softmax, and nll reads log-probabilities: use cross_entropy, which reads what is before."
        )
    if isinstance(loss, CrossEntropy) and node.op_type in ("Softmax", "LogSoftmax"):
        rank = len(value.shape or ())
        axis = node.attributes.get_int("axis", -1) % max(rank, 1)
        undecided = rank == 3 and loss.axis is None
        if rank and (axis == 0 if undecided else axis != loss.class_axis(value)):
            return value, None, []
        name = "cross_entropy"
    elif isinstance(loss, BinaryCrossEntropyWithLogits) and node.op_type == "Sigmoid":
        name = "binary_cross_entropy_with_logits"
    else:
        return value, None, []
    logits = node.inputs[0]
    assert logits is not None
    note = f"The output {value.name!r} is a {node.op_type}; {name} has its own, so it reads {logits.name!r}, the value before it."
    return logits, node, [note]


def rows(graph: ir.Graph) -> str:
    """Name of the input whose first dimension counts rows: the first that has a dimension and is read."""
    for value in graph.inputs:
        if (value.uses() or value.is_graph_output()) and (value.shape is None or len(value.shape)):
            return str(value.name)
    raise UnsupportedError("No input that the model reads has a dimension, so there are no rows to train on.")
