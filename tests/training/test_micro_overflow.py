"""Overflow policy ``micro``: the window is the one that never had the bad micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from onnxamp.trainer.collective import SingleProcess
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import SGD, AdamW, DynamicLossScale, FixedLossScale, build
from onnxamp.training.manifest import WINDOW

SIZES = (4, 3, 5)


class _Net(nn.Module):
    """BatchNormalization, Dropout, a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.last(self.drop(torch.tanh(self.head(torch.tanh(self.head(y))))))


def _parts(seed=0, bad=None, value=np.inf):
    """Three micro-batches of different size; of the one called `bad` one number is `value`."""
    rng = np.random.default_rng(seed)
    parts = []
    for index, size in enumerate(SIZES):
        x = rng.normal(size=(size, 2, 6, 6)).astype(np.float32)
        if index == bad:
            x[1, 0, 2, 2] = value
        parts.append({"x0": x, "labels": rng.integers(0, 3, size)})
    return parts


def _bundle(export, level="O0", **options):
    model = export(_Net(), torch.randn(2, 2, 6, 6), train=True)
    scale = "auto" if level == "O0" else DynamicLossScale(init_scale=256.0, growth_interval=3)
    options = {"loss": "cross_entropy", "optimizer": AdamW(lr=0.05), "ema": 0.9, "loss_scale": scale, **options}
    return build(model, level=level, overflow="micro", **options)


def _same(driver, other, but=()):
    expected = other.state()
    for key, value in driver.state().items():
        if key not in but:
            np.testing.assert_array_equal(value, expected[key], err_msg=key)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("bad", range(3))
def test_the_window_is_the_one_without_the_bad_micro_batch(export, drive, level, value, bad):
    """Bit for bit: parameters, moments, average, statistics, step, masks; and the window after it."""
    bundle = _bundle(export, level)
    dirty, clean = drive(bundle, accumulate=3), drive(bundle, accumulate=2)
    for driver in (dirty, clean):
        driver.view("scalars/seed_divisor")[...] = 4
    *_, report = [dirty.step(part) for part in _parts(bad=bad, value=value)]
    *_, other = [clean.step(part) for index, part in enumerate(_parts()) if index != bad]
    assert (report["dropped"], report["ok"], report["found_inf"], report["empty"]) == (1, 1, 0, 0)
    assert report["rows"] == other["rows"] == sum(SIZES) - SIZES[bad]
    assert report["micro_steps"] == other["micro_steps"] == 2
    for field in ("loss", "weight_sum", "gradient_norm", "step", "skipped", "stuck"):
        assert report[field] == other[field], field
    scaled = level == "O2"
    assert report["next_loss_scale"] == (128 if scaled else 1)  # once, at the end of the window
    _same(dirty, clean, ("scalars/loss_scale", "counters/growth_tracker") if scaled else ())
    dirty.view("scalars/loss_scale")[...] = clean.view("scalars/loss_scale")
    dirty.accumulate = clean.accumulate = 3
    for part in _parts(seed=1):
        report, other = dirty.step(part), clean.step(part)
    assert report["dropped"] == 0
    assert report["loss"] == other["loss"]
    _same(dirty, clean, ("counters/growth_tracker", "scalars/loss_scale"))


def test_without_dropout_masks_by_row_the_windows_would_differ(export, drive):
    """The masks of the rows that follow depend on where they stand, so the test above is about them too."""
    bundle = _bundle(export)
    losses = []
    for offset in (0, 4):
        driver = drive(bundle)
        driver.view("scalars/seed_divisor")[...] = 4
        driver.rows = offset
        losses.append(driver.step(_parts()[1])["loss"])
    assert losses[0] != losses[1]


def test_a_window_that_has_lost_everything_is_skipped(export, drive):
    bundle = _bundle(export, "O2", loss_scale=DynamicLossScale(init_scale=2.0, floor=1.0))
    driver = drive(bundle, accumulate=2)
    before = driver.state()
    for stuck in (0, 1):
        driver.step(_parts(bad=0)[0])
        report = driver.step(_parts(bad=1)[1])
        assert (report["ok"], report["found_inf"], report["empty"], report["dropped"]) == (0, 1, 0, 2)
        assert (report["rows"], report["stuck"]) == (0, stuck)
        assert np.isnan(report["loss"])
    assert report["skipped"] == 2
    changed = {key for key, value in driver.state().items() if not np.array_equal(value, before[key])}
    assert changed == {
        "counters/skipped",
        "counters/stuck",
        "scalars/loss_scale",
        "scalars/seed_divisor",
    }


