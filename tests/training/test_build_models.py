"""What build makes of a model: which parameters train, which output the loss reads, opsets, ties, 16-bit exports."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.helper as h
import pytest
import torch
from torch import nn

from onnxamp.errors import UsageError
from onnxamp.training import (
    SGD,
    Group,
    build,
)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Dropout(0.1), nn.Linear(7, 3))


@pytest.fixture
def model(export):
    """An MLP with BatchNorm and Dropout."""
    return export(_net(), torch.randn(2, 5), train=True)


def test_which_parameters_train(model):
    def masters(**options):
        manifest = build(model, loss="cross_entropy", optimizer="sgd", level="O0", **options).manifest
        return {tensor.name for tensor in manifest.tensors_in("master")}, manifest

    everything = {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"}
    assert masters()[0] == everything
    names, manifest = masters(frozen=["0.*"])
    assert names == everything - {"0.weight", "0.bias"}
    assert manifest.frozen["0.weight"] == "frozen by name"
    assert masters(frozen="*", trainable="re:4[.].*")[0] == {"4.weight", "4.bias"}
    names, manifest = masters(groups=[Group("2.*", frozen=True, name="norms")])
    assert names == everything - {"2.weight", "2.bias"}
    assert manifest.frozen["2.weight"] == "frozen by group norms"
    assert not manifest.has_arena("statistics")  # its scale does not train, so it keeps its statistics


def test_an_unsure_parameter_trains_on_request(drive):
    x, y = (h.make_tensor_value_info(name, 1, ["batch", 3]) for name in "xy")
    scale = onnx.numpy_helper.from_array(np.float32([1, 2, 3]), "scale")
    nodes = [h.make_node("Mul", ["x", "scale"], ["y"])]
    model = h.make_model(
        h.make_graph(nodes, "g", [x], [y], [scale]), opset_imports=[h.make_opsetid("", 17)], ir_version=8
    )
    with pytest.raises(UsageError, match="No parameter trains"):
        build(model, loss="mse", optimizer="sgd", level="O0")
    driver = drive(build(model, loss="mse", optimizer=SGD(lr=1.5), level="O0", trainable="scale"))
    driver.step({"x": np.eye(3, dtype=np.float32), "labels": np.zeros((3, 3), np.float32)})
    np.testing.assert_allclose(driver.view("master/scale"), np.float32([1, 2, 3]) * (1 - 1.5 * 2 / 9), rtol=1e-6)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (torch.full((8, 4), 0.5), "1 float tensor is not trained: table (--trainable table trains it;"),
        (
            torch.randn(8, 4),
            "1 float tensor is in a parameter's place, looks learned, and trains: table (--frozen table",
        ),
    ],
)
def test_tensors_that_may_be_parameters_are_told(export, table, said):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rest = nn.Parameter(table), nn.Linear(4, 3)

        def forward(self, x):
            return self.rest(x + self.table[: x.shape[1]]) * 0.7  # a table behind a Slice, and a number

    model = export(Net(), torch.randn(2, 5, 4))
    (note,) = build(model, loss="mse", optimizer="sgd", level="O0").manifest.notes
    assert said in note
    assert not build(model, loss="mse", optimizer="sgd", level="O0", trainable="table").manifest.notes
    assert not build(model, loss="mse", optimizer="sgd", level="O0", frozen="table").manifest.notes


def test_a_learned_number_is_told_by_its_name(export):
    """The exporter without notes leaves the names of attributes, parameter or buffer; numbers in the code have none."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return self.linear(x.clamp(min=1e-6) * 0.125) * self.temperature.exp() / 3.0

    model = export(Net(), torch.randn(2, 4))
    bundle = build(model, loss="mse", optimizer="sgd", level="O0")
    assert [note.partition(" (")[0] for note in bundle.manifest.notes] == ["1 float tensor is not trained: temperature"]
    trained = build(model, loss="mse", optimizer="sgd", level="O0", trainable="temperature")
    assert not trained.manifest.notes
    assert "temperature" in {tensor.name for tensor in trained.manifest.tensors_in("master")}


