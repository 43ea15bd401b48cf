"""Peak memory and time of training steps with and without `memory_budget`, for a 12-layer GPT; gradients bit for bit.

    python benchmarks/recompute.py [--share 0.3] [--level O0] [--rows 8]

Each measurement is a process of its own with one thread; peak memory is the growth of its resident set from before the first step. Times
are processor time, which a busy machine disturbs less: medians of steps, and the least of three interleaved measurements.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import statistics
import subprocess
import sys
import time
import warnings

import numpy as np

LAYERS, WIDTH, HEADS, TOKENS, WORDS = 12, 128, 4, 128, 256


def model() -> bytes:
    """The GPT in training form, with a free batch size."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            q, k, v = self.qkv(self.first(x)).reshape(rows, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5 + mask
            mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(rows, TOKENS, WIDTH)
            x = x + self.drop(self.out(mixed))
            return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.second(x)))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.table(words) + self.places
            mask = torch.full((TOKENS, TOKENS), -1e4).triu(1)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    file = io.BytesIO()
    axes = {"words": {0: "batch"}, "logits": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Net().train(), (torch.zeros(2, TOKENS, dtype=torch.int64),), file, input_names=["words"],
                          output_names=["logits"], dynamic_axes=axes, dynamo=False, opset_version=17,
                          training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)  # fmt: skip
    return file.getvalue()


def one(path: str, rows: int, steps: int) -> None:
    """Train a bundle; print peak growth, median time and a digest of gradients and parameters."""
    import onnxamp
    from onnxamp.training.bundle import Bundle

    trainer = onnxamp.Trainer(Bundle.load(path), "cpu", threads=1)
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (rows, TOKENS + 1))
    batch = {"words": words[:, :-1].copy(), "labels": words[:, 1:].copy()}
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = _status("VmRSS")
    times = []
    for _ in range(steps):
        began = time.process_time()
        trainer.micro_step(batch)
        times.append(time.process_time() - began)
    digest = hashlib.sha256()
    for arena in ("gradient", "master"):
        for name, value in sorted(trainer._arenas.values(arena).items()):
            digest.update(name.encode() + value.tobytes())
    print(
        json.dumps(
            {"bytes": _status("VmHWM") - before, "time": statistics.median(times[1:]), "digest": digest.hexdigest()}
        )
    )


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, nargs="*", default=[0.42, 0.3])
    parser.add_argument("--level", default="O0")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one, arguments.rows, arguments.steps)
        return
    import tempfile

    from onnxamp.training import AdamW, build

    source = model()
    path = tempfile.mkdtemp(prefix="onnxamp-recompute-")
    with open(f"{path}/gpt.onnx", "wb") as file:
        file.write(source)
    options = {"loss": {"name": "cross_entropy", "axis": 2}, "optimizer": AdamW(lr=1e-3), "level": arguments.level}
    dim = {"batch": arguments.rows}
    whole = build(f"{path}/gpt.onnx", memory_budget=10**15, dim=dim, **options)
    need = int(whole.manifest.notes[-1].split(" take ")[1].split(" ")[0].replace(",", ""))
    bundles = {"everything kept": whole}
    for share in arguments.share:
        bundles[f"budget {share:.0%}"] = build(f"{path}/gpt.onnx", memory_budget=int(share * need), dim=dim, **options)
    for index, bundle in enumerate(bundles.values()):
        bundle.save(f"{path}/{index}")
    found: dict[str, list[dict]] = {name: [] for name in bundles}
    for _ in range(3):  # interleaved: what disturbs the machine disturbs all
        for index, name in enumerate(bundles):
            command = [
                sys.executable,
                "-P",
                __file__,
                "--one",
                f"{path}/{index}",
                "--rows",
                str(arguments.rows),
                "--steps",
                str(arguments.steps),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout))
    print(
        f"{LAYERS} layers, width {WIDTH}, {TOKENS} tokens, {arguments.rows} rows, {arguments.level}, Dropout 0.1; modelled: {need:,} bytes"
    )
    print(
        "| bundle | peak growth, MB | of the first | processor s per step | of the first | bits |\n|---|---|---|---|---|---|"
    )
    first = None
    for name, runs in found.items():
        size, seconds = min(run["bytes"] for run in runs), min(run["time"] for run in runs)
        first = first or (size, seconds, runs[0]["digest"])
        same = "equal" if all(run["digest"] == first[2] for run in runs) else "DIFFERENT"
        print(
            f"| {name} | {size / 1e6:.0f} | {size / first[0]:.2f} | {seconds:.3f} | {seconds / first[1]:.2f} | {same} |"
        )
    for name, bundle in bundles.items():
        print(f"* {name}: {bundle.manifest.notes[-1]}")


if __name__ == "__main__":
    main()
