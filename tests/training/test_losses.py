"""Losses and their gradients against torch.nn.functional and its autograd."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxamp.errors import UsageError
from onnxamp.model.types import infer
from onnxamp.training.forward import class_axis, prepare
from onnxamp.training.fragment import FLOAT, INT64
from onnxamp.training.losses import (
    COMPARING,
    L1,
    MSE,
    NLL,
    BinaryCrossEntropyWithLogits,
    CosineEmbedding,
    CrossEntropy,
    Huber,
    KLDiv,
    SmoothL1,
)

WEIGHTS = (0.5, 2.0, 0.0, 1.5)


def _logits(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32) * 3


def _indices(*shape, ignored=True, classes=4):
    labels = np.random.default_rng(1).integers(0, classes, shape)
    if ignored:
        labels.reshape(-1)[::3] = -100
    return labels


def _probabilities(*shape, axis=1):
    raw = np.random.default_rng(2).random(shape).astype(np.float32)
    return raw / raw.sum(axis, keepdims=True)


def _logs(*shape, axis=1):
    return np.log(_probabilities(*shape, axis=axis) + 1e-3)


def _one_hot(rows, classes):
    return np.eye(classes, dtype=np.float32)[_indices(rows, ignored=False, classes=classes)]


CASES = {
    "indices": (CrossEntropy(), _logits(8, 4), _indices(8, ignored=False)),
    "ignored": (CrossEntropy(), _logits(8, 4), _indices(8)),
    "other ignore_index": (CrossEntropy(ignore_index=2), _logits(8, 4), _indices(8, ignored=False)),
    "smoothing": (CrossEntropy(label_smoothing=0.1), _logits(8, 4), _indices(8)),
    "all smoothing": (CrossEntropy(label_smoothing=1.0), _logits(8, 4), _indices(8)),
    "class weights": (CrossEntropy(weight=WEIGHTS), _logits(8, 4), _indices(8)),
    "class weights and smoothing": (CrossEntropy(weight=WEIGHTS, label_smoothing=0.2), _logits(8, 4), _indices(8)),
    "tokens": (CrossEntropy(label_smoothing=0.1, axis=2), _logits(3, 5, 4), _indices(3, 5)),
    "pixels": (CrossEntropy(weight=WEIGHTS, label_smoothing=0.1), _logits(2, 4, 3, 5), _indices(2, 3, 5)),
    "axis of three": (CrossEntropy(axis=1), _logits(2, 4, 5), _indices(2, 5)),
    "last axis of four": (CrossEntropy(axis=-1), _logits(2, 3, 5, 4), _indices(2, 3, 5)),
    "probabilities": (CrossEntropy(target="probabilities"), _logits(8, 4), _probabilities(8, 4)),
    "probabilities, smoothing, weights": (
        CrossEntropy(target="probabilities", weight=WEIGHTS, label_smoothing=0.3),
        _logits(8, 4),
        _probabilities(8, 4),
    ),
    "probabilities of pixels": (
        CrossEntropy(target="probabilities", weight=WEIGHTS),
        _logits(2, 4, 3, 5),
        _probabilities(2, 4, 3, 5),
    ),
    "large logits": (CrossEntropy(), _logits(8, 4) * 1e3, _indices(8)),
    "binary": (BinaryCrossEntropyWithLogits(), _logits(8, 3), _probabilities(8, 3)),
    "binary, large": (BinaryCrossEntropyWithLogits(), _logits(8, 3) * 50, np.round(_probabilities(8, 3))),
    "binary, pos_weight": (BinaryCrossEntropyWithLogits(pos_weight=3.0), _logits(8, 3), _probabilities(8, 3)),
    "binary, pos_weights": (BinaryCrossEntropyWithLogits((0.5, 2.0, 3.0)), _logits(8, 3), _probabilities(8, 3)),
    "binary, vector": (BinaryCrossEntropyWithLogits(), _logits(8), _probabilities(8, 1)[:, 0]),
    "mse": (MSE(), _logits(8, 3), _logits(8, 3) + 1),
    "mse of maps": (MSE(), _logits(4, 2, 3, 3), _logits(4, 2, 3, 3) * 0.5),
    "l1": (L1(), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "huber": (Huber(), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "huber, delta": (Huber(delta=0.3), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "smooth_l1": (SmoothL1(), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "smooth_l1, beta": (SmoothL1(beta=2.5), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "smooth_l1, beta 0": (SmoothL1(beta=0), _logits(8, 3), _logits(8, 3)[::-1].copy()),
    "nll": (NLL(), _logs(8, 4), _indices(8)),
    "nll, weights": (NLL(weight=WEIGHTS, ignore_index=1), _logs(8, 4), _indices(8, ignored=False)),
    "nll of pixels": (NLL(), _logs(2, 4, 3, 5), _indices(2, 3, 5)),
    "nll of tokens": (NLL(axis=-1), _logs(3, 5, 4, axis=2), _indices(3, 5)),
    "kl_div": (KLDiv(), _logs(8, 4), _probabilities(8, 4)),
    "kl_div, batchmean": (KLDiv(reduction="batchmean"), _logs(8, 4), _one_hot(8, 4)),
    "kl_div, logs": (KLDiv(log_target=True), _logs(8, 4), np.log(_probabilities(8, 4))),
    "kl_div of maps": (KLDiv(), _logs(4, 4, 3), _probabilities(4, 4, 3)),
    "cosine": (CosineEmbedding(), _logits(8, 5), _logits(8, 5)[::-1].copy()),
    "cosine of tokens": (CosineEmbedding(), _logits(4, 3, 5), _logits(4, 3, 5)[::-1].copy()),
    "cosine of nothing": (CosineEmbedding(), _logits(8, 5) * (np.arange(8) > 1)[:, None], _logits(8, 5)[::-1].copy()),
}


def _torch(loss, x, y, reduction="mean"):
    """PyTorch's loss, class dimension moved to where PyTorch wants it."""
    if isinstance(loss, CrossEntropy):
        axis = loss.axis if loss.axis is not None else (2 if x.ndim == 3 else 1)
        weight = None if loss.weight is None else torch.tensor(loss.weight, dtype=x.dtype)
        return F.cross_entropy(
            x.movedim(axis, 1),
            y if y.dtype == torch.int64 else y.movedim(axis, 1),
            weight=weight,
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            reduction=reduction,
        )
    if isinstance(loss, NLL):
        weight = None if loss.weight is None else torch.tensor(loss.weight, dtype=x.dtype)
        axis = 1 if loss.axis is None else loss.axis
        return F.nll_loss(x.movedim(axis, 1), y, weight=weight, ignore_index=loss.ignore_index, reduction=reduction)
    if isinstance(loss, KLDiv):
        total = F.kl_div(
            x, y, reduction="sum", log_target=loss.log_target
        )  # of "mean" PyTorch warns that it may change
        return total / (len(x) if loss.reduction == "batchmean" else x.numel())
    if isinstance(loss, CosineEmbedding):
        x, y = (value.reshape(-1, value.shape[-1]) for value in (x, y))
        return F.cosine_embedding_loss(x, y, torch.ones(len(x), dtype=x.dtype))
    if isinstance(loss, SmoothL1):
        return F.smooth_l1_loss(x, y, beta=loss.beta, reduction=reduction)
    if isinstance(loss, BinaryCrossEntropyWithLogits):
        pos = None if loss.pos_weight is None else torch.tensor(loss.pos_weight, dtype=x.dtype)
        return F.binary_cross_entropy_with_logits(x, y, pos_weight=pos, reduction=reduction)
    if isinstance(loss, Huber):
        return F.huber_loss(x, y, delta=loss.delta, reduction=reduction)
    return (F.mse_loss if isinstance(loss, MSE) else F.l1_loss)(x, y, reduction=reduction)


