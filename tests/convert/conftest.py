"""The judge of written files that the benchmarks use too."""

from __future__ import annotations

import importlib.util
import pathlib
import types

import pytest

JUDGE = pathlib.Path(__file__).parents[2] / "benchmarks" / "judge.py"


@pytest.fixture(scope="session")
def judge() -> types.ModuleType:
    """The module `benchmarks/judge.py`."""
    spec = importlib.util.spec_from_file_location("judge", JUDGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
