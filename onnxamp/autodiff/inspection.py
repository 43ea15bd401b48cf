"""What training a model would meet: operators without gradient, parameters, ties, folded tensors, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.parameters import Parameters, classify
from onnxamp.autodiff.reverse import backward, differentiable_path, without_gradient
from onnxamp.errors import few
from onnxamp.model import dimensions

_PROBABILITIES = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
_MOVES = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast"})
# Nodes whose result is another view of the memory of their first input.
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The answer of `onnxamp check`.

    Attributes:
        unsupported: Operators, or operands of operators, without a gradient rule between the trainable parameters and the
            outputs → node names.
        parameters: Parameters by class.
        final: Output name → the probability function that it ends in (a loss attaches to its input).
        folded: What the exporter folded into weights, one sentence each.
        unknown_shapes: Float results on the way whose number of dimensions is unknown.
    """

    unsupported: dict[str, tuple[str, ...]]
    parameters: Parameters
    final: dict[str, str]
    folded: tuple[str, ...]
    unknown_shapes: tuple[str, ...]


def inspect(model: ir.Model, outputs: Sequence[str] = ()) -> Inspection:
    """Look at a model in training form (`training.forward.training_form`).

    Args:
        model: The model; not changed.
        outputs: Names of the outputs that a loss would read; all float ones when empty.
    """
    graph = model.graph
    parameters = classify(model)
    targets = [value for value in graph.outputs if value.dtype in FLOATS and (not outputs or value.name in outputs)]
    trainable = [graph.initializers[parameter.name] for parameter in parameters.trainable]
    path = differentiable_path(list(graph), targets, trainable)
    unknown = [str(v.name) for node in path for v in node.outputs if v.name and v.dtype in FLOATS and v.shape is None]
    final = {str(value.name): kind for value in targets if (kind := _probability(value)) is not None}
    return Inspection(
        unsupported={label: tuple(names) for label, names in without_gradient(path, trainable).items()},
        parameters=parameters,
        final=final,
        folded=_folded(graph, parameters),
        unknown_shapes=tuple(unknown),
    )


def kept_bytes(model: ir.Model, outputs: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Bytes of forward results that the backward half reads, so that they live until then.

    Views of the same memory count once. The model is consumed: the backward half is appended to it.

    Args:
        model: Typed, functions inlined; in mixed precision or not.
        outputs: Names of the outputs that a loss reads.
        sizes: Sizes of named dimensions; others count as 1 when leading, else 64.

    Returns:
        The bytes, and the sizes that were assumed for dimensions without one.
    """
    graph = model.graph
    taken = dimensions.Sizes(sizes)
    for value in graph.inputs:
        _bytes(value, taken)
    seeds = {}
    for value in graph.outputs:
        if value.name in outputs:
            seed = ir.Value(name=f"grad/{value.name}/seed", type=value.type, shape=value.shape)
            graph.inputs.append(seed)
            seeds[value] = seed
    trainable = [graph.initializers[parameter.name] for parameter in classify(model).trainable]
    forward = list(graph)
    backward(graph, seeds, trainable, opset_imports=dict(model.opset_imports))
    own = set(forward)
    constants = _constant_values(forward)
    kept: dict[ir.Value, None] = {}  # in the order of the graph: a name has the size of where it is first seen
    for node in forward:
        for value in node.outputs:
            if value not in constants and any(user not in own for user, _ in value.uses()):
                kept[_memory(value)] = None
    for value in graph.inputs:
        if any(user not in own for user, _ in value.uses()) and value not in seeds.values():
            kept[value] = None
    total = sum(_bytes(value, taken) for value in kept)
    return total, {name: size for name, size in taken.dims.items() if name not in sizes}


def _memory(value: ir.Value) -> ir.Value:
    """The value whose memory `value` views."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _constant_values(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """Results that depend on no graph input: they exist once, whatever the batch."""
    constants: set[ir.Value] = set()
    for node in nodes:
        if all(value is None or value in constants or value.is_initializer() for value in node.inputs):
            constants.update(node.outputs)
    return constants


def _bytes(value: ir.Value, sizes: dimensions.Sizes) -> int:
    if value.shape is None or value.dtype is None:
        return 0
    return math.ceil(sizes.elements(value.shape) * value.dtype.itemsize)


def _probability(value: ir.Value) -> str | None:
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is not None and node.domain == "" and node.op_type in _PROBABILITIES:
        return node.op_type
    return None


def _folded(graph: ir.Graph, parameters: Parameters) -> tuple[str, ...]:
    """Traces of what exporters fold: transposed copies, BatchNormalization merged into Conv, constants in nodes."""
    found = []
    renamed = [p for p in parameters.trainable if p.name.startswith("onnx::")]
    merged = [p.name for p in renamed if any(use.op.startswith("Conv") for use in p.uses)]
    merged += [p.name for p in parameters.trainable if p.name.endswith("_bias") and p.name.removesuffix("_bias") in
               graph.initializers and any(use.op.startswith("Conv") for use in p.uses)]  # fmt: skip
    others = [p.name for p in renamed if p.name not in merged]
    if merged:
        found.append(f"BatchNormalization was merged into a convolution: {few(merged, 4)} train as one weight.")
    if others:
        found.append(f"The exporter folded an operator into {few(others, 4)}; their original names are lost.")
    for names in parameters.copies:
        found.append(f"{few(list(names), 4)} have the same content: if they were tied, they train apart now.")
    return tuple(found)
