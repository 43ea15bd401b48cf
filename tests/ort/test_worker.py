"""The worker process: sessions whose crash is an answer."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from onnxamp.errors import AmpError
from onnxamp.model.signatures import TYPE_ATTRIBUTES
from onnxamp.ort import precision, worker


def proto(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


DOUBLE = "g (float[N] x) => (float[N] y) { y = Add(x, x) }"


def test_worker_runs_reports_and_survives() -> None:
    x = np.array([1.5, 2], np.float32)
    with worker.Worker() as ours:
        good = ours.run(proto(DOUBLE), [{"x": x}, {"x": x[:1]}])
        np.testing.assert_array_equal(good.results[0]["y"], x + x)
        np.testing.assert_array_equal(good.results[1]["y"], [3])
        assert not good.error
        assert not good.note
        first = ours._running().pid
        bad = ours.run(proto("g (bfloat16[N] x) => (bfloat16[N] y) { y = Relu(x) }"))
        assert "Relu" in bad.error
        assert bad.kind == "UnsupportedError"
        assert not bad.crashed
        half = np.array([1, 2]).astype(ml_dtypes.bfloat16)
        same = ours.run(proto("g (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }"), [{"x": half}])
        assert same.results[0]["y"].dtype == ml_dtypes.bfloat16
        assert ours._running().pid == first  # an error is no crash
        process = ours._running()
    assert process.poll() is not None


def test_worker_restarts_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's process dies in sessions at the default level; the same request works one level below."""
    crash = (
        "import json, os, signal, sys; sys.path[:] = json.loads(sys.argv[1]); from onnxamp.ort import worker\n"
        "real = worker.open_session\n"
        "def fatal(source, config):\n"
        "    if config.optimization in LEVELS: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return real(source, config)\n"
        "worker.open_session = fatal\n"
        "worker.serve()"
    )
    monkeypatch.setattr(worker, "_BOOT", crash.replace("LEVELS", "('all',)"))
    x = np.array([2], np.float32)
    with worker.Worker() as ours:
        answer = ours.run(proto(DOUBLE), [{"x": x}])
        np.testing.assert_array_equal(answer.results[0]["y"], [4])
        assert answer.crashed
        assert "SIGSEGV" in answer.note
        assert "ORT_ENABLE_EXTENDED" in answer.note
    monkeypatch.setattr(worker, "_BOOT", crash.replace("LEVELS", "('all', 'extended')"))
    with worker.Worker() as ours:
        answer = ours.run(proto(DOUBLE), [{"x": x}])
        assert answer.crashed
        assert "SIGSEGV" in answer.error
        assert not answer.results


def test_memory_that_a_request_lacks_is_no_defect_and_no_verdict() -> None:
    with worker.Worker() as ours:
        with pytest.raises(MemoryError, match="Failed to allocate"):
            ours.run(proto("g (int64[1] n) => (float[N] y) { y = ConstantOfShape(n) }"), [{"n": np.array([1 << 45])}])
        answer = ours.run(proto(DOUBLE), [{"x": np.ones(1, np.float32)}])
        np.testing.assert_array_equal(answer.results[0]["y"], [2])


def test_an_interrupted_request_is_not_answered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the worker computes: its answer must not become that of the next request."""
    x = np.array([2], np.float32)
    with worker.Worker() as ours:
        first = ours._running()
        with monkeypatch.context() as patch:
            patch.setattr(worker.pickle, "load", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ours.run(proto(DOUBLE), [{"x": x}])
        answer = ours.run(proto(DOUBLE), [{"x": x + 1}])
        np.testing.assert_array_equal(answer.results[0]["y"], [6])
        assert ours._running() is not first


def test_only_errors_of_ours(tmp_path: pathlib.Path) -> None:
    with worker.Worker() as ours, pytest.raises(AmpError):
        ours.run(tmp_path / "missing.onnx")


def test_worker_takes_relative_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker was started in another folder than the one that a path is relative to."""
    onnx.save(proto(DOUBLE), tmp_path / "m.onnx")
    ours = worker.shared()
    assert ours.run(proto(DOUBLE)).error == ""
    monkeypatch.chdir(tmp_path)
    assert ours.run("m.onnx", [{"x": np.ones(1, np.float32)}]).error == ""


def test_the_worker_knows_all_attributes_that_name_types() -> None:
    """It has a list of its own, since it does without onnx-ir."""
    assert precision._TYPES == TYPE_ATTRIBUTES
