"""Where a run's numbers go: a JSON Lines file always, TensorBoard if it is installed and asked for."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from onnxamp.errors import RuntimeMissingError
from onnxamp.files import jsonable
from onnxamp.trainer.callbacks import Callback, WindowResult
from onnxamp.trainer.checkpoint import atomic, disk_error
from onnxamp.trainer.position import FitState

# Between two points of TensorBoard.
_POINT_SECONDS = 0.25
# Records wait this long: several together take a fraction of the time that each takes alone, with cold caches.
_WRITE_SECONDS = 0.5

_encode = json.JSONEncoder(allow_nan=False).encode


def record(state: FitState, window: WindowResult) -> dict[str, Any]:
    """What is written about a window."""
    report = window.report
    numbers = {
        "kind": "window",
        "window": state.windows,
        "step": state.step,
        "epoch": state.epoch,
        "loss": report["loss"],
        "learning_rate": report["learning_rate"],
        "loss_scale": report["loss_scale"],
        "next_loss_scale": report["next_loss_scale"],
        "gradient_norm": report["gradient_norm"],
        "skipped": window.skipped,
        "dropped": int(report["dropped"]),
        "empty": bool(report["empty"]),
        "rows": int(report["rows"]),
        "seconds": round(window.seconds, 6),
        "waited": round(window.waited, 6),
    }
    return numbers if window.cause is None else numbers | {"cause": window.cause}


def resident_memory() -> int | None:
    """Bytes of memory that this process holds now; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


class MetricsFile(Callback):
    """`metrics.jsonl`: one object per line, `kind` is `window` or `evaluation`.

    Lines are written a few times a second, and always before a checkpoint: after a kill no window is missing that a
    checkpoint has. A run that goes on from a checkpoint takes out what was written after it, so that every window stands there
    once.

    Raises:
        RuntimeMissingError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._waiting: list[dict[str, Any]] = []
        self._written = -math.inf

    def on_start(self, state: FitState) -> None:
        known = {"window": state.windows, "evaluation": state.evaluated}
        kept = [entry for entry in read_metrics(self.path) if entry["window"] <= known.get(entry["kind"], -1)]
        try:
            with atomic(self.path) as file:
                file.writelines(map(_line, kept))
            self._file = self.path.open("ab", buffering=0)
        except OSError as problem:
            raise disk_error(self.path, problem) from problem
        state.before_save.append(self.flush)

    def on_window(self, state: FitState, window: WindowResult) -> None:
        self._waiting.append(record(state, window))
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self.flush()

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        entry = {"kind": "evaluation", "window": state.windows, "step": state.step, "epoch": state.last_epoch}
        self._waiting.append({**entry, **values})
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait; those of windows get the memory that the process holds now."""
        if self._file is None or not self._waiting:
            return
        memory = resident_memory()
        entries = [entry | {"memory": memory} if entry["kind"] == "window" else entry for entry in self._waiting]
        self._waiting, self._written = [], time.monotonic()
        left = b"".join(map(_line, entries))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as problem:
            raise disk_error(self.path, problem) from problem

    def close(self) -> None:
        if self._file is not None:
            with self._file:
                self.flush()


def _line(entry: Mapping[str, Any]) -> bytes:
    try:
        text = _encode(entry)
    except ValueError:
        text = _encode(jsonable(dict(entry)))
    return f"{text}\n".encode()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a `metrics.jsonl`, numbers as floats; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if not isinstance(entry, dict) or "window" not in entry:
                return
            yield {
                name: float(value) if value in ("nan", "inf", "-inf") and name not in ("kind", "cause") else value
                for name, value in entry.items()
            }


class TensorBoard(Callback):
    """TensorBoard events: `train/*` and, per evaluation, `val/*`, over the number of the window.

    Writing a point takes longer than everything else around a window, so of fast windows some four a second are written,
    and all that are skipped; `metrics.jsonl` has every window.

    Raises:
        RuntimeMissingError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._writer_class = importlib.import_module("tensorboardX").SummaryWriter
        except ImportError as problem:
            raise RuntimeMissingError(
                "TensorBoard events need tensorboardX: pip install 'onnxamp[tensorboard]', or leave --tensorboard out."
            ) from problem
        self.folder = folder
        self._writer: Any = None
        self._written = -math.inf

    def on_start(self, state: FitState) -> None:
        self._writer = self._writer_class(str(self.folder), purge_step=state.windows + 1 if state.windows else None)

    def on_window(self, state: FitState, window: WindowResult) -> None:
        now = time.monotonic()
        if now - self._written < _POINT_SECONDS and not window.skipped:
            return
        self._written = now
        for name in ("loss", "learning_rate", "loss_scale", "gradient_norm"):
            self._writer.add_scalar(f"train/{name}", window.report[name], state.windows)
        self._writer.add_scalar("train/skipped", state.skipped, state.windows)
        if window.seconds > 0:
            self._writer.add_scalar("train/rows_per_second", window.report["rows"] / window.seconds, state.windows)

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"val/{name.removeprefix('val_')}", value, state.windows)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
