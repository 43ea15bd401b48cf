"""Several losses at once, on one output or on several."""

from __future__ import annotations

import dataclasses
import math

from onnxamp.errors import UsageError
from onnxamp.training.losses.terms import Loss


@dataclasses.dataclass(frozen=True)
class Part:
    """One loss of a sum.

    Attributes:
        loss: A loss that compares an output with labels.
        output: The output that it reads.
        factor: What its mean is multiplied by.
        labels: The input that it compares with; None: ``labels_OUTPUT``. Losses may share one.
    """

    loss: Loss
    output: str
    factor: float = 1.0
    labels: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor):
            raise UsageError(f"The factor of the loss on {self.output!r} is {self.factor}: it must be finite.")

    @property
    def label_name(self) -> str:
        """Name of the input that it compares with."""
        return self.labels or f"labels_{self.output}"


@dataclasses.dataclass(frozen=True)
class Sum:
    """Σ factor · mean over rows of each loss.

    One denominator serves all losses, the weight of the rows, so that any cut into micro-batches gives the same step. A mean is
    therefore over all labels of a row: ignored ones count as 0, and class weights do not change the denominator. Where no label is
    ignored and no class weighs more, it is the sum of PyTorch's means.

    Attributes:
        parts: The losses; each reads an output with one row per row of the batch.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise UsageError("A sum of losses has no loss: give it some.")
