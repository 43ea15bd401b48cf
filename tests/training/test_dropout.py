"""Masks from counters: the right share, no correlation, and the masks of the big batch whatever the micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnxamp.errors import UnsupportedError
from onnxamp.training import SGD, build
from onnxamp.training.dropout import Masks
from onnxamp.training.fragment import FLOAT, INT64

P = 0.3


@pytest.fixture
def masks(prepare):
    """A function from (seed, step, row offset, rows) to the mask of shape [rows, *rest] as 0 and 1."""

    def make(rest, node="layer/Dropout", probability=P, shape=None):
        def define(op):
            x = op.input("x", FLOAT, shape or ("batch", *rest))
            made = Masks(op, op.input("seed", INT64), op.input("step", INT64), x)
            return [made.dropped(x, node, probability)]

        run = prepare(define)

        def mask(seed, step, offset, rows):
            x = np.zeros((rows, *rest), np.float32)
            feeds = {"x": x, "seed": seed, "step": step, "amp.row_offset": offset}
            return run(**feeds)[0].astype(np.float64)

        return mask

    return make


def _z(values, variance):
    """Standardized mean."""
    return values.mean() * np.sqrt(values.size / variance)


def test_share_and_correlations(masks):
    """Rows, columns and pairs of both behave as independent draws do; every bound is five standard deviations wide."""
    mask = masks((512,))
    drawn = mask(7, 11, 0, 2048) - P
    variance = P * (1 - P)
    assert abs(_z(drawn, variance)) < 5
    for axis in (0, 1):
        means = drawn.mean(axis) * np.sqrt(drawn.shape[axis] / variance)
        assert abs(means).max() < 5.5
        assert abs(means.var() - 1) < 5 * np.sqrt(2 / means.size)
    for matrix in (drawn[:512], drawn.T):
        correlation = matrix @ matrix.T / matrix.shape[1] / variance * np.sqrt(matrix.shape[1])
        off = correlation[~np.eye(len(matrix), dtype=bool)]
        assert abs(off).max() < 6.5
        assert abs(off.var() - 1) < 0.02
    normal = drawn / np.sqrt(variance)
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, 2048, (2, 200_000)), rng.integers(0, 512, (2, 200_000))
    distinct = (rows[0] != rows[1]) & (columns[0] != columns[1])
    squares = np.prod([normal[rows[i], columns[j]] for i in (0, 1) for j in (0, 1)], axis=0)[distinct]
    assert abs(_z(squares, squares.var())) < 5


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_share(masks, probability):
    drawn = masks((64, 32), probability=probability)(0, 0, 0, 128) - probability
    assert abs(_z(drawn, probability * (1 - probability))) < 5


def test_every_key_counts(masks):
    """A mask agrees with the one of another seed, step or node no more often than two independent ones."""
    mask = masks((256,))
    first = mask(0, 0, 0, 256)
    others = [mask(1, 0, 0, 256), mask(0, 1, 0, 256), masks((256,), node="other")(0, 0, 0, 256), mask(0, 0, 256, 256)]
    others += [mask(-1, 0, 0, 256), mask(2**40, 0, 0, 256), mask(0, 2**33, 0, 256)]
    expected = 2 * P * (1 - P)
    for other in others:
        differs = (first != other) - expected
        assert abs(_z(differs, expected * (1 - expected))) < 5
    np.testing.assert_array_equal(first, mask(0, 0, 0, 256))


@pytest.mark.parametrize("rest", [(), (5,), (3, 7), (2, 3, 4)])
def test_rows_of_the_window(masks, rest):
    mask = masks(rest)
    whole = mask(3, 4, 0, 12)
    parts = [mask(3, 4, start, stop - start) for start, stop in ((0, 5), (5, 6), (6, 12))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_several_indices_belong_to_a_row(prepare):
    """[batch·tokens, width] follows its rows too."""

    def define(op):
        x = op.input("x", FLOAT, ("batch", 4, 8))
        flat = op.Reshape(x, [-1, 8])
        flat.shape = type(x.shape)(["4*batch", 8])
        made = Masks(op, op.input("seed", INT64), op.input("step", INT64), x)
        return [made.dropped(flat, "node", P)]

    run = prepare(define)

    def mask(offset, rows):
        return run(x=np.zeros((rows, 4, 8), np.float32), seed=1, step=2, **{"amp.row_offset": offset})[0]

    np.testing.assert_array_equal(np.concatenate([mask(0, 3), mask(3, 5)]), mask(0, 8))


def test_other_layouts_use_the_micro_step(prepare):
    """Where the first dimension does not count rows, micro-batches see different masks, not those of the big batch."""

    def define(op):
        x = op.input("x", FLOAT, ("batch", 8))
        made = Masks(op, op.input("seed", INT64), op.input("step", INT64), x)
        return [made.dropped(op.Transpose(x, perm=[1, 0]), "node", P)]

    run = prepare(define)
    first, second = (
        run(x=np.zeros((64, 8)).astype(np.float32), seed=1, step=2, **{"amp.micro_step": k})[0] for k in (0, 1)
    )
    assert first.shape == (8, 64)
    assert 0.2 < (first != second).mean() < 0.6


class _Net(torch.nn.Module):
    def __init__(self, p, features=6):
        super().__init__()
        self.linear = torch.nn.Linear(features, 64, bias=False)
        self.dropout = torch.nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.linear(x))


def test_trains_with_dropout_and_evaluates_without(export, drive):
    net = _Net(0.5)
    x = torch.randn(16, 6)
    bundle = build(export(net, x, train=True), loss="mse", optimizer=SGD(lr=0.0), level="O0", seed=3)
    driver = drive(bundle)
    batch = {"x0": x.numpy(), "labels": np.zeros((16, 64), np.float32)}
    report = driver.step(batch)
    plain = net.eval()(x).detach().numpy()
    np.testing.assert_allclose(driver.eval(batch)["y"], plain, rtol=1e-5, atol=1e-6)
    # The mean square of kept values, doubled and squared, is about twice the mean square of all.
    assert report["loss"] == pytest.approx(2 * (plain**2).mean(), rel=0.15)
    before = driver.view("gradient/linear.weight").copy()
    driver.step(batch)
    assert (before != driver.view("gradient/linear.weight")).mean() > 0.9  # another step, another mask
    driver.view("counters/step")[...] = 0
    driver.step(batch)
    np.testing.assert_array_equal(before, driver.view("gradient/linear.weight"))


def test_the_gradient_uses_the_same_mask(export, drive):
    """With rows of the unit matrix and L1 far from its kink, the gradient of a weight is −kept/(1−p)."""
    net = _Net(0.4, 8)
    driver = drive(build(export(net, torch.eye(8), train=True), loss="l1", optimizer="sgd", level="O0"))
    report = driver.step({"x0": np.eye(8, dtype=np.float32), "labels": np.full((8, 64), 100, np.float32)})
    slope = -driver.view("gradient/linear.weight") * driver.view("scalars/seed_divisor")
    kept = slope != 0
    np.testing.assert_allclose(slope[kept], 1 / 0.6, rtol=1e-6)
    assert 0.5 < kept.mean() < 0.7
    weight = net.linear.weight.detach().numpy()
    assert report["loss"] == pytest.approx(100 - (weight * kept / 0.6).mean(), rel=1e-6)


def test_a_ratio_computed_in_the_graph_is_refused(export):
    model = export(_Net(0.5), torch.randn(2, 6), train=True)
    node = next(node for node in model.graph.node if node.op_type == "Dropout")
    model.graph.input.add().CopyFrom(model.graph.input[0])
    model.graph.input[-1].name = "ratio"
    del model.graph.input[-1].type.tensor_type.shape.dim[:]
    node.input[1] = "ratio"
    with pytest.raises(UnsupportedError, match=r"ratio of Dropout .* constant"):
        build(model, loss="mse", optimizer="sgd", level="O0")