def _run(evaluate, loss, x, y, weights=None, *, free=True, opset=17):
    """Σ loss·w, Σ w and the gradient of the first, for a seed of 1/2."""
    weights = np.ones(len(x), np.float32) if weights is None else weights

    def define(op):
        shape = [f"d{index}" for index in range(x.ndim)] if free else list(x.shape)
        prediction = op.input("x", FLOAT, shape)
        wanted = loss.labels(prediction)
        labels = op.input("y", INT64 if wanted.dtype == "int64" else FLOAT, wanted.shape)
        terms = loss.terms(op, prediction, labels, op.input("w", FLOAT, shape[:1]))
        return [terms.loss_sum, terms.weight_sum, terms.backward(op.input("seed", FLOAT))]

    results = evaluate(define, opset, x=x, y=y, w=weights, seed=np.asarray(0.5, np.float32))
    assert results[0].shape == results[1].shape == ()
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("free", [False, True], ids=["static", "free"])
def test_equals_torch(evaluate, name, free):
    loss, x, y = CASES[name]
    loss_sum, weight_sum, slope = _run(evaluate, loss, x, y, free=free)
    exact = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor(y) if y.dtype == np.int64 else torch.tensor(y, dtype=torch.float64)
    expected = _torch(loss, exact, labels)
    expected.backward()
    np.testing.assert_allclose(loss_sum / weight_sum, expected.item(), rtol=3e-6, atol=1e-7)
    scale = exact.grad.abs().max().item()
    np.testing.assert_allclose(2 * slope / weight_sum, exact.grad.numpy(), rtol=1e-5, atol=2e-6 * scale)


