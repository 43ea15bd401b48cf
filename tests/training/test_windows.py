"""Windows: what is added, applied, skipped, empty; the same whatever the micro-batches. Oracle: PyTorch on the big batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxamp.training import SGD, AdamW, CrossEntropy, DynamicLossScale, FixedLossScale, Huber, build

ROWS = 12


def _mlp(inputs=6, outputs=4, *, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, outputs)]
    return nn.Sequential(*layers)


class _Norms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def _batch(outputs=4, labels="indices"):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 6)).astype(np.float32)
    if labels == "indices":
        y = rng.integers(0, outputs, ROWS)
        y[[1, 5, 6]] = -100
    else:
        y = rng.random((ROWS, outputs)).astype(np.float32)
    return {"x0": x, "labels": y, "weights": (np.arange(ROWS) % 4).astype(np.float32)}


def _parts(batch, *sizes):
    start = 0
    for size in sizes:
        yield {key: value[start : start + size] for key, value in batch.items()}
        start += size
    assert start == len(batch["x0"])


def _close(state, other, tolerance):
    """Norm-wise per tensor."""
    assert state.keys() == other.keys()
    for key in state:
        a, b = state[key].astype(np.float64), other[key].astype(np.float64)
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-3), key


LOSSES = {
    "cross_entropy": ("indices", {}),
    "smoothed": ("indices", {"name": "cross_entropy", "label_smoothing": 0.1, "weight": [1, 2, 0.5, 0]}),
    "probabilities": ("floats", {"name": "cross_entropy", "target": "probabilities"}),
    "binary_cross_entropy_with_logits": ("floats", {}),
    "mse": ("floats", {}),
    "l1": ("floats", {}),
    "huber": ("floats", {}),
    "smooth_l1": ("floats", {"name": "smooth_l1", "beta": 0.3}),
    "nll": ("indices", {"name": "nll", "weight": [1, 2, 0.5, 0]}),
    "kl_div": ("floats", {"name": "kl_div", "reduction": "batchmean"}),
    "cosine": ("floats", {}),
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_equal_the_big_batch(export, drive, name, dropout):
    """Ignored labels, class weights, row weights, dropout and pieces of different size included."""
    kind, spec = LOSSES[name]
    model = export(_mlp(dropout=dropout), torch.randn(2, 6), train=dropout > 0)
    bundle = build(model, loss=spec or name, optimizer=AdamW(lr=0.05), level="O0", clip_norm=0.5, seed=5)
    batch = _batch(labels=kind)
    big, small = drive(bundle), drive(bundle, accumulate=3)
    for driver in (big, small):
        driver.view("scalars/seed_divisor")[...] = 8
    for _ in range(3):
        report = big.step(batch)
        *_, other = [small.step(part) for part in _parts(batch, 5, 1, 6)]
        assert report["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert report["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
        assert (other["rows"], other["micro_steps"]) == (ROWS, 3)
        _close(small.state(), big.state(), 2e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_micro_batches_at_o2(export, drive, dtype):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="cross_entropy", optimizer=SGD(lr=0.1), dtype=dtype)
    batch = _batch()
    big, small = drive(bundle), drive(bundle, accumulate=3)
    for driver in (big, small):
        driver.view("scalars/seed_divisor")[...] = 8
    for _ in range(3):
        big.step(batch)
        for part in _parts(batch, 5, 1, 6):
            small.step(part)
        _close(small.state(), big.state(), 2e-3 if dtype == "fp16" else 1e-2)


def test_the_seed_divisor_does_not_change_the_result(export, drive):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="mse", optimizer="sgd", level="O0")
    batch = _batch(labels="floats")
    states = []
    for divisor in (1, 64, 2**20):
        driver = drive(bundle)
        driver.view("scalars/seed_divisor")[...] = divisor
        driver.step(batch)
        states.append({key: value for key, value in driver.state().items() if "divisor" not in key})
    for other in states[1:]:
        _close(other, states[0], 1e-7)


def test_a_short_last_window(export, drive):
    """A flush after one of three micro-batches takes the mean over what there is."""
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="huber", optimizer=SGD(lr=0.1), level="O0")
    part = next(_parts(_batch(labels="floats"), 5, 7))
    one, three = drive(bundle), drive(bundle, accumulate=3)
    one.step(part)
    assert three.step(part) is None
    assert three.flush()["micro_steps"] == 1
    _close(three.state(), one.state(), 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
def test_follows_torch(export, drive, optimizer, clip):
    """Loss, gradient norm and parameters over ten windows of three micro-batches."""
    net = _mlp()
    ours = SGD(lr=0.2, momentum=0.9, nesterov=True) if optimizer == "sgd" else AdamW(lr=0.02)
    bundle = build(export(net, torch.randn(2, 6)), loss=CrossEntropy(label_smoothing=0.1), optimizer=ours, level="O0",
                   clip_norm=clip)  # fmt: skip
    net = copy.deepcopy(net)
    if optimizer == "sgd":
        theirs = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    else:
        theirs = torch.optim.AdamW(net.parameters(), lr=0.02)
    driver, batch = drive(bundle, accumulate=3), _batch()
    del batch["weights"]
    for _ in range(10):
        *_, report = [driver.step(part) for part in _parts(batch, 2, 4, 6)]
        theirs.zero_grad()
        loss = F.cross_entropy(net(torch.tensor(batch["x0"])), torch.tensor(batch["labels"]), label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)
        theirs.step()
        assert report["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert report["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert report["clip_coefficient"] == pytest.approx(min(1, (clip or 1e9) / (norm.item() + 1e-6)), rel=1e-4)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(driver.view(f"master/{name}"), parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_micro_batch_leaves_no_trace(export, drive, level, bad):
    """The window is skipped; parameters, moments, average, step and schedule stay, the next window is as if it never was."""
    bundle = build(
        export(_mlp(dropout=0.3), torch.randn(2, 6), train=True),
        loss="mse",
        optimizer=AdamW(lr=0.05),
        level=level,
        schedule={"name": "linear", "total_iters": 5},
        ema=0.9,
        loss_scale="auto" if level == "O0" else DynamicLossScale(init_scale=256.0),
    )
    batch = _batch(labels="floats")
    poisoned = {**batch, "x0": batch["x0"].copy()}
    poisoned["x0"][7, 2] = bad
    clean, dirty = drive(bundle, accumulate=3), drive(bundle, accumulate=3)
    for driver in (clean, dirty):
        driver.view("scalars/seed_divisor")[...] = 8
        for part in _parts(batch, 4, 4, 4):
            driver.step(part)
    before = dirty.state()
    *_, report = [dirty.step(part) for part in _parts(poisoned, 4, 4, 4)]
    assert (report["ok"], report["found_inf"], report["empty"]) == (0, 1, 0)
    assert report["bad_losses"] == np.isnan(bad)  # tanh(inf) is 1: only the gradient is bad
    after = dirty.state()
    changed = {key for key in after if not np.array_equal(after[key], before[key])}
    scaled = level == "O2"
    assert changed == {"counters/skipped"} | (
        {"scalars/loss_scale", "counters/growth_tracker"} if scaled else {"counters/stuck"}
    )
    if scaled:
        assert after["scalars/loss_scale"] == before["scalars/loss_scale"] / 2
        dirty.view("scalars/loss_scale")[...] *= 2  # the same scale rounds the same
    for part in _parts(batch, 4, 4, 4):
        clean.step(part)
        report = dirty.step(part)
    assert (report["ok"], report["step"], report["skipped"], report["stuck"]) == (1, 2, 1, 0)
    for key, value in clean.state().items():
        if key not in ("counters/skipped", "counters/growth_tracker"):
            np.testing.assert_array_equal(dirty.view(key), value, err_msg=key)


def test_statistics_of_a_skipped_window_are_undone(export, drive):
    bundle = build(
        export(_Norms(), torch.randn(2, 2, 6, 6), train=True), loss="cross_entropy", optimizer="sgd", level="O0"
    )
    driver = drive(bundle, accumulate=2)
    rng = np.random.default_rng(0)
    good = {"x0": rng.normal(size=(4, 2, 6, 6)).astype(np.float32), "labels": rng.integers(0, 3, 4)}
    bad = {**good, "x0": np.full((4, 2, 6, 6), np.inf, np.float32)}
    before = driver.state()
    driver.step(good)
    report = driver.step(bad)
    assert report["found_inf"] == 1
    for tensor in driver.manifest.tensors_in("statistics"):
        np.testing.assert_array_equal(driver.view(tensor.key), before[tensor.key])
    driver.step(good)
    driver.step(good)
    assert all(np.isfinite(driver.view(tensor.key)).all() for tensor in driver.manifest.tensors_in("statistics"))


def test_an_empty_window_changes_nothing(export, drive):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="cross_entropy", optimizer=AdamW(weight_decay=0.5), ema=0.5,
                   loss_scale=DynamicLossScale(growth_interval=1))  # fmt: skip
    driver, batch = drive(bundle, accumulate=2), _batch()
    driver.step(batch)
    driver.step(batch)
    before = driver.state()
    nothing = {**batch, "labels": np.full(ROWS, -100)}
    assert driver.step(nothing) is None
    report = driver.step({**batch, "weights": np.zeros(ROWS, np.float32)})
    assert (report["ok"], report["empty"], report["found_inf"], report["loss"]) == (0, 1, 0, 0)
    for key, value in driver.state().items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def test_a_micro_batch_without_weight_is_neutral(export, drive):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="cross_entropy", optimizer="adamw", level="O0")
    one, two = drive(bundle), drive(bundle, accumulate=2)
    batch = _batch()
    one.step(batch)
    two.step({**batch, "labels": np.full(ROWS, -100)})  # the seed divisor of a first batch without weight is 1
    two.view("scalars/seed_divisor")[...] = one.view("scalars/seed_divisor")
    two.first, two.micro_steps, two.rows = True, 0, 0
    two.step({**batch, "labels": np.full(ROWS, -100)})
    two.step(batch)
    _close(two.state(), one.state(), 0)


def test_overflow_update_not_dropped(export, drive):
    """MindSpore's drop_overflow_update=False applies what it got."""
    scale = FixedLossScale(2.0, drop_overflow_update=False)
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="mse", optimizer="sgd", level="O0", loss_scale=scale)
    driver, batch = drive(bundle), _batch(labels="floats")
    batch["x0"][0] = np.nan
    report = driver.step(batch)
    assert (report["ok"], report["found_inf"], report["step"], report["skipped"]) == (1, 1, 1, 0)
    assert np.isnan(driver.view("master/0.weight")).any()


