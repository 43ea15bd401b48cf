"""Optimizers step by step against torch.optim, schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from onnxamp.errors import UsageError
from onnxamp.training import SGD, Adam, AdamW, Constant, Cosine, Linear, Polynomial, RMSprop, Step, Warmup
from onnxamp.training.fragment import INT64
from onnxamp.training.groups import make_groups
from onnxamp.training.layout import Parameter, make_layout
from onnxamp.training.scaler import FixedLossScale
from onnxamp.training.schedules import learning_rate
from onnxamp.training.steps import Recipe, reduce_graph, update_graph

OPTIMIZERS = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd decay": (SGD(lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "sgd momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "sgd nesterov": (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "sgd dampening": (
        SGD(lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    ),
    "adam": (Adam(), torch.optim.Adam),
    "adam decay": (
        Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (AdamW(), torch.optim.AdamW),
    "adamw decay": (AdamW(lr=0.01, weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3)),
    "rmsprop": (RMSprop(), torch.optim.RMSprop),
    "rmsprop all": (
        RMSprop(lr=0.01, alpha=0.9, weight_decay=0.1, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.1, momentum=0.5, centered=True),
    ),
}


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    """A CPU session on a checked model."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def steps(optimizer, **options):
    """Sessions and ports of reduce and update for one parameter of 50 elements."""
    recipe = Recipe(optimizer, Constant(), FixedLossScale(), decays=optimizer.weight_decay > 0, **options)
    groups = make_groups(None)
    layout = make_layout(
        [Parameter("w", (50,), groups[0], False)],
        [],
        groups=groups,
        moments=optimizer.moments,
        weight_decay=optimizer.weight_decay,
        low=None,
        ema=recipe.ema is not None,
        stored_low=False,
    )
    reduction, ports = reduce_graph(recipe, layout)
    update, _ = update_graph(recipe, ports)
    return session(reduction), session(update)


def names(values):
    """Names of inputs or outputs of a session."""
    return [value.name for value in values]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_torch(name):
    optimizer, make = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    reduction, update = steps(optimizer)
    state = {"parameter": rng.normal(size=50).astype(np.float32)} | {
        moment: np.zeros(50, np.float32) for moment in optimizer.moments
    }
    expected = torch.nn.Parameter(torch.tensor(state["parameter"]))
    other = make([expected])
    counters = {"step": 0, "growth_tracker": 0, "hysteresis": 0, "skipped": 0, "stuck": 0}
    window = np.zeros(16, np.float32)
    window[0] = 3.0  # Σ w
    for _ in range(30):
        mean = (rng.normal(size=50) * 10.0 ** rng.integers(-4, 2)).astype(np.float32)
        arena = np.zeros(1024, np.float32)
        arena[:50] = mean * 3
        feeds = {key: np.asarray(value, np.int64) for key, value in counters.items()}
        feeds |= {
            "gradient": arena,
            "window": window,
            "loss_scale": np.asarray(1, np.float32),
            "seed_divisor": np.asarray(1, np.float32),
        }
        results = dict(zip(names(reduction.get_outputs()), reduction.run(None, feeds), strict=True))
        counters["step"] = int(results["step_out"])
        feeds = {**state, **results, "gradient": mean * 3}
        feeds |= {
            "lr_factor": np.asarray(1, np.float32),
            "weight_decay": np.asarray(optimizer.weight_decay, np.float32),
        }
        outputs = update.run(None, {key: feeds[key] for key in names(update.get_inputs())})
        state = {
            key.removesuffix("_out"): value for key, value in zip(names(update.get_outputs()), outputs, strict=True)
        }
        expected.grad = torch.tensor(mean)
        other.step()
        np.testing.assert_allclose(state["parameter"], expected.detach().numpy(), rtol=3e-6, atol=3e-6)
    assert counters["step"] == 30