@pytest.mark.parametrize(
    ("dtype", "between", "opset", "blocked"),
    [("bf16", nn.ReLU, 22, False), ("fp16", nn.ReLU, 17, False), ("bf16", lambda: nn.MaxPool2d(1), 17, True)],
)
def test_the_opset_rises_for_bf16_or_what_blocks_it_is_told(export, dtype, between, opset, blocked):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), between(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    model = export(net, torch.randn(2, 1, 8, 8), opset=17)
    bundle = build(model, loss="mse", optimizer="sgd", dtype=dtype)
    assert bundle.graphs["grad"].opset_imports[""] == opset
    notes = [note for note in bundle.manifest.notes if "heavy nodes stay fp32" in note]
    assert len(notes) == blocked
    assert all("2 of 3 heavy" in note and "MaxPool" in note for note in notes)


def test_a_final_softmax_is_left_out(export, drive):
    net = nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1))
    bundle = build(export(net, torch.randn(2, 5)), loss="cross_entropy", optimizer="sgd", level="O0")
    assert len(bundle.manifest.notes) == 1
    assert "Softmax" in bundle.manifest.notes[0]
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    driver = drive(bundle)
    report = driver.step({"x0": x.numpy(), "labels": y.numpy()})
    assert report["loss"] == pytest.approx(nn.functional.cross_entropy(net[0](x), y).item(), rel=1e-6)
    outputs = drive(bundle).eval({"x0": x.numpy(), "labels": y.numpy()})
    np.testing.assert_allclose(outputs["y"], net(x).detach(), rtol=1e-5)
    sigmoid = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
    note = build(
        export(sigmoid, torch.randn(2, 5)), loss="binary_cross_entropy_with_logits", optimizer="sgd"
    ).manifest.notes
    assert "Sigmoid" in note[0]
    assert not build(export(sigmoid, torch.randn(2, 5)), loss="mse", optimizer="sgd").manifest.notes


def test_a_scalar_output_is_the_loss(export, drive):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 1)

        def forward(self, x, target):
            return ((self.linear(x) - target) ** 2).mean()

    net = Net()
    model = export(net, torch.randn(2, 5), torch.randn(2, 1))
    bundle = build(model, loss="model_output", optimizer=SGD(lr=0.1), level="O0")
    assert bundle.manifest.labels == ()
    x, t = torch.randn(6, 5), torch.randn(6, 1)
    whole, parts = drive(bundle), drive(bundle, accumulate=2)
    report = whole.step({"x0": x.numpy(), "x1": t.numpy()})
    for part in (slice(0, 4), slice(4, 6)):
        parts.step({"x0": x[part].numpy(), "x1": t[part].numpy()})
    loss = net(x, t)
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)
    expected = net.linear.weight.detach() - 0.1 * net.linear.weight.grad
    for driver in (whole, parts):
        np.testing.assert_allclose(driver.view("master/linear.weight"), expected, rtol=1e-5)


def test_several_outputs(export):
    model = export(_net(), torch.randn(2, 5))
    model.graph.node.append(h.make_node("ArgMax", ["y"], ["label"], axis=1))
    model.graph.output.append(h.make_tensor_value_info("label", onnx.TensorProto.INT64, None))
    with pytest.raises(UsageError, match="2 outputs"):
        build(model, loss="cross_entropy", optimizer="sgd")
    bundle = build(model, loss="cross_entropy", optimizer="sgd", output="y")
    assert [port.name for port in bundle.manifest.graphs["eval"].outputs] == [
        "y", "label", "amp.loss_sum", "amp.weight_sum",
    ]  # fmt: skip


