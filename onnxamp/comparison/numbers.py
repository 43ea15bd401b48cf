"""Errors of values between two models, as measured."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class ValueNumbers:
    """The error of one matched value, over all samples, under strict emulation of both models.

    Attributes:
        name, counterpart: Its names in the first and second model.
        node, op: The node that computes it in the second model.
        max_error: Largest absolute difference between finite elements.
        scale: Largest finite magnitude in the first model.
        snr: Signal to noise ratio in dB of the finite elements; None where there is none: these are equal, or the first model's are zero
            throughout.
        nonfinite: Elements that are NaN or infinite on one side only.
        elements: Elements compared.
        clamped: Elements out of the 16-bit range in the first model and finite in the second, as in a mask whose
            constants were clamped. The other fields leave them out.
    """

    name: str
    counterpart: str
    node: str
    op: str
    max_error: float
    scale: float
    snr: float | None
    nonfinite: int
    elements: int
    clamped: int

    @property
    def decibels(self) -> float:
        """The signal to noise ratio as a number to compare: inf for equal values, -inf where all is noise or what differs is not finite."""
        if self.snr is not None:
            return self.snr
        return -math.inf if self.max_error or self.nonfinite else math.inf

    @property
    def ratio(self) -> str:
        """The signal to noise ratio in words."""
        if self.snr is not None:
            return f"{self.snr:.1f} dB"
        if self.max_error:
            return "no signal"
        return "not finite" if self.nonfinite else "equal"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Errors of the values of two models on the same data.

    Attributes:
        data: Where the inputs came from.
        samples: Number of input sets.
        values: Matched float values in the order of the graph.
        first_divergence: Name of the first value that has a NaN or Inf of its own or an SNR below `diverged`; "" if none.
        diverged: That bound in dB.
    """

    data: str
    samples: int
    values: tuple[ValueNumbers, ...]
    first_divergence: str
    diverged: float
