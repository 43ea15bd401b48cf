"""Losses whose labels are values, as PyTorch names and defines them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import Fragment
from onnxamp.training.losses.terms import Terms, count_weighted, dims, spread_rows
from onnxamp.training.manifest import Labels


class _Elementwise:
    """A mean over all elements, of labels with the prediction's shape."""

    title: ClassVar[str]

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        return Labels("float32", tuple(dims(prediction, self.title, least=1)))

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """The elements of a row."""
        return op.count(prediction, list(range(1, op.rank(prediction))))

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """What `element` gives, weighted and summed."""
        loss, slope = self.element(op, prediction, labels)
        rank = op.rank(prediction)
        row = spread_rows(op, weights, rank)
        loss_sum = op.sum_all(op.select(op.is_zero(row), 0.0, op.Mul(loss, row)))

        def backward(seed: ir.Value) -> ir.Value:
            return op.select(op.is_zero(row), 0.0, op.Mul(slope(), op.Mul(row, seed)))

        return Terms(loss_sum, count_weighted(op, weights, self.per_row(op, prediction)), backward)

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """The loss of each element, and its derivative."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(_Elementwise):
    """(1−y)·x + (1+(p−1)·y)·log(1+e^−x); ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Attributes:
        pos_weight: p, a weight of positive answers: one number, or one per element of the last dimension.
    """

    title: ClassVar[str] = "binary_cross_entropy_with_logits"
    pos_weight: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.pos_weight is not None and not isinstance(self.pos_weight, (int, float)):
            object.__setattr__(self, "pos_weight", tuple(float(p) for p in self.pos_weight))
        if any(not (p >= 0 and math.isfinite(p)) for p in np.atleast_1d(self.pos_weight or 0.0)):
            raise UsageError(f"pos_weight of {self.title} is {self.pos_weight}: it must be finite and not negative.")

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        last = dims(prediction, self.title, least=1)[-1]
        if isinstance(self.pos_weight, tuple) and isinstance(last, int) and len(self.pos_weight) not in (1, last):
            raise UsageError(
                f"{self.title} has {len(self.pos_weight)} pos_weights and the last dimension of {prediction.name!r} has size "
                f"{last}: give one number, or one per element."
            )
        return super().labels(prediction)

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """The derivative is (1−y) − (1+(p−1)·y)·(1−σ(x))."""
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

        return loss, slope


@dataclasses.dataclass(frozen=True)
class MSE(_Elementwise):
    """(x−y)²; ``torch.nn.functional.mse_loss``."""

    title: ClassVar[str] = "mse"

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """The derivative is 2·(x−y)."""
        d = op.Sub(prediction, labels)
        return op.Mul(d, d), lambda: op.Mul(d, 2.0)


@dataclasses.dataclass(frozen=True)
class L1(_Elementwise):
    """``|x − y|``; ``torch.nn.functional.l1_loss``."""

    title: ClassVar[str] = "l1"

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """The derivative is sign(x−y)."""
        d = op.Sub(prediction, labels)
        return op.Abs(d), lambda: op.Sign(d)


@dataclasses.dataclass(frozen=True)
class Huber(_Elementwise):
    """``½·d²`` where ``|d| ≤ δ``, else ``δ·(|d| − ½·δ)``, with ``d = x − y``; ``torch.nn.functional.huber_loss``.

    Attributes:
        delta: δ > 0.
    """

    title: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.delta > 0 and math.isfinite(self.delta)):
            raise UsageError(f"delta of huber is {self.delta}: it must be positive and finite.")

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """With c = clip(d, −δ, δ) the loss is c·(d − ½·c) and the derivative c."""
        d = op.Sub(prediction, labels)
        c = op.Clip(d, -self.delta, self.delta)
        return op.Mul(c, op.Sub(d, op.Mul(c, 0.5))), lambda: c


@dataclasses.dataclass(frozen=True)
class SmoothL1(_Elementwise):
    """``½·d²/β`` where ``|d| < β``, else ``|d| − ½·β``, with ``d = x − y``; ``torch.nn.functional.smooth_l1_loss``.

    Attributes:
        beta: β ≥ 0; 0 is `L1`.
    """

    title: ClassVar[str] = "smooth_l1"
    beta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise UsageError(f"beta of smooth_l1 is {self.beta}: it must be finite and not be negative.")

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """Huber's with δ = β, divided by β."""
        if self.beta == 0:
            return L1().element(op, prediction, labels)
        loss, slope = Huber(self.beta).element(op, prediction, labels)
        return op.Div(loss, self.beta), lambda: op.Div(slope(), self.beta)


