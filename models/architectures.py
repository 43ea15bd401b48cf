"""Small PyTorch models of the usual kinds, for tests and benchmarks of training: `KINDS` names them.

Each is a module from one input to logits of classes in dimension 1 (or last, of sequences), with a function that gives `n` samples. `held`
says which of a module's parameters the initializers of its export are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class BidirectionalLstm(nn.Module):
    """Embedding, two bidirectional layers, a class for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(x))[0].mean(1))


class UNet(nn.Module):
    """Two levels with GroupNorm; up by a transposed convolution and by bilinear resizing; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

        self.enter, self.middle, self.bottom = block(3, 8), block(8, 16), block(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.merge, self.last = block(32, 16), block(24, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.enter(x)
        second = self.middle(F.max_pool2d(first, 2))
        third = self.up(self.bottom(F.avg_pool2d(second, 2)))
        merged = self.merge(torch.cat([second, third], 1))
        wide = F.interpolate(merged, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.last(torch.cat([first, wide], 1)))


class MobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions, BatchNorm, ReLU6, Hardswish and squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.depthwise(self.expand(x))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(F.adaptive_avg_pool2d(x + self.project(y * scale), 1).flatten(1))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 10, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.positions
        return self.head(self.norm(self.encoder(y))[:, 0])


class RmsNorm(nn.Module):
    """x / √(mean x² + ε) · weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Llama(nn.Module):
    """A decoder block: RMSNorm, rotary positions, shared key heads, SwiGLU; logits for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 16)
        self.norms = nn.ModuleList(RmsNorm(16) for _ in range(3))
        self.q, self.kv = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down, self.head = nn.Linear(24, 16, bias=False), nn.Linear(16, CLASSES, bias=False)
        angles = torch.outer(torch.arange(6.0), 100.0 ** -torch.arange(0, 1, 0.5))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        y = self.norms[0](h)
        q = self.q(y).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1)
        k, v = self.rotate(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = self.rotate(q) @ k.transpose(-2, -1) * 0.5
        mask = torch.full((6, 6), float("-inf"), device=x.device).triu(1).to(scores.dtype)
        h = h + self.out(((scores + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.norms[1](h)
        h = h + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](h))


class Recurrence(nn.Module):
    """A gated recurrence by PyTorch's scan, which only the TorchDynamo exporter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(4, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        def step(state: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            after = torch.tanh(value + self.gate(state))
            return after, after.clone()

        steps = self.enter(x).transpose(0, 1)
        last, states = scan(step, torch.zeros_like(steps[0]), steps)
        return self.head(last + states.mean(0))


def _tokens(words: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randint(0, words, (n, 6))


def _images(size: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n, 3, size, size)


KINDS: dict[str, tuple[type[nn.Module], Callable[[int], torch.Tensor]]] = {
    "lstm": (BidirectionalLstm, _tokens(11)),
    "unet": (UNet, _images(8)),
    "mobilenet": (MobileNet, _images(12)),
    "vit": (VisionTransformer, _images(12)),
    "llama": (Llama, _tokens(13)),
    "scan": (Recurrence, lambda n: torch.randn(n, 6, 4)),
}


def targets(logits: torch.Tensor, last: bool) -> torch.Tensor:
    """Random classes for logits; classes are last in those of sequences."""
    shape = logits.shape[:-1] if last else (logits.shape[0], *logits.shape[2:])
    return torch.randint(0, CLASSES, shape)


class WithLoss(nn.Module):
    """A module with its mean cross-entropy as the only output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.last = isinstance(module, Llama)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        y = self.module(x)
        return F.cross_entropy(y.flatten(0, 1), t.flatten()) if self.last else F.cross_entropy(y, t)


Form = Callable[[Callable[[str], np.ndarray]], np.ndarray]


def held(proto: onnx.ModelProto, module: nn.Module) -> dict[str, Form]:
    """For each initializer of an export that holds parameters what makes its content, given a function from their names to arrays.

    Exporters rename and turn parameters; they are found by their content, so no two may be equal.
    """
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    found: dict[str, Form] = {}
    missing = set(values)
    for form, names in _forms(module):
        want = form(values.__getitem__)
        for key, array in arrays.items():
            same = array.size == want.size and array.squeeze().shape == want.squeeze().shape
            if key not in found and same and np.allclose(array.squeeze(), want.squeeze(), rtol=1e-4, atol=1e-5):
                found[key] = form
                missing -= set(names)
                break
    if missing:
        raise ValueError(f"No initializer holds {sorted(missing)}.")
    return found


def _forms(module: nn.Module) -> list[tuple[Form, list[str]]]:
    """What becomes of parameters in a file, and of which: each as it is or turned, and those of LSTM joined over directions."""
    result: list[tuple[Form, list[str]]] = []
    for name, value in module.named_parameters():
        result.append(((lambda get, n=name: get(n)), [name]))
        if value.dim() == 2:
            result.append(((lambda get, n=name: get(n).T), [name]))
    for prefix, lstm in module.named_modules():
        if isinstance(lstm, nn.LSTM):
            for layer in range(lstm.num_layers):
                ways = [f"l{layer}", f"l{layer}_reverse"]
                for kind in ("weight_ih", "weight_hh"):
                    names = [f"{prefix}.{kind}_{way}" for way in ways]
                    result.append(((lambda get, n=names: np.stack([_gates(get(i)) for i in n])), names))
                names = [f"{prefix}.bias_{kind}_{way}" for way in ways for kind in ("ih", "hh")]
                result.append(
                    ((lambda get, n=names: np.concatenate([_gates(get(i)) for i in n]).reshape(2, -1)), names)
                )
    return result


def _gates(value: np.ndarray) -> np.ndarray:
    """PyTorch's order i, f, g, o as ONNX's i, o, f, g."""
    i, f, g, o = np.split(value, 4)
    return np.concatenate([i, o, f, g])
