"""Reshape by constants wherever at most one dimension is neither known nor kept."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.naming import Names


class ConstantReshapes(ir.passes.InPlacePass):
    """Give Reshape nodes of the main graph a constant shape where inference knows all dimensions of the result but one, which becomes -1.

    A dimension with the name of the operand's in the same place is known: 0 keeps it. Exporters compute such shapes from those of other
    values; that arithmetic runs on the CPU, whatever the device, and goes with it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        constants: dict[tuple[int, ...], ir.Value] = {}
        names = Names(model)
        modified = False
        for node in model.graph:
            if node.domain != "" or node.op_type != "Reshape" or node.outputs[0].shape is None:
                continue
            shape = node.inputs[1]
            if shape is None or fixed_tensor(shape, model.ir_version) is not None:
                continue
            source = node.inputs[0]
            sizes = constant_sizes(node.outputs[0].shape, None if source is None else source.shape)
            if sizes is None:
                continue
            if sizes not in constants:
                name = names.value(f"{node.outputs[0].name}/shape")
                constants[sizes] = add_initializer(model.graph, name, np.asarray(sizes, np.int64))
            node.replace_input_with(1, constants[sizes])
            node.attributes.pop("allowzero", None)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def constant_sizes(result: ir.Shape, operand: ir.Shape | None) -> tuple[int, ...] | None:
    """What Reshape can be told of a shape when the graph is written: sizes, 0 for one that the operand has there too, and one -1."""
    if 0 in result.dims:
        return None
    sizes = [dim if isinstance(dim, int) else -1 for dim in result]
    if sizes.count(-1) > 1 and operand is not None:
        for place, (dim, other) in enumerate(zip(result, operand, strict=False)):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None and dim == other:
                sizes[place] = 0
    return tuple(sizes) if sizes.count(-1) <= 1 else None
