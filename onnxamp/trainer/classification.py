"""Metrics on class indices, with scikit-learn's definitions; and perplexity, exp(mean negative log-likelihood).

The class axis of an output is that of the loss, where it is known; else the one whose removal gives the shape of the labels: the last
one where that fits, else axis 1 (PyTorch's place). An output of the labels' own shape is one logit per entry: positive means class 1.
"""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from onnxamp.errors import DataError
from onnxamp.trainer.metric import Array, Float, Metric, row_weights


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
        weight = row_weights(weights, wanted.shape)
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
