"""Running statistics that move once per window."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from onnxamp.training import SGD, build

SIZES = (4, 6, 5)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_statistics_move_once_per_window(export, drive, bad):
    """By the mean of the micro-batches' own statistics, whatever their number; a dropped micro-batch does not count."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 2))
    model = export(net, torch.randn(4, 3), train=True)
    options = {"loss": "mse", "optimizer": SGD(lr=0.0), "level": "O0", "batch_norm": "window"}
    driver = drive(build(model, overflow="window" if bad is None else "micro", **options), accumulate=3)
    rng = np.random.default_rng(0)
    mean, variance = (driver.view(f"statistics/0.running_{name}").astype(np.float64) for name in ("mean", "var"))
    for _ in range(2):
        parts = [rng.normal(2, 3, (size, 3)).astype(np.float32) for size in SIZES]
        for index, x in enumerate(parts):
            fed = np.where(np.arange(3) == 1, np.inf, x).astype(np.float32) if index == bad else x
            driver.step({"x0": fed, "labels": np.zeros((len(x), 2), np.float32)})
        used = [x for index, x in enumerate(parts) if index != bad]
        mean = 0.7 * mean + 0.3 * np.mean([x.mean(0) for x in used], axis=0)
        variance = 0.7 * variance + 0.3 * np.mean([x.var(0, ddof=1) for x in used], axis=0)
        np.testing.assert_allclose(driver.view("statistics/0.running_mean"), mean, rtol=1e-5)
        np.testing.assert_allclose(driver.view("statistics/0.running_var"), variance, rtol=1e-5)
