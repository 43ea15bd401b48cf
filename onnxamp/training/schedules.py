"""Learning-rate schedules: the factor of the learning rate as a function of the number of applied steps, in the graph.

Step 0 is the first step taken. Formulas and argument names are those of torch.optim.lr_scheduler; behind its end a schedule
keeps its last value. The factor is computed in FP64 (a cosine in FP32) and rounded once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import DOUBLE, FLOAT, Fragment


class Schedule(Protocol):
    """A factor of the learning rate."""

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """The factor at `step`, an FP64 scalar, as an FP64 scalar; `lr` is the base learning rate."""

    def resolved(self, total: int) -> Schedule:
        """The same schedule with `total` as its length if it has none of its own."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """`factor` during the first `total_iters` steps, then 1. ConstantLR; the defaults here mean: always 1.

    Attributes:
        factor: Factor during the first steps.
        total_iters: Their number.
    """

    factor: float = 1.0
    total_iters: int = 0

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """Select by the step."""
        if self.factor == 1.0 or self.total_iters == 0:
            return op.number(1.0, DOUBLE)
        return op.select(op.Less(step, float(self.total_iters)), op.number(self.factor, DOUBLE), 1.0)

    def resolved(self, total: int) -> Constant:
        """Itself."""
        return self


@dataclasses.dataclass(frozen=True)
class Linear:
    """From `start_factor` to `end_factor` in `total_iters` steps, on a line. LinearLR.

    The defaults decay from 1 to 0, as fine-tuning does (LinearLR's own warm up from 1/3 to 1).

    Attributes:
        start_factor: Factor of the first step.
        end_factor: Factor after `total_iters` steps.
        total_iters: Length; None: the length of the run, which whoever plans the run fills in.
    """

    start_factor: float = 1.0
    end_factor: float = 0.0
    total_iters: int | None = None

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """start + (end − start)·min(t, T)/T."""
        part = _part(op, step, _length(self.total_iters, "linear", "total_iters"))
        return op.Add(op.Mul(part, self.end_factor - self.start_factor), self.start_factor)

    def resolved(self, total: int) -> Linear:
        """With `total_iters`."""
        return dataclasses.replace(self, total_iters=total) if self.total_iters is None else self


@dataclasses.dataclass(frozen=True)
class Cosine:
    """eta_min + (lr − eta_min)·(1 + cos(π·min(t, T)/T))/2. CosineAnnealingLR; it stays at `eta_min` behind T.

    Attributes:
        T_max: T; None: the length of the run.
        eta_min: Lowest learning rate.
    """

    T_max: int | None = None
    eta_min: float = 0.0

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """The formula, divided by lr."""
        part = _part(op, step, _length(self.T_max, "cosine", "T_max"))
        wave = op.Cast(op.Cos(op.Cast(op.Mul(part, math.pi), to=FLOAT)), to=DOUBLE)
        low = self.eta_min / lr if lr else 0.0
        return op.Add(op.Mul(op.Add(wave, 1.0), (1.0 - low) / 2), low)

    def resolved(self, total: int) -> Cosine:
        """With `T_max`."""
        return dataclasses.replace(self, T_max=total) if self.T_max is None else self


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """(1 − min(t, T)/T)^power. PolynomialLR.

    Attributes:
        total_iters: T; None: the length of the run.
        power: Exponent.
    """

    total_iters: int | None = None
    power: float = 1.0

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """The formula."""
        part = _part(op, step, _length(self.total_iters, "polynomial", "total_iters"))
        return op.Pow(op.Sub(1.0, part), op.number(self.power, DOUBLE))

    def resolved(self, total: int) -> Polynomial:
        """With `total_iters`."""
        return dataclasses.replace(self, total_iters=total) if self.total_iters is None else self


@dataclasses.dataclass(frozen=True)
class Step:
    """gamma^⌊t/step_size⌋. StepLR.

    Attributes:
        step_size: Steps between two decays.
        gamma: Factor of a decay.
    """

    step_size: int = 30
    gamma: float = 0.1

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """The formula."""
        size = _length(self.step_size, "step", "step_size")
        return op.Pow(op.number(self.gamma, DOUBLE), op.Floor(op.Div(step, float(size))))

    def resolved(self, total: int) -> Step:
        """Itself."""
        return self


@dataclasses.dataclass(frozen=True)
class Warmup:
    """A line from `start_factor` to 1 in `total_iters` steps, then `after` from its beginning (SequentialLR with LinearLR).

    Attributes:
        total_iters: Number of warm-up steps W.
        after: The schedule that follows.
        start_factor: Factor of the first step; None: 1/(W+1), so that the factors are (t+1)/(W+1) and no step is wasted.
    """

    total_iters: int
    after: Schedule = dataclasses.field(default_factory=Constant)
    start_factor: float | None = None

    def multiplier(self, op: Fragment, step: ir.Value, lr: float) -> ir.Value:
        """Select by the step."""
        length = _length(self.total_iters, "warm-up", "total_iters")
        start = 1 / (length + 1) if self.start_factor is None else self.start_factor
        rising = op.Add(op.Mul(step, (1 - start) / length), start)
        later = op.Max(op.Sub(step, float(length)), op.number(0.0, DOUBLE))
        return op.select(op.Less(step, float(length)), rising, self.after.multiplier(op, later, lr))

    def resolved(self, total: int) -> Warmup:
        """With what is left for the schedule that follows."""
        return dataclasses.replace(self, after=self.after.resolved(max(total - self.total_iters, 1)))


SCHEDULES: dict[str, type] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "polynomial": Polynomial,
    "step": Step,
    "warmup": Warmup,
}


def learning_rate(op: Fragment, schedule: Schedule, lr: float, applied: ir.Value) -> ir.Value:
    """The FP32 learning rate of the next step after `applied` (int64) steps."""
    factor = schedule.multiplier(op, op.Cast(applied, to=DOUBLE), lr)
    return op.Cast(op.Mul(factor, lr), to=FLOAT)


def _part(op: Fragment, step: ir.Value, length: int) -> ir.Value:
    """min(t, T)/T."""
    return op.Div(op.Min(step, op.number(float(length), DOUBLE)), float(length))


def _length(value: int | None, schedule: str, name: str) -> int:
    if value is None:
        raise UsageError(f"The schedule {schedule} needs its length: give {name}, the number of steps of the run.")
    if value < 1:
        raise UsageError(f"{name} of the schedule {schedule} is {value}: it must be at least 1.")
    return value
