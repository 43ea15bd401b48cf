"""Nodes that passes add."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.model.naming import Names
from onnxamp.model.signatures import standard_opset
from onnxamp.model.tensors import cast_attribute


class Appender:
    """Typed nodes at the end of graphs of one model; they and their results are called ``PREFIX/1``, ``PREFIX/2``, ..."""

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self.model = model
        self._names = Names(model)
        self._wanted = (f"{prefix}/{number}" for number in itertools.count(1))

    def name(self) -> str:
        """A name that no value has."""
        return self._names.value(next(self._wanted))

    def node(
        self, graph: ir.Graph, op_type: str, inputs: Sequence[ir.Value], kind: ir.DataType, **attributes: int
    ) -> ir.Value:
        """The result of a new node; a reduction, told by ``keepdims``, is one of all elements, which every opset knows."""
        scalar = ir.Shape([]) if op_type == "Size" or "keepdims" in attributes else None
        listed = [ir.AttrInt64(name, int(number)) for name, number in attributes.items()]
        return self._append(graph, op_type, inputs, listed, kind, scalar)

    def constant(self, graph: ir.Graph, array: np.ndarray) -> ir.Value:
        """The result of a new Constant node."""
        tensor = ir.tensor(array)
        return self._append(
            graph, "Constant", [], [ir.AttrTensor("value", tensor)], tensor.dtype, ir.Shape(array.shape)
        )

    def _append(
        self,
        graph: ir.Graph,
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: Sequence[ir.Attr],
        kind: ir.DataType,
        shape: ir.Shape | None,
    ) -> ir.Value:
        result = ir.Value(name=self.name(), type=ir.TensorType(kind), shape=shape)
        graph.append(
            ir.Node("", op_type, inputs, attributes, outputs=[result], name=self._names.node(result.name or ""))
        )
        return result


def new_cast(model: ir.Model, value: ir.Value, name: str, kind: ir.DataType, names: Names) -> ir.Node:
    """A Cast of `value` to `kind`, in no graph yet; its result is called `name`, and so is the node where that is free.

    A model that imports no ai.onnx yet imports the version that came with its IR version.
    """
    opset = model.opset_imports.setdefault("", standard_opset(model))
    result = ir.Value(name=name, type=ir.TensorType(kind), shape=value.shape)
    return ir.Node("", "Cast", [value], [cast_attribute(kind, opset)], outputs=[result], name=names.node(name))