def test_learning_rate_factor_and_average():
    optimizer = SGD(lr=0.5, weight_decay=0.1)
    _, update = steps(optimizer, ema=0.9)
    p = np.arange(4, dtype=np.float32)
    feeds = {
        "parameter": p,
        "gradient": np.ones(4, np.float32),
        "ema": np.full(4, 7, np.float32),
        "ok": np.asarray(True),
        "gradient_factor": np.asarray(2, np.float32),
        "learning_rate": np.asarray(0.5, np.float32),
        "lr_factor": np.asarray(0.1, np.float32),
        "weight_decay": np.asarray(0.1, np.float32),
    }
    moved, average = update.run(None, feeds)
    np.testing.assert_allclose(moved, p - 0.05 * (2 + 0.1 * p), rtol=1e-6)
    np.testing.assert_allclose(average, 0.9 * 7 + 0.1 * moved, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_update_changes_nothing(name, value):
    optimizer, _ = OPTIMIZERS[name]
    _, update = steps(optimizer, ema=0.9)
    rng = np.random.default_rng(1)
    feeds = {}
    for each in update.get_inputs():
        feeds[each.name] = rng.random(5).astype(np.float32) if each.shape else np.asarray(0.5, np.float32)
    feeds |= {"gradient": np.full(5, value, np.float32), "ok": np.asarray(False)}
    feeds["gradient_factor"] = np.asarray(value, np.float32)
    outputs = update.run(None, feeds)
    for key, result in zip(names(update.get_outputs()), outputs, strict=True):
        np.testing.assert_array_equal(result, feeds[key.removesuffix("_out")])


def test_clip_value():
    _, update = steps(SGD(lr=1.0), clip_value=0.25)
    feeds = {key: np.asarray(1, np.float32) for key in names(update.get_inputs())}
    feeds |= {
        "parameter": np.zeros(3, np.float32),
        "gradient": np.asarray([-9, 0.1, 9], np.float32),
        "ok": np.asarray(True),
    }
    np.testing.assert_allclose(update.run(None, feeds)[0], [0.25, -0.1, -0.25])


def _sequential(optimizer, warmup, start, after):
    rising = schedulers.LinearLR(optimizer, start_factor=start, total_iters=warmup)
    return schedulers.SequentialLR(optimizer, [rising, after(optimizer)], milestones=[warmup])


SCHEDULES = {
    "constant": (Constant(), lambda o: schedulers.ConstantLR(o, factor=1.0)),
    "constant factor": (Constant(0.25, 7), lambda o: schedulers.ConstantLR(o, factor=0.25, total_iters=7)),
    "linear": (Linear(1.0, 0.0, 20), lambda o: schedulers.LinearLR(o, 1.0, 0.0, 20)),
    "linear up": (Linear(1 / 3, 1.0, 5), lambda o: schedulers.LinearLR(o, 1 / 3, 1.0, 5)),
    "cosine": (Cosine(25), lambda o: schedulers.CosineAnnealingLR(o, 25)),
    "cosine eta_min": (Cosine(25, eta_min=0.01), lambda o: schedulers.CosineAnnealingLR(o, 25, eta_min=0.01)),
    "polynomial": (Polynomial(15, 2.0), lambda o: schedulers.PolynomialLR(o, 15, 2.0)),
    "polynomial 1": (Polynomial(15), lambda o: schedulers.PolynomialLR(o, 15)),
    "step": (Step(4, 0.5), lambda o: schedulers.StepLR(o, 4, 0.5)),
    "warm-up": (
        Warmup(6, Cosine(19), 0.1),
        lambda o: _sequential(o, 6, 0.1, lambda o: schedulers.CosineAnnealingLR(o, 19)),
    ),
    "warm-up, step": (
        Warmup(3, Step(5, 0.1), 0.5),
        lambda o: _sequential(o, 3, 0.5, lambda o: schedulers.StepLR(o, 5, 0.1)),
    ),
}


def _rates(prepare, schedule, lr, count):
    rate = prepare(lambda op: [learning_rate(op, schedule, lr, op.input("t", INT64))], 21)
    return [float(rate(t=step)[0]) for step in range(count)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_equals_torch(prepare, name):
    schedule, make = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = make(optimizer)
        expected = []
        for _ in range(26):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            other.step()
    np.testing.assert_allclose(_rates(prepare, schedule, 0.3, 26), expected, rtol=2e-6, atol=1e-8)


def test_schedules_stay_behind_their_end(prepare):
    for schedule, last in ((Cosine(3, eta_min=0.1), 0.1), (Linear(1.0, 0.5, 3), 0.5), (Polynomial(3), 0.0)):
        assert np.allclose(_rates(prepare, schedule, 1.0, 8)[3:], last)


def test_warmup_wastes_no_step(prepare):
    np.testing.assert_allclose(_rates(prepare, Warmup(3), 1.0, 5), [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)


def test_length_of_the_run():
    assert Warmup(10, Cosine()).resolved(110) == Warmup(10, Cosine(100))
    assert Linear(total_iters=5).resolved(100) == Linear(total_iters=5)
    assert Polynomial().resolved(9).total_iters == 9


def test_a_schedule_without_length(prepare):
    with pytest.raises(UsageError, match="T_max"):
        _rates(prepare, Cosine(), 1.0, 1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SGD(lr=-1), "lr of sgd"),
        (lambda: SGD(nesterov=True), "momentum above 0"),
        (lambda: SGD(momentum=0.9, dampening=float("nan")), "dampening of sgd"),
        (lambda: SGD(momentum=0.9, nesterov=True, dampening=0.1), "no dampening"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas"),
        (lambda: AdamW(eps=float("nan")), "eps of adamw"),
        (lambda: RMSprop(alpha=-0.1), "alpha of rmsprop"),
    ],
)
def test_bad_arguments(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()
