"""What doctor says of broken environments, and that it says nothing of a sound one."""

from __future__ import annotations

import importlib.metadata
import types

import pytest

from onnxamp.errors import RuntimeMissingError
from onnxamp.ort import doctor
from onnxamp.ort.doctor import Provider

FULL = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "openvino": "OpenVINOExecutionProvider"}
CPU, CUDA = Provider("cpu", True), Provider("cuda", True)
NO_CUDA = Provider("cuda", False, "libcublasLt.so.13: cannot open shared object file")
NO_GPU = Provider("cuda", False, "no CUDA-capable device is detected")

# distributions, version that imports, providers, what a finding must say, commands
CASES = {
    "sound": ({"onnxruntime": "1.32.0"}, "1.32.0", [CPU], None, []),
    "sound gpu": ({"onnxruntime-gpu": "1.31.1"}, "1.31.1", [CUDA, CPU], None, []),
    "local version": ({"onnxruntime-training": "1.19.2"}, "1.19.2+cu118", [CPU], None, []),
    "nothing": ({}, "", [], "No ONNX Runtime is installed", ["python -m pip install 'onnxamp[cpu]'"]),
    "both": (
        {"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.32.0"},
        "1.32.0",
        [CPU],
        "2 distributions share the folder",
        [
            "python -m pip uninstall -y onnxruntime-gpu onnxruntime",
            "python -m pip install --no-deps 'onnxruntime-gpu==1.31.1'",
        ],
    ),
    "overwritten": (
        {"onnxruntime": "1.32.0"},
        "1.24.1",
        [CPU],
        "onnxruntime/ holds 1.24.1",
        ["python -m pip install --force-reinstall --no-deps 'onnxruntime==1.32.0'"],
    ),
    "folder gone": (
        {"onnxruntime": "1.32.0"},
        "",
        [],
        "its folder onnxruntime/ is gone",
        ["python -m pip install --force-reinstall --no-deps 'onnxruntime==1.32.0'"],
    ),
    "gpu without libraries": (
        {"onnxruntime-gpu": "1.31.1"},
        "1.31.1",
        [NO_CUDA, CPU],
        "libcublasLt",
        ["python -m pip install 'onnxruntime-gpu[cuda,cudnn]'"],
    ),
    "gpu without a card": ({"onnxruntime-gpu": "1.31.1"}, "1.31.1", [NO_GPU, CPU], "no CUDA-capable device", []),
    "gpu that is a cpu build": (
        {"onnxruntime-gpu": "1.31.1"},
        "1.31.1",
        [CPU],
        "has no CUDA provider",
        ["python -m pip install --force-reinstall --no-deps onnxruntime-gpu"],
    ),
    "openvino that does not load": (
        {"onnxruntime-openvino": "1.24.1"},
        "1.24.1",
        [Provider("openvino", False, "no device"), CPU],
        "openvino does not load: no device",
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_diagnosis(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distributions, version, providers, finding, commands = CASES[case]

    def runtime() -> types.SimpleNamespace:
        if not version:
            raise RuntimeMissingError(
                "No ONNX Runtime is installed: `pip install 'onnxamp[cpu]'`."
            ) from ModuleNotFoundError()
        return types.SimpleNamespace(
            __version__=version, get_available_providers=lambda: [FULL[p.name] for p in providers]
        )

    monkeypatch.setattr(doctor, "installed", lambda: distributions)
    monkeypatch.setattr(doctor, "runtime", runtime)
    monkeypatch.setattr(doctor, "_probe", lambda full: next(p for p in providers if FULL[p.name] == full))
    found = doctor.diagnose()
    assert found.healthy == (finding is None)
    assert list(found.commands) == commands
    if finding is not None:
        assert any(finding in text for text in found.findings), found.findings
    assert all("\n" not in text and text.endswith(".") for text in found.findings)


def test_installed_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"onnxruntime": "1.32.0", "ONNXRuntime_GPU": "1.31.1", "onnx": "1.23", "onnxruntime-extensions": "0.14"}
    fakes = [types.SimpleNamespace(metadata={"Name": name}, version=version) for name, version in names.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: fakes)
    assert list(doctor.installed().items()) == [("onnxruntime-gpu", "1.31.1"), ("onnxruntime", "1.32.0")]


LOGS = {
    "libcublasLt.so.13: cannot open shared object file: No such file or directory": (
        "2026-01-01 [E:onnxruntime:Default, provider_bridge_ort.cc:2251 TryGetProviderInfo_CUDA] "
        "/onnxruntime_src/x.cc:1844 onnxruntime::Provider& Load() [ONNXRuntimeError] : 1 : FAIL : Failed to load library "
        "libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open shared object file: "
        "No such file or directory\n\n2026-01-01 [W:onnxruntime:Default, x.cc] Failed to create CUDAExecutionProvider."
    ),
    "CUDA failure 100: no CUDA-capable device is detected": (
        "onnxruntime.capi.onnxruntime_pybind11_state.Fail: CUDA failure 100: no CUDA-capable device is detected ; GPU=0"
    ),
    "module 'onnxruntime' has no attribute 'x'": "AttributeError: module 'onnxruntime' has no attribute 'x'",
    "ONNX Runtime does not say why": "",
}


@pytest.mark.parametrize("reason", LOGS)
def test_reasons_in_logs(reason: str) -> None:
    assert doctor._reason(LOGS[reason]) == reason


def test_this_environment() -> None:
    """The providers that load here really do, and one that this build lacks does not."""
    assert doctor._probe("CPUExecutionProvider") == Provider("cpu", True)
    assert not doctor._probe("QNNExecutionProvider").loads


def test_kernels_of_the_installed_runtime() -> None:
    rows = doctor.kernels("cpu")
    assert len(rows) > 250
    assert any(first == 14 and "float" in types["T"] for first, _, types in rows["", "Add"])
    assert rows["", "Add"][0][1] is not None
    assert not doctor.kernels("qnn")