def test_a_norm_beyond_fp32_counts_as_overflow(export, drive):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="mse", optimizer="sgd", level="O0")
    driver, batch = drive(bundle), _batch(labels="floats")
    batch["labels"] *= np.float32(1e25)
    report = driver.step(batch)
    assert (report["ok"], report["found_inf"]) == (0, 1)
    assert np.isfinite(driver.view("master/0.weight")).all()


def test_stuck_counts_skips_in_a_row_at_the_floor(export, drive):
    scale = DynamicLossScale(init_scale=4.0, floor=1.0)
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="mse", optimizer="sgd", loss_scale=scale)
    driver, batch = drive(bundle), _batch(labels="floats")
    bad = {**batch, "labels": np.full((ROWS, 4), np.nan, np.float32)}
    reports = [driver.step(bad) for _ in range(4)]
    assert [report["stuck"] for report in reports] == [0, 0, 1, 2]
    assert [report["next_loss_scale"] for report in reports] == [2, 1, 1, 1]
    assert driver.step({**batch, "weights": np.zeros(ROWS, np.float32)})["stuck"] == 2  # an empty window says nothing
    assert driver.step(batch)["stuck"] == 0
    assert bundle.manifest.limits == {"floor": 1.0, "patience": 50}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_batch_norm_follows_torch(export, drive, level):
    net = _Norms()
    bundle = build(
        export(net, torch.randn(2, 2, 6, 6), train=True), loss="cross_entropy", optimizer=SGD(lr=0.1), level=level
    )
    net = copy.deepcopy(net).train()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)
    driver, rng = drive(bundle), np.random.default_rng(1)
    tolerance = 2e-5 if level == "O0" else 2e-2
    for size in (5, 8, 3, 5):
        x, y = rng.normal(1, 2, (size, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, size)
        report = driver.step({"x0": x, "labels": y})
        theirs.zero_grad()
        loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        theirs.step()
        assert report["loss"] == pytest.approx(loss.item(), rel=tolerance)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(driver.view(f"master/{name}"), parameter.detach(), rtol=tolerance, atol=tolerance)
    for name, buffer in net.named_buffers():
        if "running" in name:
            np.testing.assert_allclose(driver.view(f"statistics/{name}"), buffer, rtol=tolerance, atol=tolerance)
    expected = net.eval()(torch.tensor(x)).detach()
    np.testing.assert_allclose(driver.eval({"x0": x, "labels": y})["y"], expected, rtol=tolerance, atol=tolerance)


def test_frozen_batch_norm(export, drive):
    net = _Norms()
    bundle = build(export(net, torch.randn(2, 2, 6, 6), train=True), loss="cross_entropy", optimizer=SGD(lr=0.1),
                   level="O0", batch_norm="freeze")  # fmt: skip
    assert not bundle.manifest.has_arena("statistics")
    net = copy.deepcopy(net).eval()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)
    driver, rng = drive(bundle), np.random.default_rng(1)
    x, y = rng.normal(1, 2, (5, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, 5)
    for _ in range(3):
        driver.step({"x0": x, "labels": y})
        theirs.zero_grad()
        F.cross_entropy(net(torch.tensor(x)), torch.tensor(y)).backward()
        theirs.step()
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(driver.view(f"master/{name}"), parameter.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 2, 2, 2)])
def test_batch_norm_of_any_rank(export, drive, shape):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}[len(shape)]
    torch.manual_seed(1)
    net = nn.Sequential(nn.PReLU(), kind(3, momentum=0.3, eps=1e-3))
    bundle = build(export(net, torch.randn(shape), train=True), loss=Huber(), optimizer=SGD(lr=0.5), level="O0")
    net = copy.deepcopy(net).train()
    theirs = torch.optim.SGD(net.parameters(), lr=0.5)
    driver = drive(bundle)
    x, y = torch.randn(shape), torch.randn(shape)
    for _ in range(2):
        driver.step({"x0": x.numpy(), "labels": y.numpy()})
        theirs.zero_grad()
        F.huber_loss(net(x), y).backward()
        theirs.step()
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(
            driver.view(f"master/{name}").ravel(), parameter.detach().ravel(), rtol=2e-5, atol=2e-6
        )
    np.testing.assert_allclose(driver.view("statistics/1.running_var"), net[1].running_var, rtol=1e-5)


