"""Adapters as a file of their own: what a run with `lora` has trained, without the model."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from onnxamp.errors import ModelError, UsageError
from onnxamp.trainer.checkpoint import atomic, disk_error
from onnxamp.trainer.inference import Trained, inference_model, weights_of
from onnxamp.training.lora import merge
from onnxamp.training.manifest import Adapter

_KEY = "onnxamp.adapters"
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def check_adapters(trained: Trained) -> None:
    """See that there is something to write.

    Raises:
        UsageError: The bundle has no adapters.
    """
    if not trained.bundle.manifest.adapters:
        raise UsageError("This run has no adapters: build it with --lora rank=8,alpha=16,target=PATTERN.")


def write_adapter(trained: Trained, path: Path, weights: str = "master") -> int:
    """Write everything that was trained as safetensors: A and B of each weight, and what `trainable` added; returns the number of tensors.

    The metadata entry `onnxamp.adapters` is a JSON list with the fields of `manifest.Adapter`.

    Raises:
        UsageError: The bundle has no adapters, or no such weights.
        RuntimeMissingError: The file cannot be written.
    """
    check_adapters(trained)
    values = trained.values(weights)
    text = json.dumps([dataclasses.asdict(adapter) for adapter in trained.bundle.manifest.adapters])
    try:
        with atomic(path) as file:
            file.write(safetensors.numpy.save(values, {_KEY: text}))
    except OSError as problem:
        raise disk_error(path, problem) from problem
    return len(values)


def merged_model(model: ir.Model, path: Path) -> ir.Model:
    """A copy of `model` with the adapters of a file merged into its weights.

    Raises:
        ModelError: The file is no file of adapters, lacks a tensor, or has one that is not float32 or not finite.
        UsageError: It is for another model.
    """
    adapters, values = _read(path)
    known = weights_of(model, {adapter.weight for adapter in adapters})
    return inference_model(model, merge(adapters, values, known))


def _read(path: Path) -> tuple[list[Adapter], dict[str, NDArray[Any]]]:
    """The adapters of a file and its tensors by name, checked: all there, float32 and finite."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            text = (file.metadata() or {}).get(_KEY)
        if text is None:
            raise ModelError(f"{path} holds no adapters of onnxamp: `onnxamp export RUN --adapter FILE` writes some.")
        adapters = [_adapter(entry) for entry in json.loads(text)]
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as problem:
        raise ModelError(f"{path} is no file of adapters ({problem}).") from problem
    for adapter in adapters:
        for name in (adapter.a, adapter.b):
            if name not in values:
                raise ModelError(
                    f"{path} lacks the tensor {name!r}, which its metadata names for {adapter.weight!r}: export it again."
                )
    for name, value in values.items():
        if value.dtype != np.float32:
            raise ModelError(
                f"{path} holds {name!r} as {value.dtype}, and adapters are float32: cast it, or export it again."
            )
        if not np.isfinite(value).all():
            raise ModelError(f"{path} holds NaN or infinite values in {name!r}: the model would give nothing else.")
    return adapters, values


def _adapter(entry: dict[str, Any]) -> Adapter:
    """One entry of the metadata; TypeError or ValueError if it is none."""
    adapter = Adapter(**entry)
    for field in dataclasses.fields(Adapter):
        value, kind = getattr(adapter, field.name), _KINDS[str(field.type)]
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            raise TypeError(f"{field.name} is {value!r}")
    if adapter.form not in ("matmul", "conv") or adapter.groups < 1 or not math.isfinite(adapter.scale):
        raise ValueError(f"form {adapter.form!r}, groups {adapter.groups}, scale {adapter.scale}")
    return adapter
