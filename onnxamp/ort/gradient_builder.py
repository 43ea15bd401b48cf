"""ONNX Runtime's own gradient builder, which the training packages (last 1.19.2) have and others have not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxamp.errors import RuntimeMissingError, UnsupportedError, one_line
from onnxamp.ort.providers import runtime

INSTALL = "`pip install 'onnxamp[ort-training]'` into an environment of its own (Python 3.11, no other ONNX Runtime)"


def require() -> Any:
    """The module that has the builder.

    Raises:
        RuntimeMissingError: The installed runtime was built without training.
    """
    version = runtime().__version__
    from onnxruntime.capi import _pybind_state as binding

    if not hasattr(binding, "GradientGraphBuilder"):
        raise RuntimeMissingError(
            f"The engine ort-training needs onnxruntime-training-cpu 1.19.2 and ONNX Runtime {version} is installed: {INSTALL}."
        )
    return binding


def differentiate(model: bytes, loss: str, wrt: Sequence[str], *, fuse: bool = True) -> bytes:
    """`model` and, for each input X of `wrt`, an output `X_grad`.

    Args:
        model: A serialized model.
        loss: Its scalar FP32 output.
        wrt: Names of inputs.
        fuse: Make ONNX Runtime's training fusions first. They move operators in front of a Cast, so that a rounding gets lost.

    Raises:
        RuntimeMissingError: The installed runtime was built without training.
        UnsupportedError: The builder refuses the model.
    """
    binding = require()
    names = set(wrt)
    options = runtime().SessionOptions()
    options.log_severity_level = 4
    try:
        if fuse:
            model = binding.get_optimized_model(model, names, options)
        builder = binding.GradientGraphBuilder(model, {loss}, names, loss, options)
        builder.build()
        return bytes(builder.get_model())
    except RuntimeError as problem:
        last = one_line(str(problem)[-300:])  # a stack of calls stands in front of it
        raise UnsupportedError(f"ONNX Runtime's gradient builder refuses the model: {last}.") from problem
