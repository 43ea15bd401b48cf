"""Losses that are graphs, and sums of losses: exact under accumulation. Oracle: PyTorch in float64."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import (
    SGD,
    Bundle,
    CosineEmbedding,
    CrossEntropy,
    LossModel,
    ModelOutput,
    Part,
    SmoothL1,
    Sum,
    build,
    choices,
)

ROWS = 9
HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.box, self.kind = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.box(h), torch.softmax(self.kind(h), -1)

    def logits(self, x):
        return self.kind(torch.tanh(self.body(x)))


@pytest.fixture
def two_heads(export):
    """Outputs `boxes` and `kinds`, the second after a Softmax."""
    model = export(_TwoHeads(), torch.randn(2, 6))
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            node.output[index] = {model.graph.output[0].name: "boxes", model.graph.output[1].name: "kinds"}.get(
                name, name
            )
    model.graph.output[0].name, model.graph.output[1].name = "boxes", "kinds"
    return model


def _batch():
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, 3, ROWS)
    kinds[[2, 5]] = -100
    return {
        "x0": rng.normal(size=(ROWS, 6)).astype(np.float32),
        "labels_boxes": rng.normal(size=(ROWS, 4)).astype(np.float32),
        "labels_kinds": kinds,
        "weights": (1 + np.arange(ROWS) % 3).astype(np.float32),
    }


PARTS = (Part(SmoothL1(beta=0.5), "boxes", 2.0), Part(CrossEntropy(), "kinds", 0.25))


def _parts(batch, *sizes):
    start = 0
    for size in sizes:
        yield {key: value[start : start + size] for key, value in batch.items()}
        start += size
    assert start == ROWS


def _gradients(driver):
    """The mean's gradients, in FP64."""
    factor = float(driver.view("scalars/seed_divisor")) / float(driver.view("window/window")[0])
    return {t.name: driver.view(t.key).astype(np.float64) * factor for t in driver.manifest.tensors_in("gradient")}


def test_a_sum_of_losses_equals_torch(two_heads, drive):
    """Means over all labels, ignored ones as 0, each with its factor; the Softmax is looked through; one step of SGD."""
    bundle = build(two_heads, loss=PARTS, optimizer=SGD(lr=0.0), level="O0")
    assert [labels.name for labels in bundle.manifest.labels] == ["labels_boxes", "labels_kinds"]
    assert any("reads" in note for note in bundle.manifest.notes)
    driver, batch = drive(bundle, accumulate=2), _batch()
    driver.step(next(_parts(batch, 4, 5)))
    report = driver.step(list(_parts(batch, 4, 5))[1])
    net = _TwoHeads().double()
    x, w = torch.tensor(batch["x0"]).double(), torch.tensor(batch["weights"]).double()
    boxes = F.smooth_l1_loss(net(x)[0], torch.tensor(batch["labels_boxes"]).double(), beta=0.5, reduction="none").mean(
        1
    )
    kinds = F.cross_entropy(net.logits(x), torch.tensor(batch["labels_kinds"]), reduction="none")
    loss = ((2 * boxes + 0.25 * kinds) * w).sum() / w.sum()
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)
    found = _gradients(driver)
    assert len(found) == 6
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad, rtol=2e-5, atol=1e-7, err_msg=name)


