"""Losses, optimizers, schedules and loss scales by name: from a string, from JSON, and to JSON."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, cast

from onnxamp.errors import UsageError
from onnxamp.training.losses import COMPARING, LOSSES, AnyLoss, Loss, LossModel, Part, Sum
from onnxamp.training.optimizers import OPTIMIZERS, Optimizer
from onnxamp.training.scaler import PRESETS, DynamicLossScale, FixedLossScale, LossScale
from onnxamp.training.schedules import SCHEDULES, Constant, Schedule

LOSS_MODEL = "loss.onnx"
"""What a bundle calls the file of its loss model."""
SCALES: dict[str, type] = {"fixed": FixedLossScale, "dynamic": DynamicLossScale}
_TABLES: dict[str, dict[str, type]] = {
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "loss scale": SCALES,
}

Spec = object
"""An instance, a name that stands for the defaults, or a mapping with ``name`` and arguments."""


def loss(spec: Spec) -> AnyLoss:
    """The loss that `spec` means; a list of parts is their sum. Raises UsageError for an unknown name or argument."""
    if isinstance(spec, (list, tuple)):
        spec = {"name": "sum", "parts": spec}
    if isinstance(spec, Mapping) and spec.get("name") == "sum" and isinstance(spec.get("parts"), (list, tuple)):
        spec = {**spec, "parts": tuple(_part(part) for part in spec["parts"])}
    return cast("AnyLoss", _choice("loss", spec))


def _part(spec: Spec) -> Part:
    """A part of a sum from an instance, or a mapping with ``loss``, ``output`` and, if need be, ``factor`` and ``labels``."""
    if isinstance(spec, Part):
        return spec
    known = [field.name for field in dataclasses.fields(Part)]
    if not isinstance(spec, Mapping) or not {"loss", "output"} <= set(spec) <= set(known):
        raise UsageError(f"A part of a sum of losses is a mapping of {', '.join(known)}, not {spec!r}.")
    inner = _choice("loss", spec["loss"])
    if type(inner) not in COMPARING.values():
        raise UsageError(f"{spec['loss']!r} cannot be part of a sum: use {', '.join(COMPARING)}.")
    return Part(cast("Loss", inner), **{key: value for key, value in spec.items() if key != "loss"})


def optimizer(spec: Spec) -> Optimizer:
    """The optimizer that `spec` means; raises UsageError for an unknown name or argument."""
    return cast("Optimizer", _choice("optimizer", spec))


def schedule(spec: Spec | None) -> Schedule:
    """The schedule that `spec` means, constant for None; raises UsageError for an unknown name or argument."""
    return Constant() if spec is None else cast("Schedule", _choice("schedule", spec))


def loss_scale(spec: Spec | None, level: str, dtype: str) -> LossScale:
    """The loss scale that `spec` means.

    Args:
        spec: An instance, ``none`` or None, ``dynamic``, a preset's name, a number, or ``auto``: dynamic for fp16 at OD, O1 and
            O2, else none.
        level: The level.
        dtype: The low type.

    Raises:
        UsageError: `spec` means nothing.
    """
    if spec == "auto":
        return DynamicLossScale() if dtype == "fp16" and level in ("OD", "O1", "O2") else FixedLossScale(1.0)
    if spec is None or spec == "none":
        return FixedLossScale(1.0)
    if isinstance(spec, bool):
        raise UsageError("loss_scale is neither True nor False: use auto, none, dynamic, a preset or a number.")
    if isinstance(spec, (int, float)):
        return FixedLossScale(float(spec))
    if isinstance(spec, str):
        if spec in PRESETS:
            return PRESETS[spec]
        try:
            return FixedLossScale(float(spec))
        except ValueError:
            pass
    return cast("LossScale", _choice("loss scale", spec))


def to_json(value: object) -> dict[str, Any]:
    """A loss, optimizer, schedule or loss scale as its name and all its arguments."""
    for table in _TABLES.values():
        for name, kind in table.items():
            if type(value) is kind:
                return {"name": name, **_fields(value)}
    raise UsageError(f"{type(value).__name__} is no loss, optimizer, schedule or loss scale of onnxamp.")


def _fields(value: object) -> dict[str, Any]:
    """The arguments of an instance."""
    if isinstance(value, LossModel):
        return {"model": LOSS_MODEL}
    if isinstance(value, Sum):
        return {"parts": [{**_fields(part), "loss": to_json(part.loss)} for part in value.parts]}
    result: dict[str, Any] = {}
    for field in dataclasses.fields(cast("Any", value)):
        content = getattr(value, field.name)
        if dataclasses.is_dataclass(content):
            content = to_json(content) if not isinstance(value, Part) else None
        result[field.name] = list(content) if isinstance(content, tuple) else content
    return result


def _choice(kind: str, spec: Spec) -> object:
    chosen = _instance(kind, spec)
    _refuse_infinite(chosen, type(chosen).__name__)
    return chosen


def _refuse_infinite(value: Any, name: str) -> None:
    """Whatever the class and wherever the number: NaN and infinity would become those of the parameters."""
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        for item in content if isinstance(content, tuple) else (content,):
            if dataclasses.is_dataclass(item):
                _refuse_infinite(item, type(item).__name__)
            elif isinstance(item, float) and not math.isfinite(item):
                raise UsageError(f"{field.name} of {name} is {content}: it must be finite.")


def _instance(kind: str, spec: Spec) -> object:
    table = _TABLES[kind]
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, Mapping):
        arguments = dict(spec)
        name = str(arguments.pop("name", ""))
        if name not in table:
            raise UsageError(f"Unknown {kind} {name!r}: {_nearest(name, table)}.")
        known = {field.name: field for field in dataclasses.fields(table[name])}
        for key in arguments:
            if key not in known:
                raise UsageError(f"{name} has no argument {key!r}: {_nearest(key, known)}.")
        if isinstance(arguments.get("after"), (str, Mapping)):
            arguments["after"] = _choice(kind, arguments["after"])
        for key, value in arguments.items():
            if isinstance(value, list):
                arguments[key] = tuple(value)
        try:
            return table[name](**arguments)
        except TypeError as problem:
            missing = ", ".join(
                key
                for key, field in known.items()
                if key not in arguments
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            raise UsageError(f"{name} needs {missing}." if missing else f"{name}: {problem}.") from problem
    if type(spec) in table.values():
        return spec
    raise UsageError(f"{spec!r} is no {kind}: {_nearest('', table)}, or an instance of its class.")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}"
    return f"use one of {', '.join(known)}" if known else "it takes none"
