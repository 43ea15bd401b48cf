"""Where a running `fit` is, and when it ends.

Everything that decides what comes next is in `Trainer.position`, which is part of a checkpoint: the epoch, the
micro-batch in it, the number of windows, and what the callbacks remember. A resumed run therefore takes the same steps as one
that was never stopped.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnxamp.errors import UsageError
from onnxamp.trainer.batches import Batches, Locate
from onnxamp.trainer.cause import Cause
from onnxamp.trainer.collective import Collective
from onnxamp.trainer.data import Batch, Field
from onnxamp.trainer.metric import Metric

INTERRUPTED = "interrupted"
"""The reason of a run that a signal ended."""


class Step(Protocol):
    """What the loop reads of a micro-step's result."""

    @property
    def report(self) -> Mapping[str, float] | None:
        """The report of the window that this micro-step ended, or None."""

    @property
    def cause(self) -> Cause | None:
        """Why that window was skipped, or None."""

    @property
    def interrupted(self) -> bool:
        """Whether this micro-step ended a window and any rank wants the run to end."""


class Steps(Protocol):
    """What the loop asks of a trainer."""

    position: dict[str, Any]

    @property
    def fields(self) -> Sequence[Field]: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def collective(self) -> Collective: ...

    @property
    def metric_options(self) -> Mapping[str, Any]: ...

    def checked(self, batch: Batch, locate: Locate | None = None) -> Any: ...

    def micro_step(self, batch: Any, rows: Sequence[int] | None = None) -> Step: ...

    def flush(self) -> Step | None: ...

    def interrupt(self) -> None: ...

    def texts(self, text: str) -> Sequence[str]: ...

    def leave(self) -> None: ...

    def nonfinite_gradients(self) -> Sequence[str]: ...

    def evaluate(self, data: Any, *, metrics: Sequence[Metric] = ...) -> dict[str, float]: ...

    def save(self, path: str | os.PathLike[str]) -> None: ...


@dataclasses.dataclass(frozen=True)
class End:
    """Where a run ends: after so many epochs or so many applied windows, whichever comes first.

    Attributes:
        epochs: Epochs, or None.
        steps: Applied windows, or None.
    """

    epochs: int | None
    steps: int | None

    def reached(self, epoch: int, step: int) -> bool:
        """Whether a run that has finished so many epochs and steps has nothing left to train."""
        return (self.epochs is not None and epoch >= self.epochs) or (self.steps is not None and step >= self.steps)

    def passed(self, epoch: int, batch: int, step: int) -> bool:
        """Whether it has gone on from there: by a step, or a micro-batch of the next epoch."""
        return (self.epochs is not None and (epoch, batch) > (self.epochs, 0)) or (
            self.steps is not None and step > self.steps
        )


class FitState:
    """A running `fit`: where it is, and the handle by which callbacks stop it or save it.

    Attributes:
        trainer: The trainer.
        batches: The training data.
        epochs: Epochs to run, or None.
        steps: Applied windows after which the run ends, or None.
        epoch: The running epoch, from 0.
        batch: Micro-batches of it that were used.
        windows: Windows ended since the beginning of the run, resumed or not.
        step: Windows applied since the beginning of the run.
        skipped: Windows skipped since the beginning of the run.
        evaluated: Windows ended when the last evaluation was made.
        memory: What callbacks remember; JSON values only.
        reason: Why the run ends, once it does.
        before_save: Called before a checkpoint is written: what it says to have happened is on the disk first.

    Raises:
        UsageError: The run was saved where its rows (or batches of a stream) so far are no whole number of the micro-steps asked for
            now.
    """

    def __init__(self, trainer: Steps, batches: Batches, epochs: int | None, steps: int | None) -> None:
        self.trainer = trainer
        self.batches = batches
        self.epochs = epochs
        self.steps = steps
        self._end = End(epochs, steps)
        position = trainer.position
        self.epoch = int(position.get("epoch", 0))
        self.batch = int(position.get("batch", 0))
        self.windows = int(position.get("windows", 0))
        self.step = int(position.get("step", 0))
        self.skipped = int(position.get("skipped", 0))
        self.evaluated = int(position.get("evaluated", 0))
        self.memory: dict[str, Any] = dict(position.get("memory", {}))
        self.reason: str | None = None
        self.before_save: list[Callable[[], None]] = []
        self.batch = self._regrouped(position)
        self._settled = self._position()

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and speaks: rank 0."""
        return self.trainer.collective.rank == 0

    def stop(self, reason: str) -> None:
        """End the run after the running micro-step; where several processes train, all must call it there."""
        self.reason = self.reason or reason

    def interrupt(self) -> None:
        """End the run because this process was told to: after the running micro-step, or window if others train too."""
        if self.trainer.collective.world_size == 1:
            self.stop(INTERRUPTED)
        elif self.reason is None:
            self.trainer.interrupt()

    def save(self, path: Path) -> None:
        """Write a checkpoint from which the run can go on exactly here (on rank 0; others do nothing)."""
        for call in self.before_save:
            call()
        self.trainer.position = self._position()
        self.trainer.save(path)

    def settle(self) -> None:
        """Remember this place as the one to go back to: the window that ended here is in the trainer's state."""
        if self.trainer.collective.world_size > 1:  # else there is no one to lose
            self._settled = self._position()

    def rewind(self) -> None:
        """Go back to where the last window ended, as the only process, because another one is lost."""
        self.trainer.leave()
        for name in ("epoch", "batch", "windows", "step", "skipped", "evaluated", "memory"):
            setattr(self, name, self._settled[name])

    def _regrouped(self, position: Mapping[str, Any]) -> int:
        """Micro-steps of the size asked for now that the saved ones of the epoch are."""
        batches = self.batches
        then, now, what = position.get("size"), batches.size, "rows"
        if not self.batch or "size" not in position:
            return self.batch
        if (then is None) != (now is None):
            raise UsageError(
                "The run was saved in the middle of an epoch of another kind of batches: give batch_size as before."
            )
        if then is None or now is None:  # a micro-step takes one batch of the stream for each process
            then, now, what = position.get("world_size", batches.world_size), batches.world_size, "batches"
        done = self.batch * then
        if then == now:
            return self.batch
        if batches.rows is not None and done >= batches.rows:
            return len(batches)
        if done % now:
            raise UsageError(
                f"The run has used {done} {what} of the epoch, which are no whole number of micro-steps of {now} {what}: "
                "take a batch size and a number of processes that divide them."
            )
        return int(done // now)

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "size": self.batches.size,
            "world_size": self.batches.world_size,
            "windows": self.windows,
            "step": self.step,
            "skipped": self.skipped,
            "evaluated": self.evaluated,
            "memory": copy.deepcopy(self.memory),
        }

    @property
    def finished(self) -> bool:
        """Whether the run has the epochs or the steps that it is to have."""
        return self._end.reached(self.epoch, self.step)

    @property
    def passed(self) -> bool:
        """Whether it has more of them: what was saved is of a longer run."""
        return self._end.passed(self.epoch, self.batch, self.step)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last micro-batch, from 0: between two epochs the one before."""
        return max(0, self.epoch - (self.batch == 0))

    @property
    def total_windows(self) -> int | None:
        """Windows that the run will have in the end, if none is skipped; None if the data's length is not known."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None or self.batches.rows is None:
            return None
        return self.epochs * windows_per_epoch(self.batches, self.trainer.accumulate)


def windows_per_epoch(batches: Batches, accumulate: int) -> int:
    """Windows of an epoch, a short last one included."""
    return math.ceil(len(batches) / accumulate)