def test_a_batch_norm_that_is_used_twice(export, drive):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.norm = nn.BatchNorm1d(3)
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

        def forward(self, x):
            return self.norm(torch.tanh(self.norm(x)))

    net = Twice()
    bundle = build(export(net, torch.randn(4, 3), train=True), loss="mse", optimizer=SGD(lr=0.1), level="O0")
    assert "2 parameters are read by several nodes" in bundle.manifest.notes[0]
    net = copy.deepcopy(net).train()
    x, y = torch.randn(6, 3) * 3, torch.randn(6, 3)
    driver = drive(bundle)
    driver.step({"x0": x.numpy(), "labels": y.numpy()})
    F.mse_loss(net(x), y).backward()
    np.testing.assert_allclose(driver.view("statistics/norm.running_mean"), net.norm.running_mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(driver.view("statistics/norm.running_var"), net.norm.running_var, rtol=1e-5)
    expected = (net.norm.weight - 0.1 * net.norm.weight.grad).detach()
    np.testing.assert_allclose(driver.view("master/norm.weight"), expected, rtol=1e-5)


def test_average_of_the_parameters(export, drive):
    bundle = build(export(_mlp(), torch.randn(2, 6)), loss="mse", optimizer=SGD(lr=0.1), level="O2", ema=0.75)
    driver, batch = drive(bundle), _batch(labels="floats")
    expected = driver.view("master/0.weight").copy()
    for _ in range(4):
        driver.step(batch)
        expected += 0.25 * (driver.view("master/0.weight") - expected)
    np.testing.assert_allclose(driver.view("ema/0.weight"), expected, rtol=1e-6)
