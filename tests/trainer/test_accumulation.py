"""k micro-batches are the big batch, whatever the loss, the weights, the labels and the masks."""

import numpy as np
import onnx
import pytest

from onnxamp import training
from onnxamp.errors import DataError
from onnxamp.trainer.trainer import Trainer

ROWS, FEATURES, CLASSES = 23, 5, 4
HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def _model(shape: str, body: str, outputs: int) -> onnx.ModelProto:
    """x → hidden layer → y, with weights drawn once."""
    rng = np.random.default_rng(4)
    proto = onnx.parser.parse_model(f"{HEAD}net (float[n,{FEATURES}] x) => (float[{shape}] y) {{\n{body}\n}}")
    weights = {"w1": (FEATURES, 16), "b1": (16,), "w2": (16, outputs), "b2": (outputs,)}
    for name, size in weights.items():
        value = rng.standard_normal(size).astype(np.float32) * 0.5
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for name, value in {"half": np.array(0.5, np.float32), "yes": np.array(True), "s": np.array([-1, 2, 3])}.items():
        if name in body:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


PLAIN = "p = MatMul(x, w1)\nh = Add(p, b1)\nt = Tanh(h)\nq = MatMul(t, w2)\ny = Add(q, b2)"
DROPOUT = "p = MatMul(x, w1)\nh = Add(p, b1)\nt = Tanh(h)\nd = Dropout(t, half, yes)\nq = MatMul(d, w2)\ny = Add(q, b2)"
TOKENS = "p = MatMul(x, w1)\nh = Add(p, b1)\nt = Tanh(h)\nq = MatMul(t, w2)\nr = Add(q, b2)\ny = Reshape(r, s)"


def _indices(rng):
    labels = rng.integers(0, CLASSES, ROWS)
    labels[[2, 3, 11]] = -100
    return labels


CASES = {
    "cross_entropy, ignored labels": (PLAIN, training.CrossEntropy(), _indices),
    "cross_entropy, class weights": (PLAIN, training.CrossEntropy(weight=(1.0, 0.0, 3.0, 0.5)), _indices),
    "cross_entropy, smoothing": (PLAIN, training.CrossEntropy(label_smoothing=0.2), _indices),
    "cross_entropy, probabilities": (
        PLAIN,
        training.CrossEntropy(target="probabilities"),
        lambda rng: rng.dirichlet(np.ones(CLASSES), ROWS).astype(np.float32),
    ),
    "cross_entropy of tokens": (
        TOKENS,
        training.CrossEntropy(axis=2),
        lambda rng: np.where(rng.random((ROWS, 2)) < 0.3, -100, rng.integers(0, 3, (ROWS, 2))),
    ),
    "binary_cross_entropy_with_logits": (
        PLAIN,
        training.BinaryCrossEntropyWithLogits(pos_weight=2.0),
        lambda rng: rng.integers(0, 2, (ROWS, CLASSES)).astype(np.float32),
    ),
    "mse": (PLAIN, training.MSE(), lambda rng: rng.standard_normal((ROWS, CLASSES), np.float32)),
    "l1": (PLAIN, training.L1(), lambda rng: rng.standard_normal((ROWS, CLASSES), np.float32)),
    "huber": (PLAIN, training.Huber(delta=0.7), lambda rng: rng.standard_normal((ROWS, CLASSES), np.float32)),
    "dropout": (DROPOUT, training.CrossEntropy(), _indices),
}


def _run(bundle, batch, sizes, accumulate):
    """Two windows over the rows, cut into `sizes`; the gradients of the second and the parameters after it."""
    trainer = Trainer(bundle, "cpu", accumulate, threads=1)
    for _ in range(2):
        start, result = 0, None
        for size in sizes:
            result = trainer.micro_step({name: value[start : start + size] for name, value in batch.items()})
            start += size
        assert start == ROWS
        result = trainer.flush() or result
    assert result is not None
    assert result.applied
    assert result.report is not None
    names = list(trainer.parameters())
    # What lies in the arena is scaled by a power of two that the first micro-batch chose.
    divisor = trainer._arenas.tensor("scalars/seed_divisor") / result.report["weight_sum"]
    gradients = {name: trainer._arenas.tensor(f"gradient/{name}") * divisor for name in names}
    return trainer.parameters(), gradients, result.report


def _close(left, right, tolerance):
    for name, value in left.items():
        error = np.linalg.norm(value - right[name]) / np.linalg.norm(value)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize(("body", "loss", "labels"), CASES.values(), ids=CASES)
