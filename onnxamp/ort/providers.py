"""Execution providers by short name, and the one place that imports ONNX Runtime."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from onnxamp.errors import RuntimeMissingError, UsageError, one_line

INSTALL_HINT = "`pip install 'onnxamp[cpu]'` (or onnxamp[gpu], onnxamp[openvino], onnxamp[ort-training])"

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cann": "CANNExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "directml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}

COMPILERS = frozenset({"tensorrt", "tensorrt-rtx", "openvino", "coreml", "qnn", "migraphx"})
"""Providers that make one node of many: what is inside, and its order, nobody sees."""

# Options of a provider unless others are given. CUDA: the arena grows by what is asked for, not in powers of two (twice the
# memory of a training step otherwise); a convolution's algorithm is chosen by cuDNN's heuristics with all the workspace that it
# wants, since batches of another size would be searched anew; FP32 nodes compute in FP32, which the policy relies on.
_OPTIONS = {
    "cuda": {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "cudnn_conv_use_max_workspace": "1",
        "use_tf32": "0",
    },
    # OpenVINO would choose bf16 by itself where the processor has it.
    "openvino": {"device_type": "CPU", "load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},
}

# What "auto" tries before the CPU. TensorRT and OpenVINO compile, and choose precisions of their own: only on request.
_AUTO = ("cuda", "cann")
# What a provider hands the nodes to that it does not take, before the CPU.
_NEXT = {"tensorrt": ("cuda",), "tensorrt-rtx": ("cuda",)}


def runtime() -> Any:
    """The `onnxruntime` module.

    Raises:
        RuntimeMissingError: None is installed, or the one installed does not load.
    """
    try:
        module = importlib.import_module("onnxruntime")
    except ModuleNotFoundError as problem:
        if problem.name != "onnxruntime":
            raise RuntimeMissingError(
                f"ONNX Runtime is installed but needs {problem.name!r}: run `onnxamp doctor`."
            ) from problem
        raise RuntimeMissingError(f"No ONNX Runtime is installed: {INSTALL_HINT}.") from problem
    except ImportError as problem:
        raise RuntimeMissingError(
            f"ONNX Runtime is installed but does not load ({one_line(problem)}): run `onnxamp doctor`."
        ) from problem
    if not hasattr(module, "InferenceSession"):  # an empty folder that an uninstalled sibling left behind
        raise RuntimeMissingError("ONNX Runtime is installed but broken (no InferenceSession): run `onnxamp doctor`.")
    return module


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What the runtime raises where it refuses a model or fails on values: its own exceptions, RuntimeError and ValueError.

    Nothing else is about the model or the data: MemoryError is the machine's, TypeError ours. Memory that the runtime's own arenas lack
    is among these, and known by its text (`session.run_error`).
    """
    module = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError)


def available() -> list[str]:
    """Full names of the providers that the installed runtime was built with; whether they load is another matter."""
    names: list[str] = runtime().get_available_providers()
    return names


def short_name(provider: str) -> str:
    """The short name of a provider's full name (itself if it has none)."""
    return next((short for short, full in PROVIDERS.items() if full == provider), provider)


def provider_list(name: str = "auto") -> list[str]:
    """The providers to ask a session for, first choice first, the CPU last.

    Args:
        name: ``auto`` (CUDA or CANN where the runtime has it, else the CPU), a short name of `PROVIDERS`, or a full
            provider name.

    Raises:
        UsageError: No such provider exists.
        RuntimeMissingError: The installed runtime was not built with it.
    """
    built = available()
    cpu = PROVIDERS["cpu"]
    if name == "auto":
        chosen = [PROVIDERS[short] for short in _AUTO if PROVIDERS[short] in built][:1]
        return [*chosen, cpu]
    full = PROVIDERS.get(name.lower(), name)
    if full not in built:
        if full not in PROVIDERS.values():
            raise UsageError(f"Unknown provider {name!r}: use auto, {', '.join(PROVIDERS)}.")
        raise RuntimeMissingError(
            f"Provider {name!r} is not part of the installed ONNX Runtime (it has "
            f"{', '.join(short_name(p) for p in built)}): run `onnxamp doctor`."
        )
    if full == cpu:
        return [cpu]
    helpers = [PROVIDERS[short] for short in _NEXT.get(short_name(full), ()) if PROVIDERS[short] in built]
    return [full, *helpers, cpu]


def default_options(provider: str) -> dict[str, str]:
    """The options that a session gives to a provider (full name) unless it is told others."""
    return dict(_OPTIONS.get(short_name(provider), {}))
