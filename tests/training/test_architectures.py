"""Full bundles of the usual kinds of models, driven by hand under emulation: a few steps on one batch are finite, and the loss falls."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxamp.training import build
from onnxamp.training.losses import CrossEntropy
from onnxamp.training.optimizers import AdamW

MODELS = pathlib.Path(__file__).parents[2] / "models"
FORMS = [("O0", "fp16"), ("O1", "fp16"), ("O2", "fp16"), ("O3", "fp16"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16")]
KINDS = ("lstm", "unet", "mobilenet", "vit", "llama", "scan", "loop")
# What runs without --exported-all.
SAMPLE = {
    ("lstm", "O2", "bf16"), ("unet", "O1", "fp16"), ("mobilenet", "O2", "fp16"), ("llama", "O2", "fp16"), ("scan", "O3", "fp16"),
    ("loop", "O2", "fp16"),
}  # fmt: skip

SCAN = """<ir_version: 9, opset_import: ["" : 17]> g (float[N, 6, 4] x0) => (float[N, 5] y)
    {
        t = Transpose<perm = [1, 0, 2]>(x0) entered = MatMul(t, w_in) steps = Add(entered, b_in)
        first = Gather<axis = 0>(steps, zero) begin = Sub(first, first)
        last, states = Scan<num_scan_inputs = 1, body = step (float[N, 8] h, float[N, 8] v) => (float[N, 8] after, float[N, 8] kept)
            { g = MatMul(h, w_h) s = Add(g, v) after = Tanh(s) kept = Mul(after, scale) }>(begin, steps)
        mean = ReduceMean<axes = [0], keepdims = 0>(states) sum = Add(last, mean) y = Gemm(sum, w_out, b_out)
    }"""


def scan_model():
    """A recurrence whose step reads weights and a scale from around it."""
    model = onnx.parser.parse_model(SCAN)
    rng = np.random.default_rng(0)
    shapes = {"w_in": (4, 8), "b_in": (8,), "w_h": (8, 8), "scale": (8,), "w_out": (8, 5), "b_out": (5,)}
    held = {name: 0.4 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    held["zero"] = np.asarray(0, np.int64)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in held.items())
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture(scope="module")
def architectures():
    spec = importlib.util.spec_from_file_location("architectures", MODELS / "architectures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["architectures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def task(architectures, export):
    """A model, its loss, and one batch."""

    def make(kind):
        torch.manual_seed(3)
        rng = np.random.default_rng(3)
        if kind == "scan":
            x = rng.standard_normal((8, 6, 4)).astype(np.float32)
            return scan_model(), "cross_entropy", {"x0": x, "labels": rng.integers(0, 5, 8)}
        if kind == "loop":
            x = rng.standard_normal((16, 8)).astype(np.float32)
            settings = {"steps": np.asarray(4), "whiten": np.asarray(True)}
            return (
                onnx.load(MODELS / "loop.onnx"),
                "cross_entropy",
                {"x": x, **settings, "labels": rng.integers(0, 4, 16)},
            )
        cls, data = architectures.KINDS[kind]
        module, x = cls(), data(8)
        with torch.no_grad():
            labels = architectures.targets(module(x), kind == "llama")
        loss = CrossEntropy(axis=2) if kind == "llama" else "cross_entropy"
        return export(module, x, train=kind == "mobilenet"), loss, {"x0": x.numpy(), "labels": labels.numpy()}

    return make


@pytest.mark.parametrize(("level", "dtype"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, level, dtype, task, drive, request):
    if (kind, level, dtype) not in SAMPLE and not request.config.getoption("exported_all"):
        pytest.skip("runs with --exported-all")
    model, loss, batch = task(kind)
    driver = drive(build(model, loss=loss, optimizer=AdamW(lr=0.01), level=level, dtype=dtype))
    losses = []
    for _ in range(8):
        report = driver.step(batch)
        losses.append(report["loss"])
        assert np.isfinite(report["loss"])
    assert losses[-1] < losses[0] - 0.02, losses
    assert all(np.isfinite(value.astype(np.float32)).all() for value in driver.state().values())
