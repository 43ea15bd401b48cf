"""The arguments of `build`: checked, compared with each other, and in JSON form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from onnxamp.errors import UsageError
from onnxamp.ort import gradient_builder
from onnxamp.policy.options import Options
from onnxamp.training import choices
from onnxamp.training.groups import Group
from onnxamp.training.lora import Lora
from onnxamp.training.losses import AnyLoss
from onnxamp.training.optimizers import Optimizer
from onnxamp.training.scaler import LossScale
from onnxamp.training.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What `build` was called with, by the names that it has there; `amp` is what `convert` takes too.

    Raises:
        RuntimeMissingError: The engine is not installed.
        UsageError: A value is unknown, out of range, or contradicts another.
    """

    loss: AnyLoss
    optimizer: Optimizer
    scale: LossScale
    schedule: Schedule
    groups: tuple[Group, ...]
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    amp: Options
    batch_norm: str
    overflow: str
    clip_norm: float | None
    clip_value: float | None
    ema: float | None
    seed: int
    output: str | None
    lora: Lora | None
    memory_budget: int | None
    engine: str

    def __post_init__(self) -> None:
        if self.batch_norm not in ("auto", "window", "freeze"):
            raise UsageError(f"Unknown batch_norm {self.batch_norm!r}: use auto, window or freeze.")
        if self.overflow not in ("window", "micro"):
            raise UsageError(f"Unknown overflow {self.overflow!r}: use window or micro.")
        if self.overflow == "micro" and not self.scale.drops:
            raise UsageError(
                "overflow='micro' drops what overflows and drop_overflow_update=False does not: choose one."
            )
        if self.engine not in ("native", "ort-training"):
            raise UsageError(f"Unknown engine {self.engine!r}: use native or ort-training.")
        if self.engine == "ort-training":
            gradient_builder.require()
        if self.memory_budget is not None and self.engine != "native":
            raise UsageError("memory_budget belongs to the native engine: leave one of them out.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UsageError(f"ema is {self.ema}: it must be at least 0 and below 1.")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}: it must fit into 64 bits.")

    def to_json(self) -> dict[str, Any]:
        """The arguments of `build` in JSON form."""
        return {
            "loss": choices.to_json(self.loss),
            "optimizer": choices.to_json(self.optimizer),
            "schedule": choices.to_json(self.schedule),
            "loss_scale": choices.to_json(self.scale),
            "groups": [
                {
                    **dataclasses.asdict(group),
                    "match": group.match if isinstance(group.match, str) else list(group.match),
                }
                for group in self.groups[:-1]
            ],
            "trainable": list(self.trainable),
            "frozen": list(self.frozen),
            "level": self.amp.level,
            "dtype": self.amp.dtype,
            "target": self.amp.target,
            "keep": list(self.amp.keep),
            "keep_op": list(self.amp.keep_op),
            "lower": list(self.amp.lower),
            "lower_op": list(self.amp.lower_op),
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
            "batch_norm": self.batch_norm,
            "overflow": self.overflow,
            "ema": self.ema,
            "seed": self.seed,
            "output": self.output,
            "memory_budget": self.memory_budget,
            "dim": dict(self.amp.dim),
            "lora": None
            if self.lora is None
            else {**dataclasses.asdict(self.lora), "target": list(self.lora.patterns)},
            "engine": self.engine,
        }


def name_patterns(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """One pattern, several or none as a tuple."""
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def positive(name: str, value: float | None) -> float | None:
    """`value`, unless it is there and no finite number above 0."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name} is {value}: it must be a finite number above 0.")
    return value
