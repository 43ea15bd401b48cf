"""INT8 by ONNX Runtime: loads, stays near the original, says what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxamp.errors import DataError, UnsupportedError
from onnxamp.ort.quantize import quantize
from onnxamp.ort.session import open_session, run

MODELS = Path(__file__).parents[2] / "models"


def test_digits_lose_less_than_two_points(tmp_path):
    data = dict(np.load(MODELS / "digits_train.npz"))
    test = dict(np.load(MODELS / "digits_test.npz"))
    batches = [{"image": data["image"][first : first + 32]} for first in range(0, 320, 32)]
    quantize(MODELS / "cnn.onnx", tmp_path / "int8.onnx", batches)
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]
    operators = {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators
    accuracy = {}
    for path in (MODELS / "cnn.onnx", tmp_path / "int8.onnx"):
        (logits,) = run(open_session(path), {"image": test["image"]}).values()
        accuracy[path.name] = (logits.argmax(1) == test["labels"]).mean()
    assert accuracy["int8.onnx"] >= accuracy["cnn.onnx"] - 0.02


def test_no_data_and_no_model(tmp_path):
    with pytest.raises(DataError, match="at least one batch"):
        quantize(MODELS / "cnn.onnx", tmp_path / "int8.onnx", [])
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with pytest.raises((UnsupportedError, DataError)):
        quantize(tmp_path / "junk.onnx", tmp_path / "int8.onnx", [{}])
    assert not (tmp_path / "int8.onnx").exists()


def test_memory_that_runs_out_while_shapes_are_inferred_is_not_asked_for_again(tmp_path, monkeypatch):
    calls = []

    def fail(*arguments, **options):
        calls.append(options)
        raise MemoryError("none left")

    monkeypatch.setattr("onnxruntime.quantization.shape_inference.quant_pre_process", fail)
    with pytest.raises(MemoryError, match="none left"):
        quantize(MODELS / "cnn.onnx", tmp_path / "int8.onnx", [])
    assert len(calls) == 1


@pytest.mark.parametrize("problem", [DataError("row 3 holds a NaN"), MemoryError("none left")])
def test_what_fails_while_batches_are_read_is_not_blamed_on_the_model(tmp_path, problem):
    def batches():
        yield {"image": np.load(MODELS / "digits_test.npz")["image"][:4]}
        raise problem

    with pytest.raises(type(problem), match=str(problem)):
        quantize(MODELS / "cnn.onnx", tmp_path / "int8.onnx", batches())
