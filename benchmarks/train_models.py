"""The models of benchmarks/train.py, with a batch each, and their export as ONNX."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

VOCABULARY = 1000


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x, mask):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Dropout, if any, where GPT-2 has it on activations: behind the embedding and both branches of a block."""

    def __init__(self, layers=4, width=256, heads=8, vocabulary=VOCABULARY, tokens=128, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.register_buffer("mask", torch.full((tokens, tokens), -1e4).triu(1))
        self.register_buffer("positions", torch.arange(tokens))

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.places(self.positions))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        same = inner == outer and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.skip(x)).relu()


class Inverted(nn.Module):
    """The block of MobileNetV2: widen, one filter per channel, narrow."""

    def __init__(self, inner, outer, stride, factor=4):
        super().__init__()
        wide = factor * inner
        self.layers = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.same = inner == outer and stride == 1

    def forward(self, x):
        y = self.layers(x)
        return x + y if self.same else y


class Tagger(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, width=128, hidden=256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids):
        return self.head(self.lstm(self.tokens(ids))[0])


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def mobilenet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        Inverted(16, 24, 2), Inverted(24, 24, 1), Inverted(24, 32, 2), Inverted(32, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def make(name: str):
    """(module, inputs by name, labels) of a model; `NAME+dropout` has Dropout."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    name, _, dropout = name.partition("+")
    if name == "gpt":
        ids, labels = rng.integers(0, VOCABULARY, (2, 8, 128))
        return GPT(dropout=0.1 if dropout else 0.0), {"ids": ids}, labels
    if name == "lstm":
        ids, labels = rng.integers(0, VOCABULARY, (2, 32, 64))
        return Tagger(), {"ids": ids}, labels
    if name == "mlp":
        return mlp(), {"x": rng.standard_normal((128, 784), np.float32)}, rng.integers(0, 10, 128)
    images = {"x": rng.standard_normal((32, 3, 32, 32), np.float32)}
    return {"resnet": resnet, "mobilenet": mobilenet}[name](), images, rng.integers(0, 10, 32)


def layouts() -> dict[str, list[tuple[int, ...]]]:
    """Ten million parameters in several ways: name → shapes."""
    gpt = GPT(layers=8, vocabulary=7000)
    return {
        "1 of 10M": [(2500, 4000)],
        "20 of 500k": [(1000, 500)] * 20,
        "610 of 16k": [(128, 128)] * 610,
        "a GPT's": [tuple(parameter.shape) for parameter in gpt.parameters()],
    }


class Scaled(nn.Module):
    """The cheapest model with parameters of these shapes: their sum times x."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(shape) for shape in shapes)

    def forward(self, x):
        return sum((weight * x).sum() for weight in self.weights).reshape(1, 1)


def export(module: nn.Module, inputs: dict[str, np.ndarray], path: Path) -> None:
    """The module as ONNX, with a free batch size, in training form (batch statistics, no folded BatchNorm)."""
    names = list(inputs)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train(),
            tuple(torch.from_numpy(value) for value in inputs.values()),
            path,
            input_names=names,
            output_names=["logits"],
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=17,
            dynamic_axes={name: {0: "batch"} for name in names},
        )
