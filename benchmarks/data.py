"""Throughput and memory of training on .npy files larger than what may be held: against the same batches from memory.

    python benchmarks/data.py [--gigabytes 2] [--rounds 12] [--steps 40] [--batch-size 32] [--json FILE]

Writes a folder with `x.npy` and `labels.npy`. Throughput: rounds of micro-steps, in turn from the mapped files and from the same arrays in
memory, shuffled alike and read ahead alike, in one process; the result is the median of the rounds' ratios. Memory: a process of its own
trains one epoch from the files, and its resident memory is compared with that after the first ten steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx

import onnxamp
from onnxamp.trainer.batches import Batches, bind
from onnxamp.trainer.data import open_data
from onnxamp.training import build

ROW = (3, 64, 64)
MODEL = """<ir_version: 9, opset_import: ["": 17]> net (float[n, 3, 64, 64] x) => (float[n, 10] y) {
    a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)  b = Relu(a)
    c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (b, w2)  d = Relu(c)
    e = GlobalAveragePool(d)  f = Flatten(e)  y = MatMul(f, w3)
}"""


def write(folder: Path, gigabytes: float) -> int:
    """The data; how many rows they have."""
    rows = int(gigabytes * 1e9 / (4 * np.prod(ROW)))
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, *ROW))
    rng = np.random.default_rng(0)
    for start in range(0, rows, 1024):
        x[start : start + 1024] = rng.random((min(1024, rows - start), *ROW), np.float32)
    x.flush()
    np.save(folder / "labels.npy", rng.integers(0, 10, rows))
    return rows


def trainer() -> onnxamp.Trainer:
    """A small convolutional network."""
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (16, 3, 3, 3)), ("w2", (32, 16, 3, 3)), ("w3", (32, 10))):
        tensor = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(tensor, name))
    return onnxamp.Trainer(build(model, loss="cross_entropy", optimizer="sgd", level="O0"))


def resident() -> float:
    """Resident memory of this process in MB, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def batches(source: object, to: onnxamp.Trainer, size: int, prefetch: int = 2) -> Batches:
    return Batches(bind(open_data(source), to.fields, optional=("weights",)), size, prefetch=prefetch)


def throughput(folder: Path, rounds: int, steps: int, size: int) -> dict[str, float]:
    """Rows per second from the files and from memory, and the median of the rounds' ratios."""
    to = trainer()
    sources = {"files": folder, "memory": {path.stem: np.load(path) for path in folder.glob("*.npy")}}
    running = {name: batches(source, to, size).epoch() for name, source in sources.items()}
    times: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(rounds + 1):
        for name in sorted(sources, reverse=turn % 2 == 1):
            started = time.perf_counter()
            for _ in range(steps):
                to.micro_step(next(running[name]))
            times[name].append(time.perf_counter() - started)
    for stream in running.values():
        stream.close()
    times = {name: found[1:] for name, found in times.items()}  # the first round warms up
    ratios = [memory / files for files, memory in zip(times["files"], times["memory"], strict=True)]
    rates = {f"rows_per_second_{name}": steps * size / statistics.median(found) for name, found in times.items()}
    return {**rates, "ratio": statistics.median(ratios), "ratio_of_totals": sum(times["memory"]) / sum(times["files"])}


def growth(folder: Path, size: int) -> dict[str, float]:
    """Resident memory in MB over an epoch from the files."""
    to, most, start = trainer(), 0.0, 0.0
    for k, batch in enumerate(batches(folder, to, size).epoch()):
        to.micro_step(batch)
        if k == 10:
            start = resident()
        most = max(most, resident())
    return {"start_mb": start, "most_mb": most, "growth_mb": most - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--grow", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        print(json.dumps(growth(options.grow, options.batch_size)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found: dict[str, float] = {"rows": write(folder, options.gigabytes)}
        child = [sys.executable, __file__, "--grow", scratch, "--batch-size", str(options.batch_size)]
        found |= json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout)
        found |= throughput(folder, options.rounds, options.steps, options.batch_size)
    for name, value in found.items():
        print(f"{name:24} {value:12,.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
