"""A step in the forms that the CPU likes against the bundle's own graphs."""

import pathlib

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxamp.ort.session import SessionConfig
from onnxamp.trainer import gradient
from onnxamp.trainer.lowering import lower_gradient
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import SGD, CrossEntropy, build

MODELS = pathlib.Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_lowered_gradients_are_those_of_the_bundle(exporter, level, monkeypatch):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 12, 10), np.float32)
    batch = {"x": x, "labels": rng.integers(0, 4, 8)}
    bundle = build(exporter(module, {"x": x}), loss=CrossEntropy(), optimizer=SGD(lr=0.1), level=level, loss_scale=1.0)
    seen = []

    def step(lower):
        monkeypatch.setattr(gradient, "lower_gradient", lower)
        trainer = Trainer(bundle, "cpu", threads=1)
        loss = trainer.micro_step(batch).loss
        return loss, trainer._arenas.values("gradient")

    def lowered(model, config):
        seen.append(lower_gradient(model, config))
        return seen[0]

    (loss, plain), (other, fast) = step(lambda model, config: model), step(lowered)
    operators = [node.op_type for node in seen[0].graph]
    # Two of the three convolutions and the input gradient of the last have enough channels.
    assert operators.count("ReorderOutput") == 3
    assert other == pytest.approx(loss, rel=1e-5)
    tolerance = 1e-4 if level == "O0" else 2e-2
    for name, values in plain.items():
        assert np.linalg.norm(fast[name] - values) <= tolerance * np.linalg.norm(values) + 1e-6, name


@pytest.mark.parametrize(("level", "kept"), [("O0", 0), ("O2", 4)])
def test_dropout_becomes_products(exporter, level, kept, monkeypatch):
    """Bit for bit what the selections give; operands that were rounded to 16 bits, which may have overflowed, keep theirs."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.4), nn.Linear(32, 3)
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 6), np.float32)
    batch = {"x": x, "labels": rng.integers(0, 3, 64)}
    bundle = build(exporter(module, {"x": x}), loss=CrossEntropy(), optimizer=SGD(lr=0.1), level=level)
    selections, results = [], []

    def lowered(model, config):
        result = lower_gradient(model, config)
        hashed = [
            node for node in result.graph if node.op_type == "Less" and node.inputs[0].dtype == ir.DataType.UINT32
        ]
        selections.append(sum(user.op_type == "Where" for node in hashed for user, _ in node.outputs[0].uses()))
        return result

    for lower in (lambda model, config: model, lowered):
        monkeypatch.setattr(gradient, "lower_gradient", lower)
        trainer = Trainer(bundle, "cpu", threads=1)
        results.append((trainer.micro_step(batch).loss, trainer._arenas.values("gradient")))
    (loss, plain), (other, fast) = results
    assert selections == [kept]
    assert other == loss
    for name, values in plain.items():
        assert np.linalg.norm(values) > 0
        np.testing.assert_array_equal(fast[name], values, err_msg=name)


def test_other_providers_keep_the_graph(bundle):
    graph = bundle.graphs["grad"]
    assert lower_gradient(graph, SessionConfig("cuda")) is graph


def test_openvino_gets_what_it_can_read():
    """Each form is compared with the bundle's in `tests/passes/test_compilers.py`."""
    graph = build(MODELS / "gpt.onnx", loss="cross_entropy", optimizer="sgd", level="O0").graphs["grad"]
    lowered = lower_gradient(graph, SessionConfig("openvino")).graph
    operators = [node.op_type for node in lowered]
    assert "ScatterElements" in operators
    assert "ScatterND" not in operators
    norms = [len(node.outputs) for node in lowered if node.op_type == "LayerNormalization"]
    assert norms
    assert set(norms) == {1}
