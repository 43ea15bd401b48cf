"""What the models of the zoo have in common: a module with its inputs, made like a trained one.

Constant parameters (scales of 1, biases of 0, layer scales of 1e-6) get noise and BatchNormalization gets statistics of its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, TOKENS, PIXELS = 500, 24, 64


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A model with what it is fed.

    Attributes:
        module: In evaluation mode, takes tensors by position, gives a tensor or a tuple.
        sample: Inputs by name, for a seed.
        dynamic: Names of free dimensions by input and axis.
    """

    module: nn.Module
    sample: Callable[[int], dict[str, torch.Tensor]]
    dynamic: dict[str, dict[int, str]]


class Call(nn.Module):
    """A transformers model called by position, with its tensors among the outputs (`want` of them) as result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], want: int = 1, **constants: Any) -> None:
        super().__init__()
        self.model, self.names, self.want, self.constants = model, names, want, constants

    def forward(self, *tensors: torch.Tensor) -> Any:
        found = self.model(**dict(zip(self.names, tensors, strict=True)), **self.constants)
        values = found.values() if hasattr(found, "values") else found if isinstance(found, (tuple, list)) else [found]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point]
        return tensors[0] if self.want == 1 else tuple(tensors[: self.want])


fresh = False
"""Leave parameters as PyTorch makes them: many are equal, and exporters write equal ones once."""


def enliven(module: nn.Module, seed: int) -> None:
    """Noise for parameters that are constant, as in no trained model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if not parameter.dtype.is_floating_point or parameter.numel() < 2 or parameter.std() > 1e-5:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        level = parameter.detach().mean()
        with torch.no_grad():
            if level.abs() > 0.05:  # a scale
                parameter.mul_(1 + 0.2 * noise)
            elif level != 0 or "gamma" in name or "scale" in name:  # a layer scale, which training enlarges
                parameter.copy_(0.3 + 0.1 * noise)
            elif parameter.ndim > 1:  # a matrix that starts at zero
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.1 * noise)


def settle(module: nn.Module, sample: Callable[[int], dict[str, torch.Tensor]]) -> None:
    """Statistics for BatchNormalization: those of two samples, layer by layer."""
    norms = [inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 0.5
    if norms:
        with torch.no_grad():
            for seed in (100, 101, 102, 103):
                module(*sample(seed).values())
    module.eval()


def zoo(module: nn.Module, sample: Callable[[int], dict[str, torch.Tensor]], dynamic: dict[str, dict[int, str]]) -> Zoo:
    module.eval()
    if not fresh:
        enliven(module, 1)
    settle(module, sample)
    return Zoo(module.requires_grad_(True), sample, dynamic)


def words(names: tuple[str, ...], batch: int = 2, tokens: int = TOKENS) -> Callable[[int], dict[str, torch.Tensor]]:
    """Token ids of one padded and one full row, with mask and the other integer inputs that are named."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[0, tokens * 2 // 3 :] = 0
        ids = torch.randint(5, VOCABULARY, (batch, tokens), generator=generator)
        made = {
            "input_ids": ids * mask + (1 - mask),
            "attention_mask": mask,
            "token_type_ids": (torch.arange(tokens) >= tokens // 2).long().expand(batch, -1).contiguous(),
            "decoder_input_ids": torch.randint(5, VOCABULARY, (batch, tokens // 2), generator=generator),
        }
        return {name: made[name] for name in names}

    return sample


def pictures(
    names: tuple[str, ...] = ("pixel_values",), batch: int = 2, size: int = PIXELS, channels: int = 3
) -> Callable[[int], dict[str, torch.Tensor]]:
    """Smooth pictures, normalized as usual; and token ids beside them where named."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(batch, channels, 8, 8, generator=generator)
        smooth = nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)
        picture = smooth + 0.1 * torch.randn(batch, channels, size, size, generator=generator)
        text = words(tuple(name for name in names if name.endswith(("_ids", "_mask"))), batch)(seed)
        return {name: text.get(name, picture) for name in names}

    return sample


def sound(name: str, shape: tuple[int, ...]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Tones and noise: a wave along the last axis."""

    def sample(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        time = torch.arange(shape[-1]) / shape[-1]
        pitch = 5 + 200 * torch.rand(*shape[:-1], 1, generator=generator)
        return {name: torch.sin(6.2832 * pitch * time) + 0.2 * torch.randn(shape, generator=generator)}

    return sample


def free(names: tuple[str, ...], tokens: bool = True) -> dict[str, dict[int, str]]:
    return {
        name: {0: "batch", 1: "decoder" if name.startswith("decoder") else "tokens"}
        if tokens and "_" in name and name != "pixel_values"
        else {0: "batch"}
        for name in names
    }
