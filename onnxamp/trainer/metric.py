"""What a metric is: sums over batches, and one number at the end."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

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


def row_weights(weights: Array | None, shape: tuple[int, ...]) -> Float:
    """One weight per entry from one weight per row; all 1 without weights."""
    if weights is None:
        return np.ones(shape)
    spread = np.asarray(weights, np.float64)
    return np.broadcast_to(spread.reshape(spread.shape + (1,) * (len(shape) - spread.ndim)), shape)