def test_without_ignored_labels_it_is_the_sum_of_the_means(two_heads, drive):
    driver, batch = drive(build(two_heads, loss=PARTS, optimizer="sgd", level="O0")), _batch()
    batch["labels_kinds"] = np.abs(batch["labels_kinds"]) % 3
    del batch["weights"]
    net = _TwoHeads()
    x = torch.tensor(batch["x0"])
    loss = 2 * F.smooth_l1_loss(net(x)[0], torch.tensor(batch["labels_boxes"]), beta=0.5)
    loss += 0.25 * F.cross_entropy(net.logits(x), torch.tensor(batch["labels_kinds"]))
    assert driver.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_micro_batches_of_a_sum_are_the_big_batch(two_heads, level):
    bundle = build(two_heads, loss=PARTS, optimizer=SGD(lr=0.1), level=level, loss_scale=64)
    batch = _batch()
    big, small = Trainer(bundle, "cpu", 1, threads=1), Trainer(bundle, "cpu", 4, threads=1)
    for _ in range(3):
        expected = big.micro_step(batch)
        for part in _parts(batch, 4, 1, 4):
            small.micro_step(part)
        assert small.flush().report["loss"] == pytest.approx(
            expected.report["loss"], rel=1e-6 if level == "O0" else 1e-2
        )
    for name, value in big.parameters().items():
        np.testing.assert_allclose(small.parameters()[name], value, atol=2e-7 if level == "O0" else 2e-3)
    assert big.evaluate(batch)["loss"] == pytest.approx(big.evaluate(batch, weights="master")["loss"], rel=2e-3)
    assert set(big.predict({"x0": batch["x0"]})) == {"boxes", "kinds"}


def test_two_losses_on_one_output_share_labels(two_heads, drive):
    parts = [Part(CosineEmbedding(), "boxes", labels="y"), Part(SmoothL1(), "boxes", 3.0, labels="y")]
    bundle = build(two_heads, loss=parts, optimizer="sgd", level="O0")
    assert [labels.name for labels in bundle.manifest.labels] == ["y"]
    batch = _batch()
    x, y = torch.tensor(batch["x0"]), torch.tensor(batch["labels_boxes"])
    boxes = _TwoHeads()(x)[0]
    loss = F.cosine_embedding_loss(boxes, y, torch.ones(ROWS)) + 3 * F.smooth_l1_loss(boxes, y)
    report = drive(bundle).step({"x0": batch["x0"], "y": batch["labels_boxes"]})
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)


def _loss_model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    return model


# Σ over rows of w·(s·(y − target)²) / Σ w, with a scale s of its own.
SUMS = """judge (float[rows, 4] boxes, float[rows, 4] target, float[rows] importance) => (float loss_sum, float weight_sum) {
    d = Sub(boxes, target)
    e = Mul(d, d)
    scaled = Mul(e, s)
    each = ReduceMean<axes = [1], keepdims = 0>(scaled)
    weighted = Mul(each, importance)
    loss_sum = ReduceSum<keepdims = 0>(weighted)
    weight_sum = ReduceSum<keepdims = 0>(importance)
}"""
SCALE = np.float32([1, 2, 0.5, 4])


def _judged(batch, rows=slice(None)):
    return {
        "x0": batch["x0"][rows],
        "target": batch["labels_boxes"][rows],
        "importance": batch["weights"][rows],
    }


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_loss_model_is_joined_by_names(two_heads, tmp_path, level):
    """Exact sums under any cut, its parameters frozen, FP32 at every level, and part of the bundle."""
    judge = _loss_model(SUMS, s=SCALE)
    bundle = build(two_heads, loss=LossModel(judge), optimizer=SGD(lr=0.1), level=level, loss_scale=64)
    assert {
        port.name: port.kind for port in bundle.manifest.graphs["grad"].inputs if port.name in ("x0", "target")
    } == {
        "x0": "data",
        "target": "labels",
    }
    assert bundle.manifest.frozen["loss/s"] == "belongs to the loss"
    for node in bundle.graphs["grad"].graph:
        if (node.name or "").startswith("loss/"):
            assert node.metadata_props.get("onnxamp.precision", "fp32") == "fp32"
    again = Bundle.load(bundle.save(tmp_path / "b").path)
    assert (tmp_path / "b" / "loss.onnx").is_file()
    batch = _batch()
    big, small = Trainer(again, "cpu", 1, threads=1), Trainer(bundle, "cpu", 3, threads=1)
    net = _TwoHeads()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    x, w = torch.tensor(batch["x0"]), torch.tensor(batch["weights"])
    tolerance = 1e-5 if level == "O0" else 1e-2
    for _ in range(3):
        sgd.zero_grad()
        square = (net(x)[0] - torch.tensor(batch["labels_boxes"])) ** 2 * torch.tensor(SCALE)
        loss = (square.mean(1) * w).sum() / w.sum()
        loss.backward()
        sgd.step()
        result = big.micro_step(_judged(batch))
        for rows in (slice(0, 4), slice(4, 5), slice(5, 9)):
            other = small.micro_step(_judged(batch, rows))
        assert result.report["loss"] == pytest.approx(loss.item(), rel=tolerance)
        assert other.report["loss"] == pytest.approx(loss.item(), rel=tolerance)
    for name in ("body.weight", "box.weight"):
        np.testing.assert_allclose(big.parameters()[name], net.get_parameter(name).detach(), atol=tolerance)
        np.testing.assert_allclose(small.parameters()[name], big.parameters()[name], atol=tolerance)
    exact = big.evaluate(_judged(batch), weights="master")["loss"]
    assert exact == pytest.approx(big.evaluate(_judged(batch))["loss"], rel=tolerance)
    big.export(tmp_path / "out.onnx")
    assert not [tensor.name for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer if "loss" in tensor.name]