def test_an_empty_window_is_neither_bad_nor_good(export, drive):
    driver = drive(_bundle(export, "O2"))
    driver.step(_parts()[0])
    before = driver.state()
    report = driver.step({**_parts()[0], "labels": np.full(SIZES[0], -100)})
    assert (report["ok"], report["found_inf"], report["empty"], report["dropped"]) == (0, 0, 1, 0)
    for key, value in driver.state().items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def test_a_gradient_that_overflows_in_16_bits_costs_its_micro_batch(export, drive):
    """The loss is finite; at this scale only the gradient of the loud micro-batch leaves FP16's range."""
    torch.manual_seed(0)
    model = export(nn.Linear(6, 4), torch.randn(2, 6))
    bundle = build(model, loss="mse", optimizer=SGD(lr=1e-3), overflow="micro", loss_scale=DynamicLossScale(2.0**10))
    driver = drive(bundle, accumulate=2)
    driver.view("scalars/seed_divisor")[...] = 1
    rng = np.random.default_rng(0)
    quiet, loud = (
        {"x0": rng.normal(size=(3, 6)).astype(np.float32), "labels": rng.normal(0, size, (3, 4)).astype(np.float32)}
        for size in (1, 1e3)
    )
    driver.step(loud)
    report = driver.step(quiet)
    assert (report["ok"], report["dropped"], report["bad_losses"], report["rows"]) == (1, 1, 0, 3)
    assert (report["loss_scale"], report["next_loss_scale"]) == (1024, 512)


@pytest.mark.parametrize("bad", [0, 1])
def test_the_trainer_saves_and_loads_after_a_dropped_micro_batch(export, tmp_path, bad):
    bundle = _bundle(export, "O2")
    parts = _parts(bad=bad)
    whole = Trainer(bundle, "cpu", 3, threads=1)
    for part in parts:
        result = whole.micro_step(part)
    assert result.applied
    assert result.cause is not None
    assert str(result.cause).startswith("the loss is not finite in 1 of 3 micro-batches; the input 'x0' holds 1 Inf")
    half = Trainer(bundle, "cpu", 3, threads=1)
    for part in parts[:2]:
        assert half.micro_step(part).cause is None
    half.save(tmp_path / "half.safetensors")
    again = Trainer.load(tmp_path / "half.safetensors", "cpu", threads=1)
    assert again.micro_step(parts[2]).report == result.report
    aliased = Trainer(bundle, "cpu", 3, threads=1, in_place=False)
    for part in parts:
        aliased.micro_step(part)
    for tensor in whole.manifest.tensors:
        for other in (again, aliased):
            np.testing.assert_array_equal(whole._arenas.tensor(tensor.key), other._arenas.tensor(tensor.key))


def test_windows_of_one_micro_batch(export):
    """The graph without accumulators drops too, and then the window is skipped."""
    trainer = Trainer(_bundle(export), "cpu", 1, threads=1)
    assert trainer.micro_step(_parts()[0]).applied
    before = trainer.parameters()
    result = trainer.micro_step(_parts(bad=1)[1])
    assert result.skipped
    assert result.report["dropped"] == 1
    for name, value in trainer.parameters().items():
        np.testing.assert_array_equal(value, before[name])


class _Two(SingleProcess):
    """Two ranks of which the other has nothing to add."""

    world_size, rank = 2, 1


def test_several_ranks_keep_the_numbers_of_their_rows(export, monkeypatch):
    """What another rank has dropped is not known, so the graph must not move rows to numbers that are taken."""
    trainer = Trainer(_bundle(export), "cpu", 3, threads=1, collective=_Two())
    offsets, run = [], trainer._programs.grad.run

    def spy(feeds, fresh, alone):
        window = trainer._arenas.tensor("window/window")
        lost = 0 if feeds["amp.first"] else int(window[WINDOW.index("dropped_rows")])
        offsets.append(int(feeds["amp.row_offset"]) - lost)  # as the graph does
        run(feeds, fresh, alone)

    monkeypatch.setattr(trainer._programs.grad, "run", spy)
    for part in _parts(bad=0):
        trainer.micro_step(part)
    assert offsets == [0, 4, 7]


def test_policy_window_costs_nothing_for_micro(export):
    """No node of the check is in the graph of the other policy."""
    model = export(_Net(), torch.randn(2, 2, 6, 6), train=True)
    graph = build(model, loss="cross_entropy", optimizer="sgd", level="O0").graphs["grad"].graph
    assert not [node for node in graph if (node.name or "").startswith("overflow/")]


def test_gradients_that_are_kept_as_they_are(export, drive):
    """MindSpore's drop_overflow_update=False: what overflowed is applied, and counted."""
    model = export(_Net(), torch.randn(2, 2, 6, 6), train=True)
    scale = FixedLossScale(2.0, drop_overflow_update=False)
    driver = drive(build(model, loss="cross_entropy", optimizer="sgd", level="O0", loss_scale=scale))
    report = driver.step(_parts(bad=0)[0])
    assert (report["ok"], report["found_inf"], report["dropped"]) == (1, 1, 0)
    assert np.isnan(driver.view("master/conv.weight")).any()
