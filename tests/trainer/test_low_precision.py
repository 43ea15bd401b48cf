"""What 16 bits do to training, seen on the CPU: overflow, recovery, and real accuracy."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from onnxamp import training
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.passes.emulate import emulate
from onnxamp.trainer import device
from onnxamp.trainer.trainer import Trainer

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def _overflowing() -> onnx.ModelProto:
    """A hidden value of about 2000 meets the backward pass: with a loss scale of 2^16 its gradient leaves fp16."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f"{HEAD}net (float[n,4] x) => (float[n,3] y) {{\nh = MatMul(x, w1)\nt = Tanh(h)\nu = Mul(t, big)\ny = MatMul(u, w2)\n}}"
    )
    for name, value in {
        "w1": rng.standard_normal((4, 8)) * 0.5,
        "w2": rng.standard_normal((8, 3)) * 1e-3,
        "big": np.array(100.0),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return proto


def _losses(level: str, steps: int = 120, **options) -> tuple[list[float], list[dict[str, float]]]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((32, 4), np.float32)
    batch = {"x": x, "labels": (x @ rng.standard_normal((4, 3))).argmax(1)}
    bundle = training.build(
        _overflowing(),
        loss="cross_entropy",
        optimizer=training.Adam(lr=2e-3),
        level=level,
        frozen="big",
        loss_scale=options.pop("loss_scale", "auto"),
        lower="*" if level != "O0" else (),
    )
    trainer = Trainer(bundle, "cpu", threads=1)
    results = [trainer.micro_step(batch) for _ in range(steps)]
    return [result.loss for result in results], [dict(result.report or {}) for result in results]


def test_overflow_is_seen_on_the_cpu_and_the_run_recovers():
    wide, _ = _losses("O0")
    scale = training.DynamicLossScale(init_scale=2.0**24, growth_interval=50)
    low, reports = _losses("O2", loss_scale=scale)
    skipped = [report["found_inf"] for report in reports]
    assert skipped[0] == 1
    assert 2 <= sum(skipped) < 30
    first = skipped.index(0)
    assert reports[first]["loss_scale"] == 2.0 ** (24 - first)
    assert reports[-1]["step"] == 120 - sum(skipped)
    assert any(report["next_loss_scale"] > report["loss_scale"] for report in reports)
    assert low[-1] == pytest.approx(wide[-1 - int(sum(skipped))], abs=0.02)


@pytest.mark.parametrize(("name", "kind"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_a_model_that_came_in_16_bits_trains_at_o0(name, kind):
    """The CPU has no bf16 MatMul: what the file computes in 16 bits is rounded explicitly, whatever the level."""
    proto = onnx.parser.parse_model(f"""{HEAD}net (float[n,4] x) => (float[n,3] y) {{
        l = Cast <to = {onnx.TensorProto.DataType.Value(name.upper())}> (x)
        h = MatMul(l, w1)  r = Relu(h)  o = MatMul(r, w2)  y = Cast <to = 1> (o) }}""")
    rng = np.random.default_rng(0)
    weights = [torch.tensor(rng.standard_normal(shape), dtype=kind) for shape in ((4, 8), (8, 3))]
    for initializer, weight in zip(("w1", "w2"), weights, strict=True):
        held = ir.Tensor(weight.float().numpy().astype(ir.DataType[name.upper()].numpy()), name=initializer)
        proto.graph.initializer.append(ir.to_proto(held))
    x, labels = rng.standard_normal((16, 4)).astype(np.float32), rng.integers(0, 3, 16)
    trainer = Trainer(training.build(proto, loss="cross_entropy", optimizer=training.SGD(lr=0.3)), "cpu", threads=1)
    found = [trainer.micro_step({"x": x, "labels": labels}).loss for _ in range(4)]
    masters = [weight.float().requires_grad_() for weight in weights]
    optimizer, expected = torch.optim.SGD(masters, lr=0.3), []
    for _ in range(4):
        first, second = (master.to(kind) for master in masters)
        loss = nn.functional.cross_entropy(
            ((torch.tensor(x).to(kind) @ first).relu() @ second).float(), torch.tensor(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < 0.9 * expected[0]


def test_without_emulation_the_cpu_hides_the_overflow(monkeypatch):
    """The test above depends on the emulated graph: the runtime's own fp16 computes in fp32."""
    monkeypatch.setattr(device, "emulate", lambda model: model)
    scale = training.DynamicLossScale(init_scale=2.0**24, growth_interval=50)
    _, reports = _losses("O2", steps=3, loss_scale=scale)
    assert reports[0]["found_inf"] == 0


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(128, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.out(x.flatten(1))


@pytest.fixture(scope="module")
def digits():
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, labels = (x[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)
    return (x[:1300], labels[:1300]), (x[1300:], labels[1300:])


@pytest.fixture(scope="module")
def net(exporter):
    torch.manual_seed(0)
    return exporter(_Net(), {"x": np.zeros((2, 1, 8, 8), np.float32)})


def test_digits_reach_the_accuracy_of_fp32(net, digits):
    (x, labels), (held_x, held_labels) = digits
    accuracy = {}
    for level, dtype in (("O0", "fp16"), ("O2", "fp16"), ("O2", "bf16")):
        bundle = training.build(
            net, loss="cross_entropy", optimizer=training.AdamW(lr=5e-3), level=level, dtype=dtype, seed=1
        )
        trainer = Trainer(bundle, "cpu", 2, threads=1)
        for _ in range(8):
            for start in range(0, len(x), 50):
                trainer.micro_step({"x": x[start : start + 50], "labels": labels[start : start + 50]})
        scores = trainer.predict({"x": held_x})["y"]
        accuracy[level, dtype] = (scores.argmax(1) == held_labels).mean()
    assert accuracy["O0", "fp16"] > 0.95
    for value in accuracy.values():
        assert abs(value - accuracy["O0", "fp16"]) < 0.01


@pytest.mark.parametrize("in_place", [True, False])
def test_a_mixed_run_with_statistics_and_average_resumes_bit_for_bit(net, digits, tmp_path, in_place):
    (x, labels), _ = digits
    bundle = training.build(
        net, loss="cross_entropy", optimizer=training.SGD(lr=0.1, momentum=0.9), level="O2", ema=0.9,
        loss_scale=training.DynamicLossScale(init_scale=2.0**18),
    )  # fmt: skip
    whole = Trainer(bundle, "cpu", 3, threads=1)
    cut = Trainer(bundle, "cpu", 3, threads=1, in_place=in_place)
    skipped = 0
    for index in range(10):
        batch = {"x": x[10 * index : 10 * index + 10], "labels": labels[10 * index : 10 * index + 10]}
        if index in (2, 4, 7):
            cut.save(tmp_path / "run.safetensors")
            cut = Trainer.load(tmp_path / "run.safetensors", "cpu", threads=1, in_place=in_place)
        first, second = whole.micro_step(batch), cut.micro_step(batch)
        assert first.loss == second.loss
        np.testing.assert_equal(first.report, second.report)  # NaN norms of skipped windows are equal too
        skipped += first.skipped
        for tensor in whole.manifest.tensors:
            left, right = whole._arenas.tensor(tensor.key), cut._arenas.tensor(tensor.key)
            np.testing.assert_array_equal(left, right, err_msg=tensor.key)
    assert 0 < skipped < 3
    probe = {"x": x[:100], "labels": labels[:100]}
    working, average = whole.evaluate(probe), whole.evaluate(probe, weights="ema")
    assert working == cut.evaluate(probe)
    assert average == cut.evaluate(probe, weights="ema")
    assert average["loss"] != working["loss"]


def test_evaluation_at_a_level_is_what_the_exported_model_does(net, digits, tmp_path):
    (x, labels), (held_x, held_labels) = digits
    bundle = training.build(net, loss="cross_entropy", optimizer=training.AdamW(lr=5e-3), level="O2", ema=0.9)
    trainer = Trainer(bundle, "cpu", threads=1)
    for start in range(0, 500, 50):
        trainer.micro_step({"x": x[start : start + 50], "labels": labels[start : start + 50]})
    batch = {"x": held_x, "labels": held_labels}
    losses = {}
    for weights in ("master", "ema"):
        for level, dtype in (("O0", "fp16"), ("O1", "bf16"), ("O2", "fp16")):
            path = tmp_path / f"{weights}.{level}.onnx"
            trainer.export(path, level, dtype, weights=weights)
            exported = ir.load(path)
            session = open_session(exported if level == "O0" else emulate(exported), SessionConfig("cpu", threads=1))
            (logits,) = session.run(None, {"x": held_x})
            expected = nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(held_labels)).item()
            got = trainer.evaluate([batch], level, dtype=dtype, weights=weights)["loss"]
            assert got == pytest.approx(expected, rel=1e-5)
            losses[weights, level] = got
            if (weights, level) == ("master", "O0"):
                (predicted,) = trainer.predict({"x": held_x}, weights="master").values()
                np.testing.assert_allclose(predicted, logits, rtol=1e-5, atol=1e-6)
            assert [value.name for value in exported.graph.inputs] == ["x"]
    assert len(set(losses.values())) == len(losses)
    assert trainer.evaluate(batch, weights="master")["loss"] == losses["master", "O0"]
    assert trainer.evaluate(batch)["loss"] == pytest.approx(losses["master", "O2"], rel=1e-2)
