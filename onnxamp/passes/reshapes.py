"""Reshape by constants wherever at most one dimension is free."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.naming import Names


class ConstantReshapes(ir.passes.InPlacePass):
    """Give Reshape nodes of the main graph a constant shape where inference knows all dimensions of the result but one, which becomes -1.

    Exporters compute such shapes from those of other values; that arithmetic runs on the CPU, whatever the device, and goes with it.
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
            sizes = tuple(size if isinstance(size, int) else -1 for size in node.outputs[0].shape)
            if sizes.count(-1) > 1 or 0 in sizes:
                continue
            if sizes not in constants:
                name = names.value(f"{node.outputs[0].name}/shape")
                constants[sizes] = add_initializer(model.graph, name, np.asarray(sizes, np.int64))
            node.replace_input_with(1, constants[sizes])
            node.attributes.pop("allowzero", None)
            modified = True
        return ir.passes.PassResult(model, modified=modified)
