"""AMP112: boxes before non-maximum suppression; AMP111: long reductions."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.marks import Marks

# Operators that compare or cut at coordinates, and the operands with coordinates.
_COORDINATES = {
    "NonMaxSuppression": (0, 1),
    "EfficientNMS_TRT": (0, 1, 2),
    "RoiAlign": (1,),
    "MaxRoiPool": (1,),
    "GridSample": (1,),
    "com.microsoft.CropAndResize": (1,),
}
_LONG = 4096


def boxes(marks: Marks) -> None:
    """What is computed between the last heavy operator and a consumer of coordinates stays fp32.

    In 16 bits, a coordinate above 2,048 (fp16) or 256 (bf16) moves in whole pixels, and the offsets that keep classes apart erase it.
    """
    for node in marks.facts.graph.nodes(_COORDINATES):
        values = [
            v for i in _COORDINATES[operator_name(node)] if i < len(node.inputs) and (v := node.inputs[i]) is not None
        ]
        for unit in marks.facts.backward(values):
            marks.fp32(unit, codes.BOXES, before=operator_name(node))


def long_reductions(marks: Marks) -> None:
    """Pooling over more than 4,096 elements, and sums of more than 64 operands, stay fp32."""
    for node in marks.facts.graph.nodes(("Sum", "Mean", "AveragePool", "GlobalAveragePool")):
        length = _length(node)
        limit = 64 if node.op_type in ("Sum", "Mean") else _LONG
        if length > limit:
            marks.node(node, codes.LONG_REDUCTION, length=length, limit=limit)


def _length(node: ir.Node) -> int:
    if node.op_type in ("Sum", "Mean"):
        return len(node.inputs)
    if node.op_type == "AveragePool":
        return math.prod(node.attributes["kernel_shape"].as_ints()) if "kernel_shape" in node.attributes else 0
    if node.inputs[0] is not None and node.inputs[0].shape is not None:
        return math.prod(dim if isinstance(dim, int) else 1 for dim in list(node.inputs[0].shape)[2:])
    return 0
