"""Full bundles of the usual kinds of models, driven by hand under emulation: the first gradients are those of float64 autograd, all
is finite for a few steps on one batch, and the loss falls."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from onnxamp.training import build
from onnxamp.training.losses import CrossEntropy
from onnxamp.training.manifest import WINDOW
from onnxamp.training.optimizers import AdamW

MODELS = pathlib.Path(__file__).parents[2] / "models"
FORMS = [("O0", "fp16"), ("O1", "fp16"), ("O2", "fp16"), ("O3", "fp16"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16")]
KINDS = ("lstm", "unet", "mobilenet", "vit", "llama", "scan", "loop")
# What runs without --exported-all.
SAMPLE = {(kind, "O0", "fp16") for kind in KINDS} | {
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


class Twin(torch.nn.Module):
    """What `scan_model` computes."""

    def __init__(self, proto):
        super().__init__()
        for tensor in proto.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                value = torch.from_numpy(numpy_helper.to_array(tensor).copy())
                self.register_parameter(tensor.name, torch.nn.Parameter(value))

    def forward(self, x):
        steps = x.transpose(0, 1) @ self.w_in + self.b_in
        state, states = torch.zeros_like(steps[0]), []
        for step in steps:
            state = torch.tanh(state @ self.w_h + step)
            states.append(state * self.scale)
        return (state + torch.stack(states).mean(0)) @ self.w_out + self.b_out


def load(name):
    """A module of models/."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def architectures():
    return load("architectures")


@pytest.fixture
def task(architectures, export):
    """A model, its loss, one batch, and the model in PyTorch."""

    def make(kind):
        torch.manual_seed(3)
        rng = np.random.default_rng(3)
        if kind == "scan":
            x = rng.standard_normal((8, 6, 4)).astype(np.float32)
            model = scan_model()
            return model, "cross_entropy", {"x0": x, "labels": rng.integers(0, 5, 8)}, Twin(model)
        if kind == "loop":
            x = rng.standard_normal((16, 8)).astype(np.float32)
            batch = {"x": x, "steps": np.asarray(4), "whiten": np.asarray(True), "labels": rng.integers(0, 4, 16)}
            model, twin = onnx.load(MODELS / "loop.onnx"), load("export_loop").Whiten()
            for name, value in twin.named_parameters():
                value.data = torch.from_numpy(
                    numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)).copy()
                )
            return model, "cross_entropy", batch, twin
        cls, data = architectures.KINDS[kind]
        module, x = cls().train(kind == "mobilenet"), data(8)
        with torch.no_grad():
            for parameter in module.parameters():  # fresh scales are all ones: exporters merge equal tensors
                parameter.add_(0.1 * torch.randn_like(parameter))
            labels = architectures.targets(copy.deepcopy(module)(x), kind == "llama")
        loss = CrossEntropy(axis=2) if kind == "llama" else "cross_entropy"
        proto = export(copy.deepcopy(module), x, train=kind == "mobilenet")
        return proto, loss, {"x0": x.numpy(), "labels": labels.numpy()}, module

    return make


def by_autograd(module, batch, dtype):
    """The gradient of the mean loss, by name."""
    module = copy.deepcopy(module).to(dtype)
    arrays = [torch.from_numpy(np.asarray(value)) for name, value in batch.items() if name != "labels"]
    torch.set_default_dtype(dtype)
    try:
        y = module(*(x.to(dtype) if x.is_floating_point() else x for x in arrays))
    finally:
        torch.set_default_dtype(torch.float32)
    labels = torch.from_numpy(batch["labels"])
    y = y.flatten(0, 1) if labels.dim() == 2 else y
    torch.nn.functional.cross_entropy(y, labels.flatten() if labels.dim() == 2 else labels).backward()
    return {name: value.grad.numpy() for name, value in module.named_parameters()}


def assert_gradients(driver, scale, held, exact, single, dtype):
    """Those that the first window left, against float64 autograd.

    In FP32 each within 1e-4 or twice PyTorch's own error; in low precision all together within some units of its last place.
    """
    weight = driver.view("window/window")[WINDOW.index("weight_sum")]
    factor = driver.view("scalars/seed_divisor") / (scale * weight)
    assert set(held) <= {tensor.name for tensor in driver.manifest.tensors_in("gradient")}
    errors, norms = [], []
    for name, form in held.items():
        want, own = form(exact.__getitem__), form(single.__getitem__)
        got = driver.view(f"gradient/{name}").reshape(want.shape).astype(np.float64) * factor
        norm, error, torch_error = (np.linalg.norm(x) for x in (want, got - want, own - want))
        if dtype is None:
            assert error <= max(1e-4 * norm, 2 * torch_error), f"{name}: {error / norm:.2e}"
        errors.append(error)
        norms.append(norm)
    share = np.linalg.norm(errors) / np.linalg.norm(norms)
    assert share <= {None: 1e-4, "fp16": 0.01, "bf16": 0.08}[dtype], f"{share:.2e}"


@pytest.mark.parametrize(("level", "dtype"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, level, dtype, task, drive, architectures, request):
    if (kind, level, dtype) not in SAMPLE and not request.config.getoption("exported_all"):
        pytest.skip("runs with --exported-all")
    model, loss, batch, module = task(kind)
    held = architectures.held(model, module)
    options = {"loss": loss, "optimizer": AdamW(lr=0.01), "trainable": list(held), "level": level, "dtype": dtype}
    driver = drive(build(model, **options))
    scale, losses = driver.view("scalars/loss_scale").item(), []
    for step in range(8):
        report = driver.step(batch)
        losses.append(report["loss"])
        assert np.isfinite(report["loss"])
        if step == 0:
            exact, single = (by_autograd(module, batch, precision) for precision in (torch.float64, torch.float32))
            assert_gradients(driver, scale, held, exact, single, None if level == "O0" else dtype)
    assert losses[-1] < losses[0] - 0.02, losses
    assert all(np.isfinite(value.astype(np.float32)).all() for value in driver.state().values())


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_sizes_that_data_is_divided_by_are_counted(level):
    """No Cast of a size is left in the loop model's branches, forward or backward: it would be computed on the CPU and copied."""
    bundle = build(MODELS / "loop.onnx", loss="cross_entropy", optimizer=AdamW(lr=0.01), level=level)
    casts = [node.inputs[0] for graph in bundle.graphs["grad"].graphs() for node in graph if node.op_type == "Cast"]
    assert not [value.name for value in casts if value.dtype == ir.DataType.INT64]
