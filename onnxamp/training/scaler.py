"""Loss scales: a number that multiplies the loss so that small 16-bit gradients do not vanish.

A dynamic scale shrinks when a gradient is not finite and grows after some good windows. Its rule is a piece of
reduce.onnx: constant within a window, selections only. An empty window changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import FLOAT_MAX, INT64, Fragment


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name} of the loss scale is {value}: it must be a finite number above 0.")


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The state of a loss scale.

    Attributes:
        scale: FP32 scalar.
        growth_tracker: int64 scalar, good windows since the last change.
        hysteresis: int64 scalar, bad windows that may still pass before the scale shrinks, that one included.
    """

    scale: ir.Value
    growth_tracker: ir.Value
    hysteresis: ir.Value


class LossScale(Protocol):
    """How the loss scale starts and changes."""

    @property
    def initial(self) -> tuple[float, int, int]:
        """Scale, growth tracker and hysteresis at the start."""

    @property
    def lowest(self) -> float:
        """The scale that it never goes below."""

    @property
    def drops(self) -> bool:
        """Whether a window with a gradient that is not finite is skipped."""

    def next(self, op: Fragment, state: ScaleState, bad: ir.Value, empty: ir.Value) -> ScaleState:
        """The state after a window."""


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
    """A constant.

    Attributes:
        scale: The factor of the loss; 1 means no scaling.
        drop_overflow_update: Skip a window whose gradient is not finite (MindSpore's name); if False, it is applied as it is.
    """

    scale: float = 1.0
    drop_overflow_update: bool = True

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    @property
    def initial(self) -> tuple[float, int, int]:
        """The scale and two zeros."""
        return self.scale, 0, 0

    @property
    def lowest(self) -> float:
        """The scale."""
        return self.scale

    @property
    def drops(self) -> bool:
        """`drop_overflow_update`."""
        return self.drop_overflow_update

    def next(self, op: Fragment, state: ScaleState, bad: ir.Value, empty: ir.Value) -> ScaleState:
        """No change."""
        return state


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """good window: tracker += 1, at `growth_interval` scale = min(scale·growth, ceiling) and tracker = 0;
    bad window: tracker = −delay, hysteresis −= 1, at 0 scale = max(scale·backoff, floor).

    Attributes:
        init_scale: Scale at the start.
        growth_factor: > 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Good windows in a row before the scale grows.
        floor: Lowest scale.
        ceiling: Highest scale; None: it does not grow beyond the FP32 range.
        hysteresis: Bad windows that it takes to shrink the scale.
        refill: When the hysteresis counter is filled again: ``growth`` (DeepSpeed), ``good`` (at any good window; DeepSpeed's
            consecutive_hysteresis), or ``backoff`` (at any good window and after shrinking; Paddle).
        delay: Additional good windows after the start and after a bad window (DeepSpeed counts one).
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    ceiling: float | None = 2.0**24
    hysteresis: int = 1
    refill: str = "backoff"
    delay: int = 0

    def __post_init__(self) -> None:
        _positive("init_scale", self.init_scale)
        if not (self.growth_factor > 1 and math.isfinite(self.growth_factor)):
            raise UsageError(f"growth_factor of the loss scale is {self.growth_factor}: it must be above 1.")
        if not 0 < self.backoff_factor < 1:
            raise UsageError(f"backoff_factor of the loss scale is {self.backoff_factor}: it must be between 0 and 1.")
        if self.growth_interval < 1 or self.hysteresis < 1 or self.delay < 0:
            raise UsageError("growth_interval and hysteresis of the loss scale must be at least 1, delay at least 0.")
        if self.refill not in ("growth", "good", "backoff"):
            raise UsageError(f"Unknown refill {self.refill!r} of the loss scale: use growth, good or backoff.")
        if not 0 <= self.floor <= self.init_scale <= (math.inf if self.ceiling is None else self.ceiling):
            raise UsageError(
                f"The loss scale must start between floor {self.floor:g} and ceiling {self.ceiling}, "
                f"not at {self.init_scale:g}."
            )

    @classmethod
    def preset(cls, name: str) -> DynamicLossScale:
        """The rule and the defaults of a framework: onnxamp, pytorch, paddle, mindspore, deepspeed.

        Raises:
            UsageError: There is no such preset.
        """
        if name not in PRESETS:
            raise UsageError(f"Unknown loss-scale preset {name!r}: use one of {', '.join(sorted(PRESETS))}.")
        return PRESETS[name]

    @property
    def initial(self) -> tuple[float, int, int]:
        """Scale, tracker and full hysteresis."""
        return self.init_scale, -self.delay, self.hysteresis

    @property
    def lowest(self) -> float:
        """`floor`."""
        return self.floor

    @property
    def drops(self) -> bool:
        """Always."""
        return True

    def next(self, op: Fragment, state: ScaleState, bad: ir.Value, empty: ir.Value) -> ScaleState:
        """Both branches are computed and selected."""
        count = op.Add(state.growth_tracker, 1)
        grow = op.Equal(count, self.growth_interval)
        grown = op.Mul(state.scale, self.growth_factor)
        if self.ceiling is None:
            grown = op.select(op.LessOrEqual(grown, FLOAT_MAX), grown, state.scale)
        else:
            grown = op.Min(grown, op.number(self.ceiling))
        good_scale = op.select(grow, grown, state.scale)
        good_tracker = op.select(grow, 0, count)
        full = op.number(self.hysteresis, INT64)
        good_hysteresis = op.select(grow, full, state.hysteresis) if self.refill == "growth" else full

        left = op.Sub(state.hysteresis, 1)
        shrink = op.LessOrEqual(left, 0)
        shrunk = op.Mul(state.scale, self.backoff_factor)
        if self.floor > 0:
            shrunk = op.Max(shrunk, op.number(self.floor))
        bad_scale = op.select(shrink, shrunk, state.scale)
        bad_hysteresis = op.select(shrink, self.hysteresis if self.refill == "backoff" else 1, left)

        def after(good: ir.Value, other: ir.Value | float, now: ir.Value) -> ir.Value:
            return op.select(empty, now, op.select(bad, other, good))

        return ScaleState(
            after(good_scale, bad_scale, state.scale),
            after(good_tracker, -self.delay, state.growth_tracker),
            after(good_hysteresis, bad_hysteresis, state.hysteresis),
        )


PRESETS: dict[str, DynamicLossScale] = {
    "onnxamp": DynamicLossScale(),
    "pytorch": DynamicLossScale(floor=0.0, ceiling=None),
    "paddle": DynamicLossScale(floor=0.0, ceiling=None, refill="backoff"),
    "mindspore": DynamicLossScale(init_scale=2.0**24, ceiling=None),
    "deepspeed": DynamicLossScale(growth_interval=1000, ceiling=None, hysteresis=2, refill="growth", delay=1),
}
"""torch.amp.GradScaler, paddle.amp.GradScaler, mindspore.amp.DynamicLossScaler, deepspeed's DynamicLossScaler."""
