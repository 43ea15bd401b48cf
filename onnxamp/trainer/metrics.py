"""Metrics over a whole data set, summed batch by batch in float64.

A metric sees the model's output and the labels of one batch after the other and gives one number at the end; batches
of any size give the number that one big batch gives. Definitions are scikit-learn's (classification, regression)
and the usual exp(mean negative log-likelihood) for perplexity.

The class axis of an output is that of the loss, where it is known; else the one whose removal gives the shape of the labels: the last
one where that fits, else axis 1 (PyTorch's place). An output of the labels' own shape is one logit per entry: positive means class 1.
"""

from __future__ import annotations

import abc
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from onnxamp.errors import DataError, UsageError

Array = npt.NDArray[Any]
Float = npt.NDArray[np.float64]


class Metric(abc.ABC):
    """Sums over batches; `value` reads them out.

    Attributes:
        name: How the metric is called in tables and files.
        better: Whether a higher or a lower value is the better one.
    """

    name: str
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    def __init__(self) -> None:
        self.reset()

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything seen."""

    @abc.abstractmethod
    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        """Add a batch.

        Args:
            output: The model's output: logits or predictions.
            labels: What was wanted.
            weights: One value per row; None counts every row once.

        Raises:
            DataError: The shapes do not belong together.
        """

    @abc.abstractmethod
    def value(self) -> float:
        """The metric over all batches since `reset`; NaN if there was nothing to measure."""


def classes_last(
    output: Array, labels: Array, binary: bool = False, probabilities: bool = False, axis: int | None = None
) -> tuple[Array, Array]:
    """Logits with the class axis, `axis` if it is given, last and the class index of every entry.

    Labels that are class probabilities (floats of the output's shape) count by their largest entry; with `binary`,
    and where an entry has only one logit x, the classes are 0 and 1 with the logits 0 and x (1 − x and x where the output
    is `probabilities`).
    """
    if output.size == labels.size and output.shape[:1] == labels.shape[:1]:
        place = 1 if axis is None else axis % max(output.ndim, 1)
        if labels.dtype.kind == "f" and labels.ndim > place and labels.shape[place] > 1 and not binary:
            return np.moveaxis(output.reshape(labels.shape), place, -1), labels.argmax(place)
        logits = output.reshape(labels.shape)
        other = 1 - logits if probabilities else np.zeros_like(logits)
        return np.stack([other, logits], axis=-1), labels.astype(np.int64)
    if output.ndim == labels.ndim + 1:
        for place in (output.ndim - 1, 1) if axis is None else (axis % output.ndim,):
            if output.shape[:place] + output.shape[place + 1 :] == labels.shape:
                return np.moveaxis(output, place, -1), labels.astype(np.int64)
    raise DataError(
        f"Labels of shape {list(labels.shape)} do not belong to an output of shape {list(output.shape)}: "
        "expected one class index per entry, or the output's own shape."
    )


def _row_weights(weights: Array | None, shape: tuple[int, ...]) -> Float:
    """One weight per entry from one weight per row."""
    if weights is None:
        return np.ones(shape)
    spread = np.asarray(weights, np.float64)
    return np.broadcast_to(spread.reshape(spread.shape + (1,) * (len(shape) - spread.ndim)), shape)


class _Classification(Metric):
    """What metrics on class indices share: which entries count, and how labels of the output's shape are meant."""

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        binary: bool = False,
        probabilities: bool = False,
        class_axis: int | None = None,
    ) -> None:
        self.ignore_index = ignore_index
        self.binary = binary
        self.probabilities = probabilities
        self.class_axis = class_axis
        super().__init__()

    def _kept(self, output: Array, labels: Array, weights: Array | None) -> tuple[Array, npt.NDArray[np.int64], Float]:
        """Flat logits, class indices and weights of the entries that are not ignored."""
        logits, wanted = classes_last(output, labels, self.binary, self.probabilities, self.class_axis)
        weight = _row_weights(weights, wanted.shape)
        keep = wanted != self.ignore_index
        logits, wanted = logits[keep], wanted[keep]
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < logits.shape[-1]:
            raise DataError(
                f"Labels lie in [{wanted.min()}, {wanted.max()}], and the output has {logits.shape[-1]} classes; "
                f"use 0 to {logits.shape[-1] - 1}, or {self.ignore_index} to leave an entry out."
            )
        return logits, wanted, weight[keep]


