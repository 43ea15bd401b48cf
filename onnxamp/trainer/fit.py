"""The loop over epochs: reads batches, steps the trainer, evaluates, calls the callbacks, can stop and go on anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxamp.errors import DataError, DivergedError, RankLostError, UsageError
from onnxamp.trainer.batches import Batches, Share, bind
from onnxamp.trainer.callbacks import Callback, WindowResult
from onnxamp.trainer.cause import Cause
from onnxamp.trainer.data import Array, open_data
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.metrics import metrics_of
from onnxamp.trainer.position import INTERRUPTED, FitState, Step, Steps

logger = logging.getLogger("onnxamp")


@dataclasses.dataclass(frozen=True)
class History:
    """How a run went.

    Attributes:
        reason: Why it ended: `done`, or what a callback or signal gave to `FitState.stop`.
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
    losses: tuple[float, ...] = dataclasses.field(repr=False)
    values: Mapping[str, float]
    best: Mapping[str, Any] | None


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
    warns: bool = True,
) -> History:
    """Train.

    Where several processes train (`trainer.collective`), each calls this with the same arguments: every process takes its
    own rows of the training data, and all of `val`. Rank 0 writes; if a process is lost, those that are left save the state
    of the last window.

    Windows do not reach over epochs: what is left at the end of one is applied as a shorter window. `val` is evaluated
    after each epoch (or every `eval_every` windows) and at the end. `epochs` and `steps` count from the beginning of the
    run, which `trainer.position` knows once it was saved or loaded. A run that has as many trains no further, and a warning is logged;
    one that has more is left as it is: nothing is evaluated, and no callback hears of it.

    Args:
        trainer: The trainer; if its position is not the beginning, the run goes on from there.
        data: Anything `data.open_data` opens.
        epochs: Passes over the data since the beginning of the run; default 1 if `steps` is not given either.
        steps: Applied windows since then, after which to end.
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
        warns: Whether to log that nothing is left to train; not where the caller knows, and has only the end of a run to do.

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
    binding.check_size(batch_size, trainer.collective.world_size)
    batches = Batches(
        binding,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        prefetch=prefetch,
        rank=trainer.collective.rank,
        world_size=trainer.collective.world_size,
        prepare=trainer.checked,
    )
    checks = None
    if val is not None:
        bound = bind(open_data(val), trainer.fields, columns=columns, optional=("weights",))
        bound.check_size(val_batch_size or batch_size)
        checks = Batches(bound, val_batch_size or batch_size, shuffle=False, prepare=trainer.checked)
    state = FitState(trainer, batches, epochs, steps)
    if warns and state.finished and state.writes:
        logger.warning("%s", _nothing_left(state))
    return _Run(state, callbacks, checks, eval_every, metrics_of(metrics, **trainer.metric_options)).run()


def _nothing_left(state: FitState) -> str:
    """What a run that has the epochs or steps asked for has, and how it goes on."""
    by_epochs = state.epochs is not None and state.epoch >= state.epochs
    name, asked, has = ("epochs", state.epochs, state.epoch) if by_epochs else ("steps", state.steps, state.step)
    unit = name.removesuffix("s") if has == 1 else name
    return (
        f"Nothing is left to train: {name}={asked} counts from the beginning of the run, which has {has} {unit}; "
        f"give more {name} to go on."
    )


class _Run:
    """The state of one call of `fit`."""

    def __init__(
        self,
        state: FitState,
        callbacks: Sequence[Callback],
        val: Batches | None,
        eval_every: int | None,
        metrics: list[Metric],
    ) -> None:
        self.state = state
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
            self.state.rewind()
            for callback in self.callbacks:
                callback.on_rank_lost(self.state)
            raise
        finally:
            with contextlib.ExitStack() as stack:  # each is closed, whatever happens to the others
                for callback in reversed(self.callbacks):
                    stack.callback(callback.close)

    def _run(self) -> History:
        state = self.state
        if state.passed:
            return self._history("done")
        for callback in self.callbacks:
            callback.on_start(state)
        while state.reason is None and not state.finished:
            self._epoch()
        if self.val is not None and state.evaluated != state.windows and state.finished:
            self._evaluate()
        if state.reason is None and self.losses and not state.step:
            raise DivergedError(
                f"None of the {state.windows} windows could be applied (the last: {self._last_cause}); lower the "
                "learning rate, mend the data or train longer, and see `onnxamp diagnose`."
            )
        state.reason = state.reason or "done"
        for callback in self.callbacks:
            callback.on_end(state, state.reason)
        return self._history(state.reason)

    def _history(self, reason: str) -> History:
        state = self.state
        return History(
            reason,
            state.epoch,
            state.step,
            state.windows,
            state.skipped,
            self.rows,
            self.seconds,
            tuple(self.losses),
            self.values,
            state.memory.get("best"),
        )

    def _epoch(self) -> None:
        state = self.state
        applied, skipped, began = state.step, state.skipped, state.batch
        self._since = time.perf_counter()
        together = state.trainer.collective.world_size > 1
        with contextlib.closing(state.batches.shares(state.epoch, state.batch)) as stream:
            while True:
                asked = time.perf_counter()
                share: Share | None = next(stream, None)
                self._waited += time.perf_counter() - asked
                if share is None:
                    break
                step = state.trainer.micro_step
                result = step(share.batch, share.rows) if together else step(share.batch)
                state.batch += 1
                if result.report is not None:
                    self._window(result, result.report)
                if state.reason is not None or state.finished:
                    return
        if (last := state.trainer.flush()) is not None and last.report is not None:
            self._window(last, last.report)
        if state.reason is not None:
            return
        if began == 0 and state.step == applied and state.skipped == skipped:
            raise DataError("No row of a whole epoch had weight: every label is ignored or every weight is 0.")
        if self.val is not None and self.eval_every is None:
            self._evaluate()
        state.epoch, state.batch = state.epoch + 1, 0
        state.settle()
        for callback in self.callbacks:
            callback.on_epoch(state)

    def _window(self, result: Step, report: Mapping[str, float]) -> None:
        state = self.state
        now = time.perf_counter()
        state.windows += 1
        state.step += bool(report["ok"])
        skipped = not report["ok"] and not report["empty"]
        state.skipped += skipped
        state.settle()
        if state.trainer.collective.world_size > 1 and result.interrupted:
            state.stop(INTERRUPTED)
        cause = self._cause(result) if skipped or report["dropped"] else None
        self._last_cause = cause or self._last_cause
        window = WindowResult(report, now - self._since, self._waited, cause)
        self.seconds += window.seconds
        self.rows += int(report["rows"])
        self.losses.append(float(report["loss"]))
        self._waited = 0.0
        for callback in self.callbacks:
            callback.on_window(state, window)
        if self.val is not None and self.eval_every is not None and state.windows % self.eval_every == 0:
            self._evaluate()
        for callback in self.callbacks:
            callback.on_checkpoint(state)
        state.settle()
        self._since = time.perf_counter()

    def _cause(self, result: Step) -> str:
        """Why a window was skipped; of an overflow also where: the parameter nearest to the output."""
        cause = result.cause or Cause("overflow", "the gradient is not finite")
        if self.state.trainer.collective.world_size > 1:
            cause = self._of_all_ranks(cause)
        return cause.text(self.state.trainer.nonfinite_gradients() if cause.kind == "overflow" else ())

    def _of_all_ranks(self, cause: Cause) -> Cause:
        """The cause, with what the rank knows that has seen the rows: each looks at its own alone, and a window is skipped on all."""
        own = cause.what if cause.kind == "data" else cause.beside
        told = self.state.trainer.texts(f"{cause.kind}:{own}" if own else "")
        known = [(*text.partition(":"), rank) for rank, text in enumerate(told) if text]
        if not known:
            return cause
        kind, _, words, rank = min(known, key=lambda one: (one[0] != "data", one[-1]))
        words = f"rank {rank}: {words}"
        return Cause("data", words) if kind == "data" else dataclasses.replace(cause, beside=words)

    def _evaluate(self) -> None:
        assert self.val is not None
        values = self.state.trainer.evaluate(self.val, metrics=self.metrics)
        self.values = {"val_loss" if name == "loss" else name: float(value) for name, value in values.items()}
        self.state.evaluated = self.state.windows
        for callback in self.callbacks:
            callback.on_evaluate(self.state, self.values)
        self._since = time.perf_counter()
