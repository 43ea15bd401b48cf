"""AMP209: shape and index arithmetic in floats."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import SHAPE_ONLY
from onnxamp.policy import codes
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import SHAPE_OPERANDS, Kind, operator, row

# Operands that say which elements.
_INDICES = {"Gather": (1,), "GatherElements": (1,), "GatherND": (1,)}
# From a shape these make data: their results are no longer sizes.
_FILLS = frozenset(
    {
        "ConstantOfShape",
        "Expand",
        "Range",
        "EyeLike",
        "OneHot",
        "Tile",
        "RandomNormal",
        "RandomUniform",
        "If",
        "Loop",
        "Scan",
    }
)


def shape_arithmetic(marks: Marks) -> None:
    """Floats that are computed from shapes alone, or that a shape is computed from, stay fp32.

    1. A node whose computed operands all stem from Shape or Size computes sizes. Operands that only say how large or where do not count:
       a piece of a weight is a weight, wherever its bounds come from.
    2. So does every node between an operand that says how large (Reshape's shape, Resize's scales, ...) and the heavy results, inputs
       or constants that it comes from.
    """
    shape_data: set[ir.Value] = set()
    pending: list[ir.Value] = []
    for node, name in marks.facts.graph.operators.items():
        if name in SHAPE_ONLY:
            shape_data.update(node.outputs)
            continue
        for index in SHAPE_OPERANDS.get(name, ()):
            if index < len(node.inputs) and (value := node.inputs[index]) is not None:
                pending.append(value)
        if name in _FILLS or row(name).kind is Kind.HEAVY:
            continue
        places = (*SHAPE_OPERANDS.get(name, ()), *_INDICES.get(name, ()))
        operands = [v for index, v in enumerate(node.inputs) if v is not None and index not in places]
        computed = [v for v in operands if not _constant(v)]
        if computed and all(v in shape_data for v in computed):
            shape_data.update(node.outputs)
            marks.node(node, codes.SHAPE_ARITHMETIC, of="shapes")
    seen = set(pending)
    while pending:
        source = pending.pop().producer()
        if source is None or operator_name(source) in SHAPE_ONLY or operator(source).kind is Kind.HEAVY:
            continue
        marks.node(source, codes.SHAPE_ARITHMETIC, of="an operand that sets a size")
        for operand in source.inputs:
            if operand is not None and operand not in seen:
                seen.add(operand)
                pending.append(operand)


def _constant(value: ir.Value) -> bool:
    node = value.producer()
    return value.is_initializer() or (node is not None and operator_name(node) == "Constant")
