"""Metrics on values, with scikit-learn's definitions."""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from onnxamp.errors import DataError
from onnxamp.trainer.metric import Array, Float, Metric, row_weights


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
    weight = row_weights(weights, wanted.shape[:1])[:, None]
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