class TopK(_Classification):
    """Share of entries whose class is among the k largest logits: Σ w·[rank(label) < k] / Σ w.

    Ties count against the label where a class of a lower index has the same logit, as `argmax` decides them.
    """

    def __init__(self, k: int = 1, **how: Any) -> None:
        self.k = k
        self.name = "accuracy" if k == 1 else f"top{k}"
        super().__init__(**how)

    def reset(self) -> None:
        self._hits = self._weight = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        logits, wanted, weight = self._kept(output, labels, weights)
        own = np.take_along_axis(logits, wanted[:, None], -1)
        if self.k == 1:
            hits = logits.argmax(-1) == wanted
        else:
            before = np.arange(logits.shape[-1]) < wanted[:, None]
            hits = ((logits > own) | ((logits == own) & before)).sum(-1) < self.k
        hits &= ~np.isnan(own[:, 0])
        self._hits += float((weight * hits).sum())
        self._weight += float(weight.sum())

    def value(self) -> float:
        return self._hits / self._weight if self._weight else math.nan


class _Confusion(_Classification):
    """Per-class true positives, predictions and labels; what precision, recall and F1 are made of.

    `average` is `macro` (mean over the classes seen in labels or predictions) or `micro` (all entries together). Where
    an entry has one logit, the metric is that of class 1. A class without predictions or labels counts as 0.
    """

    kind: ClassVar[str]

    def __init__(self, average: Literal["macro", "micro"] = "macro", **how: Any) -> None:
        self.average = average
        self.name = self.kind if average == "macro" else f"{self.kind}-{average}"
        super().__init__(**how)

    def reset(self) -> None:
        self._hits = self._predicted = self._actual = np.zeros(0)
        self._one_logit = False

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        logits, wanted, weight = self._kept(output, labels, weights)
        self._one_logit = logits.shape[-1] == 2 and logits.size == 2 * output.size
        predicted = logits.argmax(-1)
        size = logits.shape[-1]
        sums = [self._hits, self._predicted, self._actual] if len(self._actual) else [np.zeros(size)] * 3
        self._hits, self._predicted, self._actual = (
            old + np.bincount(index, mass, size)
            for old, index, mass in zip(
                sums,
                (wanted, predicted, wanted),
                (weight * (predicted == wanted), weight, weight),
                strict=True,
            )
        )

    @abc.abstractmethod
    def _ratio(self) -> tuple[Float, Float]:
        """Numerator and denominator per class."""

    def value(self) -> float:
        if not self._actual.sum():
            return math.nan
        above, below = self._ratio()
        if self._one_logit:
            above, below = above[1:], below[1:]
        elif self.average == "micro":
            above, below = above.sum(keepdims=True), below.sum(keepdims=True)
        else:
            seen = self._predicted + self._actual > 0
            above, below = above[seen], below[seen]
        return float(np.divide(above, below, out=np.zeros_like(above), where=below > 0).mean())


class Precision(_Confusion):
    """True positives / predictions of the class."""

    kind = "precision"

    def _ratio(self) -> tuple[Float, Float]:
        return self._hits, self._predicted


class Recall(_Confusion):
    """True positives / entries of the class."""

    kind = "recall"

    def _ratio(self) -> tuple[Float, Float]:
        return self._hits, self._actual


class F1(_Confusion):
    """2 · true positives / (predictions + entries of the class), the harmonic mean of precision and recall."""

    kind = "f1"

    def _ratio(self) -> tuple[Float, Float]:
        return 2 * self._hits, self._predicted + self._actual


class _Mean(Metric):
    """Σ w·f(prediction − label) / Σ w over all entries."""

    better = "lower"

    def reset(self) -> None:
        self._sum = self._weight = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        difference, _, weight = _residual(output, labels, weights)
        self._sum += float((weight * self._measure(difference)).sum())
        self._weight += float(weight.sum())

    @abc.abstractmethod
    def _measure(self, difference: Float) -> Float: ...

    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


class MSE(_Mean):
    """Mean squared error."""

    name = "mse"

    def _measure(self, difference: Float) -> Float:
        return difference**2


class MAE(_Mean):
    """Mean absolute error."""

    name = "mae"

    def _measure(self, difference: Float) -> Float:
        return np.abs(difference)


def _residual(output: Array, labels: Array, weights: Array | None) -> tuple[Float, Float, Float]:
    """Prediction − label, label and weight, one row per sample and one column per predicted quantity."""
    if output.size != labels.size or output.shape[:1] != labels.shape[:1]:
        raise DataError(
            f"Labels of shape {list(labels.shape)} do not belong to predictions of shape {list(output.shape)}."
        )
    wanted = np.asarray(labels, np.float64).reshape(len(labels), -1)
    given = np.asarray(output, np.float64).reshape(wanted.shape)
    weight = _row_weights(weights, wanted.shape[:1])[:, None]
    return given - wanted, wanted, np.broadcast_to(weight, wanted.shape)


