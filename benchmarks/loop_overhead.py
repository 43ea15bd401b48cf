"""What the training loop costs besides the runtime's own runs, with all that `onnxamp train` does around a step.

    python benchmarks/loop_overhead.py [--epochs 4]

Trains the CNN of `models/` on its digits with the callbacks of the command: records, a checkpoint per epoch, status lines. The gradient's
run is drawn out, by sleep, to 50 ms; what a window of one micro-step takes besides the runtime's runs is the loop's: from the end of one
window to the end of the next, callbacks included, in wall time and in processor time of the training thread.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
from rich.console import Console

import onnxamp
from onnxamp.ort.binding import Binding
from onnxamp.trainer.callbacks import Callback, Checkpoints
from onnxamp.trainer.progress import Progress
from onnxamp.trainer.tracking import MetricsFile
from onnxamp.training import build

MODELS = Path(__file__).resolve().parents[1] / "models"
STEP = 0.050


class Clock(Callback):
    """Per window the time outside the runtime, as (wall, processor of this thread)."""

    def __init__(self) -> None:
        self.outside: list[tuple[float, float]] = []
        self.drawn_out = False
        self._inside, self._runs, self._ended = np.zeros(2), 0, self._now()
        original = Binding.run

        def run(binding: Binding) -> None:
            began = self._now()
            original(binding)
            self._runs += 1
            if self.drawn_out and self._runs == 1:
                time.sleep(max(0.0, STEP - (self._now() - began)[0]))
            if threading.current_thread() is threading.main_thread():
                self._inside += self._now() - began

        Binding.run = run

    @staticmethod
    def _now() -> np.ndarray:
        return np.array([time.perf_counter(), time.thread_time()])

    def on_window(self, state, window) -> None:
        now = self._now()
        self.outside.append(tuple(now - self._ended - self._inside))
        self._inside, self._runs, self._ended = np.zeros(2), 0, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    data = dict(np.load(MODELS / "digits_train.npz"))
    bundle = build(MODELS / "cnn.onnx", loss="cross_entropy", optimizer="adamw", level="O2", dtype="fp16")
    trainer, clock = onnxamp.Trainer(bundle), Clock()
    trainer.fit(data, epochs=1, batch_size=32)
    trainer.position = {}
    clock.drawn_out = True
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w", encoding="utf-8") as nowhere:
        folder = Path(scratch)
        shown = Progress(Console(file=nowhere))
        callbacks = [MetricsFile(folder / "metrics.jsonl"), Checkpoints(folder / "checkpoints"), shown, clock]
        trainer.fit(data, epochs=options.epochs, batch_size=32, callbacks=callbacks)
    wall, own = (statistics.median(window[k] for window in clock.outside[1:]) for k in (0, 1))
    print(f"median of {len(clock.outside) - 1} windows outside the runtime, in percent of {1e3 * STEP:.0f} ms:")
    print(
        f"wall {1e3 * wall:.3f} ms ({wall / STEP:.2%}), processor of the training thread {1e3 * own:.3f} ms ({own / STEP:.2%})"
    )


if __name__ == "__main__":
    main()
