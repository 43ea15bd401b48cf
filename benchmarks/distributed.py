"""Data-parallel training in 2 and 4 real processes (torchrun, gloo) against one process with the same windows.

Run as `python benchmarks/distributed.py [--processes 2 4]`; writes `benchmarks/results/distributed.md`. Each case is one run of
the command: level O0 and O2, Dropout in the model, rows that do not divide evenly, a row that overflows fp16 on one rank, a
rank that is killed, and a resume on other numbers of processes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

ROWS = 1_030
WINDOW = 64
MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n,20] x) => (float[n,5] y) {
    training = Constant<value_int=1>()
    flag = Cast<to=9>(training)
    ratio = Constant<value = float {0.2}>()
    a = Gemm<transB=1>(x, w0, b0)
    r = Relu(a)
    d, mask = Dropout<seed=1>(r, ratio, flag)
    h = Gemm<transB=1>(d, w1, b1)
    t = Tanh(h)
    y = Gemm<transB=1>(t, w2, b2)
}"""
# The command; it counts the all-reduces of its rank, and kills one rank without warning in a micro-step that the environment names.
WORKER = """
import atexit, os, pathlib, signal
from onnxamp.cli import main
from onnxamp.trainer.trainer import Trainer

rank = os.environ.get("RANK", "0")
step, taken = Trainer.micro_step, []

def micro_step(self, batch, rows=None):
    taken.append(rows)
    if rank == os.environ["KILL_RANK"] and len(taken) == int(os.environ["KILL_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, rows)

Trainer.micro_step = micro_step
if "RANK" in os.environ:
    import torch.distributed as distributed

    together, reduced = distributed.all_reduce, []
    distributed.all_reduce = lambda *arguments, **named: (reduced.append(1), together(*arguments, **named))[1]
    atexit.register(lambda: pathlib.Path(f"reduced-{rank}").write_text(str(len(reduced))))
main()
"""
HEAD = "| processes | level | data | windows, skipped | all-reduces | skips and scales | loss | parameters | seconds |"
TRAINING = ("model.onnx", "--loss", "cross_entropy", "--lr", "0.003", "--epochs", "2", "--provider", "cpu")


