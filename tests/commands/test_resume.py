"""`onnxamp train --resume`: after the end, after a kill, after Ctrl-C, after a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from onnxamp.trainer.tracking import read_metrics


def test_a_finished_run_goes_on_only_with_more_epochs(run, place, call, options):
    folder, _, _ = run
    code, out, _ = call("train", "--resume", "-o", folder)
    assert code == 0
    assert "nothing left to do" in out
    (place / "faster.toml").write_text("lr = 0.5\n")
    for given in (("--lr", 0.5), ("--config", place / "faster.toml")):
        code, _, err = call("train", "--resume", "-o", folder, *given)
        assert (code, err) == (
            2,
            "Error: --lr is fixed in a run that goes on, and was 0.003 when it was begun: leave it out, or begin a new run from its "
            f"parameters with `--init-from {folder} -o OTHER`.\n",
        )
    code, _, err = call("train", "--resume", "-o", folder, "--frozen", "fc1.*")
    assert (code, "--frozen is fixed in a run that goes on, and was not given when" in err) == (2, True)
    (place / "same.toml").write_text("lr = 3e-3\nepochs = 6\n")
    assert call("train", "--resume", "-o", folder, "--config", place / "same.toml", "--lr", "0.003")[0] == 0
    code, _, err = call(*options(place, folder))
    assert code == 2
    assert "holds a run: give --resume to go on, --force to replace it" in err


def test_a_run_that_ended_before_its_model_is_told_nothing_of_more_epochs(run, call, tmp_path, caplog):
    """Killed behind the last checkpoint: the model is what is left to do."""
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    model = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").unlink()
    code, out, err = call("train", "--resume", "-o", folder)
    assert code == 0, err
    assert "Nothing is left to train" not in out + err + caplog.text
    assert (folder / "model.onnx").read_bytes() == model


@pytest.mark.parametrize("lost", ["gone", "truncated", "gone and no model"])
def test_a_run_without_a_readable_checkpoint_is_not_begun_over(run, call, tmp_path, caplog, lost):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    saved = sorted((folder / "checkpoints").glob("step-*"))
    assert len(saved) == 2
    for path in (folder / "checkpoints").iterdir():
        os.truncate(path, 100) if lost == "truncated" else path.unlink()
    if lost.endswith("no model"):
        (folder / "model.onnx").unlink()
    before = _contents(folder)
    code, _, err = call("train", "--resume", "-o", folder)
    assert code == 3
    assert "no checkpoint to go on from" in err
    assert "--force instead of --resume" in err
    assert caplog.text.count("Trying the one before") == (lost == "truncated")
    tried = f"tried {saved[1].name}, {saved[0].name}" if lost == "truncated" else "there is none"
    assert tried in " ".join(err.split())
    assert _contents(folder) == before


@pytest.mark.parametrize("lost", ["config.toml", "bundle/manifest.json", "both"])
@pytest.mark.parametrize("again", ["short", "whole"])
def test_a_run_that_lost_its_configuration_or_bundle_is_not_begun_over(
    run, place, call, options, tmp_path, lost, again
):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    lost = ["config.toml", "bundle/manifest.json"] if lost == "both" else [lost]
    for name in lost:
        (folder / name).unlink()
    before = _contents(folder)
    arguments = options(place, folder, resume=True) if again == "whole" else ("train", "--resume", "-o", folder)
    code, _, err = call(*arguments)
    assert code == 3
    assert f"but no {' and no '.join(lost)} to go on with" in " ".join(err.split())
    assert "--force instead of --resume" in err
    assert _contents(folder) == before


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(
    place, call, options, monkeypatch, last, tmp_path
):
    """Windows of the first epoch are recorded, and none is saved before its end."""
    folder = tmp_path / "run"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("onnxamp.trainer.callbacks.Checkpoints.save", killed)
        assert call(*options(place, folder, epochs=1, val=None, metric=None))[0] == 130
    assert _windows(folder)
    code, out, _ = call("train", "--resume", "-o", folder)
    assert code == 0
    assert "nothing was saved yet: the run begins anew" in out
    assert last(folder)


def _windows(folder: Path) -> int:
    return sum(1 for _ in read_metrics(folder / "metrics.jsonl"))


@pytest.fixture(scope="module")
def start(options):
    def begin(place: Path, folder: Path, **changes: object) -> subprocess.Popen[str]:
        arguments = options(place, folder, level="O2", epochs=4, resume=True, **{"save-every": 2, **changes})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        return subprocess.Popen(
            [sys.executable, "-m", "onnxamp", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


@pytest.fixture(scope="module")
def undisturbed(place, last, start):
    process = start(place, place / "whole")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return last(place / "whole")


def test_a_run_that_is_killed_four_times_ends_with_the_same_bits(place, undisturbed, last, start):
    folder = place / "killed"
    rng = np.random.default_rng(5)
    for kill in range(4):
        process = start(place, folder)
        until = _windows(folder) + int(rng.integers(1, 25)) if kill else 0
        deadline = time.monotonic() + 60
        while _windows(folder) <= until and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.05)))
        process.kill()
        process.communicate()
    process = start(place, folder)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    ended = last(folder)
    assert undisturbed.keys() == ended.keys()
    assert [key for key in ended if ended[key].tobytes() != undisturbed[key].tobytes()] == []
    assert not list((folder / "checkpoints").glob(".*"))


def test_ctrl_c_saves_and_says_how_to_go_on(place, undisturbed, last, start):
    folder = place / "stopped"
    process = start(place, folder, **{"save-every": 1000})
    while _windows(folder) < 5 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130, out
    assert out.splitlines()[-1] == f"Interrupted and saved. Go on with:  onnxamp train --resume -o {folder}"
    assert not (folder / "model.onnx").exists()
    process = start(place, folder, **{"save-every": 1000})
    out, _ = process.communicate()
    assert process.returncode == 0, out
    ended = last(folder)
    assert [key for key in ended if ended[key].tobytes() != undisturbed[key].tobytes()] == []


def test_a_full_disk_leaves_the_checkpoints_before(place, call, monkeypatch, options, last):
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = call(*options(place, place / "full", **{"save-every": 2}))
    assert code == 5
    assert "the disk is full; what was saved before is intact" in err
    monkeypatch.undo()
    assert last(place / "full")


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("given", [{"epochs": 1}, {"steps": 4}])
def test_a_run_that_has_more_than_is_asked_for_is_left_alone(place, call, options, tmp_path, given):
    """One that was stopped within an epoch, at a window that was never evaluated."""
    folder = tmp_path / "run"
    trained = {"epochs": None, "steps": 25, "val": None, "metric": None, "save-every": 5}
    code, out, _ = call(*options(place, folder, **trained))
    assert code == 0
    assert [line.split("  loss ")[0] for line in out.splitlines() if "  loss " in line] == [
        "epoch 1  step 23", "epoch 2  step 25"
    ]  # fmt: skip
    before = _contents(folder)
    shorter = options(place, folder, resume=True, **{**trained, "steps": None, "val": place / "test.npz", **given})
    code, out, _ = call(*shorter)
    assert code == 0
    assert out.splitlines()[1:] == [
        "nothing left to do: the run has 1 epoch and 25 steps; a larger --epochs or --steps goes further"
    ]
    assert _contents(folder) == before
