"""The epoch loop, its callbacks and its records, on a trainer that only counts."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from onnxamp.errors import DataError, DivergedError, UsageError
from onnxamp.trainer.callbacks import Callback, Checkpoints, EarlyStopping, checkpoints
from onnxamp.trainer.cause import Cause
from onnxamp.trainer.collective import SingleProcess
from onnxamp.trainer.data import Field
from onnxamp.trainer.fit import fit
from onnxamp.trainer.progress import Progress, amount, scale_text
from onnxamp.trainer.run_report import run_page, scale_hint
from onnxamp.trainer.tracking import MetricsFile, TensorBoard, read_metrics

ROWS = 50
DATA = {"x": np.arange(ROWS, dtype=np.float32)[:, None], "labels": np.arange(ROWS)}


class Counter:
    """A trainer in outline: its state is the list of the rows of every applied window."""

    fields = (
        Field("x", np.dtype(np.float32), ("batch", 1)),
        Field("labels", np.dtype(np.int64), ("batch",)),
        Field("weights", np.dtype(np.float32), ("batch",)),
    )

    metric_options: dict = {}  # noqa: RUF012
    collective = SingleProcess()

    def __init__(self, accumulate: int = 1, bad: tuple[int, ...] = ()) -> None:
        self.accumulate = accumulate
        self.bad = bad
        self.position: dict = {}
        self.seen: list[list[int]] = []
        self.window: list[list[int]] = []
        self.windows = 0
        self.scale = 65536.0

    def checked(self, batch, locate=None):
        return batch

    def micro_step(self, batch):
        self.window.append(batch["labels"].tolist())
        return self.flush() if len(self.window) == self.accumulate else _result(None)

    def flush(self):
        if not self.window:
            return None
        ok = self.windows not in self.bad
        if ok:
            self.seen += self.window
        scale, self.scale = self.scale, self.scale * (1 if ok else 0.5)
        rows = sum(map(len, self.window))
        self.window = []
        self.windows += 1
        report = {
            "loss": 1 / self.windows if ok else math.nan,
            "ok": ok,
            "empty": False,
            "found_inf": not ok,
            "dropped": 0,
            "rows": rows,
            "weight_sum": rows,
            "learning_rate": 0.1,
            "gradient_norm": 1.0 if ok else math.inf,
            "loss_scale": scale,
            "next_loss_scale": self.scale,
        }
        return _result(report, None if ok else Cause("overflow", "a gradient overflowed"))

    def nonfinite_gradients(self):
        return ["conv.weight", "fc.weight"]

    def evaluate(self, data, metrics=()):
        rows = sum(len(batch["labels"]) for batch in data)
        return {"loss": 1 / (1 + len(self.seen)), "rows": rows}

    def save(self, path):
        Path(path).write_text(json.dumps([self.position, self.seen, self.window, self.windows, self.scale]))

    @classmethod
    def load(cls, path, accumulate=1):
        trainer = cls(accumulate)
        trainer.position, trainer.seen, trainer.window, trainer.windows, trainer.scale = json.loads(path.read_text())
        return trainer


def _result(report, cause=None):
    return types.SimpleNamespace(report=report, cause=cause)


def test_every_row_once_per_epoch_with_a_short_last_window():
    trainer = Counter(accumulate=3)
    history = fit(trainer, DATA, epochs=2, batch_size=8)
    assert [len(rows) for rows in trainer.seen] == ([8] * 6 + [2]) * 2
    assert sorted(row for rows in trainer.seen[:7] for row in rows) == list(range(ROWS))
    assert trainer.seen[:7] != trainer.seen[7:]
    assert (history.windows, history.steps, history.epochs, history.rows) == (6, 6, 2, 100)
    assert history.reason == "done"
    assert len(history.losses) == 6


def test_steps_count_applied_windows_and_end_anywhere():
    trainer = Counter(accumulate=2, bad=(1, 4))
    history = fit(trainer, DATA, steps=7, batch_size=8)
    assert (history.steps, history.windows, history.skipped) == (7, 9, 2)
    assert history.epochs == 2


class Stop(Callback):
    def __init__(self, after: int, path: Path | None = None) -> None:
        self.after = after
        self.path = path

    def on_window(self, loop, window):
        if loop.windows == self.after:
            if self.path is not None:
                loop.save(self.path)
            loop.stop("asked to")


@pytest.mark.parametrize("after", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_resuming_takes_the_same_steps(tmp_path, after, accumulate):
    whole = Counter(accumulate)
    fit(whole, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[MetricsFile(tmp_path / "whole.jsonl")])
    first = Counter(accumulate)
    records = MetricsFile(tmp_path / "m.jsonl")
    history = fit(first, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[records, Stop(after, tmp_path / "c")])
    assert history.reason == "asked to"
    # What was written after the checkpoint is taken back, a line cut off by a kill included.
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "window", "window": after + 1, "loss": 7.0}) + '\n{"kind": "win')
    second = Counter.load(tmp_path / "c", accumulate)
    fit(second, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[records])
    assert second.seen == whole.seen
    timeless = [
        [{k: v for k, v in entry.items() if k not in ("seconds", "waited", "memory")} for entry in read_metrics(path)]
        for path in (tmp_path / "whole.jsonl", tmp_path / "m.jsonl")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("kill", range(1, 15))
@pytest.mark.parametrize(("eval_every", "save_every"), [(2, 2), (2, 1), (None, 1), (None, 7), (3, 2)])
def test_a_kill_changes_no_decision(tmp_path, kill, eval_every, save_every):
    """Best value, early stopping and records after a kill are those of a run that was never killed."""

    class Valley(Counter):
        def evaluate(self, data, metrics=()):
            return {"loss": abs(self.windows - 6) + 1.0}

    class Kill(Callback):
        def on_window(self, loop, window):
            if loop.windows == kill:
                raise KeyboardInterrupt

        def on_evaluate(self, loop, values):
            if loop.windows == kill - 1:  # the evaluation after the window of the last checkpoint, before it is used
                raise KeyboardInterrupt

    def go(trainer, folder, *extra, **more):
        callbacks = [
            MetricsFile(folder / "m.jsonl"), *extra, Checkpoints(folder, save_every, metric="val_loss"),
            EarlyStopping("val_loss", 2),
        ]  # fmt: skip
        options = {"epochs": 2, "batch_size": 8, "val": DATA, "eval_every": eval_every}
        return fit(trainer, DATA, **options, callbacks=callbacks)

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = Valley()
    wanted = go(whole, tmp_path / "whole")
    killed = Valley()
    with contextlib.suppress(KeyboardInterrupt):
        go(killed, tmp_path / "killed", Kill())
    saved = checkpoints(tmp_path / "killed")
    again = Valley.load(saved[-1]) if saved else Valley()
    history = go(again, tmp_path / "killed")
    assert (history.best, history.reason, history.windows) == (wanted.best, wanted.reason, wanted.windows)
    assert again.seen == whole.seen
    best, other = (Valley.load(tmp_path / name / "best.safetensors") for name in ("whole", "killed"))
    assert best.seen == other.seen
    records = [
        [(entry["kind"], entry["window"]) for entry in read_metrics(tmp_path / name / "m.jsonl")]
        for name in ("whole", "killed")
    ]
    assert records[0] == records[1]


def test_one_failing_close_leaves_the_others_closed():
    closed = []

    class Fragile(Callback):
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            if self.name == "a":
                raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(Counter(), DATA, steps=1, batch_size=10, callbacks=[Fragile("a"), Fragile("b")])
    assert closed == ["a", "b"]


def test_callbacks_are_called_in_order():
    calls = []

    class Log(Callback):
        def on_start(self, loop):
            calls.append("start")

        def on_window(self, loop, window):
            calls.append(f"window {loop.windows}")

        def on_evaluate(self, loop, values):
            calls.append(f"evaluate {values['rows']:.0f}")

        def on_epoch(self, loop):
            calls.append(f"epoch {loop.epoch}")

        def on_end(self, loop, reason):
            calls.append(reason)

    fit(Counter(), DATA, epochs=2, batch_size=25, val={k: v[:30] for k, v in DATA.items()}, callbacks=[Log()])
    one = ["evaluate 30"]
    assert calls == ["start", "window 1", "window 2", *one, "epoch 1", "window 3", "window 4", *one, "epoch 2", "done"]


def test_evaluation_every_so_many_windows_and_at_the_end():
    at = []

    class Log(Callback):
        def on_evaluate(self, loop, values):
            at.append(loop.windows)

    fit(Counter(), DATA, epochs=2, batch_size=10, val=DATA, eval_every=4, callbacks=[Log()])
    assert at == [4, 8, 10]


def test_early_stopping_and_its_memory(tmp_path):
    class Plateau(Counter):
        def evaluate(self, data, metrics=()):
            return {"loss": 1.0, "accuracy": min(0.9, 0.3 * self.windows / 5)}

    trainer = Plateau()
    stopping = EarlyStopping("accuracy", 2, better="higher")
    history = fit(trainer, DATA, epochs=20, batch_size=10, val=DATA, callbacks=[stopping])
    assert history.epochs == 5  # 0.3 0.6 0.9 0.9 0.9
    assert "accuracy has not become better than 0.9 for 2 evaluations" in history.reason
    with pytest.raises(UsageError, match="only val_loss, accuracy"):
        fit(Plateau(), DATA, epochs=2, batch_size=10, val=DATA, callbacks=[EarlyStopping("f1")])


def test_checkpoints_keep_the_newest_and_the_best(tmp_path):
    class Bumpy(Counter):
        def evaluate(self, data, metrics=()):
            return {"loss": abs(self.windows - 10) + 1.0}

    saving = Checkpoints(tmp_path, every=3, keep=2, metric="val_loss")
    history = fit(Bumpy(), DATA, epochs=4, batch_size=10, val=DATA, callbacks=[saving])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000018.safetensors", "step-00000020.safetensors"]
    assert history.best == {"metric": "val_loss", "value": 1.0, "windows": 10, "epoch": 1}
    assert Bumpy.load(saving.best_path).windows == 10


def test_a_run_that_never_applies_ends_with_the_cause():
    with pytest.raises(DivergedError, match=r"None of the 15 windows.*gradient of fc.weight and 1 more overflowed"):
        fit(Counter(bad=tuple(range(99))), DATA, epochs=3, batch_size=10)


def test_data_without_weight_end_after_an_epoch():
    class Empty(Counter):
        def flush(self):
            result = super().flush()
            if result is not None:
                result.report.update(ok=False, empty=True)
            return result

    with pytest.raises(DataError, match="No row of a whole epoch"):
        fit(Empty(), DATA, steps=3, batch_size=10)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"steps": -1}, {"eval_every": 0}])
def test_numbers_below_one(wrong):
    with pytest.raises(UsageError, match="at least 1"):
        fit(Counter(), DATA, **wrong)


def test_records_of_windows(tmp_path):
    fit(Counter(bad=(1,)), DATA, epochs=1, batch_size=20, callbacks=[MetricsFile(tmp_path / "m.jsonl")])
    entries = list(read_metrics(tmp_path / "m.jsonl"))
    assert [entry["skipped"] for entry in entries] == [False, True, False]
    assert math.isnan(entries[1]["loss"])
    assert entries[1]["gradient_norm"] == math.inf
    assert entries[1]["cause"] == "gradient of fc.weight and 1 more overflowed"
    assert (entries[1]["loss_scale"], entries[1]["next_loss_scale"]) == (65536, 32768)
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("every", [1, 3, None])
def test_no_checkpoint_is_ahead_of_the_records(tmp_path, every):
    """What a kill may find: the file as it lies there when a checkpoint is written."""
    seen = []

    class Looking(Counter):
        def save(self, path):
            entries = list(read_metrics(tmp_path / "m.jsonl"))
            assert [e["window"] for e in entries if e["kind"] == "window"] == list(
                range(1, self.position["windows"] + 1)
            )
            assert len([e for e in entries if e["kind"] == "evaluation"]) == self.position["evaluated"] // 5
            seen.append(self.position["windows"])

    callbacks = [Checkpoints(tmp_path, every, metric="val_loss"), MetricsFile(tmp_path / "m.jsonl")]
    fit(Looking(), DATA, epochs=2, batch_size=10, val=DATA, callbacks=callbacks[::-1])
    assert len(seen) == 2 + {1: 11, 3: 4, None: 3}[every]  # best of each evaluation; so often; the end


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboardX")
    fit(Counter(), DATA, epochs=1, batch_size=20, val=DATA, callbacks=[TensorBoard(tmp_path)])
    content = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    for tag in (b"train/loss", b"train/loss_scale", b"train/skipped", b"val/loss"):
        assert tag in content


@pytest.mark.parametrize("width", [80, 120])
def test_lines_without_a_terminal(width):
    with open(os.devnull, "w") as sink:
        console = Console(width=width, force_terminal=False, no_color=True, record=True, file=sink)
        fit(Counter(bad=(1,)), DATA, epochs=2, batch_size=20, val=DATA, callbacks=[Progress(console)])
    lines = console.export_text().splitlines()
    assert lines[0] == ("  window 2 skipped: gradient of fc.weight and 1 more overflowed; scale 65536 → 32768")
    assert lines[1].startswith("epoch 1/2  step 2  loss 0.")
    assert "val_loss 0.3333" in lines[1]
    assert len(lines) == 3


def test_the_living_line_fits_the_terminal():
    plain = Console(width=80, color_system=None, force_terminal=False)
    with open(os.devnull, "w") as sink:
        console = Console(width=80, force_terminal=True, color_system=None, file=sink)
        progress = Progress(console)
        seen = []

        class Look(Callback):
            def on_window(self, loop, window):
                with plain.capture() as text:
                    plain.print(progress._status(loop))
                seen.append(text.get())

        fit(Counter(), DATA, steps=9, batch_size=10, callbacks=[progress, Look()])
    assert len(seen) == 9
    assert all(len(line.rstrip("\n")) <= 80 and line.count("\n") == 1 for line in seen)
    assert "ETA" in seen[5]


def test_durations_and_scales():
    assert [amount(s) for s in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert [scale_text(s) for s in (65536.0, 1.0, 0.5, 2.0**40)] == ["65536", "1", "0.5", "1.1e+12"]


def test_the_hint_on_the_initial_scale():
    def windows(*skipped, scale=65536.0):
        for bad in skipped:
            after = scale / 2 if bad else scale
            yield {"loss_scale": scale, "next_loss_scale": after, "skipped": bad}
            scale = after

    assert scale_hint([]) is None
    assert scale_hint(list(windows(*[False] * 20))) is None
    hint = scale_hint(list(windows(True, True, True, False, False)))
    assert hint is not None
    assert hint.endswith("Start with --init-scale 8192 to save them.")
    hint = str(scale_hint(list(windows(*[False] * 200))))
    assert "never had to back off from 65536: --loss-scale dynamic --init-scale 1048576" in hint
    assert scale_hint(list(windows(*[False] * 200, scale=1.0))) is None
    assert scale_hint(list(windows(*[False] * 100, True, *[False] * 100))) is None


def test_the_page_of_a_run_that_only_failed():
    entry = {"kind": "window", "window": 1, "step": 0, "epoch": 0, "loss": math.nan, "learning_rate": 1.0}
    entry |= {"loss_scale": 1.0, "next_loss_scale": 1.0, "gradient_norm": math.nan, "skipped": True, "empty": False}
    entry |= {"rows": 4, "seconds": 0.0, "waited": 0.0, "memory": None, "cause": "<b>NaN</b> in 'x'"}
    text = run_page("Training of <m>", [entry], {"lr": 1.0}, "failed")
    assert "not finite" in text
    assert "<b>NaN" not in text
    assert "Why it ended" not in run_page("empty", [], {}, "failed", failed=True)


ENDS = {
    "done": ("done", False, "done"),
    "interrupted": ("interrupted", False, "interrupted"),
    "early": ("val_loss has not become better than 0.25 for 3 evaluations", False, "stopped early"),
    "error": ("NaN in 'x'.", True, "failed"),
    "long error": ("50 windows in a row were skipped at the lowest loss scale (1); mend the data.", True, "failed"),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_headline_of_a_page_is_short_and_the_reason_a_note(case):
    reason, failed, headline = ENDS[case]
    text = html.unescape(run_page("Training", [], {}, reason, failed=failed))
    assert f'<div class="label">ended</div><div class="value">{headline}</div>' in text
    note = f'<h2>Why it ended</h2><div class="note {"bad" if failed else "plain"}"><p>{reason}</p></div>'
    assert (note in text) == (reason != headline)
    assert reason == headline or text.count(reason) == 1


@pytest.mark.parametrize("end", [{"epochs": 1}, {"steps": 6}])
def test_a_run_beyond_its_end_is_left_as_it_is(end, tmp_path, caplog):
    """Nothing trained means nothing evaluated, recorded or saved; and it is said."""

    class Never(Callback):
        def on_start(self, loop):
            raise AssertionError

    trainer = Counter()
    fit(trainer, DATA, steps=7, batch_size=10, callbacks=[Checkpoints(tmp_path)])  # 5 windows an epoch
    assert not caplog.records
    history = fit(trainer, DATA, batch_size=10, val=DATA, callbacks=[Never()], **end)
    assert (history.reason, history.epochs, history.steps, history.losses) == ("done", 1, 7, ())
    ((name, asked),) = end.items()
    has = {"epochs": 1, "steps": 7}[name]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Nothing is left to train: {name}={asked} counts from the beginning of the run, which has {has} {name}; "
        f"give more {name} to go on."
    )


def test_a_second_fit_to_the_same_end_says_that_it_trains_nothing(tmp_path, caplog):
    trainer = Counter()
    for expected in (5, 0):
        history = fit(trainer, DATA, epochs=1, batch_size=10, callbacks=[Checkpoints(tmp_path)])
        assert len(history.losses) == expected
    assert "epochs=1 counts from the beginning of the run, which has 1 epochs" in caplog.text
    caplog.clear()
    assert len(fit(trainer, DATA, epochs=2, batch_size=10).losses) == 5
    assert not caplog.records


def test_lines_of_an_end_within_an_epoch(tmp_path):
    """The last windows have a loss of their own, once; an evaluation without a new window has none."""

    def lines(trainer, **options):
        with open(os.devnull, "w") as sink:
            console = Console(width=80, no_color=True, record=True, file=sink)
            fit(trainer, DATA, batch_size=10, callbacks=[Checkpoints(tmp_path), Progress(console)], **options)
        return console.export_text().splitlines()

    assert lines(Counter(), steps=7) == ["epoch 1  step 5  loss 0.4567", "epoch 2  step 7  loss 0.1548"]
    resumed = Counter.load(tmp_path / "step-00000007.safetensors")
    assert lines(resumed, steps=7, val=DATA) == ["epoch 2  step 7  val_loss 0.125  rows 50"]
    assert lines(Counter(), epochs=2, val=DATA, eval_every=4)[-1].startswith(
        "epoch 2/2  step 10  loss 0.1056  val_loss"
    )
