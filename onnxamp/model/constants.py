"""What is constant in a graph: the data of initializers and of Constant nodes, whatever form they have."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.tensors import nbytes

_NUMBERS = {
    ir.AttributeType.FLOAT: np.float32,
    ir.AttributeType.FLOATS: np.float32,
    ir.AttributeType.INT: np.int64,
    ir.AttributeType.INTS: np.int64,
}


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The data of an initializer or of a Constant node's result.

    None for what is computed, and for what is no plain data: text, a sparse tensor, the parameter of a function.
    """
    node = value.producer()
    if node is None:
        return value.const_value if value.is_initializer() else None
    if operator_name(node) != "Constant" or len(node.attributes) != 1:
        return None
    (attribute,) = node.attributes.values()
    if attribute.is_ref():
        return None
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor()
    if attribute.type in _NUMBERS:
        return ir.Tensor(np.asarray(attribute.value, _NUMBERS[attribute.type]))
    return None


def fixed_tensor(value: ir.Value | None, ir_version: int) -> ir.TensorProtocol | None:
    """The data of a constant that callers cannot replace: from IR 4 on an initializer that is an input too is only its default."""
    if value is None or (ir_version >= 4 and value.is_graph_input()):
        return None
    return constant_tensor(value)


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """A new initializer of `graph` that holds `array`; no value has the name yet."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def constant_bytes(value: ir.Value) -> int:
    """The bytes of a constant; 0 for what is none."""
    tensor = constant_tensor(value)
    return nbytes(tensor) if tensor is not None else 0
