"""What the training loop costs besides the runtime's own runs, with all that `onnxamp train` does around a step.

    python benchmarks/loop_overhead.py [--epochs 8] [--step sleep] [--terminal] [--profile]

Trains the CNN of `models/` on its digits with the callbacks of the command: records, a checkpoint per epoch, status lines. The gradient's
run is drawn out to 50 ms, by running it again and again, or by sleep, after which the caches are as cold. What a window of one
micro-step takes besides the runtime's runs is the loop's: from the end of one window to the end of the next, callbacks included, in
wall time and in processor time of the training thread; the checkpoint at the end of an epoch counts in the mean, not in the median. The
thread that reads ahead works while the runtime computes; its processor time is told apart.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
from onnxruntime import InferenceSession
from rich.console import Console

import onnxamp
from onnxamp.trainer.callbacks import Callback, Checkpoints
from onnxamp.trainer.progress import Progress
from onnxamp.trainer.tracking import MetricsFile
from onnxamp.training import build

MODELS = Path(__file__).resolve().parents[1] / "models"
STEP = 0.050


class Clock(Callback):
    """Per window the seconds outside the runtime: wall, and processor of this thread."""

    def __init__(self, sleeps: bool) -> None:
        self.wall: list[float] = []
        self.own: list[float] = []
        self.reader: list[float] = []
        self.drawn_out = False
        self._runs, self._inside_wall, self._inside_own = 0, 0.0, 0.0
        self._ended = (time.perf_counter(), time.thread_time())
        original = InferenceSession.run_with_iobinding
        training = threading.get_ident()

        def run(*arguments) -> None:
            if threading.get_ident() != training:  # a share of the update: the training thread waits for it
                original(*arguments)
                return
            wall, own = time.perf_counter(), time.thread_time()
            original(*arguments)
            self._runs += 1
            if self.drawn_out and self._runs == 1:
                if sleeps:
                    time.sleep(max(0.0, STEP - (time.perf_counter() - wall)))
                while time.perf_counter() - wall < STEP:
                    original(*arguments)
            self._inside_wall += time.perf_counter() - wall
            self._inside_own += time.thread_time() - own

        InferenceSession.run_with_iobinding = run

    def on_window(self, state, window) -> None:
        wall, own = time.perf_counter(), time.thread_time()
        self.wall.append(wall - self._ended[0] - self._inside_wall)
        self.own.append(own - self._ended[1] - self._inside_own)
        for thread in threading.enumerate():
            if thread.name == "onnxamp-prefetch" and thread.ident is not None:
                self.reader.append(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)))
        self._runs, self._inside_wall, self._inside_own = 0, 0.0, 0.0
        self._ended = (time.perf_counter(), time.thread_time())

    def per_window_of_reader(self) -> float:
        """Seconds of the reading thread's processor time between two windows of one epoch, in the median."""
        return statistics.median(b - a for a, b in zip(self.reader, self.reader[1:], strict=False) if b >= a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--step", choices=["compute", "sleep"], default="compute", help="how 50 ms go by")
    parser.add_argument("--terminal", action="store_true", help="with the living line of a terminal")
    parser.add_argument("--profile", action="store_true", help="show where the time goes; the profiler slows it down")
    options = parser.parse_args()
    data = dict(np.load(MODELS / "digits_train.npz"))
    bundle = build(MODELS / "cnn.onnx", loss="cross_entropy", optimizer="adamw", level="O2", dtype="fp16")
    trainer, clock = onnxamp.Trainer(bundle), Clock(options.step == "sleep")
    trainer.fit(data, epochs=1, batch_size=32)
    trainer.position = {}
    clock.drawn_out = True
    profiler = cProfile.Profile(time.thread_time)
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w", encoding="utf-8") as nowhere:
        folder = Path(scratch)
        trainer.bundle = bundle.save(folder / "bundle")  # as the command does before it begins
        shown = Progress(Console(file=nowhere, force_terminal=options.terminal, width=120))
        callbacks = [MetricsFile(folder / "metrics.jsonl"), Checkpoints(folder / "checkpoints"), shown, clock]
        if options.profile:
            profiler.enable()
        trainer.fit(data, epochs=options.epochs, batch_size=32, callbacks=callbacks)
        profiler.disable()
    print(f"{len(clock.wall) - 1} windows outside the runtime, load {os.getloadavg()[0]:.1f}:")
    for name, values in (("wall", clock.wall[1:]), ("processor of the training thread", clock.own[1:])):
        median, mean = statistics.median(values), statistics.fmean(values)
        print(
            f"{name}: median {1e3 * median:.3f} ms ({median / STEP:.2%}), mean {1e3 * mean:.3f} ms ({mean / STEP:.2%})"
        )
    print(f"processor of the thread that reads ahead: {1e3 * clock.per_window_of_reader():.3f} ms")
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
