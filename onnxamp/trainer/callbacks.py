"""Callbacks: what happens around the loop of `fit`, apart from training itself.

A callback overrides the methods that it needs. Methods get the `FitState`, which says where the run is and can stop it;
what a callback must remember over a restart goes into `state.memory`, which is saved with every checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onnxamp.errors import UsageError
from onnxamp.trainer.position import FitState


@dataclasses.dataclass(frozen=True)
class WindowResult:
    """A window that has just ended.

    Attributes:
        report: What `reduce.onnx` says of it (`manifest.REPORT`): loss, learning rate, gradient norm, scales, `ok`...
        seconds: Wall time since the window before ended, evaluation and saving left out.
        waited: The part of `seconds` that was spent waiting for data.
        cause: Of a skipped window, or one that has lost micro-batches: what was not finite, and where it showed first.
    """

    report: Mapping[str, float]
    seconds: float
    waited: float
    cause: str | None = None

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite and the update was left out."""
        return not self.report["ok"] and not self.report["empty"]


class Callback:
    """Does nothing; override what you need."""

    def on_start(self, state: FitState) -> None:
        """Before the first micro-step."""

    def on_window(self, state: FitState, window: WindowResult) -> None:
        """After each window, applied, skipped or empty, and before the evaluation that may be due."""

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        """After each evaluation; `values` has `val_loss` and the metrics by name."""

    def on_checkpoint(self, state: FitState) -> None:
        """After each window and all that follows from it: a run that goes on from what is saved here misses nothing."""

    def on_epoch(self, state: FitState) -> None:
        """After each epoch and its evaluation; the position is already that of the next epoch."""

    def on_end(self, state: FitState, reason: str) -> None:
        """After the last window of the run, unless it ended by an error; `reason` is `FitState.reason`."""

    def on_rank_lost(self, state: FitState) -> None:
        """Another process is gone and the run ends: `state` is where the last window ended, and may be saved."""

    def close(self) -> None:
        """Last of all, after an error too: give back files, terminals and signals."""


class EarlyStopping(Callback):
    """Stop when a metric has not become better for some evaluations.

    Args:
        metric: Name of the value: `val_loss` or a metric's name.
        patience: Evaluations without a new best value before the run stops.
        better: Whether `higher` or `lower` is better.
        delta: By how much a value must be better to count.
    """

    def __init__(
        self, metric: str, patience: int = 3, *, better: Literal["higher", "lower"] = "lower", delta: float = 0.0
    ) -> None:
        self.metric = metric
        self.patience = patience
        self.sign = 1 if better == "higher" else -1
        self.delta = delta

    def on_start(self, state: FitState) -> None:
        self._stop_if_due(state)  # what is resumed may have been saved between the decision and the end

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        if self.metric not in values:
            raise UsageError(f"Early stopping watches {self.metric!r}, and there are only {', '.join(values)}.")
        memory: dict[str, Any] = state.memory.setdefault("early_stopping", {"best": None, "waited": 0})
        value = values[self.metric]
        best = memory["best"]
        if not math.isnan(value) and (best is None or self.sign * (value - best) > self.delta):
            memory.update(best=value, waited=0)
            return
        memory["waited"] += 1
        self._stop_if_due(state)

    def _stop_if_due(self, state: FitState) -> None:
        memory = state.memory.get("early_stopping")
        if memory is None or memory["waited"] < self.patience:
            return
        best = memory["best"]
        than = "has been no number" if best is None else f"has not become better than {best:.6g}"
        state.stop(f"{self.metric} {than} for {self.patience} evaluations")


class Checkpoints(Callback):
    """Save every so often, keep the newest ones, and keep the best one apart.

    Files: `step-N.safetensors` with N the number of windows, and `best.safetensors`. A new file is whole before an old
    one goes, so there is always one to resume from. Where several processes train, rank 0 writes, the state at the start too;
    if one is lost, each that is left writes the same file.

    Args:
        folder: Where they go.
        every: Windows between two; None saves after each epoch. The end of a run is always saved.
        keep: How many of the newest stay; None keeps all.
        metric: Name of the value that decides what is best; None keeps no best one.
        better: Whether `higher` or `lower` is better.
    """

    def __init__(
        self,
        folder: Path,
        every: int | None = None,
        *,
        keep: int | None = 2,
        metric: str | None = None,
        better: Literal["higher", "lower"] = "lower",
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError("At least one checkpoint must be kept.")
        self.folder = folder
        self.every = every
        self.keep = keep
        self.metric = metric
        self.sign = 1 if better == "higher" else -1

    @property
    def best_path(self) -> Path:
        """Where the best checkpoint lies, if there is one."""
        return self.folder / "best.safetensors"

    def on_start(self, state: FitState) -> None:
        if not state.writes:
            return
        for unfinished in self.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            unfinished.unlink(missing_ok=True)
        if state.trainer.collective.world_size > 1 and not checkpoints(self.folder):
            self.save(state)

    def on_checkpoint(self, state: FitState) -> None:
        if self.every is not None and state.windows % self.every == 0:
            self.save(state)

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        value = values.get(self.metric, math.nan) if self.metric else math.nan
        best = state.memory.get("best")
        if math.isnan(value) or (best is not None and self.sign * (value - best["value"]) <= 0):
            return
        state.memory["best"] = {
            "metric": self.metric,
            "value": value,
            "windows": state.windows,
            "epoch": state.last_epoch,
        }
        state.save(self.best_path)

    def on_epoch(self, state: FitState) -> None:
        if self.every is None:
            self.save(state)

    def on_end(self, state: FitState, reason: str) -> None:
        self.save(state)

    def on_rank_lost(self, state: FitState) -> None:
        self.save(state)

    def save(self, state: FitState) -> Path:
        """Save now."""
        path = self.folder / f"step-{state.windows:08d}.safetensors"
        if not state.writes:
            return path
        state.save(path)
        saved = checkpoints(self.folder)
        for old in saved[: -self.keep] if self.keep else []:
            old.unlink(missing_ok=True)
        return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first, without the best one."""
    return sorted(folder.glob("step-*.safetensors"))
