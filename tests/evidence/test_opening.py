"""Files on which the runtime ends the process: told if it does, and only then."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

from onnxamp.conversion import convert
from onnxamp.errors import InternalError
from onnxamp.evidence import opening
from onnxamp.evidence.opening import crash_on_cpu
from onnxamp.model import io

MODELS = {
    # Operands of unequal ranks, the first transposed so that its first axis is a batch: ONNX Runtime 1.32 crashes.
    "attention": "t = Transpose<perm=[1,0,2]>(x) y = MatMul(t, w)",
    "fusable": "t = Transpose<perm=[0,2,1]>(x) y = MatMul(t, v)",
    "a constant": "t = Transpose<perm=[1,0]>(w) y = MatMul(x, t)",
    "no product": "y = Transpose<perm=[1,0,2]>(x)",
}


def _model(body: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 17]> g (float[a,4,8] x) => (float[b,c,d] y) {{ {body} }}"""
    )
    for name, shape in {"w": (8, 8), "v": (4, 8)}.items():
        if f"{name} =" not in body and (f" {name})" in body or f"({name})" in body):
            array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def _ends(path) -> bool:
    """Whether a program that only opens the file on the CPU is killed."""
    code = "import sys, onnxruntime as o; o.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False).returncode < 0


@pytest.mark.parametrize("case", MODELS)
def test_what_is_told_is_what_happens(case, tmp_path, monkeypatch):
    model, path = convert(_model(MODELS[case]), level="O3", io="low").model, tmp_path / "m.onnx"
    io.save(model, path)
    if case in ("a constant", "no product"):  # nothing that could crash: not opened at all
        monkeypatch.setattr(opening.worker, "shared", None)
    text = crash_on_cpu(model, path)
    assert bool(text) == _ends(path)
    assert not text or text.startswith("On the CPU ONNX Runtime ends its process on this file at its default")
    assert ("ORT_ENABLE_EXTENDED" in text) == bool(text)


def test_fp32_and_large_files_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(opening.worker, "shared", None)
    low = convert(_model(MODELS["attention"]), level="O3", io="low").model
    with pytest.raises(TypeError):  # it would be
        crash_on_cpu(low, tmp_path / "none.onnx")
    monkeypatch.setattr(opening, "_MOST_BYTES", 8 * 8 * 2 - 1)
    assert crash_on_cpu(low, tmp_path / "none.onnx") == ""
    ones = ", ".join(["1.0"] * 64)
    inside = f"w = Constant<value = float[8, 8] {{{ones}}}>() {MODELS['attention']}"
    held = convert(_model(inside), level="O3", io="low")
    assert crash_on_cpu(held.model, tmp_path / "none.onnx") == ""
    monkeypatch.undo()
    monkeypatch.setattr(opening.worker, "shared", None)
    assert crash_on_cpu(io.load(_model(MODELS["attention"])), tmp_path / "none.onnx") == ""


@pytest.mark.parametrize("problem", [MemoryError("none left"), InternalError("the worker")], ids=str)
def test_what_cannot_be_opened_here_is_not_told(problem, tmp_path, monkeypatch):
    class Failing:
        def run(self, *arguments, **options):
            raise problem

    low = convert(_model(MODELS["attention"]), level="O3", io="low").model
    monkeypatch.setattr(opening.worker, "shared", Failing)
    assert crash_on_cpu(low, tmp_path / "none.onnx") == ""
