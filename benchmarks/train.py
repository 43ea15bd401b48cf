"""Time and memory of a training step: onnxamp on ONNX Runtime against PyTorch, interleaved on one machine.

    python benchmarks/train.py                      # all models, writes benchmarks/results/train.md
    python benchmarks/train.py --model mlp --rounds 5 --no-write

A step is forward, backward and optimizer on one batch (grad, reduce and update graphs). The engines take turns within each
round, so that a slow moment of the machine meets all of them; the table shows medians, and the ratio is the median of
the rounds' ratios. Memory is the peak of a step above what the process held before it, each engine in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent
ENGINES = ("onnxamp O0", "PyTorch", "PyTorch fused", "PyTorch bf16 autocast")
REFERENCE = "PyTorch"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def models():
    """Model constructors with a batch: name → (module, inputs by name, labels)."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x, mask):
            batch, tokens, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
            x = x + self.out(mixed)
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, layers=4, width=256, heads=8, vocabulary=1000, tokens=128):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.register_buffer("mask", torch.full((tokens, tokens), -1e4).triu(1))
            self.register_buffer("positions", torch.arange(tokens))

        def forward(self, ids):
            x = self.tokens(ids) + self.places(self.positions)
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

    def resnet():
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def mlp():
        return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    rng = np.random.default_rng(0)
    floats = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    ids = lambda high, *shape: rng.integers(0, high, shape)  # noqa: E731
    torch.manual_seed(0)
    return {
        "gpt": (GPT, {"ids": ids(1000, 8, 128)}, ids(1000, 8, 128)),
        "resnet": (resnet, {"x": floats(32, 3, 32, 32)}, ids(10, 32)),
        "mlp": (mlp, {"x": floats(128, 784)}, ids(10, 128)),
    }


def export(module, inputs, path: Path) -> None:
    """The module as ONNX, with a free batch size, in training form (batch statistics, no folded BatchNorm)."""
    import torch

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


def engine(name: str, model: str, threads: int) -> Callable[[], float]:
    """A function that makes one training step and returns its loss."""
    import torch

    torch.set_num_threads(threads)
    make, inputs, labels = models()[model]
    torch.manual_seed(0)
    module = make()
    if name.startswith("onnxamp"):
        from onnxamp.trainer.trainer import Trainer
        from onnxamp.training import AdamW, CrossEntropy, build

        with tempfile.TemporaryDirectory() as folder:
            export(module, inputs, Path(folder) / "model.onnx")
            bundle = build(
                Path(folder) / "model.onnx", loss=CrossEntropy(), optimizer=AdamW(lr=1e-3), level=name.split()[1]
            )
            trainer = Trainer(bundle, "cpu", threads=threads)
        batch = {**inputs, "labels": labels}
        return lambda: trainer.micro_step(batch).loss

    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True if "fused" in name else None)
    tensors, targets = [torch.from_numpy(value) for value in inputs.values()], torch.from_numpy(labels).reshape(-1)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name)

    def step() -> float:
        with autocast:
            logits = module(*tensors)
            loss = torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def memory(name: str, model: str, threads: int) -> float:
    """MiB at the peak of a step above those held before it (Linux)."""
    step = engine(name, model, threads)
    before = _status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def measure(
    steppers: dict[str, Callable[[], object]], rounds: int, steps: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Medians in ms and ratios to the reference of each engine."""
    for step in steppers.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(rounds):
        for name, step in steppers.items():
            took = []
            for _ in range(steps):
                start = clock()
                step()
                took.append(clock() - start)
            times[name].append(1e3 * statistics.median(took))
    return {
        name: {
            "ms": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, times[REFERENCE], strict=True)),
        }
        for name, values in times.items()
    }


def update_engine(name: str, threads: int) -> Callable[[], object]:
    """A function that runs the optimizer alone: AdamW on 10 million parameters in 20 tensors."""
    import torch

    torch.set_num_threads(threads)
    if name.startswith("onnxamp"):
        from onnxamp.trainer.trainer import Trainer
        from onnxamp.training import AdamW, build

        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = torch.nn.ParameterList(torch.rand(1000, 500) for _ in range(20))

            def forward(self, x):
                return sum(x @ weight for weight in self.weights)

        inputs = {"x": np.ones((1, 1000), np.float32)}
        with tempfile.TemporaryDirectory() as folder:
            export(Sum(), inputs, Path(folder) / "model.onnx")
            bundle = build(Path(folder) / "model.onnx", loss="mse", optimizer=AdamW(lr=1e-3), level="O0")
        trainer = Trainer(bundle, "cpu", threads=threads)
        trainer.micro_step({**inputs, "labels": np.ones((1, 500), np.float32)})
        return trainer._loop._update.run
    parameters = [torch.nn.Parameter(torch.rand(1000, 500)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    return torch.optim.AdamW(parameters, fused=True if "fused" in name else None).step


def in_process_of_its_own(*arguments: str) -> float:
    """Run this file again for one number."""
    command = [sys.executable, __file__, *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", default=["gpt", "resnet", "mlp", "update-10m"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time, for one thread on a machine that is not idle",
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--memory", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(*arguments.memory, arguments.threads))
        return
    lines = [
        "| model | engine | step, ms | ratio to PyTorch | step memory, MiB |",
        "|---|---|---|---|---|",
    ]
    for model in arguments.model:
        alone = model == "update-10m"
        engines = [name for name in ENGINES if not (alone and "bf16" in name)]
        make = (lambda name: update_engine(name, arguments.threads)) if alone else (
            lambda name, model=model: engine(name, model, arguments.threads)
        )  # fmt: skip
        result = measure(
            {name: make(name) for name in engines}, arguments.rounds, arguments.steps, CLOCKS[arguments.clock]
        )
        for name, row in result.items():
            used = "" if alone else f"{in_process_of_its_own('--memory', name, model):.0f}"
            lines.append(f"| {model} | {name} | {row['ms']:.1f} | {row['ratio']:.2f} | {used} |")
            print(lines[-1], flush=True)
    if not arguments.no_write:
        write("\n".join(lines), arguments)


def write(table: str, arguments: argparse.Namespace) -> None:
    """Replace the table and the description of the machine in the results file."""
    import onnxruntime
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    text = f"""# Training step: onnxamp on ONNX Runtime against PyTorch

{datetime.date.today()}, {cpu or platform.processor()}, {arguments.threads} threads, ONNX Runtime {onnxruntime.__version__}, PyTorch
{torch.__version__}, Python {platform.python_version()}. AdamW, fp32 unless stated; {arguments.clock} time;
{arguments.rounds} interleaved rounds of {arguments.steps} steps, medians.
Made by `python benchmarks/train.py`; load average of the machine while it ran: {os.getloadavg()[1]:.1f} (its own threads
included; where it is far above {arguments.threads}, other programs ran too and only ratios mean something).

{table}

`gpt`: 4 layers, width 256, 8 heads, vocabulary 1000, batch 8 of 128. `resnet`: 3 residual blocks, widths 32, 64, 128, BatchNorm in training
mode, batch 32 of 3 by 32 by 32. `mlp`: 784-1024-1024-10, batch 128. `update-10m`: the optimizer alone on 10 million parameters.
Step memory is the peak of a step above what the process held before it, each engine in a process of its own.
"""
    target = ROOT / "results" / "train.md"
    target.write_text(text)
    print(target)


if __name__ == "__main__":
    main()
