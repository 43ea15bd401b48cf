"""ONNX Runtime's own static quantization to INT8, with settings that hold on every CPU."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxamp.errors import AmpError, DataError, UnsupportedError, one_line
from onnxamp.ort.providers import runtime


class _Reader:
    """The batches as ONNX Runtime's `CalibrationDataReader` (which is recognised by this method alone)."""

    def __init__(self, batches: Iterable[Mapping[str, Any]]) -> None:
        self._batches = iter(batches)
        self.count = 0

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        self.count += batch is not None
        return None if batch is None else dict(batch)


def quantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], batches: Iterable[Mapping[str, Any]]
) -> None:
    """Quantize an FP32 model to QDQ form: signed 8-bit activations (per tensor) and weights (per channel).

    Ranges are the minima and maxima over `batches`. Both sides are signed because the product of an unsigned and a signed
    operand saturates on CPUs without VNNI: on a digits CNN that alone costs five points of accuracy.

    Args:
        source: The model file.
        target: Where the result goes; it is replaced as a whole.
        batches: Representative inputs, by input name.

    Raises:
        DataError: There is no batch.
        UnsupportedError: ONNX Runtime cannot quantize this model.
    """
    runtime()
    tools = importlib.import_module("onnxruntime.quantization")
    shapes = importlib.import_module("onnxruntime.quantization.shape_inference")
    target = Path(target)
    reader = _Reader(batches)
    with tempfile.TemporaryDirectory(prefix=".onnxamp-", dir=target.parent) as folder, _quiet():
        prepared, result = Path(folder) / "prepared.onnx", Path(folder) / target.name
        try:
            try:
                shapes.quant_pre_process(os.fspath(source), os.fspath(prepared))
            except MemoryError:
                raise
            # Symbolic shape inference, which is Python, fails on valid models in any way; it can be left out.
            except Exception:
                shapes.quant_pre_process(os.fspath(source), os.fspath(prepared), skip_symbolic_shape=True)
            tools.quantize_static(
                os.fspath(prepared),
                os.fspath(result),
                reader,
                quant_format=tools.QuantFormat.QDQ,
                per_channel=True,
                activation_type=tools.QuantType.QInt8,
                weight_type=tools.QuantType.QInt8,
                calibrate_method=tools.CalibrationMethod.MinMax,
            )
        except (AmpError, MemoryError):  # the batches' own
            raise
        # The quantizer is Python that meets unforeseen models with KeyError, AttributeError, ...
        except Exception as problem:
            if not reader.count:
                raise DataError("Quantization needs at least one batch of data to take ranges from.") from problem
            raise UnsupportedError(
                f"ONNX Runtime cannot quantize {os.fspath(source)}: {one_line(problem)}."
            ) from problem
        result.replace(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantizer's notes on its progress and its advice to users of its own interface off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
