"""The loop over epochs: reads batches, steps the trainer, evaluates, calls the callbacks, can stop and go on anywhere.

Everything that decides what comes next is in `Trainer.position`, which is part of a checkpoint: the epoch, the
micro-batch in it, the number of windows, and what the callbacks remember. A resumed run therefore takes the same steps as one
that was never stopped.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnxamp.errors import DataError, DivergedError, RankLostError, UsageError
from onnxamp.trainer.batches import Batches, Share, bind
from onnxamp.trainer.callbacks import Callback, Window
from onnxamp.trainer.collective import Collective
from onnxamp.trainer.data import Array, Batch, Field, open_data
from onnxamp.trainer.metrics import Metric, metric

INTERRUPTED = "interrupted"
"""The reason of a run that a signal ended."""


class Step(Protocol):
    """What the loop reads of a micro-step's result."""

    @property
    def report(self) -> Mapping[str, float] | None:
        """The report of the window that this micro-step ended, or None."""

    @property
    def cause(self) -> str | None:
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

    def micro_step(self, batch: Batch | None, rows: Sequence[int] | None = None) -> Step: ...

    def flush(self) -> Step | None: ...

    def interrupt(self) -> None: ...

    def leave(self) -> None: ...

    def nonfinite_gradients(self) -> Sequence[str]: ...

    def evaluate(self, data: Any, *, metrics: Sequence[Metric] = ...) -> dict[str, float]: ...

    def save(self, path: str | os.PathLike[str]) -> None: ...


@dataclasses.dataclass(frozen=True)
class History:
    """How a run went.

    Attributes:
        reason: Why it ended: `done`, or what a callback or signal gave to `Loop.stop`.
        epochs: Epochs that were finished.
        steps: Updates that were applied.
        windows: All windows, skipped and empty ones included.
        skipped: Windows whose gradient was not finite.
        rows: Rows trained on in this process's call.
        seconds: Time spent in training steps, evaluation and saving left out.
        losses: Mean loss of each window of this call.
        values: What the last evaluation gave.
        best: The best evaluation as `Checkpoints` remembers it.
    """

    reason: str
    epochs: int
    steps: int
    windows: int
    skipped: int
    rows: int
    seconds: float
    losses: tuple[float, ...]
    values: Mapping[str, float]
    best: Mapping[str, Any] | None


class Loop:
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

    Raises:
        UsageError: The run was saved where its rows so far are no whole number of the micro-batches asked for now.
    """

    def __init__(self, trainer: Steps, batches: Batches, epochs: int | None, steps: int | None) -> None:
        self.trainer = trainer
        self.batches = batches
        self.epochs = epochs
        self.steps = steps
        position = trainer.position
        self.epoch = int(position.get("epoch", 0))
        self.batch = int(position.get("batch", 0))
        self.windows = int(position.get("windows", 0))
        self.step = int(position.get("step", 0))
        self.skipped = int(position.get("skipped", 0))
        self.evaluated = int(position.get("evaluated", 0))
        self.memory: dict[str, Any] = dict(position.get("memory", {}))
        self.reason: str | None = None
        before, size = position.get("size"), batches.size
        if before and size and before != size:
            done = self.batch * before
            if batches.rows is not None and done >= batches.rows:
                self.batch = len(batches)
            elif done % size:
                raise UsageError(
                    f"The run has used {done} rows of the epoch, which are no whole number of micro-batches of {size} rows: "
                    "take a batch size and a number of processes that divide them."
                )
            else:
                self.batch = done // size
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
        else:
            self.trainer.interrupt()

    def save(self, path: Path) -> None:
        """Write a checkpoint from which the run can go on exactly here (on rank 0; others do nothing)."""
        self.trainer.position = self._position()
        self.trainer.save(path)

    def settle(self) -> None:
        """Remember this place as the one to go back to: the window that ended here is in the trainer's state."""
        self._settled = self._position()

    def rewind(self) -> None:
        """Go back to where the last window ended, as the only process, because another one is lost."""
        self.trainer.leave()
        for name in ("epoch", "batch", "windows", "step", "skipped", "evaluated", "memory"):
            setattr(self, name, self._settled[name])

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "size": self.batches.size,
            "windows": self.windows,
            "step": self.step,
            "skipped": self.skipped,
            "evaluated": self.evaluated,
            "memory": copy.deepcopy(self.memory),
        }

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


