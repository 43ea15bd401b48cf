"""Providers: what is asked for, what is there, and no runtime at all."""

from __future__ import annotations

import sys
import types

import pytest

from onnxamp.errors import AmpError, RuntimeMissingError
from onnxamp.ort import providers
from onnxamp.ort.session import SessionConfig, open_session


def test_failures_are_what_the_runtime_raises() -> None:
    names = {kind.__name__ for kind in providers.failures()}
    assert {"Fail", "InvalidArgument", "InvalidGraph", "NotImplemented", "EPFail", "RuntimeException"} <= names
    assert not any(issubclass(kind, providers.failures()) for kind in (MemoryError, TypeError, KeyError, AmpError))


def fake_runtime(built: list[str], got: list[str]) -> types.SimpleNamespace:
    """A runtime that was built with some providers and whose sessions get others."""

    class Session:
        def __init__(self, source: object, options: object, providers: object, enable_fallback: int) -> None:
            assert enable_fallback == 0

        def get_providers(self) -> list[str]:
            return got

        def disable_fallback(self) -> None:
            pass

    import onnxruntime

    return types.SimpleNamespace(
        InferenceSession=Session,
        SessionOptions=onnxruntime.SessionOptions,
        GraphOptimizationLevel=onnxruntime.GraphOptimizationLevel,
        get_available_providers=lambda: built,
    )


def test_asking_for_cuda_and_getting_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda, cpu = providers.PROVIDERS["cuda"], providers.PROVIDERS["cpu"]
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_runtime([cuda, cpu], [cpu]))
    for name in ("cuda", cuda):
        with pytest.raises(RuntimeMissingError, match="cuda does not load here"):
            open_session(b"", SessionConfig(provider=name))
    assert not caplog.records
    open_session(b"", SessionConfig(provider="auto"))
    assert "cuda does not load here" in caplog.text
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_runtime([cuda, cpu], [cuda, cpu]))
    caplog.clear()
    open_session(b"", SessionConfig(provider="cuda"))
    assert not caplog.records


LISTS = [
    (["cuda", "cpu"], "auto", ["cuda", "cpu"]),
    (["tensorrt", "cuda", "cpu"], "auto", ["cuda", "cpu"]),
    (["tensorrt", "cuda", "cpu"], "tensorrt", ["tensorrt", "cuda", "cpu"]),
    (["openvino", "cpu"], "auto", ["cpu"]),
    (["openvino", "cpu"], "openvino", ["openvino", "cpu"]),
    (["cann", "cpu"], "auto", ["cann", "cpu"]),
    (["cuda", "cpu"], "cpu", ["cpu"]),
]


@pytest.mark.parametrize(("built", "asked", "want"), LISTS)
def test_provider_lists(built: list[str], asked: str, want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_runtime([providers.PROVIDERS[n] for n in built], []))
    assert [providers.short_name(full) for full in providers.provider_list(asked)] == want


def test_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeMissingError, match=r"onnxamp\[cpu\]"):
        open_session(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(RuntimeMissingError, match="broken"):
        open_session(b"")
