"""Losses whose labels are classes, as PyTorch names and defines them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import Fragment
from onnxamp.training.losses.terms import Terms, count_weighted, dims, spread_rows
from onnxamp.training.manifest import Labels


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
        object.__setattr__(self, "weight", _weights(self.weight, "cross_entropy"))

    def labels(self, prediction: ir.Value) -> Labels:
        """Index labels lack the class dimension; probabilities have the logits' shape."""
        if self.target == "probabilities":
            _check_weights(self.weight, prediction, self.class_axis(prediction), "cross_entropy")
            return Labels("float32", tuple(dims(prediction, "cross_entropy", least=2)))
        return _index_labels(prediction, self.class_axis(prediction), self.weight, self.ignore_index, "cross_entropy")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """Log-softmax in FP32; the gradient is softmax·Σq − q."""
        if self.target == "probabilities":
            return self._probabilities(op, prediction, labels, weights)
        return self._indices(op, prediction, labels, weights)

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """The positions that have a label."""
        return _positions(op, prediction, self.class_axis(prediction))

    def class_axis(self, prediction: ir.Value) -> int:
        """The class dimension of `prediction`, counted from the front."""
        return _class_axis(prediction, self.axis, "cross_entropy")

    def _class_weights(self, op: Fragment, rank: int, axis: int) -> ir.Value | None:
        if self.weight is None:
            return None
        shape = [-1 if index == axis else 1 for index in range(rank)]
        return op.constant(np.asarray(self.weight, np.float32).reshape(shape))

    def _indices(self, op: Fragment, logits: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        axis, rank = self.class_axis(logits), op.rank(logits)
        eps = self.label_smoothing
        index, used, label_weight = _label_weights(op, labels, weights, rank, self.weight, self.ignore_index)
        position = op.Unsqueeze(index, [axis])
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
        row = spread_rows(op, weights, rank)
        q = labels
        if eps:
            q = op.Add(op.Mul(labels, 1 - eps), self._share(op, logits, axis))
        class_weights = self._class_weights(op, rank, axis)
        if class_weights is not None:
            q = op.Mul(q, class_weights)
        log_p = op.LogSoftmax(logits, axis=axis)
        per_label = op.Mul(op.sum(op.Mul(q, log_p), [axis]), row)
        loss_sum = op.Neg(op.sum_all(op.select(op.is_zero(row), 0.0, per_label)))

        def backward(seed: ir.Value) -> ir.Value:
            slope = op.Sub(op.Mul(op.Exp(log_p), op.sum(q, [axis])), q)
            return op.select(op.is_zero(row), 0.0, op.Mul(slope, op.Mul(row, seed)))

        return Terms(loss_sum, count_weighted(op, weights, self.per_row(op, logits)), backward)

    def _share(self, op: Fragment, logits: ir.Value, axis: int) -> ir.Value:
        """ε / C."""
        count = op.count(logits, [axis])
        eps = self.label_smoothing
        return op.Div(op.number(eps), count) if isinstance(count, ir.Value) else op.number(eps / count)


@dataclasses.dataclass(frozen=True)
class NLL:
    """−w_y·x_y of log-probabilities x, the mean over Σ w_y; ``torch.nn.functional.nll_loss``.

    Attributes:
        weight: A weight per class, or None.
        ignore_index: Label that counts nothing.
        axis: The class dimension; see `CrossEntropy`.
    """

    weight: tuple[float, ...] | None = None
    ignore_index: int = -100
    axis: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", _weights(self.weight, "nll"))

    def labels(self, prediction: ir.Value) -> Labels:
        """Indices, without the class dimension."""
        return _index_labels(prediction, self.class_axis(prediction), self.weight, self.ignore_index, "nll")

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """The gradient is −w_y at the label, 0 elsewhere."""
        axis, rank = self.class_axis(prediction), op.rank(prediction)
        index, _, label_weight = _label_weights(op, labels, weights, rank, self.weight, self.ignore_index)
        position = op.Unsqueeze(index, [axis])
        chosen = op.Squeeze(op.GatherElements(prediction, position, axis=axis), [axis])
        per_label = op.select(op.is_zero(label_weight), 0.0, op.Mul(chosen, label_weight))

        def backward(seed: ir.Value) -> ir.Value:
            slope = op.Unsqueeze(op.Neg(op.Mul(label_weight, seed)), [axis])
            return op.ScatterElements(op.zeros(prediction), position, slope, axis=axis)

        return Terms(op.Neg(op.sum_all(per_label)), op.sum_all(label_weight), backward)

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """The positions that have a label."""
        return _positions(op, prediction, self.class_axis(prediction))

    def class_axis(self, prediction: ir.Value) -> int:
        """The class dimension of `prediction`, counted from the front."""
        return _class_axis(prediction, self.axis, "nll")


def _weights(weight: Sequence[float] | None, loss: str) -> tuple[float, ...] | None:
    if weight is None:
        return None
    if any(w < 0 or not math.isfinite(w) for w in weight):
        raise UsageError(f"The class weights of {loss} must be finite and not negative.")
    return tuple(float(w) for w in weight)


def _class_axis(prediction: ir.Value, axis: int | None, loss: str) -> int:
    rank = len(dims(prediction, loss, least=2))
    if axis is None and rank == 3:
        raise UsageError(
            f"Dimension 1 or 2 of {prediction.name!r}, of shape {prediction.shape}, may be the classes of {loss}: say "
            "which with its axis (--class-axis); PyTorch takes 1, language models give 2."
        )
    axis = 1 if axis is None else axis
    if not -rank <= axis < rank or axis % rank == 0:
        raise UsageError(f"axis={axis} is not a class dimension of the {rank} dimensions of {prediction.name!r}.")
    return axis % rank


def _check_weights(weight: tuple[float, ...] | None, prediction: ir.Value, axis: int, loss: str) -> None:
    classes = dims(prediction, loss, least=2)[axis]
    if weight is not None and isinstance(classes, int) and len(weight) != classes:
        raise UsageError(
            f"{loss} has {len(weight)} class weights and {prediction.name!r} has {classes} classes: "
            "give one weight per class."
        )


def _index_labels(
    prediction: ir.Value, axis: int, weight: tuple[float, ...] | None, ignore_index: int, loss: str
) -> Labels:
    _check_weights(weight, prediction, axis, loss)
    sizes = dims(prediction, loss, least=2)
    classes = sizes.pop(axis)
    return Labels("int64", tuple(sizes), classes if isinstance(classes, int) else None, ignore_index)


def _label_weights(
    op: Fragment,
    labels: ir.Value,
    weights: ir.Value,
    rank: int,
    weight: tuple[float, ...] | None,
    ignore_index: int,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Indices with 0 for ignored labels; row weights with 0 there; and these times the class weights."""
    valid = op.Not(op.Equal(labels, ignore_index))
    index = op.select(valid, labels, 0)
    used = op.select(valid, spread_rows(op, weights, rank - 1), 0.0)
    if weight is None:
        return index, used, used
    return index, used, op.Mul(used, op.Gather(np.asarray(weight, np.float32), index, axis=0))


def _positions(op: Fragment, prediction: ir.Value, axis: int) -> float | ir.Value:
    return op.count(prediction, [index for index in range(1, op.rank(prediction)) if index != axis])
