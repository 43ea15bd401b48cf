"""Time and memory of a training step: onnxamp on ONNX Runtime against PyTorch and onnxruntime-training, interleaved.

    python benchmarks/train.py                                  # all models; writes benchmarks/results/train.md
    python benchmarks/train.py --ort-training VENV/bin/python   # with onnxruntime-training-cpu 1.19.2
    python benchmarks/train.py --model mlp --rounds 5 --no-write

A step is forward, backward and optimizer on one batch (grad, reduce and update graphs). Each engine has a process of its own
and they take turns within each round, so that a slow moment of the machine meets all of them; the table shows medians, and a
ratio is the median of the rounds' ratios. Memory is the peak of the first steps above what the process held before.

onnxruntime-training needs an environment of its own: `pip install onnxruntime-training-cpu==1.19.2 "numpy<2" onnx==1.17.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OURS, REFERENCE, ORT_TRAINING = "onnxamp", "PyTorch", "onnxruntime-training"
DROPOUT = f"{OURS} + Dropout"
STEPS = (OURS, REFERENCE, "PyTorch fused", ORT_TRAINING)
MODELS = {
    "gpt": (*STEPS, "PyTorch bf16 autocast", DROPOUT, "PyTorch + Dropout"),
    "resnet": (*STEPS, "PyTorch bf16 autocast"),
    "mlp": (*STEPS, "PyTorch bf16 autocast"),
    "mobilenet": STEPS,
    "lstm": STEPS,
    **{f"update, {layout}": STEPS[:3] for layout in ("1 of 10M", "20 of 500k", "610 of 16k", "a GPT's")},
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Engine:
    """An engine with a model in a process of its own.

    Attributes:
        memory: MiB at the peak of a step above those held before it.
        times: Milliseconds of a step, by round.
        problem: Why there is no process.
    """

    def __init__(self, python: str, name: str, model: str, threads: int, folder: Path) -> None:
        folder.mkdir()
        self.times: list[float] = []
        self.memory, self.problem = 0.0, ""
        self._errors = folder / "errors.txt"
        command = [python, str(ROOT / "train_engines.py"), name, model, str(threads), str(folder)]
        environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def start(self) -> None:
        """Wait for the first steps."""
        try:
            self.memory = self._answer()
        except EOFError:
            lines = self._errors.read_text().strip().splitlines()
            self.problem = lines[-1] if lines else "it ended without a word"

    def round(self, clock: str, seconds: float) -> None:
        """Make steps for that long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{clock} {seconds}\n")
        self._process.stdin.flush()
        self.times.append(self._answer())

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@ "):
                return float(line[2:])
        raise EOFError


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Engine]:
    """All engines of a model, measured in turns."""
    with tempfile.TemporaryDirectory(prefix="onnxamp-train-") as folder:
        engines = {}
        for index, name in enumerate(MODELS[model]):
            python = arguments.ort_training if name == ORT_TRAINING else sys.executable
            if python:
                engines[name] = Engine(python, name, model, arguments.threads, Path(folder) / str(index))
                engines[name].start()  # one after the other: the peak of one must not meet another's building
        running = [engine for engine in engines.values() if not engine.problem]
        for _ in range(arguments.rounds):
            for engine in running:
                engine.round(arguments.clock, arguments.seconds)
        for engine in engines.values():
            engine.stop()
    return engines


def rows(model: str, engines: dict[str, Engine]) -> Iterator[str]:
    """Lines of the table; the ratio says how long onnxamp takes where this engine takes 1."""
    ours = engines[OURS].times
    for name, engine in engines.items():
        if engine.problem:
            yield f"| {model} | {name} | {engine.problem} | | |"
            continue
        ratio = statistics.median(a / b for a, b in zip(ours, engine.times, strict=True))
        memory = "" if model.startswith("update") else f"{engine.memory:.0f}"
        yield f"| {model} | {name} | {statistics.median(engine.times):.1f} | {ratio:.2f} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.8, help="time of each engine in a round; at least one step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ort-training", metavar="PYTHON", help="interpreter that has onnxruntime-training-cpu")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, for one thread on a machine that is not idle",
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    lines = ["| model | engine | step, ms | onnxamp / it | step memory, MiB |", "|---|---|---|---|---|"]
    for model in arguments.model:
        for line in rows(model, measure(model, arguments)):
            lines.append(line)
            print(line, flush=True)
    if not arguments.no_write:
        write("\n".join(lines), arguments)


def write(table: str, arguments: argparse.Namespace) -> None:
    """Replace what was measured in the results file; the text around it stays."""
    import onnxruntime
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    text = f"""{BEGIN}
{datetime.date.today()}, {cpu or platform.processor()}, {arguments.threads} threads, ONNX Runtime {onnxruntime.__version__}, PyTorch
{torch.__version__}, Python {platform.python_version()}. AdamW, fp32 unless stated; {arguments.clock} time;
{arguments.rounds} interleaved rounds of {arguments.seconds:g} s, medians.
Made by `python benchmarks/train.py`; load average of the machine while it ran: {os.getloadavg()[1]:.1f} (its own threads
included; where it is far above {arguments.threads}, other programs ran too and only ratios mean something).

{table}
{END}"""
    target = ROOT / "results" / "train.md"
    before = target.read_text()
    target.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, before, flags=re.DOTALL))
    print(target)


if __name__ == "__main__":
    main()
