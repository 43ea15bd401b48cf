"""Parameters as graph inputs: FP32 masters, and low copies where the graph reads the parameter through a Cast."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.errors import UnsupportedError
from onnxamp.model.constants import add_initializer
from onnxamp.training.fragment import FLOAT


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter in a graph.

    Attributes:
        name: Its name in the user's model.
        shape: Its shape.
        master: The FP32 input, if the graph reads it.
        low: The 16-bit input, if the graph reads it.
    """

    name: str
    shape: tuple[int, ...]
    master: ir.Value | None
    low: ir.Value | None


def promote(graph: ir.Graph, initializer: ir.Value, low: bool) -> Entry:
    """Make a parameter an input, ``master/NAME`` or ``low/NAME`` or both.

    Args:
        graph: The graph.
        initializer: The parameter; FP32, or 16-bit in a model that was exported so (its master is FP32 all the same).
        low: Read a low copy instead of casting the master at each use.

    Raises:
        UnsupportedError: It is of another type.
    """
    name = str(initializer.name)
    assert initializer.shape is not None
    shape = tuple(int(size) for size in initializer.shape.numpy())
    if initializer.dtype not in (FLOAT, *LOW):
        raise UnsupportedError(f"Parameter {name!r} is {initializer.dtype}: only fp32, fp16 and bf16 parameters train.")
    del graph.initializers[name]
    if initializer.dtype in LOW:
        value = _input(graph, f"low/{name}", initializer.dtype, shape)
        initializer.replace_all_uses_with(value, replace_graph_outputs=True)
        return Entry(name, shape, None, value)
    copy: ir.Value | None = None
    for node in _casts(initializer) if low else ():
        result = node.outputs[0]
        if copy is None:
            assert result.dtype is not None
            copy = _input(graph, f"low/{name}", result.dtype, shape)
        if result.dtype == copy.dtype and node.graph is graph:
            result.replace_all_uses_with(copy, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    master: ir.Value | None = None
    if initializer.uses() or initializer.is_graph_output():
        master = _input(graph, f"master/{name}", FLOAT, shape)
        initializer.replace_all_uses_with(master, replace_graph_outputs=True)
    return Entry(name, shape, master, copy)


def demote(graph: ir.Graph, entry: Entry, initializer: ir.Value) -> None:
    """Make a parameter that does not train a constant again: its inputs are left without uses.

    Args:
        graph: The graph.
        entry: What `promote` made of it.
        initializer: What it was before, in another copy of the model.
    """
    assert initializer.const_value is not None
    for value, name in ((entry.master, entry.name), (entry.low, f"low/{entry.name}")):
        if value is None or not (value.uses() or value.is_graph_output()):
            continue
        array = initializer.const_value.numpy()
        assert value.dtype is not None
        constant = add_initializer(graph, name, array.astype(value.dtype.numpy()))
        value.replace_all_uses_with(constant, replace_graph_outputs=True)


def has_low_copy(initializer: ir.Value, low: bool) -> bool:
    """Whether `promote` would give the parameter a low copy."""
    return initializer.dtype in LOW or (low and bool(_casts(initializer)))


def _casts(initializer: ir.Value) -> list[ir.Node]:
    """The Casts of a parameter to a 16-bit type."""
    return [
        node
        for node, _ in initializer.uses()
        if node.op_type == "Cast" and node.domain == "" and ir.DataType(node.attributes["to"].as_int()) in LOW
    ]


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def content(initializer: ir.Value) -> np.ndarray:
    """The value of a parameter in FP32."""
    tensor = initializer.const_value
    assert tensor is not None
    return tensor.numpy().astype(np.float32)
