"""The judge of written files that the benchmarks use too, the counter of bytes, and the process in which 16-bit files run."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping

import onnx
import pytest

from onnxamp.ort import worker

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def judge() -> types.ModuleType:
    """The module `benchmarks/judge.py`."""
    return _module("judge")


@pytest.fixture(scope="session")
def counter(judge: types.ModuleType) -> types.ModuleType:
    """The module `benchmarks/counter.py`, which imports `judge`."""
    return _module("counter")


def _module(name: str) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


Run = Callable[[onnx.ModelProto, Mapping[str, object]], dict[str, object]]


@pytest.fixture(scope="session")
def run_low(judge: types.ModuleType) -> Run:
    """Outputs by name of a written 16-bit file, as users run it: at ONNX Runtime's default level, which may end its process.

    So all such sessions share one worker process. Raises `NotImplementedError` where there is no kernel, `RuntimeError` for all else.
    """

    def run(model: onnx.ModelProto, feeds: Mapping[str, object]) -> dict[str, object]:
        kinds = {value.name: judge.leaf(value.type) for value in model.graph.input}
        answer = worker.shared().run(model, [judge.adapted(feeds, kinds)])
        if answer.kind == "UnsupportedError":
            raise NotImplementedError(answer.error)
        if answer.error:
            raise RuntimeError(answer.error)
        return answer.results[0]

    return run