def test_micro_batches_are_the_big_batch(body, loss, labels, weighted):
    rng = np.random.default_rng(7)
    batch = {"x": rng.standard_normal((ROWS, FEATURES), np.float32), "labels": labels(rng)}
    if weighted:
        batch["weights"] = rng.uniform(0, 2, ROWS).astype(np.float32)
        batch["weights"][5:9] = 0
    shape, outputs = ("n,2,3", 6) if body is TOKENS else (f"n,{CLASSES}", CLASSES)
    model = _model(shape, body, outputs)
    for level, tolerance in (("O0", 2e-6), ("O2", 2e-2)):
        scale = training.FixedLossScale(256.0)  # no window may be skipped here
        bundle = training.build(model, loss=loss, optimizer=training.SGD(lr=0.1), level=level, loss_scale=scale)
        big = _run(bundle, batch, [ROWS], 1)
        for sizes in ([8, 8, 7], [10, 10, 3]):
            small = _run(bundle, batch, sizes, 4)  # a short window: flush ends it
            _close(big[1], small[1], tolerance)
            _close(big[0], small[0], tolerance)
            assert small[2]["loss"] == pytest.approx(big[2]["loss"], rel=tolerance)
            assert small[2]["weight_sum"] == pytest.approx(big[2]["weight_sum"], rel=1e-6)
            assert small[2]["rows"] == big[2]["rows"] == ROWS


def test_dropout_masks_change_with_the_step_and_the_seed():
    """The masks above are not simply all ones or the same in every window."""
    rng = np.random.default_rng(7)
    batch = {"x": rng.standard_normal((ROWS, FEATURES), np.float32), "labels": np.abs(_indices(rng)) % CLASSES}
    model = _model(f"n,{CLASSES}", DROPOUT, CLASSES)
    losses = []
    for seed in (0, 0, 1):
        bundle = training.build(model, loss="cross_entropy", optimizer=training.SGD(lr=1e-12), level="O0", seed=seed)
        trainer = Trainer(bundle, "cpu", threads=1)
        losses.append([trainer.micro_step(batch).loss for _ in range(5)])
    assert losses[0] == losses[1]
    assert len({*losses[0], *losses[2]}) == 10


def test_a_window_of_one_micro_batch_has_the_bits_of_the_accumulating_graph():
    rng = np.random.default_rng(7)
    batch = {"x": rng.standard_normal((ROWS, FEATURES), np.float32), "labels": _indices(rng)}
    model = _model(f"n,{CLASSES}", DROPOUT, CLASSES)
    bundle = training.build(model, loss="cross_entropy", optimizer=training.Adam(lr=0.01), level="O2")
    alone, flushed = Trainer(bundle, "cpu", 1, threads=1), Trainer(bundle, "cpu", 2, threads=1)
    assert "amp.first" not in alone._programs.grad.program(True).names
    for window in range(6):
        if window == 4:  # the other graph takes over
            alone.accumulate = 3
        first, second = alone.micro_step(batch), flushed.micro_step(batch)
        first = first if window < 4 else alone.flush()
        second = flushed.flush()
        assert first.report == second.report
        for tensor in alone.manifest.tensors:
            np.testing.assert_array_equal(alone._arenas.tensor(tensor.key), flushed._arenas.tensor(tensor.key))
    assert alone.step == flushed.step >= 5


def test_an_input_that_only_another_output_needs_is_part_of_the_batch():
    model = _model(f"n,{CLASSES}", PLAIN + "\nz = Mul(y, side)", CLASSES)
    model.graph.input.append(onnx.helper.make_tensor_value_info("side", 1, ["n", 1]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["n", CLASSES]))
    bundle = training.build(model, loss="cross_entropy", optimizer="sgd", level="O0", output="y")
    trainer = Trainer(bundle, "cpu", threads=1)
    assert [field.name for field in trainer.fields] == ["x", "labels", "weights", "side"]
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((3, FEATURES), np.float32),
        "side": np.full((3, 1), 2, np.float32),
        "labels": np.array([0, 1, 2]),
    }
    assert trainer.micro_step(batch).applied
    outputs = trainer.predict(batch)
    np.testing.assert_allclose(outputs["z"], 2 * outputs["y"])
    assert trainer.evaluate(batch)["loss"] > 0
    with pytest.raises(DataError, match="lacks 'side'"):
        trainer.micro_step({"x": batch["x"], "labels": batch["labels"]})