def fit(
    trainer: Steps,
    data: object,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = 32,
    val: object = None,
    val_batch_size: int | None = None,
    eval_every: int | None = None,
    metrics: Sequence[str | Metric | Callable[[Array, Array], float]] = (),
    columns: Mapping[str, str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    prefetch: int = 2,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Train.

    Where several processes train (`trainer.collective`), each calls this with the same arguments: every process takes its
    own rows of the training data, and all of `val`. Rank 0 writes; if a process is lost, those that are left save the state
    of the last window.

    Windows do not reach over epochs: what is left at the end of one is applied as a shorter window. `val` is evaluated
    after each epoch (or every `eval_every` windows) and at the end.

    Args:
        trainer: The trainer; if its position is not the beginning, the run goes on from there.
        data: Anything `data.open_data` opens.
        epochs: Passes over the data; default 1 if `steps` is not given either.
        steps: Applied windows after which to end.
        batch_size: Rows of a micro-batch; None takes the batches of a stream as they come.
        val: Data to evaluate on.
        val_batch_size: Rows of a batch there; default `batch_size`.
        eval_every: Windows between two evaluations, instead of once per epoch.
        metrics: Metrics besides the loss: names, objects or functions.
        columns: Input name to column name, where the data call an input otherwise.
        shuffle: Draw a new order each epoch.
        seed: Seed of the order.
        prefetch: Batches read ahead.
        callbacks: Called in this order.

    Raises:
        DataError: The data do not fit the model, or no row of a whole epoch has weight.
        DivergedError: No window could be applied, or too many in a row were skipped at the lowest loss scale.
        RankLostError: Another process has ended or does not answer.
        UsageError: The arguments contradict each other.
    """
    if epochs is None and steps is None:
        epochs = 1
    for name, value in (("epochs", epochs), ("steps", steps), ("eval_every", eval_every)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
    binding = bind(open_data(data), trainer.fields, columns=columns, optional=("weights",))
    batches = Batches(
        binding,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        prefetch=prefetch,
        rank=trainer.collective.rank,
        world_size=trainer.collective.world_size,
    )
    checks = None
    if val is not None:
        bound = bind(open_data(val), trainer.fields, columns=columns, optional=("weights",))
        checks = Batches(bound, val_batch_size or batch_size, shuffle=False)
    loop = Loop(trainer, batches, epochs, steps)
    measures = [metric(which, **trainer.metric_options) for which in metrics]
    return _Run(loop, callbacks, checks, eval_every, measures).run()


class _Run:
    """The state of one call of `fit`."""

    def __init__(
        self,
        loop: Loop,
        callbacks: Sequence[Callback],
        val: Batches | None,
        eval_every: int | None,
        metrics: list[Metric],
    ) -> None:
        self.loop = loop
        self.callbacks = callbacks
        self.val = val
        self.eval_every = eval_every
        self.metrics = metrics
        self.losses: list[float] = []
        self.values: dict[str, float] = {}
        self.rows = 0
        self.seconds = self._since = self._waited = 0.0
        self._last_cause = ""

    def run(self) -> History:
        try:
            return self._run()
        except RankLostError:
            self.loop.rewind()
            for callback in self.callbacks:
                callback.on_rank_lost(self.loop)
            raise
        finally:
            with contextlib.ExitStack() as stack:  # each is closed, whatever happens to the others
                for callback in reversed(self.callbacks):
                    stack.callback(callback.close)

    def _run(self) -> History:
        loop = self.loop
        for callback in self.callbacks:
            callback.on_start(loop)
        while loop.reason is None and not self._finished():
            self._epoch()
        if self.val is not None and loop.evaluated != loop.windows and self._finished():
            self._evaluate()
        if loop.reason is None and self.losses and not loop.step:
            raise DivergedError(
                f"None of the {loop.windows} windows could be applied (the last: {self._last_cause}); lower the "
                "learning rate, mend the data or train longer, and see `onnxamp diagnose`."
            )
        loop.reason = loop.reason or "done"
        for callback in self.callbacks:
            callback.on_end(loop, loop.reason)
        return History(
            loop.reason,
            loop.epoch,
            loop.step,
            loop.windows,
            loop.skipped,
            self.rows,
            self.seconds,
            tuple(self.losses),
            self.values,
            loop.memory.get("best"),
        )

    def _finished(self) -> bool:
        loop = self.loop
        return (loop.epochs is not None and loop.epoch >= loop.epochs) or (
            loop.steps is not None and loop.step >= loop.steps
        )

    def _epoch(self) -> None:
        loop = self.loop
        applied, skipped, began = loop.step, loop.skipped, loop.batch
        self._since = time.perf_counter()
        together = loop.trainer.collective.world_size > 1
        with contextlib.closing(_generator(loop.batches.shares(loop.epoch, loop.batch))) as stream:
            while True:
                asked = time.perf_counter()
                share: Share | None = next(stream, None)
                self._waited += time.perf_counter() - asked
                if share is None:
                    break
                step = loop.trainer.micro_step
                result = step(share.batch, share.rows) if together else step(share.batch)
                loop.batch += 1
                if result.report is not None:
                    self._window(result, result.report)
                if loop.reason is not None or self._finished():
                    return
        if (last := loop.trainer.flush()) is not None and last.report is not None:
            self._window(last, last.report)
        if loop.reason is not None:
            return
        if began == 0 and loop.step == applied and loop.skipped == skipped:
            raise DataError("No row of a whole epoch had weight: every label is ignored or every weight is 0.")
        if self.val is not None and self.eval_every is None:
            self._evaluate()
        loop.epoch, loop.batch = loop.epoch + 1, 0
        loop.settle()
        for callback in self.callbacks:
            callback.on_epoch(loop)

    def _window(self, result: Step, report: Mapping[str, float]) -> None:
        loop = self.loop
        now = time.perf_counter()
        loop.windows += 1
        loop.step += bool(report["ok"])
        skipped = not report["ok"] and not report["empty"]
        loop.skipped += skipped
        loop.settle()
        if loop.trainer.collective.world_size > 1 and result.interrupted:
            loop.stop(INTERRUPTED)
        cause = self._cause(result) if skipped or report["dropped"] else None
        self._last_cause = cause or self._last_cause
        window = Window(report, now - self._since, self._waited, cause)
        self.seconds += window.seconds
        self.rows += int(report["rows"])
        self.losses.append(float(report["loss"]))
        self._waited = 0.0
        for callback in self.callbacks:
            callback.on_window(loop, window)
        if self.val is not None and self.eval_every is not None and loop.windows % self.eval_every == 0:
            self._evaluate()
        for callback in self.callbacks:
            callback.on_checkpoint(loop)
        loop.settle()
        self._since = time.perf_counter()

    def _cause(self, result: Step) -> str:
        """Why a window was skipped; of an overflow also where: the parameter nearest to the output."""
        cause = result.cause or "the gradient is not finite"
        if not cause.startswith("a gradient overflowed") or not (names := self.loop.trainer.nonfinite_gradients()):
            return cause
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"gradient of {names[-1]}{more} overflowed"

    def _evaluate(self) -> None:
        assert self.val is not None
        values = self.loop.trainer.evaluate(self.val, metrics=self.metrics)
        self.values = {"val_loss" if name == "loss" else name: float(value) for name, value in values.items()}
        self.loop.evaluated = self.loop.windows
        for callback in self.callbacks:
            callback.on_evaluate(self.loop, self.values)
        self._since = time.perf_counter()


def _generator(shares: Iterator[Share]) -> Any:
    """`shares` as something that can be closed, so that its thread ends with the epoch."""
    return shares if hasattr(shares, "close") else (share for share in shares)