def test_the_table_covers_every_loss():
    assert len(CASES) == 39
    assert {type(loss) for loss, _, _ in CASES.values()} == set(COMPARING.values())


@pytest.mark.parametrize("opset", [13, 15, 18, 21])
def test_opsets(evaluate, opset):
    for name in ("class weights and smoothing", "binary, pos_weights", "huber", "nll, weights", "kl_div", "cosine"):
        loss, x, y = CASES[name]
        assert np.isclose(_run(evaluate, loss, x, y, opset=opset)[0], _run(evaluate, loss, x, y)[0])


@pytest.mark.parametrize("name", CASES)
def test_row_weights(evaluate, name):
    """mean = Σ w·loss/Σ w; weights of integers equal repeated rows."""
    loss, x, y = CASES[name]
    counts = np.arange(len(x)) % 3
    loss_sum, weight_sum, slope = _run(evaluate, loss, x, y, counts.astype(np.float32))
    expected = _run(evaluate, loss, *(np.repeat(value, counts, axis=0) for value in (x, y)))
    np.testing.assert_allclose(loss_sum, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight_sum, expected[1], rtol=1e-6)
    assert not slope[counts == 0].any()


@pytest.mark.parametrize("name", CASES)
def test_sums_add_up(evaluate, name):
    """The sums of two parts are the sums of the whole, so that a window may be cut anywhere."""
    loss, x, y = CASES[name]
    whole = _run(evaluate, loss, x, y)
    parts = [_run(evaluate, loss, x[part], y[part]) for part in (slice(0, 1), slice(1, None))]
    for index in range(2):
        np.testing.assert_allclose(sum(part[index] for part in parts), whole[index], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([part[2] for part in parts]), whole[2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_row_without_weight_leaves_no_trace(evaluate, bad):
    names = ("indices", "probabilities", "binary", "mse", "l1", "huber", "smooth_l1", "nll", "kl_div", "cosine")
    for name in names:
        loss, x, y = CASES[name]
        poisoned = x.copy()
        poisoned[2] = bad
        weights = np.ones(len(x), np.float32)
        weights[2] = 0
        clean = _run(evaluate, loss, x, y, weights)
        for got, expected in zip(_run(evaluate, loss, poisoned, y, weights), clean, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_an_ignored_label_leaves_no_trace(evaluate):
    loss, x, y = CASES["smoothing"]
    poisoned = x.copy()
    poisoned[y == -100] = np.nan
    for got, expected in zip(_run(evaluate, loss, poisoned, y), _run(evaluate, loss, x, y), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_nothing_has_weight(evaluate):
    loss, x, _ = CASES["indices"]
    for value in _run(evaluate, loss, x, np.full(8, -100)):
        assert not value.any()


def test_what_a_loss_expects():
    def value(*shape):
        return ir.Value(name="logits", type=ir.TensorType(FLOAT), shape=ir.Shape(shape))

    labels = CrossEntropy(ignore_index=7, axis=-1).labels(value("batch", "tokens", 50))
    assert (labels.dtype, labels.shape, labels.classes, labels.ignore_index) == ("int64", ("batch", "tokens"), 50, 7)
    assert CrossEntropy().labels(value("batch", 10, "h", "w")).shape == ("batch", "h", "w")
    assert CrossEntropy(target="probabilities").labels(value("batch", 10)).dtype == "float32"
    assert MSE().labels(value("batch", 3)).shape == ("batch", 3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda v: CrossEntropy().labels(v("batch")), "needs at least 2"),
        (lambda v: CrossEntropy(weight=(1.0, 2.0)).labels(v("batch", 3)), "2 class weights and 'logits' has 3"),
        (lambda v: CrossEntropy(axis=0).labels(v("batch", 3)), "axis=0"),
        (lambda v: CrossEntropy().labels(v("batch", 5, 5)), "Dimension 1 or 2"),
        (lambda v: MSE().labels(v()), "needs at least 1"),
        (lambda v: CrossEntropy(label_smoothing=1.5), "between 0 and 1"),
        (lambda v: CrossEntropy(target="onehot"), "indices or probabilities"),
        (lambda v: CrossEntropy(weight=(-1.0,)), "not negative"),
        (lambda v: Huber(delta=0), "positive"),
        (lambda v: SmoothL1(beta=-1), "not be negative"),
        (lambda v: KLDiv(reduction="sum"), "mean or batchmean"),
        (
            lambda v: BinaryCrossEntropyWithLogits((1.0, 2.0)).labels(v("batch", 3)),
            "2 pos_weights and the last dimension",
        ),
        (lambda v: BinaryCrossEntropyWithLogits((1.0, -2.0)), "not negative"),
        (lambda v: BinaryCrossEntropyWithLogits(float("nan")), "finite"),
        (lambda v: NLL().labels(v("batch", 5, 5)), "classes of nll"),
        (lambda v: NLL(weight=(1.0,)).labels(v("batch", 5)), "nll has 1 class weights"),
        (lambda v: CosineEmbedding().labels(v("batch")), "cosine needs at least 2"),
    ],
)
def test_bad_arguments(make, sentence):
    def value(*shape):
        return ir.Value(name="logits", type=ir.TensorType(FLOAT), shape=ir.Shape(shape))

    with pytest.raises(UsageError, match=sentence):
        make(value)


@pytest.mark.parametrize(
    ("inputs", "body", "axis"),
    [
        ("float[n, 5, 4] x", "y = MatMul(x, w)", 2),
        ("float[n, 5, 4] x", "h = MatMul(x, w) a = Add(b, h) y = Transpose<perm = [0, 2, 1]>(a)", 1),
        ("float[n, 4, 5] x", "y = Conv(x, k)", 1),
        ("float[n, 4, 5] x", "h = ConvTranspose(x, k) c = Relu(h) y = Mul(one, c)", 1),
        ("float[n, 5, 4] x", "h = MatMul(x, w) d = Div(h, one) t = Tanh(d) y = Mul(t, one)", 2),
        ("float[n, 4, 5] x", "h = Conv(x, k) s = Neg(h) y = Transpose<perm = [0, 2, 1]>(s)", 2),
        ("float[n, 5, 4] x", "f = Reshape(x, rows) h = Gemm(f, w, b) y = Reshape(h, tokens)", 2),
        ("float[n, 5, 4] x", "f = Reshape(x, rows) h = MatMul(f, w) a = Add(b, h) y = Reshape(a, tokens)", 2),
        ("float[n, 5, 4] x", "h = MatMul(x, w) y = LogSoftmax(h)", 2),
        ("float[n, 4, 5] x", "h = Mul(x, one) y = Softmax<axis = 1>(h)", 1),
        ("float[n, t, 4] x", "y = Mul(x, one)", 2),
        ("float[n, 4, t] x", "y = Mul(x, one)", 1),
        ("float[n, 5, 5] x", "y = Mul(x, one)", None),
        ("float[n, 5, 5] x", "y = Softmax<axis = 0>(x)", None),
    ],
)
def test_class_dimension_of_three_comes_from_the_model(inputs, body, axis):
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[a, b, c] y) {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("w", (4, 5)), ("b", (5,)), ("k", (4, 4, 1)), ("one", ())):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    for name, sizes in (("rows", (-1, 4)), ("tokens", (-1, 5, 5))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(sizes), name))
    source = ir.from_proto(model)
    if axis is None:
        forward = prepare(source, CrossEntropy())
        with pytest.raises(UsageError, match="Dimension 1 or 2"):
            forward.loss.labels(next(v for v in forward.model.graph.outputs if v.name == forward.predictions[0]))
        assert prepare(source, CrossEntropy(axis=1)).loss.axis == 1
        return
    forward = prepare(source, CrossEntropy())
    assert forward.loss.axis == axis
    assert f"Dimension {axis} of" in forward.notes[-1]


@pytest.mark.parametrize(("classes", "found"), [("5", True), ("C", True), ("?", False)])
def test_a_reshaped_projection_has_its_classes_last_where_their_number_is_known(classes, found):
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[N, 8] h, float[8, {classes}] w, int64[3] shape) => (float[A, B, {classes}] y)
        {{ f = MatMul(h, w) y = Reshape(f, shape) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer(model)
    assert (class_axis(model.graph.outputs[0]) is not None) == found
