"""Small models of public architectures with random weights, made from their configurations: nothing is downloaded.

    from zoo_models import MODELS
    zoo = MODELS["llama"]()             # a Zoo: module, sample(seed), dynamic
    zoo.module(*zoo.sample(0).values())

Needs torch, and transformers, timm or torchvision for the entries of each. An entry builds its model only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from zoo_base import Call, Zoo
from zoo_transformers import SOUNDS, TEXTS, VISION, clip, detr, hearing, sam, text, vision, whisper
from zoo_vision import DETECTORS, TIMM, TORCHVISION, detector, raft, timm_model, torchvision_model

MODELS: dict[str, Callable[..., Zoo]] = {
    **{name: lambda name=name, **options: text(name, **options) for name in TEXTS},
    **{name: lambda name=name, **options: vision(name, **options) for name in VISION},
    **{name: lambda name=name, **options: hearing(name, **options) for name in SOUNDS},
    "whisper": whisper, "clip": clip, "detr": detr, "sam": sam, "tv_raft": raft,
    **{f"timm_{name}": lambda name=name: timm_model(name) for name in TIMM},
    **{name: lambda name=name: torchvision_model(name) for name in TORCHVISION},
    **{name: lambda name=name: detector(name) for name in DETECTORS},
}  # fmt: skip


def export(model: Zoo, path: str, *, dynamo: bool, opset: int, free: bool) -> None:
    """Write a model as ONNX by PyTorch's exporter, the new or the old one, with free or fixed sizes."""
    inputs = model.sample(0)
    arguments: dict[str, Any] = {"input_names": list(inputs), "opset_version": opset, "dynamo": dynamo}
    if free and dynamo:
        arguments["dynamic_shapes"] = (
            (tuple(dict.fromkeys(model.dynamic.get(name, {}), torch.export.Dim.AUTO) for name in inputs),)
            if isinstance(model.module, Call)
            else tuple(dict.fromkeys(model.dynamic.get(name, {}), torch.export.Dim.AUTO) for name in inputs)
        )
    elif free:
        arguments["dynamic_axes"] = model.dynamic
    if dynamo:
        arguments |= {"external_data": False, "verbose": False}
    torch.onnx.export(model.module, tuple(inputs.values()), path, **arguments)
