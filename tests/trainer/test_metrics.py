"""Metrics against scikit-learn and PyTorch, in batches of uneven size."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import sklearn.metrics as sk
import torch

from onnxamp.errors import DataError, UsageError
from onnxamp.trainer.classification import TopK
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.metrics import Function, metric

RNG = np.random.default_rng(0)
N, C = 203, 7
LOGITS = RNG.normal(size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C - 1, N)  # the last class never occurs, but is predicted
WEIGHTS = RNG.uniform(0.1, 3, N).astype(np.float32)
PREDICTED = LOGITS.argmax(1)
BINARY = (RNG.uniform(size=N) > 0.7).astype(np.float32)
LOGIT = RNG.normal(size=N).astype(np.float32)
TARGET = (1000 + RNG.normal(size=(N, 3))).astype(np.float32)
GUESS = (TARGET + 0.3 * RNG.normal(size=(N, 3))).astype(np.float32)

CASES = [
    ("accuracy", LOGITS, LABELS, lambda w: sk.accuracy_score(LABELS, PREDICTED, sample_weight=w)),
    ("top3", LOGITS, LABELS, lambda w: sk.top_k_accuracy_score(LABELS, LOGITS, k=3, sample_weight=w, labels=range(C))),
    *(
        (f"{kind}{'' if average == 'macro' else '-micro'}", LOGITS, LABELS, score)
        for kind, function in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score))
        for average in ("macro", "micro")
        for score in [
            lambda w, f=function, a=average: f(LABELS, PREDICTED, average=a, sample_weight=w, zero_division=0)
        ]
    ),
    ("accuracy", LOGIT, BINARY, lambda w: sk.accuracy_score(BINARY, LOGIT > 0, sample_weight=w)),
    ("f1", LOGIT[:, None], BINARY, lambda w: sk.f1_score(BINARY, LOGIT > 0, sample_weight=w)),
    ("precision", LOGIT, BINARY, lambda w: sk.precision_score(BINARY, LOGIT > 0, sample_weight=w)),
    ("recall", LOGIT, BINARY, lambda w: sk.recall_score(BINARY, LOGIT > 0, sample_weight=w)),
    ("mse", GUESS, TARGET, lambda w: sk.mean_squared_error(TARGET.astype(float), GUESS.astype(float), sample_weight=w)),
    (
        "mae",
        GUESS,
        TARGET,
        lambda w: sk.mean_absolute_error(TARGET.astype(float), GUESS.astype(float), sample_weight=w),
    ),
    ("r2", GUESS, TARGET, lambda w: sk.r2_score(TARGET.astype(float), GUESS.astype(float), sample_weight=w)),
    ("r2", GUESS[:, :1], TARGET[:, 0], lambda w: sk.r2_score(TARGET[:, 0].astype(float), GUESS[:, 0], sample_weight=w)),
    (
        "perplexity",
        LOGITS,
        LABELS,
        lambda w: math.exp(sk.log_loss(LABELS, _softmax(LOGITS), sample_weight=w, labels=range(C))),
    ),
]


def _softmax(x: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.tensor(x, dtype=torch.float64), -1).numpy()


def _feed(measure: Metric, output: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, size: int) -> float:
    for first in range(0, len(output), size):
        part = slice(first, first + size)
        measure.update(output[part], labels[part], None if weights is None else weights[part])
    return measure.value()


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("name", "output", "labels", "oracle"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_equals_scikit_learn(name, output, labels, oracle, weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = oracle(None if weights is None else weights.astype(np.float64))
    for size in (N, 32):
        assert _feed(metric(name), output, labels, weights, size) == pytest.approx(wanted, rel=1e-9)


def test_number_of_cases():
    assert len(CASES) == 17


def test_sequences_and_ignored_labels():
    logits = RNG.normal(size=(4, 9, C)).astype(np.float32)
    labels = RNG.integers(0, C, (4, 9))
    labels[0, 3:] = -100
    loss = torch.nn.functional.cross_entropy(torch.tensor(logits.reshape(-1, C)).double(), torch.tensor(labels.ravel()))
    for output in (logits, np.moveaxis(logits, -1, 1)):  # classes last, and on axis 1 as in PyTorch
        assert _feed(metric("perplexity"), output, labels, None, 3) == pytest.approx(math.exp(float(loss)), rel=1e-9)
        hits = (logits.argmax(-1) == labels)[labels != -100]
        assert _feed(metric("accuracy"), output, labels, None, 3) == hits.mean()


def test_probability_and_multi_label_targets():
    share = _softmax(RNG.normal(size=(N, C))).astype(np.float32)
    assert _feed(metric("accuracy"), LOGITS, share, None, 50) == (share.argmax(1) == PREDICTED).mean()
    many = (RNG.uniform(size=(N, C)) > 0.5).astype(np.float32)
    assert _feed(metric("accuracy", binary=True), LOGITS, many, None, 50) == ((LOGITS > 0) == many).mean()
    wanted = sk.f1_score(many.ravel(), LOGITS.ravel() > 0)
    assert _feed(metric("f1", binary=True), LOGITS, many, None, 50) == pytest.approx(wanted)


def test_outputs_that_are_probabilities():
    for name, labels in (("perplexity", LABELS), ("top3", LABELS), ("f1", LABELS)):
        straight = _feed(metric(name), LOGITS, labels, WEIGHTS, 50)
        assert _feed(metric(name, probabilities=True), _softmax(LOGITS), labels, WEIGHTS, 50) == pytest.approx(straight)
    sigmoid = 1 / (1 + np.exp(-LOGIT))
    for name in ("accuracy", "recall", "perplexity"):
        straight = _feed(metric(name), LOGIT, BINARY, None, 50)
        assert _feed(metric(name, probabilities=True), sigmoid, BINARY, None, 50) == pytest.approx(straight, rel=1e-6)


def test_nothing_to_measure_is_nan():
    labels = np.full(N, -100)
    for name in ("accuracy", "f1", "perplexity"):
        assert math.isnan(_feed(metric(name), LOGITS, labels, None, 50))
    for name in ("mse", "r2"):
        assert math.isnan(metric(name).value())


def test_nan_logits_are_no_hit():
    output = np.full((4, C), np.nan, np.float32)
    for k in (1, 2):
        assert _feed(TopK(k), output, np.zeros(4, np.int64), None, 4) == 0


def test_functions_and_names():
    measure = metric(lambda output, labels: float(np.abs(output - labels).max()))
    assert isinstance(measure, Function)
    assert _feed(measure, GUESS, TARGET, None, N) == np.abs(GUESS - TARGET).max()
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        metric("acuracy")


def test_labels_that_do_not_fit():
    with pytest.raises(DataError, match=r"\[0, 7\].*7 classes"):
        metric("accuracy").update(LOGITS[:2], np.array([0, 7]))
    with pytest.raises(DataError, match="do not belong"):
        metric("mse").update(GUESS, TARGET[:, 0])
    with pytest.raises(DataError, match="do not belong"):
        metric("accuracy").update(LOGITS, LABELS[:5])


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_the_class_axis_is_that_of_the_loss(axis: int) -> None:
    """As many classes as positions: the shapes tell nothing."""
    rng = np.random.default_rng(0)
    output, labels = rng.normal(size=(6, 4, 4)), rng.integers(0, 4, (6, 4))
    measured = metric("accuracy", class_axis=axis)
    measured.update(output, labels)
    assert measured.value() == (output.argmax(axis) == labels).mean()


@pytest.mark.parametrize(("shape", "axis"), [((8, 1, 10), 2), ((8, 1, 10), -1), ((8, 10, 1), 1), ((8, 3, 10), 2)])
def test_labels_that_are_probabilities_have_the_class_axis_of_the_loss(shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    output, labels = rng.normal(size=shape), rng.uniform(size=shape)
    measured = metric("accuracy", class_axis=axis)
    measured.update(output, labels)
    assert measured.value() == (output.argmax(axis) == labels.argmax(axis)).mean()
