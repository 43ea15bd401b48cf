"""Where each state tensor lies: arenas, offsets and segments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from onnxamp.training.groups import Group
from onnxamp.training.manifest import (
    ALIGNMENT,
    BLOCK,
    ITEM_SIZE,
    PARAMETER_ALIGNMENT,
    WINDOW_SIZE,
    Arena,
    Segment,
    StateTensor,
)

SCALARS = ("loss_scale", "seed_divisor")
COUNTERS = ("step", "growth_tracker", "hysteresis", "skipped", "stuck", "seed")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that trains.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        group: Its group.
        low: The graph reads a low copy of it.
    """

    name: str
    shape: tuple[int, ...]
    group: Group
    low: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """All state of a bundle."""

    arenas: tuple[Arena, ...]
    tensors: tuple[StateTensor, ...]
    segments: tuple[Segment, ...]


def make_layout(
    parameters: Sequence[Parameter],
    statistics: Sequence[tuple[str, tuple[int, ...]]],
    *,
    groups: Sequence[Group],
    moments: Sequence[str],
    weight_decay: float,
    low: str | None,
    ema: bool,
    stored_low: bool,
) -> Layout:
    """Place parameters group by group, those with a low copy first in each, and everything else around them.

    Args:
        parameters: In the order of the model.
        statistics: Names and shapes of running statistics.
        groups: In the order of the arena.
        moments: Names of the optimizer's arenas.
        weight_decay: That of groups without their own.
        low: Type of the low copies, or None.
        ema: Whether there is a moving average.
        stored_low: Segments with a low copy keep only what the low type can hold (O3).
    """
    places: list[tuple[Parameter, int]] = []
    segments: list[Segment] = []
    lows: list[StateTensor] = []
    end = low_end = 0
    for group in groups:
        for has_low in (True, False):
            members = [p for p in parameters if p.group is group and p.low is has_low]
            if not members:
                continue
            start, low_start = end, low_end
            for parameter in members:
                places.append((parameter, end))
                if has_low:
                    lows.append(StateTensor(parameter.name, "low", parameter.shape, low_start + end - start))
                end = _up(end + math.prod(parameter.shape), PARAMETER_ALIGNMENT)
            if has_low:
                low_end += end - start
            scalars = {
                "lr_factor": group.lr_factor,
                "weight_decay": weight_decay if group.weight_decay is None else group.weight_decay,
            }
            if stored_low:
                scalars["stored_low"] = float(has_low)
            segments.append(Segment(group.title, start, end, low_start if has_low else None, scalars))
    length = _up(end, BLOCK)
    roles = ["master", "gradient", *moments, *(["ema"] if ema else [])]
    arenas = [Arena(role, "float32", length) for role in roles]
    tensors = [StateTensor(p.name, role, p.shape, offset) for role in roles for p, offset in places]
    arenas.insert(2, Arena("window", "float32", WINDOW_SIZE, after="gradient"))
    tensors.append(StateTensor("window", "window", (WINDOW_SIZE,), 0))
    if low and low_end:
        arenas.append(Arena("low", low, low_end, saved=False))
        tensors += lows
    if statistics:
        offsets, size = _pack([math.prod(shape) for _, shape in statistics], "float32")
        for role in ("statistics", "statistics_work"):
            arenas.append(Arena(role, "float32", size))
            tensors += [
                StateTensor(name, role, shape, offset)
                for (name, shape), offset in zip(statistics, offsets, strict=True)
            ]
    for role, dtype, names in (("scalars", "float32", SCALARS), ("counters", "int64", COUNTERS)):
        offsets, size = _pack([1] * len(names), dtype)
        arenas.append(Arena(role, dtype, size))
        tensors += [StateTensor(name, role, (), offset) for name, offset in zip(names, offsets, strict=True)]
    return Layout(tuple(arenas), tuple(tensors), tuple(segments))


def _pack(sizes: Sequence[int], dtype: str) -> tuple[list[int], int]:
    """Aligned offsets of tensors of these sizes, and the length of all."""
    step = ALIGNMENT // ITEM_SIZE[dtype]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = _up(end + size, step)
    return offsets, end


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