class R2(Metric):
    """1 − Σ w(ŷ − y)² / Σ w(y − ȳ)² per predicted quantity, averaged.

    The label's variance is merged batch by batch (Chan, Golub, LeVeque 1983), so a large mean loses no digits.
    """

    name = "r2"

    def reset(self) -> None:
        self._weight: Any = 0.0
        self._mean: Any = 0.0
        self._spread: Any = 0.0
        self._error: Any = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        difference, wanted, weight = _residual(output, labels, weights)
        mass = weight.sum(0)
        if not mass.any():
            return
        mean = (weight * wanted).sum(0) / mass
        shift = mean - self._mean
        total = self._weight + mass
        self._spread = self._spread + (weight * (wanted - mean) ** 2).sum(0) + shift**2 * self._weight * mass / total
        self._mean = self._mean + shift * mass / total
        self._weight = total
        self._error = self._error + (weight * difference**2).sum(0)

    def value(self) -> float:
        spread = np.asarray(self._spread)
        if not spread.ndim or not (spread > 0).all():
            return math.nan
        return float((1 - self._error / spread).mean())


class Perplexity(_Classification):
    """exp(Σ −w·log softmax(logits)[label] / Σ w) over the entries that are not ignored."""

    name = "perplexity"
    better = "lower"

    def reset(self) -> None:
        self._sum = self._weight = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        logits, wanted, weight = self._kept(output, labels, weights)
        logits = logits.astype(np.float64)
        if self.probabilities:
            with np.errstate(divide="ignore"):
                logits = np.log(logits)
        shifted = logits - logits.max(-1, keepdims=True)
        own = np.take_along_axis(shifted, wanted[:, None], -1)[:, 0]
        self._sum += float((weight * (np.log(np.exp(shifted).sum(-1)) - own)).sum())
        self._weight += float(weight.sum())

    def value(self) -> float:
        if not self._weight:
            return math.nan
        mean = self._sum / self._weight
        return math.exp(mean) if mean < 700 else math.inf


class Function(Metric):
    """A user's `function(output, labels) -> float` per batch, averaged over the rows."""

    def __init__(self, function: Callable[[Array, Array], float], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", "metric"))
        super().__init__()

    def reset(self) -> None:
        self._sum = self._rows = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        self._sum += float(self.function(output, labels)) * len(labels)
        self._rows += len(labels)

    def value(self) -> float:
        return self._sum / self._rows if self._rows else math.nan


_MAKERS: dict[str, Callable[..., Metric]] = {
    "accuracy": TopK,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "precision-micro": functools.partial(Precision, "micro"),
    "recall-micro": functools.partial(Recall, "micro"),
    "f1-micro": functools.partial(F1, "micro"),
    "mse": MSE,
    "mae": MAE,
    "r2": R2,
    "perplexity": Perplexity,
}
NAMES = (*_MAKERS, "topK")


def metric(
    which: str | Metric | Callable[[Array, Array], float],
    *,
    ignore_index: int = -100,
    binary: bool = False,
    probabilities: bool = False,
    class_axis: int | None = None,
) -> Metric:
    """The metric meant: an object as it is, a function wrapped, a name looked up (`top5` is `TopK(5)`).

    Args:
        which: An object, a function `(output, labels) -> float`, or one of `NAMES`.
        ignore_index: Labels of this value do not count (classification by name).
        binary: Float labels of the output's shape are 0 and 1 each, not class probabilities (classification by name).
        probabilities: The output ends in a softmax or sigmoid (classification by name).
        class_axis: The class dimension of the output, that of the loss; None if no loss tells (classification by name).

    Raises:
        UsageError: No metric has this name, or it is something else.
    """
    if isinstance(which, Metric):
        return which
    if not isinstance(which, str):
        if isinstance(which, type) or not callable(which):
            raise UsageError(f"A metric is a name, a function of output and labels, or a Metric, not {which!r}.")
        return Function(which)
    top = re.fullmatch(r"top-?([1-9]\d*)", which)
    if top is None and which not in _MAKERS:
        near = difflib.get_close_matches(which, NAMES, 1)
        question = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"There is no metric {which!r}{question} Known: {', '.join(NAMES)}.")
    make = functools.partial(TopK, int(top[1])) if top else _MAKERS[which]
    if which in ("mse", "mae", "r2"):
        return make()
    return make(ignore_index=ignore_index, binary=binary, probabilities=probabilities, class_axis=class_axis)


def metrics_of(wanted: Iterable[str | Metric | Callable[[Array, Array], float]], **options: Any) -> list[Metric]:
    """The metrics meant, in their order; `options` as of `metric`.

    Raises:
        UsageError: One of them is none, or a name stands there by itself.
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise UsageError(f"Metrics are given as a list, not as {wanted!r}: write metrics=[{wanted!r}].")
    return [metric(which, **options) for which in wanted]
