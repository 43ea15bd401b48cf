"""Saving where something is in the way: one sentence, and no file that was there is lost."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxamp
from onnxamp.errors import RuntimeMissingError, UsageError
from onnxamp.model import io


def saved(path: pathlib.Path, data: str) -> np.ndarray:
    """Write a model whose weight lies in `data` beside it; the weight."""
    graph = onnx.parser.parse_graph("g (float[2,1024] x) => (float[2,8] y) { y = MatMul(x, w) }")
    weight = np.random.default_rng(0).standard_normal((1024, 8), np.float32)
    graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=0)
    return weight


def weight(path: pathlib.Path) -> np.ndarray:
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_models_that_share_a_data_file_keep_it(tmp_path: pathlib.Path) -> None:
    want = saved(tmp_path / "a.onnx", "w.bin")
    (tmp_path / "b.onnx").write_bytes((tmp_path / "a.onnx").read_bytes())
    for name in ("a", "b"):
        onnxamp.convert(tmp_path / f"{name}.onnx").save(tmp_path / f"{name}.fp16.onnx")
    np.testing.assert_array_equal(weight(tmp_path / "b.onnx"), want)
    np.testing.assert_array_equal(weight(tmp_path / "b.fp16.onnx"), want.astype(np.float16))
    # Onto its own source: that gets a data file of its own, and the other model keeps the common one.
    onnxamp.convert(tmp_path / "a.onnx").save(tmp_path / "a.onnx", overwrite=True)
    np.testing.assert_array_equal(weight(tmp_path / "a.onnx"), want.astype(np.float16))
    np.testing.assert_array_equal(weight(tmp_path / "b.onnx"), want)


def test_a_model_never_replaces_the_data_that_it_reads(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "a.onnx", "out.onnx")
    (tmp_path / "link.onnx").symlink_to("out.onnx")
    before = contents(tmp_path)
    for model in (onnxamp.convert(tmp_path / "a.onnx").model, io.load(tmp_path / "a.onnx")):
        with pytest.raises(UsageError, match=r"'.*out.onnx' holds the data of tensor 'w'; choose another name"):
            io.save(model, tmp_path / "out.onnx", overwrite=True)
        with pytest.raises(UsageError, match=r"'.*link.onnx' holds the data"):
            io.save(model, tmp_path / "link.onnx", overwrite=True)
    assert contents(tmp_path) == before


def test_data_in_a_subfolder_come_out_beside_the_model(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    want = saved(tmp_path / "a.onnx", "sub/w.bin")
    (tmp_path / "out").mkdir()
    onnxamp.convert(tmp_path / "a.onnx").save(tmp_path / "out" / "b.onnx")
    np.testing.assert_array_equal(weight(tmp_path / "out" / "b.onnx"), want.astype(np.float16))
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".data", ".onnx"]


def test_a_folder_that_may_not_be_written(tmp_path: pathlib.Path) -> None:
    saved(tmp_path / "a.onnx", "w.bin")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):  # root may write anywhere but there
        folder = pathlib.Path("/sys")
    result = onnxamp.convert(tmp_path / "a.onnx")
    with pytest.raises(RuntimeMissingError, match=f"'{folder}/b.onnx' cannot be written: [^.]*\\.$"):
        result.save(folder / "b.onnx")


@pytest.mark.parametrize("limit", [100, 10_000])
def test_a_disk_that_fills_up_leaves_what_was_there(limit: int, tmp_path: pathlib.Path) -> None:
    """A limit on the size of files stands for the disk: the system refuses a write half way."""
    saved(tmp_path / "a.onnx", "w.bin")
    (tmp_path / "b.onnx").write_bytes(b"old")
    before = contents(tmp_path)
    code = (
        f"import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from onnxamp.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, "convert", "a.onnx", "-o", "b.onnx", "--force"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "cannot be written: File too large." in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path) == before