@dataclasses.dataclass(frozen=True)
class KLDiv(_Elementwise):
    """t·(log t − x) of log-probabilities x and labels t; ``torch.nn.functional.kl_div``.

    Attributes:
        reduction: ``mean`` divides by the number of elements, as PyTorch does by default; ``batchmean`` by that of rows.
        log_target: The labels are log t.
    """

    title: ClassVar[str] = "kl_div"
    reduction: str = "mean"
    log_target: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "batchmean"):
            raise UsageError(f"Unknown reduction {self.reduction!r} of kl_div: use mean or batchmean.")

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """The elements of a row, or 1."""
        return 1 if self.reduction == "batchmean" else super().per_row(op, prediction)

    def element(self, op: Fragment, prediction: ir.Value, labels: ir.Value) -> tuple[ir.Value, Callable[[], ir.Value]]:
        """The derivative is −t; where t is 0 the loss is 0, whatever x."""
        if self.log_target:
            t = op.Exp(labels)
            return op.Mul(t, op.Sub(labels, prediction)), lambda: op.Neg(t)
        none = op.is_zero(labels)
        loss = op.Mul(labels, op.Sub(op.Log(op.select(none, 1.0, labels)), prediction))
        return op.select(none, 0.0, loss), lambda: op.Neg(labels)


_COSINE_EPSILON = 1e-12
"""What PyTorch adds to the squared norms."""


@dataclasses.dataclass(frozen=True)
class CosineEmbedding:
    """1 − x·y/√((‖x‖²+ε)·(‖y‖²+ε)) over the last dimension; ``torch.nn.functional.cosine_embedding_loss`` of similar pairs.

    The labels are the embeddings to be similar to, and ε = 1e-12. The mean is over all embeddings.
    """

    def labels(self, prediction: ir.Value) -> Labels:
        """Floats of the prediction's shape."""
        return Labels("float32", tuple(dims(prediction, "cosine", least=2)))

    def per_row(self, op: Fragment, prediction: ir.Value) -> float | ir.Value:
        """The embeddings of a row."""
        return op.count(prediction, list(range(1, op.rank(prediction) - 1)))

    def terms(self, op: Fragment, prediction: ir.Value, labels: ir.Value, weights: ir.Value) -> Terms:
        """The gradient is cos·x/(‖x‖²+ε) − y/√((‖x‖²+ε)·(‖y‖²+ε))."""
        rank = op.rank(prediction)
        last = [rank - 1]
        row = spread_rows(op, weights, rank)
        product = op.sum(op.Mul(prediction, labels), last)
        x2, y2 = (op.Add(op.sum(op.Mul(v, v), last), _COSINE_EPSILON) for v in (prediction, labels))
        inverse = op.Reciprocal(op.Mul(op.Sqrt(x2), op.Sqrt(y2)))
        cosine = op.Mul(product, inverse)
        loss = op.Mul(op.Sub(1.0, cosine), row)
        loss_sum = op.sum_all(op.select(op.is_zero(row), 0.0, loss))

        def backward(seed: ir.Value) -> ir.Value:
            slope = op.Sub(op.Mul(prediction, op.Div(cosine, x2)), op.Mul(labels, inverse))
            return op.select(op.is_zero(row), 0.0, op.Mul(slope, op.Mul(row, seed)))

        return Terms(loss_sum, count_weighted(op, weights, self.per_row(op, prediction)), backward)