def prepare(folder: Path) -> None:
    """Write the model and the data, plain and with one row that is beyond fp16."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(MODEL)
    for name, shape in (
        ("w0", (64, 20)),
        ("w1", (64, 64)),
        ("w2", (5, 64)),
        ("b0", (64,)),
        ("b1", (64,)),
        ("b2", (5,)),
    ):
        values = rng.standard_normal(shape).astype(np.float32) * (0.15 if len(shape) > 1 else 0)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, folder / "model.onnx")
    x = rng.standard_normal((ROWS, 20), np.float32)
    labels = np.argmax(x @ rng.standard_normal((20, 5)), axis=1)
    np.savez(folder / "data.npz", x=x, labels=labels)
    x[500] = 1e6
    np.savez(folder / "huge.npz", x=x, labels=labels)


def train(folder: Path, processes: int, *arguments: str, kill: tuple[int, int] | None = None) -> tuple[int, str, float]:
    """Run the command in so many processes, in `folder`; exit code, stderr, seconds. `kill`: a rank, and its last micro-step."""
    (folder / "worker.py").write_text(WORKER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment |= dict(zip(("KILL_RANK", "KILL_STEP"), map(str, kill or (-1, 0)), strict=True))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else ()), "worker.py", "train", *arguments]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr, time.perf_counter() - began


def parameters(run: Path) -> dict[str, np.ndarray]:
    """The trained parameters of a run."""
    graph = onnx.load(run / "model.onnx").graph
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def windows(run: Path) -> list[dict]:
    """What was recorded of each window."""
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["kind"] == "window"]


def difference(run: Path, other: Path) -> float:
    """Largest difference of a parameter, relative to the largest parameter of its tensor."""
    first, second = parameters(run), parameters(other)
    return max(float(np.abs(first[name] - second[name]).max() / np.abs(second[name]).max()) for name in second)


def compare(folder: Path, processes: int, level: str, data: str) -> list[str]:
    """One row of the table: the same run in `processes` processes and in one, with the same micro-batches."""
    common = [*TRAINING, "--data", data, "--level", level, "--batch-size", str(WINDOW // processes // 2)]
    common += ["--init-scale", "1024"] if level != "O0" else []
    alone, together = (f"{level}-{Path(data).stem}-{processes}-{kind}" for kind in ("alone", "together"))
    for name, number, accumulate in ((alone, 1, 2 * processes), (together, processes, 2)):
        code, problem, seconds = train(folder, number, *common, "--accumulate", str(accumulate), "-o", name)
        if code:
            raise SystemExit(problem)
    first, second = windows(folder / alone), windows(folder / together)
    skipped = [[entry["window"] for entry in entries if entry["skipped"]] for entries in (first, second)]
    scales = [[entry["next_loss_scale"] for entry in entries] for entries in (first, second)]
    loss = max(
        abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(first, second, strict=True) if not a["skipped"]
    )
    same = "equal" if skipped[0] == skipped[1] and scales[0] == scales[1] else "DIFFERENT"
    apart = difference(folder / together, folder / alone)
    reduced = {(folder / f"reduced-{rank}").read_text() for rank in range(processes)}
    counts = f"{len(first)}, {len(skipped[0])}"
    return [
        str(processes), level, data, counts, ", ".join(sorted(reduced)), same, f"{loss:.1e}", f"{apart:.1e}", f"{seconds:.0f}"
    ]  # fmt: skip


def lose(folder: Path, processes: int) -> list[list[str]]:
    """Kill the last rank, then go on with other numbers of processes; each ends as a run that was never stopped."""
    common = [*TRAINING, "--data", "data.npz", "--level", "O0"]
    rows = []
    whole = f"whole-{processes}"
    code, problem, _ = train(folder, 1, *common, "--batch-size", str(WINDOW), "-o", whole)
    if code:
        raise SystemExit(problem)
    for after in (1, 2 if processes != 2 else 4):
        run = f"killed-{processes}-{after}"
        size = str(WINDOW // processes)
        code, problem, seconds = train(
            folder, processes, *common, "--batch-size", size, "-o", run, kill=(processes - 1, 20)
        )
        told = sum(f"[rank {rank}] Error: One of the" in problem for rank in range(processes - 1))
        if not code or f"exitcode  : {-signal.SIGKILL}" not in problem:
            raise SystemExit(problem)
        saved = sorted(path.stem for path in (folder / run / "checkpoints").glob("step-*"))[-1]
        code, problem, _ = train(folder, after, "--resume", "-o", run)
        if code:
            raise SystemExit(problem)
        apart = difference(folder / run, folder / whole)
        rows.append([str(processes), f"{told} of {processes - 1}", saved, str(after), f"{apart:.1e}", f"{seconds:.0f}"])
    return rows


def table(head: str, rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join([head, "|---" * head.count(" | ") + "|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    """Run everything and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    chosen = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        equal, lost = [], []
        for processes in chosen:
            for level, data in (("O0", "data.npz"), ("O2", "data.npz"), ("O2", "huge.npz")):
                equal.append(compare(folder, processes, level, data))
                print(*equal[-1], flush=True)
            lost += lose(folder, processes)
            print(*lost[-2:], sep="\n", flush=True)
    text = f"""# Several processes on gloo

{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} processors; `python benchmarks/distributed.py`. An MLP with
Dropout 0.2, {ROWS} rows, windows of {WINDOW} rows, two epochs; {ROWS % WINDOW} rows are left for the last window and dealt out unevenly.
`huge.npz` has one row beyond fp16, which overflows on one rank.

Against one process with the same micro-batches (loss: largest relative difference of a window; parameters: largest difference relative to
the largest of the tensor). All-reduces are counted in each rank: one a window, and one at the start, for the size of the first batch's
weights:

{table(HEAD, equal)}

The last rank is killed (SIGKILL) in window 20; the others say so and save window 19; the run goes on with another number of
processes, and is compared with one that was never stopped:

{table("| processes | ranks that said why | saved | goes on with | parameters | seconds to the end |", lost)}
"""
    (Path(__file__).parent / "results" / "distributed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
