"""What a run tells: its records, the lines on a terminal, TensorBoard and the page."""

from __future__ import annotations

import html
import json
import math
import os

import numpy as np
import pytest
from rich.console import Console

from onnxamp.trainer.callbacks import Callback, Checkpoints
from onnxamp.trainer.fit import fit
from onnxamp.trainer.progress import Progress, amount, scale_text
from onnxamp.trainer.run_report import run_page, scale_hint
from onnxamp.trainer.tracking import MetricsFile, TensorBoard, read_metrics

DATA = {"x": np.arange(50, dtype=np.float32)[:, None], "labels": np.arange(50)}


def test_records_of_windows(counter, tmp_path):
    fit(counter(bad=(1,)), DATA, epochs=1, batch_size=20, callbacks=[MetricsFile(tmp_path / "m.jsonl")])
    entries = list(read_metrics(tmp_path / "m.jsonl"))
    assert [entry["skipped"] for entry in entries] == [False, True, False]
    assert math.isnan(entries[1]["loss"])
    assert entries[1]["gradient_norm"] == math.inf
    assert entries[1]["cause"] == "gradient of fc.weight and 1 more overflowed"
    assert (entries[1]["loss_scale"], entries[1]["next_loss_scale"]) == (65536, 32768)
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("every", [1, 3, None])
def test_no_checkpoint_is_ahead_of_the_records(counter, tmp_path, every):
    """What a kill may find: the file as it lies there when a checkpoint is written."""
    seen = []

    class Looking(counter):
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


def test_tensorboard_events(counter, tmp_path):
    pytest.importorskip("tensorboardX")
    fit(counter(), DATA, epochs=1, batch_size=20, val=DATA, callbacks=[TensorBoard(tmp_path)])
    content = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    for tag in (b"train/loss", b"train/loss_scale", b"train/skipped", b"val/loss"):
        assert tag in content


@pytest.mark.parametrize("width", [80, 120])
def test_lines_without_a_terminal(counter, width):
    with open(os.devnull, "w") as sink:
        console = Console(width=width, force_terminal=False, no_color=True, record=True, file=sink)
        fit(counter(bad=(1,)), DATA, epochs=2, batch_size=20, val=DATA, callbacks=[Progress(console)])
    lines = console.export_text().splitlines()
    assert lines[0] == ("  window 2 skipped: gradient of fc.weight and 1 more overflowed; scale 65536 → 32768")
    assert lines[1].startswith("epoch 1/2  step 2  loss 0.")
    assert "val_loss 0.3333" in lines[1]
    assert len(lines) == 3


def test_the_living_line_fits_the_terminal(counter):
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

        fit(counter(), DATA, steps=9, batch_size=10, callbacks=[progress, Look()])
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


def test_lines_of_an_end_within_an_epoch(counter, tmp_path):
    """The last windows have a loss of their own, once; an evaluation without a new window has none."""

    def lines(trainer, **options):
        with open(os.devnull, "w") as sink:
            console = Console(width=80, no_color=True, record=True, file=sink)
            fit(trainer, DATA, batch_size=10, callbacks=[Checkpoints(tmp_path), Progress(console)], **options)
        return console.export_text().splitlines()

    assert lines(counter(), steps=7) == ["epoch 1  step 5  loss 0.4567", "epoch 2  step 7  loss 0.1548"]
    resumed = counter.load(tmp_path / "step-00000007.safetensors")
    assert lines(resumed, steps=7, val=DATA) == ["epoch 2  step 7  val_loss 0.125  rows 50"]
    assert lines(counter(), epochs=2, val=DATA, eval_every=4)[-1].startswith(
        "epoch 2/2  step 10  loss 0.1056  val_loss"
    )
