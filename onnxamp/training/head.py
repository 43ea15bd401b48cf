"""Replacing the last layer of a classifier or regressor, to fine-tune it for other classes."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model import io, types
from onnxamp.model.constants import add_initializer

# What may stand between the last layer and the output.
_ACTIVATIONS = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "Relu", "Tanh"})
_POOLING = frozenset({"GlobalAveragePool", "GlobalMaxPool", "AveragePool", "ReduceMean"})
_MOVES = frozenset({"Identity", "Cast", "Dropout", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_PASSED = _ACTIVATIONS | _POOLING | _MOVES

Draw = Callable[[np.random.Generator, tuple[int, ...], int, int], np.ndarray]


def _uniform(bound: float, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-bound, bound, shape)


INITS: dict[str, Draw] = {
    "kaiming_uniform": lambda rng, shape, fan_in, fan_out: _uniform(1 / math.sqrt(fan_in), rng, shape),
    "xavier_uniform": lambda rng, shape, fan_in, fan_out: _uniform(math.sqrt(6 / (fan_in + fan_out)), rng, shape),
    "normal": lambda rng, shape, fan_in, fan_out: rng.normal(0.0, 0.02, shape),
    "zeros": lambda rng, shape, fan_in, fan_out: np.zeros(shape),
}
"""Ways to draw new weights; ``kaiming_uniform`` is what PyTorch's Linear and Conv do, for the bias too."""


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The last layer.

    Attributes:
        node: MatMul, Gemm or Conv.
        weight: Its weight, an initializer.
        axis: Dimension of the weight that counts the units.
        bias: Its bias, an initializer, or None.
        between: Nodes from the layer to the output, bias Add included.
    """

    node: ir.Node
    weight: ir.Value
    axis: int
    bias: ir.Value | None
    between: tuple[ir.Node, ...]


def replace_head(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    output: str | None,
    units: int,
    init: str = "kaiming_uniform",
    seed: int = 0,
) -> ir.Model:
    """A copy of a model whose last layer has `units` outputs and fresh weights.

    The last layer is the MatMul, Gemm or Conv that `output` is computed from through activations, pooling, flattening and a bias
    alone. Its weight and bias keep their names.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`; it is not changed.
        output: Name of the output; None for the only one.
        units: New number of classes or values.
        init: ``kaiming_uniform``, ``xavier_uniform``, ``normal`` (σ = 0.02) or ``zeros``. Biases are drawn too by
            ``kaiming_uniform``, else zero.
        seed: Seed of the weights.

    Raises:
        UsageError: There is no such output or `init`, or `units` is not positive.
        UnsupportedError: The output does not come from a last layer in the sense above.
    """
    if units < 1:
        raise UsageError(f"A head needs at least one unit, not {units}.")
    if init not in INITS:
        raise UsageError(f"Unknown init {init!r}: use one of {', '.join(INITS)}.")
    copy = io.load(model)
    # Some exporters (Paddle's) hold weights in Constant nodes.
    LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(copy)
    types.infer(copy)
    value = _output(copy.graph, output)
    layer = _last_layer(value)
    rng = np.random.default_rng(seed)
    tensor = layer.weight.const_value
    assert tensor is not None
    shape = list(tensor.shape.numpy())
    old = int(shape[layer.axis])
    shape[layer.axis] = units
    fan_in = math.prod(shape) // units
    dtype = tensor.dtype.numpy()
    weight = INITS[init](rng, tuple(shape), fan_in, units).astype(dtype)
    replacements = [(layer.weight, weight, layer.node)]
    if layer.bias is not None:
        drawn = init == "kaiming_uniform"
        bias = _uniform(1 / math.sqrt(fan_in), rng, (units,)) if drawn else np.zeros(units)
        reader = layer.node if layer.bias in layer.node.inputs else layer.between[-1]
        replacements.append((layer.bias, bias.astype(dtype), reader))
    for initializer, array, reader in replacements:
        _put(copy.graph, initializer, array, reader)
    for node in layer.between:
        if node.op_type == "Reshape":
            _reshaped(copy.graph, node, old, units)
    _forget_shapes(layer.node)
    types.infer(copy)
    return copy


def _output(graph: ir.Graph, name: str | None) -> ir.Value:
    names = [str(value.name) for value in graph.outputs]
    if name is None:
        if len(names) != 1:
            raise UsageError(f"The model has {len(names)} outputs: say whose head to replace, of {', '.join(names)}.")
        name = names[0]
    if name not in names:
        raise UsageError(f"The model has no output {name!r}: it has {', '.join(names)}.")
    return graph.outputs[names.index(name)]


def _last_layer(output: ir.Value) -> _Layer:
    value, between, bias = output, [], None
    while True:
        node = value.producer()
        if node is None or node.domain != "":
            raise _no_head(output, value)
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            break
        source = node.inputs[0]
        if node.op_type == "Add" and bias is None:
            constants = [each for each in node.inputs if each is not None and each.is_initializer()]
            others = [each for each in node.inputs if each is not None and not each.is_initializer()]
            if len(constants) != 1 or len(others) != 1 or constants[0].shape is None or len(constants[0].shape) != 1:
                raise _no_head(output, value)
            bias, source = constants[0], others[0]
        elif node.op_type not in _PASSED:
            raise _no_head(output, value)
        assert source is not None
        between.append(node)
        value = source
    weight, axis = node.inputs[1], 0
    transposed = node.attributes.get_int("transB", 0) == 1
    if node.op_type != "Conv":
        axis = 0 if transposed else 1
    if node.op_type != "MatMul" and len(node.inputs) > 2 and node.inputs[2] is not None:
        if bias is not None:
            raise _no_head(output, value)
        bias = node.inputs[2]
    while weight is not None and not weight.is_initializer():
        maker = weight.producer()
        if maker is None or maker.op_type not in ("Transpose", "Identity", "Cast"):
            raise _no_head(output, value)
        if maker.op_type == "Transpose":
            axis = 1 - axis
        weight = maker.inputs[0]
    if weight is None or weight.shape is None or (bias is not None and not bias.is_initializer()):
        raise _no_head(output, value)
    if node.op_type != "Conv" and len(weight.shape) != 2:
        raise _no_head(output, value)
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) != 1:
        raise _no_head(output, value)
    return _Layer(node, weight, axis, bias, tuple(between))


def _no_head(output: ir.Value, value: ir.Value) -> UnsupportedError:
    producer = value.producer()
    what = f"{producer.op_type} {producer.name!r}" if producer is not None else f"the input {value.name!r}"
    return UnsupportedError(
        f"The output {output.name!r} has no last layer to replace: {what} is in the way; "
        "it must be a MatMul, Gemm or Conv with constant weight, followed by activations, pooling or a bias alone."
    )


def _put(graph: ir.Graph, initializer: ir.Value, array: np.ndarray, reader: ir.Node) -> None:
    """Give an initializer a new value; if anything else reads it too, `reader` gets one of its own."""
    tensor = ir.tensor(np.ascontiguousarray(array), name=str(initializer.name))
    if len({node for node, _ in initializer.uses()}) == 1:
        initializer.const_value = tensor
        initializer.shape = ir.Shape(array.shape)
        return
    name = f"{initializer.name}_head"
    while name in graph.initializers:
        name += "_"
    tensor.name = name
    fresh = ir.Value(name=name, type=initializer.type, shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(fresh)
    if initializer not in reader.inputs:
        raise UnsupportedError(
            f"The weight {initializer.name!r} of the head is shared through a Transpose: untie it first."
        )
    reader.replace_input_with(reader.inputs.index(initializer), fresh)


def _reshaped(graph: ir.Graph, node: ir.Node, old: int, units: int) -> None:
    """Put the new number of units into the constant shape of a Reshape that spells out the old one."""
    shape = node.inputs[1]
    tensor = None if shape is None else ir.convenience.get_const_tensor(shape)
    if tensor is None or old not in tensor.numpy():
        return
    content = np.where(tensor.numpy() == old, units, tensor.numpy()).astype(np.int64)
    name = f"{node.name or node.outputs[0].name}/shape_of_head"
    node.replace_input_with(1, add_initializer(graph, name, content))


def _forget_shapes(node: ir.Node) -> None:
    """Drop what is known of shapes behind a node, the declared ones of outputs included."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for value in current.outputs:
            value.shape = None
            pending.extend(user for user, _ in value.uses())
