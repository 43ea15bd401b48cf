"""Adapters as a file of their own: what a run with `lora` has trained, without the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx_ir as ir
import safetensors
import safetensors.numpy

from onnxamp.errors import ModelError, UsageError
from onnxamp.trainer.checkpoint import atomic, disk_error
from onnxamp.trainer.inference import Trained, inference_model, weights_of
from onnxamp.training.lora import merge
from onnxamp.training.manifest import Adapter

_KEY = "onnxamp.adapters"


def write_adapter(trained: Trained, path: Path, weights: str = "master") -> int:
    """Write everything that was trained as safetensors: A and B of each weight, and what `trainable` added; returns the number of tensors.

    The metadata entry `onnxamp.adapters` is a JSON list with the fields of `manifest.Adapter`.

    Raises:
        UsageError: The bundle has no adapters, or no such weights.
        RuntimeMissingError: The file cannot be written.
    """
    adapters = trained.bundle.manifest.adapters
    if not adapters:
        raise UsageError("This run has no adapters: build it with --lora rank=8,alpha=16,target=PATTERN.")
    values = trained.values(weights)
    text = json.dumps([dataclasses.asdict(adapter) for adapter in adapters])
    try:
        with atomic(path) as file:
            file.write(safetensors.numpy.save(values, {_KEY: text}))
    except OSError as problem:
        raise disk_error(path, problem) from problem
    return len(values)


def merged_model(model: ir.Model, path: Path) -> ir.Model:
    """A copy of `model` with the adapters of a file merged into its weights.

    Raises:
        ModelError: The file is no file of adapters.
        UsageError: It is for another model.
    """
    try:
        with safetensors.safe_open(path, framework="np") as file:
            values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            text = (file.metadata() or {}).get(_KEY)
        if text is None:
            raise ModelError(f"{path} holds no adapters of onnxamp: `onnxamp export RUN --adapter FILE` writes some.")
        adapters = [Adapter(**entry) for entry in json.loads(text)]
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as problem:
        raise ModelError(f"{path} is no file of adapters ({problem}).") from problem
    known = weights_of(model, {adapter.weight for adapter in adapters})
    return inference_model(model, merge(adapters, values, known))
