"""The epoch loop and its callbacks, on a trainer that only counts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from onnxamp.errors import DataError, DivergedError, UsageError
from onnxamp.trainer.callbacks import Callback, Checkpoints, EarlyStopping, checkpoints
from onnxamp.trainer.fit import fit
from onnxamp.trainer.tracking import MetricsFile, read_metrics

ROWS = 50
DATA = {"x": np.arange(ROWS, dtype=np.float32)[:, None], "labels": np.arange(ROWS)}


def test_every_row_once_per_epoch_with_a_short_last_window(counter):
    trainer = counter(accumulate=3)
    history = fit(trainer, DATA, epochs=2, batch_size=8)
    assert [len(rows) for rows in trainer.seen] == ([8] * 6 + [2]) * 2
    assert sorted(row for rows in trainer.seen[:7] for row in rows) == list(range(ROWS))
    assert trainer.seen[:7] != trainer.seen[7:]
    assert (history.windows, history.steps, history.epochs, history.rows) == (6, 6, 2, 100)
    assert history.reason == "done"
    assert len(history.losses) == 6


def test_steps_count_applied_windows_and_end_anywhere(counter):
    trainer = counter(accumulate=2, bad=(1, 4))
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
def test_resuming_takes_the_same_steps(counter, tmp_path, after, accumulate):
    whole = counter(accumulate)
    fit(whole, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[MetricsFile(tmp_path / "whole.jsonl")])
    first = counter(accumulate)
    records = MetricsFile(tmp_path / "m.jsonl")
    history = fit(first, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[records, Stop(after, tmp_path / "c")])
    assert history.reason == "asked to"
    # What was written after the checkpoint is taken back, a line cut off by a kill included.
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "window", "window": after + 1, "loss": 7.0}) + '\n{"kind": "win')
    second = counter.load(tmp_path / "c", accumulate)
    fit(second, DATA, epochs=3, batch_size=8, val=DATA, callbacks=[records])
    assert second.seen == whole.seen
    timeless = [
        [{k: v for k, v in entry.items() if k not in ("seconds", "waited", "memory")} for entry in read_metrics(path)]
        for path in (tmp_path / "whole.jsonl", tmp_path / "m.jsonl")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("kill", range(1, 15))
@pytest.mark.parametrize(("eval_every", "save_every"), [(2, 2), (2, 1), (None, 1), (None, 7), (3, 2)])
def test_a_kill_changes_no_decision(counter, tmp_path, kill, eval_every, save_every):
    """Best value, early stopping and records after a kill are those of a run that was never killed."""

    class Valley(counter):
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


def test_one_failing_close_leaves_the_others_closed(counter):
    closed = []

    class Fragile(Callback):
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            if self.name == "a":
                raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(counter(), DATA, steps=1, batch_size=10, callbacks=[Fragile("a"), Fragile("b")])
    assert closed == ["a", "b"]


def test_callbacks_are_called_in_order(counter):
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

    fit(counter(), DATA, epochs=2, batch_size=25, val={k: v[:30] for k, v in DATA.items()}, callbacks=[Log()])
    one = ["evaluate 30"]
    assert calls == ["start", "window 1", "window 2", *one, "epoch 1", "window 3", "window 4", *one, "epoch 2", "done"]


def test_evaluation_every_so_many_windows_and_at_the_end(counter):
    at = []

    class Log(Callback):
        def on_evaluate(self, loop, values):
            at.append(loop.windows)

    fit(counter(), DATA, epochs=2, batch_size=10, val=DATA, eval_every=4, callbacks=[Log()])
    assert at == [4, 8, 10]


def test_early_stopping_and_its_memory(counter, tmp_path):
    class Plateau(counter):
        def evaluate(self, data, metrics=()):
            return {"loss": 1.0, "accuracy": min(0.9, 0.3 * self.windows / 5)}

    trainer = Plateau()
    stopping = EarlyStopping("accuracy", 2, better="higher")
    history = fit(trainer, DATA, epochs=20, batch_size=10, val=DATA, callbacks=[stopping])
    assert history.epochs == 5  # 0.3 0.6 0.9 0.9 0.9
    assert "accuracy has not become better than 0.9 for 2 evaluations" in history.reason
    with pytest.raises(UsageError, match="only val_loss, accuracy"):
        fit(Plateau(), DATA, epochs=2, batch_size=10, val=DATA, callbacks=[EarlyStopping("f1")])


def test_checkpoints_keep_the_newest_and_the_best(counter, tmp_path):
    class Bumpy(counter):
        def evaluate(self, data, metrics=()):
            return {"loss": abs(self.windows - 10) + 1.0}

    saving = Checkpoints(tmp_path, every=3, keep=2, metric="val_loss")
    history = fit(Bumpy(), DATA, epochs=4, batch_size=10, val=DATA, callbacks=[saving])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000018.safetensors", "step-00000020.safetensors"]
    assert history.best == {"metric": "val_loss", "value": 1.0, "windows": 10, "epoch": 1}
    assert Bumpy.load(saving.best_path).windows == 10


def test_a_run_that_never_applies_ends_with_the_cause(counter):
    with pytest.raises(DivergedError, match=r"None of the 15 windows.*gradient of fc.weight and 1 more overflowed"):
        fit(counter(bad=tuple(range(99))), DATA, epochs=3, batch_size=10)


def test_data_without_weight_end_after_an_epoch(counter):
    class Empty(counter):
        def flush(self):
            result = super().flush()
            if result is not None:
                result.report.update(ok=False, empty=True)
            return result

    with pytest.raises(DataError, match="No row of a whole epoch"):
        fit(Empty(), DATA, steps=3, batch_size=10)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"steps": -1}, {"eval_every": 0}])
def test_numbers_below_one(counter, wrong):
    with pytest.raises(UsageError, match="at least 1"):
        fit(counter(), DATA, **wrong)


@pytest.mark.parametrize("end", [{"epochs": 1}, {"steps": 6}])
def test_a_run_beyond_its_end_is_left_as_it_is(counter, end, tmp_path, caplog):
    """Nothing trained means nothing evaluated, recorded or saved; and it is said."""

    class Never(Callback):
        def on_start(self, loop):
            raise AssertionError

    trainer = counter()
    fit(trainer, DATA, steps=7, batch_size=10, callbacks=[Checkpoints(tmp_path)])  # 5 windows an epoch
    assert not caplog.records
    history = fit(trainer, DATA, batch_size=10, val=DATA, callbacks=[Never()], **end)
    assert (history.reason, history.epochs, history.steps, history.losses) == ("done", 1, 7, ())
    ((name, asked),) = end.items()
    has = {"epochs": 1, "steps": 7}[name]
    (record,) = caplog.records
    unit = {"epochs": "epoch", "steps": "steps"}[name]
    assert record.getMessage() == (
        f"Nothing is left to train: {name}={asked} counts from the beginning of the run, which has {has} {unit}; "
        f"give more {name} to go on."
    )


def test_a_second_fit_to_the_same_end_says_that_it_trains_nothing(counter, tmp_path, caplog):
    trainer = counter()
    for expected in (5, 0):
        history = fit(trainer, DATA, epochs=1, batch_size=10, callbacks=[Checkpoints(tmp_path)])
        assert len(history.losses) == expected
    assert "epochs=1 counts from the beginning of the run, which has 1 epoch;" in caplog.text
    caplog.clear()
    assert len(fit(trainer, DATA, epochs=2, batch_size=10).losses) == 5
    assert not caplog.records
