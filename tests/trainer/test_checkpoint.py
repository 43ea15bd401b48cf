"""Checkpoint files: readable by anyone, replaced in one step, and never lost."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.numpy

from onnxamp.errors import ModelError, RuntimeMissingError
from onnxamp.trainer import checkpoint
from onnxamp.trainer.checkpoint import Progress
from onnxamp.trainer.device import processors
from onnxamp.training.manifest import Arena, StateTensor

PROGRESS = Progress(4, 2, 17, None, {"epoch": 3}, "../bundle", "0" * 64, {"provider": "cpu", "threads": 1})
W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _arenas(fill: float = 0.0):
    raw = np.zeros(64, np.float32)
    raw[16:28] = W.reshape(-1) + fill
    counters = np.arange(16, dtype=np.int64)
    yield Arena("master", "float32", 64), raw.view(np.uint8), (StateTensor("w", "master", (3, 4), 16),)
    yield Arena("counters", "int64", 16), counters.view(np.uint8), (StateTensor("step", "counters", (), 8),)


def test_the_file_is_plain_safetensors_and_comes_back(tmp_path):
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, _arenas(), PROGRESS)
    loaded = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(loaded["master/w"], W)
    assert loaded["counters/step"] == 8
    state, progress = checkpoint.read(path)
    assert progress == PROGRESS
    assert state.keys() == loaded.keys()
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ModelError, match="no state file"):
        checkpoint.read(path)
    checkpoint.write(path, _arenas(), PROGRESS)
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated or no checkpoint"):
            checkpoint.read(path)


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.write(tmp_path / "a.safetensors", _arenas(), PROGRESS)
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640


def test_the_number_of_threads_is_recorded_as_it_is():
    assert checkpoint.environment("cpu", 3)["threads"] == 3
    assert checkpoint.environment("cpu", 0)["threads"] == processors() >= 1


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, _arenas(), PROGRESS)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeMissingError, match="the disk is full; what was saved before is intact"):
        checkpoint.write(path, _arenas(1), PROGRESS)
    monkeypatch.undo()
    np.testing.assert_array_equal(checkpoint.read(path)[0]["master/w"], W)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_kill_during_save_leaves_the_old_checkpoint(tmp_path, call):
    """The process dies by SIGKILL just before the named step of its second save."""
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, _arenas(), PROGRESS)
    script = f"""
        import os, signal, tempfile
        import numpy as np
        from pathlib import Path
        from onnxamp.trainer import checkpoint
        from onnxamp.training.manifest import Arena, StateTensor

        class Dying:
            @property
            def data(self):
                os.kill(os.getpid(), signal.SIGKILL)
            nbytes = 48

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        raw = np.ones(64, np.float32).view(np.uint8)
        if {call!r} == "write":
            class Raw(np.ndarray):
                def __getitem__(self, key):
                    return Dying()
            raw = raw.view(Raw)
        elif {call!r} == "open":
            tempfile.mkstemp = die
        else:
            setattr(os, {call!r}, die)
        progress = checkpoint.Progress(1, 0, 0, None, {{}}, "", "", {{}})
        arenas = [(Arena("master", "float32", 64), raw, (StateTensor("w", "master", (3, 4), 16),))]
        checkpoint.write(Path({os.fspath(path)!r}), arenas, progress)
    """
    code = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode
    assert code == -signal.SIGKILL
    state, progress = checkpoint.read(path)
    np.testing.assert_array_equal(state["master/w"], W)
    assert progress == PROGRESS


def test_another_environment_is_logged(caplog):
    here = {"provider": "cpu", "threads": 1}
    checkpoint.warn_of_differences(PROGRESS.environment, here)
    assert not caplog.records
    checkpoint.warn_of_differences(PROGRESS.environment, {**here, "threads": 2})
    assert "threads 1 → 2" in caplog.text


def test_progress_goes_to_json_and_back():
    assert Progress(**dataclasses.asdict(PROGRESS)) == PROGRESS
