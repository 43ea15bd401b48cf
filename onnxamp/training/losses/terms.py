"""What a loss is made of: exact sums, their gradient, and what is common to all losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import Fragment
from onnxamp.training.manifest import Labels


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a loss computes of one micro-batch.

    Attributes:
        loss_sum: Σ loss·w, FP32 scalar.
        weight_sum: Σ w, FP32 scalar.
        backward: Appends seed · d(Σ loss·w)/d(prediction) for a scalar seed; FP32, shape of the prediction.
    """

    loss_sum: ir.Value
    weight_sum: ir.Value
    backward: Callable[[ir.Value], ir.Value]


class Loss(Protocol):
    """A loss that compares an output of the model with labels."""

    def labels(self, prediction: ir.Value) -> Labels:
        """What the loss expects of the input `labels` for this prediction."""

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """Append the loss of an FP32 `prediction`; `weights` is FP32 of shape [rows]."""

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """How many terms of the mean a row of weight 1 has, ignored labels and class weights aside: a number or a scalar."""


def spread_rows(op: Fragment, weights: ir.Value, rank: int) -> ir.Value:
    """Row weights with trailing dimensions of size 1, to broadcast against `rank` dimensions."""
    return op.Unsqueeze(weights, list(range(1, rank))) if rank > 1 else weights


def count_weighted(op: Fragment, weights: ir.Value, per_row: float | ir.Value) -> ir.Value:
    """Σ over rows of weight · number of terms of a row."""
    rows = op.sum_all(weights)
    return rows if not isinstance(per_row, ir.Value) and per_row == 1 else op.Mul(rows, per_row)


def dims(prediction: ir.Value, loss: str, least: int) -> list[int | str]:
    """The sizes of `prediction`, names for those that are free; at least `least` of them."""
    shape = prediction.shape
    if shape is None:
        raise UsageError(
            f"The shape of {prediction.name!r} is unknown and the loss {loss} needs it: export it with shapes."
        )
    if len(shape) < least:
        raise UsageError(
            f"{prediction.name!r} has {len(shape)} dimensions and the loss {loss} needs at least {least}: "
            "choose another output or loss."
        )
    return [dim if isinstance(dim, int) else (dim.value or f"labels_{index}") for index, dim in enumerate(shape)]
