"""Training on ONNX Runtime follows PyTorch: every optimizer, every schedule, every precision."""

import math
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onnxamp import training
from onnxamp.trainer.trainer import Trainer

STEPS = 20


def _module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def model(exporter) -> onnx.ModelProto:
    return exporter(_module(), {"x": np.zeros((2, 6), np.float32)})


@pytest.fixture(scope="module")
def data() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((8, 6), np.float32), rng.integers(0, 4, 8)) for _ in range(STEPS)]


OPTIMIZERS = {
    "sgd": (training.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        training.SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "nesterov": (
        training.SGD(lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (training.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam with decay": (
        training.Adam(lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adamw": (training.AdamW(lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "rmsprop": (training.RMSprop(lr=0.005), lambda p: torch.optim.RMSprop(p, lr=0.005)),
    "rmsprop centered": (
        training.RMSprop(lr=0.005, momentum=0.5, centered=True, weight_decay=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5, centered=True, weight_decay=0.01),
    ),
}


def _follow(model, data, optimizer, other, schedule=None, rates=None, clip=None):
    """Train both; losses to 1e-4, parameters of some gradient to float tolerance."""
    bundle = training.build(
        model, loss="cross_entropy", optimizer=optimizer, schedule=schedule, level="O0", clip_norm=clip
    )
    trainer = Trainer(bundle, "cpu", threads=1)
    module = _module()
    names = {name for name, _ in module.named_parameters()}
    assert names == set(trainer.parameters())
    torch_optimizer = other(module.parameters())
    scheduler = None if rates is None else rates(torch_optimizer)
    assert len(data) == STEPS
    for x, labels in data:
        result = trainer.micro_step({"x": x, "labels": labels})
        torch_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
            assert result.report["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert result.report["learning_rate"] == pytest.approx(
            torch_optimizer.param_groups[0]["lr"], rel=1e-5, abs=1e-9
        )
        torch_optimizer.step()
        if scheduler is not None:
            scheduler.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-4)
        assert result.applied
    for name, parameter in module.named_parameters():
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(trainer.parameters()[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("optimizer", "other"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_twenty_steps_follow_the_optimizer(model, data, optimizer, other):
    _follow(model, data, optimizer, other)


_rates = torch.optim.lr_scheduler
SCHEDULES = {
    "constant": (
        training.Constant(factor=0.5, total_iters=6),
        lambda o: _rates.ConstantLR(o, factor=0.5, total_iters=6),
    ),
    "linear": (
        training.Linear(start_factor=1.0, end_factor=0.1, total_iters=15),
        lambda o: _rates.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=15),
    ),
    "cosine": (
        training.Cosine(T_max=20, eta_min=1e-3),
        lambda o: _rates.CosineAnnealingLR(o, T_max=20, eta_min=1e-3),
    ),
    "polynomial": (
        training.Polynomial(total_iters=15, power=2.0),
        lambda o: _rates.PolynomialLR(o, total_iters=15, power=2.0),
    ),
    "step": (training.Step(step_size=7, gamma=0.3), lambda o: _rates.StepLR(o, step_size=7, gamma=0.3)),
    "warm-up": (
        training.Warmup(5, training.Cosine(T_max=15), start_factor=0.2),
        lambda o: _rates.SequentialLR(
            o,
            [_rates.LinearLR(o, start_factor=0.2, total_iters=5), _rates.CosineAnnealingLR(o, T_max=15)],
            milestones=[5],
        ),
    ),
}


@pytest.mark.parametrize(("schedule", "rates"), SCHEDULES.values(), ids=SCHEDULES)
def test_twenty_steps_follow_the_schedule(model, data, schedule, rates):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its schedulers in an order that PyTorch warns of
        _follow(model, data, training.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), schedule, rates)


def test_clipping_follows_pytorch(model, data):
    _follow(model, data, training.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), clip=0.3)


def _learn(model, level: str, dtype: str) -> tuple[float, float]:
    """First and last loss of 120 steps on one learnable problem."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 6), np.float32)
    batch = {"x": x, "labels": (x @ rng.standard_normal((6, 4), np.float32)).argmax(1)}
    bundle = training.build(model, loss="cross_entropy", optimizer=training.AdamW(lr=0.01), level=level, dtype=dtype)
    assert bundle.manifest.has_arena("low") == (level in ("O2", "O3"))
    trainer = Trainer(bundle, "cpu", threads=1)
    losses = [trainer.micro_step(batch).loss for _ in range(120)]
    return losses[0], losses[-1]


@pytest.fixture(scope="module")
def fp32_loss(model) -> float:
    return _learn(model, "O0", "fp16")[1]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_ends_where_fp32_ends(model, fp32_loss, level, dtype):
    first, last = _learn(model, level, dtype)
    assert math.isfinite(last)
    assert last < 0.5 * first
    if level != "O3":
        assert abs(last - fp32_loss) < max(0.02 * fp32_loss, 0.02)
