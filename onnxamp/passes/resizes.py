"""Resize along axes that are counted from the front."""

from __future__ import annotations

import onnx_ir as ir


class PlainResizes(ir.passes.InPlacePass):
    """Write the negative `axes` of Resize as non-negative ones where the rank is known.

    With a `keep_aspect_ratio_policy` ONNX Runtime (1.32) does not find negative axes: it leaves these dimensions as they are, and all
    that is computed from the right shape fails.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in model.graphs():
            for node in graph:
                if node.op_type != "Resize" or node.domain != "" or node.inputs[0] is None:
                    continue
                shape, axes = node.inputs[0].shape, node.attributes.get_ints("axes", ())
                if shape is not None and any(axis < 0 for axis in axes):
                    node.attributes["axes"] = ir.AttrInt64s("axes", [axis % len(shape) for axis in axes])
                    modified = True
        return ir.passes.PassResult(model, modified=modified)
