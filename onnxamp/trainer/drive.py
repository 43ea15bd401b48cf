"""A run from its folder: puts the callbacks together, handles signals, and leaves report and model behind."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from onnxamp.errors import AmpError, RankLostError, UsageError
from onnxamp.trainer.batches import Binding, bind
from onnxamp.trainer.callbacks import Callback, Checkpoints, EarlyStopping
from onnxamp.trainer.checkpoint import write_text
from onnxamp.trainer.data import open_data
from onnxamp.trainer.export import read_trained
from onnxamp.trainer.fit import History, fit
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.position import INTERRUPTED, End, FitState
from onnxamp.trainer.progress import Progress, amount
from onnxamp.trainer.run import Run
from onnxamp.trainer.run_report import run_page, scale_hint
from onnxamp.trainer.tracking import MetricsFile, TensorBoard
from onnxamp.trainer.trainer import Trainer


class StopOnSignal(Callback):
    """Ctrl-C and SIGTERM end the run after the running micro-step (window, with several ranks); a second one at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._before: dict[int, Any] = {}
        self._asked = False

    def on_start(self, state: FitState) -> None:
        def stop(number: int, frame: object) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
            state.interrupt()
            after = "micro-batch" if state.reason else "window"
            self.console.print(f"stopping after this {after} (once more: at once)", style="yellow")

        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, stop)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is to do, apart from its bundle.

    Attributes:
        data: Training data.
        val: Data to evaluate on, or None.
        columns: Input name to column name.
        epochs: Passes over the data, or None.
        steps: Updates, or None.
        batch_size: Rows of a micro-batch.
        eval_every: Windows between two evaluations, or None: once per epoch.
        metrics: Metrics besides the loss.
        early_stop: Name of the value that stops the run when it no longer gets better.
        patience: Evaluations to wait for a better one.
        save_every: Windows between two checkpoints, or None: once per epoch.
        keep: Checkpoints kept.
        shuffle: Draw a new order each epoch.
        seed: Seed of the order.
        tensorboard: Write TensorBoard events.
    """

    data: object
    val: object = None
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    eval_every: int | None = None
    metrics: Sequence[Metric] = ()
    early_stop: str | None = None
    patience: int = 3
    save_every: int | None = None
    keep: int = 2
    shuffle: bool = True
    seed: int = 0
    tensorboard: bool = False

    def better(self, name: str) -> Literal["higher", "lower"]:
        """Whether a higher or lower value of `val_loss` or a metric is the better one.

        Raises:
            UsageError: There is no such value.
        """
        if name == "val_loss":
            return "lower"
        for metric in self.metrics:
            if metric.name == name:
                return metric.better
        known = ", ".join(["val_loss", *(metric.name for metric in self.metrics)])
        raise UsageError(f"There is no {name!r} to watch; there are {known}: add it with --metric.")

    def check(self, trainer: Trainer) -> None:
        """Find what is wrong with the data and the options before the run begins.

        Raises:
            DataError: The data do not fit the model.
            UsageError: An option names something that does not exist.
        """
        data, *val = self._bindings(trainer)
        data.check_size(self.batch_size, trainer.collective.world_size)
        for binding in val:
            binding.check_size(self.batch_size)
        if self.early_stop is not None:
            if self.val is None:
                raise UsageError("--early-stop needs data to evaluate on: add --val or --val-split.")
            self.better(self.early_stop)
        if self.metrics and self.val is None:
            raise UsageError("--metric needs data to evaluate on: add --val or --val-split.")

    def notes(self, trainer: Trainer) -> list[str]:
        """What a person should know of the data: casts, columns not used."""
        return [f"{binding.data.origin}: {note}" for binding in self._bindings(trainer) for note in binding.notes]

    def _bindings(self, trainer: Trainer) -> list[Binding]:
        sources = [self.data] if self.val is None else [self.data, self.val]
        return [
            bind(open_data(source), trainer.fields, columns=self.columns, optional=("weights",)) for source in sources
        ]

    def callbacks(
        self, run: Run, console: Console, extra: Sequence[Callback] = (), *, writes: bool = True
    ) -> list[Callback]:
        """Everything that goes on around the loop, in the order that the records need; `writes` is false beside rank 0."""
        watched = None if self.val is None else self.early_stop or "val_loss"
        better = self.better(watched) if watched else "lower"
        callbacks: list[Callback] = [MetricsFile(run.metrics_path)] if writes else []
        if self.tensorboard and writes:
            callbacks.append(TensorBoard(run.tensorboard_folder))
        callbacks.append(
            Checkpoints(run.checkpoint_folder, self.save_every, keep=self.keep, metric=watched, better=better)
        )
        if watched and self.early_stop is not None:
            callbacks.append(EarlyStopping(watched, self.patience, better=better))
        shown: list[Callback] = [Progress(console)] if writes else []
        return [*callbacks, *shown, StopOnSignal(console), *extra]


def drive(run: Run, trainer: Trainer, plan: Plan, console: Console, extra: Sequence[Callback] = ()) -> History:
    """Train, then write the page and the model.

    Args:
        run: The folder, made before.
        trainer: A fresh trainer, or one loaded from a checkpoint of this run.
        plan: What to do.
        console: Where a person looks.
        extra: Further callbacks.

    Raises:
        AmpError: Whatever ended the run; the page is written nevertheless.
    """
    reason, failed = "failed", True
    writes = trainer.collective.rank == 0
    try:
        history = fit(
            trainer,
            plan.data,
            epochs=plan.epochs,
            steps=plan.steps,
            batch_size=plan.batch_size,
            val=plan.val,
            eval_every=plan.eval_every,
            metrics=plan.metrics,
            columns=plan.columns,
            shuffle=plan.shuffle,
            seed=plan.seed,
            callbacks=plan.callbacks(run, console, extra, writes=writes),
            warns=False,  # where training is done, `finished` has found that evaluation or model are not
        )
        reason, failed = history.reason, False
    except RankLostError as problem:
        reason = str(problem)
        raise RankLostError(f"{problem} {_saved(run)}") from problem
    except AmpError as problem:
        reason = str(problem)
        raise
    finally:
        if writes:
            write_report(run, reason, failed=failed)
    if not writes:
        return history
    if reason != INTERRUPTED:
        export_best(run, trainer, history)
    summary(run, trainer, history, console)
    return history


def finished(trainer: Trainer, plan: Plan, *, exported: bool) -> History | None:
    """How the run went that a trainer goes on with, if nothing of the plan is left to do: neither training, nor the evaluation
    and the model of its end.

    Args:
        trainer: A trainer loaded from a checkpoint.
        plan: What is asked of it.
        exported: Whether the run has its model.
    """
    position, end = trainer.position, End(plan.epochs, plan.steps)
    epoch, batch, step, windows, skipped, evaluated = (
        int(position.get(name, 0)) for name in ("epoch", "batch", "step", "windows", "skipped", "evaluated")
    )
    ended = end.reached(epoch, step) and exported and (plan.val is None or evaluated == windows)
    if not ended and not end.passed(epoch, batch, step):
        return None
    best = position.get("memory", {}).get("best")
    return History("done", epoch, step, windows, skipped, 0, 0.0, (), {}, best)


def _saved(run: Run) -> str:
    """What is left of a run that a lost process ended, and how it goes on."""
    newest = run.newest()
    kept = f"The run is saved up to {newest}" if newest else "Nothing was saved yet"
    return f"{kept}; start it again with the same command and --resume -o {run.folder}, with any number of processes."


def write_report(run: Run, reason: str, *, failed: bool) -> None:
    """Write `report.html` from what was recorded; `reason` and `failed` are those of `run_page`."""
    options = run.read_config()
    title = f"Training of {Path(str(options.get('model', run.folder.name))).name}"
    write_text(run.report_path, run_page(title, run.metrics(), options, reason, failed=failed))


def export_best(run: Run, trainer: Trainer, history: History) -> None:
    """Write `model.onnx`: the best checkpoint's parameters, or the last ones where nothing was evaluated."""
    best = run.checkpoint_folder / "best.safetensors"
    chosen = read_trained(best, trainer.bundle) if history.best and best.is_file() else trainer
    chosen.export(run.model_path, overwrite=True)


def summary(run: Run, trainer: Trainer, history: History, console: Console) -> None:
    """The last lines: what was done, what came out, what to do next."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=not console.is_terminal)

    shown = run.folder
    rate = history.rows / history.seconds if history.seconds else 0.0
    skipped = f", {history.skipped} skipped" if history.skipped else ""
    spent = f" in {amount(history.seconds)} ({rate:,.0f} rows/s)" if history.losses else ""
    early = "" if history.reason in ("done", INTERRUPTED) else f"; stopped early: {history.reason}"
    say(f"{history.steps} steps{skipped}{spent}{early}")
    if hint := scale_hint([entry for entry in run.metrics() if entry["kind"] == "window"]):
        say(hint, "yellow")
    if history.reason == INTERRUPTED:
        say(f"Interrupted and saved. Go on with:  onnxamp train --resume -o {shown}", "yellow")
        return
    best = history.best
    what = f"best {best['metric']} {best['value']:.4g}, epoch {best['epoch'] + 1}" if best else "last parameters"
    say(f"model   {shown / run.model_path.name}  ({what})")
    say(f"report  {shown / run.report_path.name}")
