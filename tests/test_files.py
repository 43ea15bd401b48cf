"""A name never stands for a file that the disk did not take."""

from __future__ import annotations

import errno
import os

import pytest

from onnxamp import files


def test_an_error_of_the_disk_while_writing_keeps_the_name(tmp_path, monkeypatch):
    """The disk tells such an error once: to the flush in the background, here, so that the last one sees none."""
    path = tmp_path / "weights.data"
    path.write_bytes(b"old")
    flush, told = os.fsync, []

    def once(handle):
        if not told:
            told.append(handle)
            raise OSError(errno.EIO, "Input/output error")
        flush(handle)

    monkeypatch.setattr(files.os, "fsync", once)
    monkeypatch.setattr(files, "_BURST", 4)

    def write():
        with files.Unfinished(path) as unfinished:
            unfinished.write(b"new!")
            unfinished.publish(path)

    with pytest.raises(OSError, match="Input/output"):
        write()
    assert told
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["weights.data"]
