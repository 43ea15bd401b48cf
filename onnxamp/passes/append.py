"""Nodes that passes add."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.naming import Names
from onnxamp.model.signatures import standard_opset
from onnxamp.model.tensors import cast_attribute


def new_cast(model: ir.Model, value: ir.Value, name: str, kind: ir.DataType, names: Names) -> ir.Node:
    """A Cast of `value` to `kind`, in no graph yet; its result is called `name`, and so is the node where that is free.

    A model that imports no ai.onnx yet imports the version that came with its IR version.
    """
    opset = model.opset_imports.setdefault("", standard_opset(model))
    result = ir.Value(name=name, type=ir.TensorType(kind), shape=value.shape)
    return ir.Node("", "Cast", [value], [cast_attribute(kind, opset)], outputs=[result], name=names.node(name))
