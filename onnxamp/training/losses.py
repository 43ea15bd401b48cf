"""Losses, as PyTorch names and defines them (torch.nn.functional, reduction="mean"), split into exact sums.

A loss gives Σ loss·w and Σ w with w the denominator of PyTorch's mean, both FP32, and its own gradient, so that the mean
is taken once per window whatever the window's pieces. `weights` holds one value per row (index of the first dimension):
mean = Σ w·loss / Σ w. What has weight 0 is selected away, not multiplied away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
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


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """−Σ_c q_c · log softmax(x)_c; ``torch.nn.functional.cross_entropy``.

    With index labels q = (1−ε)·w_y at the class y and ε·w_c/C added everywhere, and the mean divides by Σ w_y over the labels
    that are not `ignore_index`. With probabilities t, q = w·((1−ε)·t + ε/C), and the mean divides by their number.

    Attributes:
        weight: A weight per class, or None.
        ignore_index: Label that counts nothing (index labels only).
        label_smoothing: ε in [0, 1].
        target: ``indices`` (int64, without the class dimension) or ``probabilities`` (float, shape of the logits).
        axis: The class dimension of the logits. None: 1, as in PyTorch; of three dimensions the one that the model shows
            (`forward.class_axis`), as they may be (batch, tokens, classes) or (batch, classes, positions).
    """

    weight: tuple[float, ...] | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    target: str = "indices"
    axis: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(f"label_smoothing is {self.label_smoothing}: it must lie between 0 and 1.")
        if self.target not in ("indices", "probabilities"):
            raise UsageError(f"Unknown target {self.target!r} of cross_entropy: use indices or probabilities.")
        if self.weight is not None:
            object.__setattr__(self, "weight", tuple(float(w) for w in self.weight))
            if any(w < 0 or not math.isfinite(w) for w in self.weight or ()):
                raise UsageError("The class weights of cross_entropy must be finite and not negative.")

    def labels(self, prediction: ir.Value) -> Labels:
        """Index labels lack the class dimension; probabilities have the logits' shape."""
        dims = _dims(prediction, "cross_entropy", least=2)
        axis = self.class_axis(prediction)
        classes = dims[axis]
        if self.weight is not None and isinstance(classes, int) and len(self.weight) != classes:
            raise UsageError(
                f"cross_entropy has {len(self.weight)} class weights and {prediction.name!r} has {classes} classes: "
                "give one weight per class."
            )
        if self.target == "probabilities":
            return Labels("float32", tuple(dims))
        rest = tuple(dim for index, dim in enumerate(dims) if index != axis)
        return Labels("int64", rest, classes if isinstance(classes, int) else None, self.ignore_index)

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """Log-softmax in FP32; the gradient is softmax·Σq − q."""
        if self.target == "probabilities":
            return self._probabilities(op, prediction, labels, weights)
        return self._indices(op, prediction, labels, weights)

    def class_axis(self, prediction: ir.Value) -> int:
        """The class dimension of `prediction`, counted from the front."""
        rank = len(_dims(prediction, "cross_entropy", least=2))
        axis = 1 if self.axis is None else self.axis
        if self.axis is None and rank == 3:
            raise UsageError(
                f"Dimension 1 or 2 of {prediction.name!r}, of shape {prediction.shape}, may be the classes of cross_entropy: say "
                "which with its axis (--class-axis); PyTorch takes 1, language models give 2."
            )
        if not -rank <= axis < rank or axis % rank == 0:
            raise UsageError(f"axis={axis} is not a class dimension of the {rank} dimensions of {prediction.name!r}.")
        return axis % rank

    def _class_weights(self, op: Fragment, rank: int, axis: int) -> ir.Value | None:
        if self.weight is None:
            return None
        shape = [-1 if index == axis else 1 for index in range(rank)]
        return op.constant(np.asarray(self.weight, np.float32).reshape(shape))

    def _indices(self, op: Fragment, logits: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        axis, rank = self.class_axis(logits), op.rank(logits)
        eps = self.label_smoothing
        valid = op.Not(op.Equal(labels, self.ignore_index))
        index = op.select(valid, labels, 0)
        position = op.Unsqueeze(index, [axis])
        row = _per_row(op, weights, rank - 1)
        used = op.select(valid, row, 0.0)
        label_weight = (
            used if self.weight is None else op.Mul(used, op.Gather(np.asarray(self.weight, np.float32), index, axis=0))
        )
        weight_sum = op.sum_all(label_weight)
        log_p = op.LogSoftmax(logits, axis=axis)
        chosen = op.Squeeze(op.GatherElements(log_p, position, axis=axis), [axis])
        label_part = op.Mul(chosen, label_weight)
        per_label = op.Mul(label_part, 1 - eps) if eps else label_part
        class_weights = self._class_weights(op, rank, axis)
        counted = used if eps else label_weight
        if eps:
            weighted = log_p if class_weights is None else op.Mul(log_p, class_weights)
            share = self._share(op, logits, axis)
            smooth = op.Mul(op.Mul(op.sum(weighted, [axis], keepdims=False), used), share)
            per_label = op.Add(per_label, smooth)
        loss_sum = op.Neg(op.sum_all(op.select(op.is_zero(counted), 0.0, per_label)))

        def backward(seed: ir.Value) -> ir.Value:
            label_q = op.Mul(op.Mul(label_weight, seed), 1 - eps) if eps else op.Mul(label_weight, seed)
            label_q = op.Unsqueeze(label_q, [axis])
            total_q, spread = label_q, None
            if eps:
                spread = op.Mul(op.Unsqueeze(op.Mul(used, seed), [axis]), share)
                if class_weights is None:
                    all_classes: ir.Value = op.Unsqueeze(op.Mul(used, seed), [axis])
                    total_q = op.Add(label_q, op.Mul(all_classes, eps))
                else:
                    total_q = op.Add(label_q, op.Mul(spread, op.sum(class_weights, [axis])))
                    spread = op.Mul(spread, class_weights)
            slope = op.Mul(op.Exp(log_p), total_q)
            if spread is not None:
                slope = op.Sub(slope, spread)
            slope = op.select(op.Unsqueeze(op.is_zero(counted), [axis]), 0.0, slope)
            at_label = op.Sub(op.GatherElements(slope, position, axis=axis), label_q)
            return op.ScatterElements(slope, position, at_label, axis=axis)

        return Terms(loss_sum, weight_sum, backward)

    def _probabilities(self, op: Fragment, logits: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        axis, rank = self.class_axis(logits), op.rank(logits)
        eps = self.label_smoothing
        row = _per_row(op, weights, rank)
        q = labels
        if eps:
            q = op.Add(op.Mul(labels, 1 - eps), self._share(op, logits, axis))
        class_weights = self._class_weights(op, rank, axis)
        if class_weights is not None:
            q = op.Mul(q, class_weights)
        log_p = op.LogSoftmax(logits, axis=axis)
        per_label = op.Mul(op.sum(op.Mul(q, log_p), [axis]), row)
        loss_sum = op.Neg(op.sum_all(op.select(op.is_zero(row), 0.0, per_label)))
        axes = [index for index in range(1, rank) if index != axis]

        def backward(seed: ir.Value) -> ir.Value:
            slope = op.Sub(op.Mul(op.Exp(log_p), op.sum(q, [axis])), q)
            return op.select(op.is_zero(row), 0.0, op.Mul(slope, op.Mul(row, seed)))

        return Terms(loss_sum, _counted(op, logits, weights, axes), backward)

    def _share(self, op: Fragment, logits: ir.Value, axis: int) -> ir.Value:
        """ε / C."""
        count = op.count(logits, [axis])
        eps = self.label_smoothing
        return op.Div(op.number(eps), count) if isinstance(count, ir.Value) else op.number(eps / count)


@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropyWithLogits:
    """(1−y)·x + (1+(p−1)·y)·log(1+e^−x); ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Attributes:
        pos_weight: p, a weight of positive answers: one number, or one per element of the last dimension.
    """

    pos_weight: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.pos_weight is not None and not isinstance(self.pos_weight, (int, float)):
            object.__setattr__(self, "pos_weight", tuple(float(p) for p in self.pos_weight))

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats in [0, 1] of the prediction's shape."""
        return _same(prediction, "binary_cross_entropy_with_logits")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """The gradient is (1−y) − (1+(p−1)·y)·(1−σ(x))."""
        negative = op.Sub(1.0, labels)
        softplus = op.Softplus(op.Neg(prediction))
        factor = None
        if self.pos_weight is not None:
            factor = op.Add(op.Mul(labels, np.asarray(self.pos_weight, np.float32) - np.float32(1)), 1.0)
            softplus = op.Mul(softplus, factor)
        loss = op.Add(op.Mul(negative, prediction), softplus)

        def slope() -> ir.Value:
            p = op.Sigmoid(prediction)
            return op.Sub(p, labels) if factor is None else op.Sub(negative, op.Mul(factor, op.Sub(1.0, p)))

        return _elementwise(op, prediction, weights, loss, slope)


@dataclasses.dataclass(frozen=True)
class MSE:
    """(x−y)²; ``torch.nn.functional.mse_loss``."""

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        return _same(prediction, "mse")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """The gradient is 2·(x−y)."""
        d = op.Sub(prediction, labels)
        return _elementwise(op, prediction, weights, op.Mul(d, d), lambda: op.Mul(d, 2.0))


@dataclasses.dataclass(frozen=True)
class L1:
    """``|x − y|``; ``torch.nn.functional.l1_loss``."""

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        return _same(prediction, "l1")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """The gradient is sign(x−y)."""
        d = op.Sub(prediction, labels)
        return _elementwise(op, prediction, weights, op.Abs(d), lambda: op.Sign(d))


@dataclasses.dataclass(frozen=True)
class Huber:
    """``½·d²`` where ``|d| ≤ δ``, else ``δ·(|d| − ½·δ)``, with ``d = x − y``; ``torch.nn.functional.huber_loss``.

    Attributes:
        delta: δ > 0.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise UsageError(f"delta of huber is {self.delta}: it must be positive.")

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        return _same(prediction, "huber")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """With c = clip(d, −δ, δ) the loss is c·(d − ½·c) and the gradient c."""
        d = op.Sub(prediction, labels)
        c = op.Clip(d, -self.delta, self.delta)
        return _elementwise(op, prediction, weights, op.Mul(c, op.Sub(d, op.Mul(c, 0.5))), lambda: c)


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """A scalar output of the model is the mean loss of its rows; `labels` and `weights` are then the model's own affair.

    Attributes:
        name: The output; None for the only one.
    """

    name: str | None = None


LOSSES: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy_with_logits": BinaryCrossEntropyWithLogits,
    "mse": MSE,
    "l1": L1,
    "huber": Huber,
    "model_output": ModelOutput,
}


def _per_row(op: Fragment, weights: ir.Value, rank: int) -> ir.Value:
    """Row weights with trailing dimensions of size 1, to broadcast against `rank` dimensions."""
    return op.Unsqueeze(weights, list(range(1, rank))) if rank > 1 else weights


def _counted(op: Fragment, prediction: ir.Value, weights: ir.Value, axes: list[int]) -> ir.Value:
    """Σ over rows of weight · number of elements over `axes`."""
    rows = op.sum_all(weights)
    count = op.count(prediction, axes)
    return rows if not isinstance(count, ir.Value) and count == 1 else op.Mul(rows, count)


def _elementwise(
    op: Fragment, prediction: ir.Value, weights: ir.Value, loss: ir.Value, slope: Callable[[], ir.Value]
) -> Terms:
    """The terms of a loss that is a mean over all elements."""
    rank = op.rank(prediction)
    row = _per_row(op, weights, rank)
    loss_sum = op.sum_all(op.select(op.is_zero(row), 0.0, op.Mul(loss, row)))

    def backward(seed: ir.Value) -> ir.Value:
        return op.select(op.is_zero(row), 0.0, op.Mul(slope(), op.Mul(row, seed)))

    return Terms(loss_sum, _counted(op, prediction, weights, list(range(1, rank))), backward)


def _dims(prediction: ir.Value, loss: str, least: int) -> list[int | str]:
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


def _same(prediction: ir.Value, loss: str) -> Labels:
    return Labels("float32", tuple(_dims(prediction, loss, least=1)))
