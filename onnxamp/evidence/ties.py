"""Ties: unequal indices that come from scores closer than their own error.

Where the best and the second best score differ by less than twice the error that 16 bits put on them, either is as right
as the other; such an index is no defect of the conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]

# What may lie between the index and the output without changing it.
_PASS = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose"})
_PICKS = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}


def picking(value: ir.Value | None) -> ir.Value | None:
    """The result of the ArgMax, ArgMin or TopK that gives the integers in `value`, or None."""
    while value is not None:
        node = value.producer()
        if node is None:
            return None
        if _PICKS.get(node.op_type) == value.index():
            return value
        if node.op_type not in _PASS:
            return None
        value = node.inputs[0]
    return None


def picked_by(node: ir.Node) -> ir.Value | None:
    """The indices that an ArgMax, ArgMin or TopK gives; None for any other node, or where nothing reads them."""
    index = _PICKS.get(node.op_type)
    return node.outputs[index] if index is not None and node.outputs[index].name else None


def unexplained(node: ir.Node, scores: tuple[Array, Array], picked: tuple[Array, Array]) -> int:
    """How many unequal indices no tie explains.

    With i the reference's and j the candidate's index, r and c the scores: explained if |rᵢ − rⱼ| < 2 max(|rᵢ − cᵢ|, |rⱼ − cⱼ|).

    Args:
        node: The ArgMax, ArgMin or TopK of the reference.
        scores: What it reads in the reference and in the candidate's emulation.
        picked: The indices that it gives in each.
    """
    reference, candidate = (np.asarray(side, np.float64) for side in scores)
    default = -1 if node.op_type == "TopK" else 0
    axis = node.attributes.get_int("axis", default)
    i, j = picked
    if node.op_type != "TopK" and node.attributes.get_int("keepdims", 1) == 0:
        i, j = np.expand_dims(i, axis), np.expand_dims(j, axis)
    ri, rj = np.take_along_axis(reference, i, axis), np.take_along_axis(reference, j, axis)
    ci, cj = np.take_along_axis(candidate, i, axis), np.take_along_axis(candidate, j, axis)
    error = np.maximum(np.abs(ri - ci), np.abs(rj - cj))
    return int(np.count_nonzero((i != j) & ~(np.abs(ri - rj) < 2 * error)))