def test_parameters_of_a_loss_model_train_on_request(two_heads, tmp_path):
    judge = _loss_model(SUMS, s=SCALE)
    bundle = build(two_heads, loss=LossModel(judge), optimizer=SGD(lr=0.1), level="O0", trainable="loss/s")
    trainer = Trainer(bundle, "cpu", threads=1)
    batch = _judged(_batch())
    trainer.micro_step(batch)
    assert not np.array_equal(trainer.parameters()["loss/s"], SCALE)
    trainer.export(tmp_path / "out.onnx")
    assert trainer.evaluate(batch, weights="master")["loss"] == pytest.approx(trainer.evaluate(batch)["loss"], rel=1e-6)


def test_a_loss_model_with_one_scalar_is_the_mean_of_its_rows(two_heads, drive):
    """It may read inputs and several outputs of the model."""
    text = """judge (float[n, 6] x0, float[n, 3] kinds, float[n, 4] boxes) => (float loss) {
        a = ReduceMean<keepdims = 0>(x0)
        b = ReduceMax<axes = [1], keepdims = 0>(kinds)
        c = ReduceMean<keepdims = 0>(b)
        d = Mul(boxes, boxes)
        e = ReduceMean<keepdims = 0>(d)
        f = Add(a, c)
        loss = Sub(e, f)
    }"""
    bundle = build(two_heads, loss=LossModel(_loss_model(text)), optimizer="sgd", level="O0")
    assert bundle.manifest.labels == ()
    driver, batch = drive(bundle, accumulate=3), _batch()
    for part in _parts({"x0": batch["x0"]}, 2, 3, 4):
        report = driver.step(part)
    net = _TwoHeads().double()
    x = torch.tensor(batch["x0"]).double()
    boxes, kinds = net(x)
    loss = (boxes**2).mean() - x.mean() - kinds.max(1)[0].mean()
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in _gradients(driver).items():
        np.testing.assert_allclose(gradient, net.get_parameter(name).grad, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dropout", [False, True])
def test_micro_batches_of_a_scalar_output_are_the_big_batch(drive, dropout):
    """The mean of rows of any cut, with Dropout too."""
    rng = np.random.default_rng(0)
    drop = "t = Dropout(h, half)" if dropout else "t = Tanh(h)"
    text = f"""g (float[n, 6] x0, float[n, 2] target) => (float loss) {{
        h = MatMul(x0, w1)
        {drop}
        y = MatMul(t, w2)
        d = Sub(y, target)
        e = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(e)
    }}"""
    weights = {"w1": rng.normal(size=(6, 5)), "w2": rng.normal(size=(5, 2)), "half": np.array(0.5)}
    model = _loss_model(text, **{name: value.astype(np.float32) for name, value in weights.items()})
    bundle = build(model, loss=ModelOutput(), optimizer=SGD(lr=0.05), level="O0")
    assert choices.to_json(ModelOutput("loss")) == {"name": "model_output", "output": "loss"}
    batch = {
        "x0": rng.normal(size=(ROWS, 6)).astype(np.float32),
        "target": rng.normal(size=(ROWS, 2)).astype(np.float32),
    }
    big, small = drive(bundle), drive(bundle, accumulate=3)
    for driver in (big, small):
        driver.view("scalars/seed_divisor")[...] = 8
    for _ in range(3):
        report = big.step(batch)
        *_, other = [small.step(part) for part in _parts(batch, 4, 1, 4)]
        assert other["loss"] == pytest.approx(report["loss"], rel=1e-6)
        assert (other["weight_sum"], other["rows"]) == (ROWS, ROWS)
    for name in ("master/w1", "master/w2"):
        np.testing.assert_allclose(small.view(name), big.view(name), rtol=1e-6, atol=1e-7)


def test_the_options_build_the_same_sum(two_heads):
    first = build(two_heads, loss=PARTS, optimizer="sgd", level="O0")
    options = json.loads(first.manifest.to_json())["options"]
    assert choices.loss(options["loss"]) == Sum(PARTS)
    assert build(two_heads, **options).manifest == first.manifest


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "j (float[n, 4] box, float[n] w) => (float l) { a = Mul(box, box) l = ReduceMean<keepdims=0>(a) }",
            "mean 'boxes'",
        ),
        (
            "j (float16[n, 4] boxes) => (float l) { a = Cast<to=1>(boxes) l = ReduceMean<keepdims=0>(a) }",
            "types differ",
        ),
        ("j (float[n, 5] boxes) => (float l) { l = ReduceMean<keepdims=0>(boxes) }", "sizes differ"),
        ("j (float[n] boxes) => (float l) { l = ReduceMean<keepdims=0>(boxes) }", "numbers of dimensions"),
        ("j (float[n, 4] boxes) => (float[n, 4] l) { l = Mul(boxes, boxes) }", "not a float32 scalar"),
        (
            "j (float[n, 4] boxes) => (float a, float b) { a = ReduceMean<keepdims=0>(boxes) b = Neg(a) }",
            "one scalar, or",
        ),
    ],
)
def test_loss_models_that_do_not_fit(two_heads, text, sentence):
    with pytest.raises(UsageError, match=sentence):
        build(two_heads, loss=LossModel(_loss_model(text)), optimizer="sgd", level="O0")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ([], "no loss"),
        ([{"loss": "mse"}], "loss, output, factor, labels"),
        ([{"loss": "model_output", "output": "boxes"}], "cannot be part"),
        ([Part(SmoothL1(), "box")], "no output 'box'"),
        ([{"loss": "mse", "output": "boxes", "factor": float("nan")}], "must be finite"),
        ([Part(SmoothL1(), "boxes", labels="y"), Part(CrossEntropy(), "kinds", labels="y")], "different labels"),
    ],
)
def test_sums_that_make_no_sense(two_heads, loss, sentence):
    with pytest.raises(UsageError, match=sentence):
        build(two_heads, loss=loss, optimizer="sgd", level="O0")


def test_an_opset_in_which_the_loss_means_something_else(two_heads):
    judge = _loss_model("j (float[n, 4] boxes) => (float l) { l = ReduceMean<keepdims=0>(boxes) }")
    judge.opset_import[0].version = 18
    with pytest.raises(UsageError, match="opset 18, the model 17, and ReduceMean"):
        build(two_heads, loss=LossModel(judge), optimizer="sgd", level="O0")


def test_an_old_opset_of_the_loss_is_not_said_of_the_model(two_heads, tmp_path):
    judge = _loss_model("j (float[n, 4] boxes) => (float l) { l = ReduceMean<keepdims=0>(boxes) }")
    judge.opset_import[0].version = 11
    with pytest.raises(UnsupportedError, match="and the loss model has 11"):
        build(two_heads, loss=LossModel(judge), optimizer="sgd", level="O0")
    onnx.save(judge, tmp_path / "judge.onnx")
    with pytest.raises(UnsupportedError, match=r"and the loss model .*judge\.onnx has 11"):
        build(two_heads, loss=LossModel(tmp_path / "judge.onnx"), optimizer="sgd", level="O0")