def test_tied_weights_are_one_parameter(export, drive):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(torch.tanh(self.linear(x)))

    net = Net()
    bundle = build(export(net, torch.randn(2, 4)), loss="mse", optimizer=SGD(lr=1.0))
    driver = drive(bundle)
    x = torch.randn(3, 4)
    driver.step({"x0": x.numpy(), "labels": np.zeros((3, 4), np.float32)})
    before = net.linear.weight.detach().clone()
    (net(x) ** 2).mean().backward()
    np.testing.assert_allclose(
        driver.view("master/linear.weight"), before - net.linear.weight.grad, rtol=2e-2, atol=2e-3
    )


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_model_in_16_bits_gets_masters(export, drive, level):
    """An FP16 export trains: FP32 masters, low copies, FP32 loss."""
    net = nn.Sequential(nn.Linear(5, 3)).half()
    model = export(net, torch.randn(2, 5).half())
    driver = drive(build(model, loss="cross_entropy", optimizer=SGD(lr=0.1), level=level))
    assert driver.state()["master/0.weight"].dtype == np.float32
    assert {tensor.name for tensor in driver.manifest.tensors_in("low")} == {"0.weight", "0.bias"}
    x, y = torch.randn(8, 5).half(), torch.randint(0, 3, (8,))
    losses = [driver.step({"x0": x.numpy(), "labels": y.numpy()})["loss"] for _ in range(3)]
    expected = nn.functional.cross_entropy(net.float()(x.float()), y).item()
    assert losses[0] == pytest.approx(expected, rel=5e-3)
    assert losses[2] < losses[0]


def test_o3_keeps_only_what_the_low_type_holds(model, drive):
    driver = drive(build(model, loss="cross_entropy", optimizer=SGD(lr=0.01), level="O3", dtype="bf16"))
    rng = np.random.default_rng(0)
    batch = {"x0": rng.normal(size=(8, 5)).astype(np.float32), "labels": rng.integers(0, 3, 8)}
    for _ in range(3):
        assert driver.step(batch)["ok"] == 1
    for tensor in driver.manifest.tensors_in("low"):
        master = driver.view(f"master/{tensor.name}")
        np.testing.assert_array_equal(master, driver.view(tensor.key).astype(np.float32))


def test_names_that_training_uses_too(export, drive):
    """An inner value may be called like an input of the loss, an input may not."""
    model = export(nn.Linear(5, 3), torch.randn(2, 5))
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    for tensor in renamed.graph.initializer:
        tensor.name = {"weight": "weights", "bias": "labels"}[tensor.name]
    for node in renamed.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = {"weight": "weights", "bias": "labels"}.get(name, name)
    driver = drive(build(renamed, loss="mse", optimizer="sgd", level="O0"))
    report = driver.step({"x0": np.ones((2, 5), np.float32), "labels": np.ones((2, 3), np.float32)})
    assert report["ok"] == 1
    for node in model.graph.node:
        node.input[:] = ["labels" if name == "x0" else name for name in node.input]
    model.graph.input[0].name = "labels"
    with pytest.raises(UsageError, match="input 'labels'"):
        build(model, loss="mse", optimizer="sgd", level="O0")


def test_parameters_that_do_not_reach_the_loss(export):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x):
            return self.used(x), self.unused(x).argmax(-1)

    model = export(Net(), torch.randn(2, 5))
    bundle = build(model, loss="cross_entropy", optimizer="sgd", output="y", level="O0")
    assert {tensor.name for tensor in bundle.manifest.tensors_in("master")} == {"used.weight", "used.bias"}
    assert bundle.manifest.frozen["unused.weight"] == "does not reach the loss"
    assert "2 parameters do not reach the loss" in bundle.manifest.notes[0]


@pytest.mark.parametrize("opset", [13, 15, 18, 20])
def test_opsets(export, drive, opset):
    driver = drive(
        build(export(_net(), torch.randn(2, 5), train=True, opset=opset), loss="cross_entropy", optimizer="adamw")
    )
    rng = np.random.default_rng(0)
    batch = {"x0": rng.normal(size=(8, 5)).astype(np.float32), "labels": rng.integers(0, 3, 8)}
    losses = [driver.step(batch)["loss"] for _ in range(4)]
    assert all(map(math.isfinite, losses))
