"""The training protocol of a bundle: micro-batches add up to windows, and a window changes the state at its end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from onnxamp.errors import DivergedError, UsageError
from onnxamp.ort.values import Slots, View
from onnxamp.trainer.arenas import FLOAT, Arenas
from onnxamp.trainer.batch import CheckedBatch
from onnxamp.trainer.cause import Cause
from onnxamp.trainer.collective import Collective
from onnxamp.trainer.step import StepPrograms
from onnxamp.training.manifest import ITEM_SIZE, REPORT, WINDOW, WINDOW_SIZE, Manifest

# The last element of the window's sums, which no graph uses, tells with them how many ranks want the run to end.
VOTE = WINDOW_SIZE - 1
# Reading from a device waits for it, so the count of windows skipped in a row is not read after each of them.
_LOOK_EVERY = 16
_STUCK = ITEM_SIZE["float32"] * REPORT.index("stuck")


class Window:
    """The micro-batches whose gradients are added before the parameters change.

    Attributes:
        micro_steps: Micro-steps so far, which all ranks take together.
        own: Micro-batches so far of this rank; fewer where it had none left.
        rows: Rows so far, over all ranks.
        nan: What is known of NaN in its data, in words.
        infinity: What is known of infinities in its data, in words.
        interrupted: When it ended some rank wanted the run to end.
    """

    def __init__(
        self,
        micro_steps: int = 0,
        rows: int = 0,
        nan: str | None = None,
        own: int | None = None,
        infinity: str | None = None,
    ) -> None:
        self.micro_steps = micro_steps
        self.own = micro_steps if own is None else own
        self.interrupted = False
        self.rows = rows
        self.nan = nan
        self.infinity = infinity
        self._report: View | None = None

    @property
    def ended(self) -> bool:
        """Whether it has been applied, or skipped."""
        return self._report is not None

    def end(self, report: View) -> None:
        """Keep where the report lies."""
        self._report = report

    @functools.cached_property
    def report(self) -> dict[str, float]:
        """The fields of `manifest.REPORT` of a window that has ended, copied from the device once."""
        assert self._report is not None
        return dict(zip(REPORT, self._report.read().tolist(), strict=True))

    @property
    def stuck(self) -> int:
        """Windows skipped in a row at the lowest loss scale; on the CPU it is looked up where it lies."""
        view = self._report
        if view is None or view.buffer.device != "cpu":
            return int(self.report["stuck"])
        start = view.offset + _STUCK
        return int(view.buffer.host[start : start + ITEM_SIZE["float32"]].view(np.float32)[0])

    @property
    def loss(self) -> View:
        """Where the mean loss lies, the first field of the report."""
        assert self._report is not None
        return self._report.buffer.view(self._report.offset, (), FLOAT)


class StepResult:
    """What came of a micro-step; the numbers are copied from the device when they are first asked for."""

    def __init__(self, window: Window, loss: View, scale: Callable[[], float] | None, ended: bool) -> None:
        self._window = window
        self._loss = loss
        self._scale = scale
        self._ended = ended

    def __repr__(self) -> str:
        report = self.report
        if report is None:
            return f"<StepResult loss {self.loss:.6g}, window open>"
        ended = f"skipped: {self.cause}" if self.skipped else "applied" if self.applied else "empty"
        return f"<StepResult loss {self.loss:.6g}, window {ended}; loss {report['loss']:.6g} over {report['rows']:.0f} rows>"

    @property
    def loss(self) -> float:
        """Mean loss of this micro-batch (0 if no row has weight)."""
        return float(self._loss.read())

    @property
    def report(self) -> dict[str, float] | None:
        """The fields of `manifest.REPORT` if this micro-step ended a window, else None."""
        return self._window.report if self._ended else None

    @property
    def applied(self) -> bool:
        """This micro-step ended a window and the parameters were updated."""
        return bool(self.report and self.report["ok"])

    @property
    def skipped(self) -> bool:
        """This micro-step ended a window whose gradient was not finite: nothing but the loss scale changed."""
        return bool(self.report and self.report["found_inf"] and not self.report["ok"])

    @property
    def scale(self) -> float:
        """The loss scale that this micro-step was run with."""
        # The state holds it only until the window ends; then the report does.
        if self._window.ended:
            return self._window.report["loss_scale"]
        assert self._scale is not None
        return self._scale()

    @property
    def interrupted(self) -> bool:
        """This micro-step ended a window, and one of the ranks wants the run to end here."""
        return self._ended and self._window.interrupted

    @property
    def cause(self) -> Cause | None:
        """Why the window was skipped or has lost micro-batches (policy ``micro``); None if it was and has not."""
        report, window = self.report, self._window
        if not report or not (self.skipped or report["dropped"]):
            return None
        if window.nan is not None:
            return Cause("data", window.nan)
        offered, dropped, bad = (int(report[name]) for name in ("micro_steps", "dropped", "bad_losses"))
        if bad:
            what = f"the loss is not finite in {bad} of {offered + dropped} micro-batches"
            return Cause("loss", what, window.infinity)
        where = f" in {dropped} of {offered + dropped} micro-batches" if dropped else ""
        return Cause(
            "overflow", f"a gradient overflowed{where} at loss scale {report['loss_scale']:g}", window.infinity
        )


def seed_divisor(weight: float) -> float:
    """What the seed of the backward half is divided by: the power of two nearest to a sum of weights, 1 where there is none."""
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0


class WindowLoop:
    """Runs the graphs of a bundle in the order that its protocol asks for.

    Args:
        manifest: The bundle's manifest.
        arenas: The state.
        programs: The graphs.
        accumulate: Micro-batches in a window.
        collective: The processes that train together.
        weight_sum: Runs eval.onnx for the sum of weights of a batch, a float32 scalar.

    Attributes:
        interrupting: This process wants the run to end: the others hear it with the next all-reduce.
    """

    def __init__(
        self,
        manifest: Manifest,
        arenas: Arenas,
        programs: StepPrograms,
        accumulate: int,
        collective: Collective,
        weight_sum: Callable[[CheckedBatch], View],
    ) -> None:
        self.accumulate = accumulate
        self.window = self._last = Window()
        self._manifest = manifest
        self._arenas = arenas
        self._grad = programs.grad
        self._reduce = programs.reduce
        self._update = programs.update
        self._collective = collective
        self._windows = 0
        self._in_step = False
        self.interrupting = False
        self._seeded = float(arenas.tensor("scalars/seed_divisor")) != 0
        self._loss = next(p for p in manifest.graphs["grad"].outputs if p.name == "amp.loss")
        self._report = next(p for p in manifest.graphs["reduce"].outputs if p.ref == "report")
        self._weight_sum = weight_sum
        self._slots = Slots(arenas.device, arenas.device_id)

    def micro_step(self, batch: CheckedBatch | None, rows: Sequence[int] | None = None) -> StepResult:
        """Add the gradients of one micro-batch; after the last of a window, apply it.

        Args:
            batch: The micro-batch; None where `rows` leaves this rank no row.
            rows: Rows of every rank in this micro-step, if they are known; else the ranks ask each other.

        Raises:
            DivergedError: Too many windows in a row were skipped at the lowest loss scale.
        """
        window = self.window
        self._in_step = rows is not None
        before, together = self._ranks(batch.rows if batch else 0, rows)
        if not self._seeded:
            self._seed(self._weight_sum(batch) if batch else self._slots.take((), FLOAT))
        loss = self._slots.take((), FLOAT)
        if batch is not None:
            self._add(batch, before, loss)
        if not self._seeded:
            self._set_divisor(0)
        ended = self._count(together)
        return StepResult(window, loss, self._scale, ended)

    def _add(self, batch: CheckedBatch, before: int, loss: View) -> None:
        """Run the backward pass; `before` counts the rows of lower ranks in this micro-step."""
        window = self.window
        ranks, rank = self._collective.world_size, self._collective.rank
        hosts = {
            "first": np.array(window.own == 0),
            "row_offset": np.array(window.rows + before + self._kept_apart("dropped_rows"), np.int64),
            "micro_step": np.array(window.micro_steps * ranks + rank + self._kept_apart("dropped"), np.int64),
        }
        feeds = {**batch.feeds, **{name: hosts[ref] for name, ref in self._grad.hosts.items()}}
        alone = self.accumulate == 1 and window.micro_steps == 0
        self._grad.run(feeds, {self._loss.name: loss}, alone)
        window.own += 1
        window.nan = window.nan or batch.nan
        window.infinity = window.infinity or batch.infinity

    def flush(self) -> StepResult | None:
        """Apply a window that has fewer micro-batches than the others; None if there are none."""
        result = None
        # A rank that has no micro-batch left takes part, with nothing, until all ranks have come here.
        while self._collective.world_size > 1 and not self._in_step and (rows := self._ranks(0)[1]):
            if not self._seeded:
                self._seed(self._slots.take((), FLOAT))
            result = self._result() if self._count(rows) else None
        if not self.window.micro_steps:
            return result
        self._apply()
        return self._result()

    def _result(self) -> StepResult:
        """The result of the window that was applied last; its report begins with the mean loss."""
        return StepResult(self._last, self._last.loss, None, True)

    def _count(self, rows: int) -> bool:
        """Count a micro-step of all ranks, and apply the window if it was the last."""
        self.window.micro_steps += 1
        self.window.rows += rows
        ended = self.window.micro_steps >= self.accumulate
        if ended:
            self._apply()
        return ended

    def regroup(self, accumulate: int) -> None:
        """Let windows of the same rows have `accumulate` micro-batches, the one that is open too."""
        window = self.window
        own = bool(window.own)
        window.micro_steps = window.micro_steps * accumulate // self.accumulate
        window.own = window.micro_steps if own else 0
        self.accumulate = accumulate

    def join(self, collective: Collective) -> None:
        """Exchange with these processes from now on."""
        self._collective = collective

    def restore(self, window: Window) -> None:
        """Go on in the middle of `window`; the arenas hold its state already."""
        self.window = window
        self._seeded = float(self._arenas.tensor("scalars/seed_divisor")) != 0

    def _apply(self) -> None:
        window = self.window
        report = self._slots.take((len(REPORT),), FLOAT)
        if self._collective.world_size > 1:
            if not window.own:
                self._contribute_nothing()
            vote = self._arenas.range("window", VOTE, (1,))
            if self.interrupting:
                vote.write(np.ones(1, np.float32))
            self._collective.all_reduce(*self._arenas.reduced())
            window.interrupted = bool(vote.read()[0])
            if window.interrupted:  # the wish is granted; a signal since the vote was written wanted the same
                self.interrupting = False
        self._reduce.run(fresh={self._report.name: report})
        self._reduce.turn()
        self._update.run()
        window.end(report)
        self._last, self.window = window, Window()
        self._windows += 1
        if self._arenas.device == "cpu" or self._windows % _LOOK_EVERY == 0:
            self._stop_if_stuck(window)

    def _stop_if_stuck(self, window: Window) -> None:
        patience = self._manifest.limits.get("patience", math.inf)
        stuck = window.stuck
        if stuck < patience:
            return
        report = window.report
        if window.nan is not None:
            why = f"{window.nan}: mend the data"
        elif window.infinity is not None:
            why = f"{window.infinity}: mend the data, or lower the learning rate if it is meant"
        elif report["bad_losses"]:
            why = (
                "the loss itself is not finite, so no loss scale can help: lower the learning rate or look at the data"
            )
        else:
            why = "gradients are not finite at the lowest loss scale: lower the learning rate or raise the precision"
        raise DivergedError(
            f"{stuck} windows in a row were skipped at the lowest loss scale "
            f"({report['next_loss_scale']:g}); {why}; `onnxamp diagnose` names the first bad node."
        )

    def _seed(self, weight: View) -> None:
        """Choose the divisor of the backward seed by the first batch that has weight; 1 as long as there was none."""
        if self._collective.world_size > 1:
            self._collective.all_reduce(weight)
        total = float(weight.read())
        self._seeded = 0 < total < math.inf
        self._set_divisor(seed_divisor(total))

    def _set_divisor(self, value: float) -> None:
        self._arenas.write("scalars/seed_divisor", np.array(value, np.float32))

    def _contribute_nothing(self) -> None:
        """Clear what an earlier window left, on a rank that has no micro-batch while others have."""
        view, _ = self._arenas.reduced()
        view.write(np.zeros(view.shape, np.float32))
        if self._manifest.has_arena("statistics"):
            shape = (self._manifest.arena("statistics").elements,)
            self._arenas.range("statistics_work", 0, shape).write(self._arenas.range("statistics", 0, shape).read())

    def _ranks(self, own: int, rows: Sequence[int] | None = None) -> tuple[int, int]:
        """Rows of lower ranks in this micro-step, and of all ranks; `own` are those of this one."""
        size, rank = self._collective.world_size, self._collective.rank
        if size == 1:
            return 0, own
        if rows is not None:
            if len(rows) != size or rows[rank] != own:
                raise UsageError(
                    f"Rank {rank} of {size} has {own} rows, and those given of all ranks are {list(rows)}."
                )
            return sum(rows[:rank]), sum(rows)
        counts = np.zeros(size, np.float32)
        counts[rank] = own
        shared = self._slots.take((size,), FLOAT)
        shared.write(counts)
        self._collective.all_reduce(shared)
        counts = shared.read()
        return int(counts[:rank].sum()), int(counts.sum())

    def _kept_apart(self, field: str) -> int:
        """What the graph takes away from a count for the micro-batches that were dropped, to be added back.

        A rank does not know what others have dropped. So where several train, rows keep their numbers, and none has that of
        another.
        """
        if self._collective.world_size == 1 or self._manifest.options.get("overflow") != "micro" or not self.window.own:
            return 0
        return int(self._arenas.tensor("window/window")[WINDOW.index(field)])

    def _scale(self) -> float:
        return float(self._arenas.tensor("scalars/loss_scale"))
