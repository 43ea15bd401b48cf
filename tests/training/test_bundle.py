"""What build makes: interface, layout, files, choices of parameters, and refusals."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxamp.errors import ModelError, RuntimeMissingError, UnsupportedError, UsageError
from onnxamp.model import io
from onnxamp.passes.assume import AssumePass
from onnxamp.training import (
    SGD,
    AdamW,
    Bundle,
    Cosine,
    CrossEntropy,
    DynamicLossScale,
    Group,
    Warmup,
    build,
    choices,
)
from onnxamp.training.manifest import ALIGNMENT, BLOCK, ITEM_SIZE, PARAMETER_ALIGNMENT, Manifest


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Dropout(0.1), nn.Linear(7, 3))


@pytest.fixture
def model(export):
    """An MLP with BatchNorm and Dropout."""
    return export(_net(), torch.randn(2, 5), train=True)


LEVELS = [
    ("O0", "fp16"),
    ("OD", "fp16"),
    ("O1", "bf16"),
    ("O2", "fp16"),
    ("O2", "bf16"),
    ("O3", "fp16"),
    ("O3", "bf16"),
]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_every_port_is_bound(model, level, dtype):
    """The manifest tells the graphs' inputs and outputs, in order, with types and shapes, and each refers to something."""
    bundle = build(model, loss="cross_entropy", optimizer="adamw", level=level, dtype=dtype, ema=0.9)
    manifest = bundle.manifest
    results = {port.ref for port in manifest.graphs["reduce"].outputs if port.kind == "result"}
    for name, ports in manifest.graphs.items():
        proto = ir.to_proto(bundle.graphs[name])
        onnx.checker.check_model(proto, full_check=True)
        assert proto.ir_version == 10
        assert {node.domain for node in proto.graph.node} == {""}
        for values, entries in ((proto.graph.input, ports.inputs), (proto.graph.output, ports.outputs)):
            assert [value.name for value in values] == [port.name for port in entries]
            for value, port in zip(values, entries, strict=True):
                kind = ir.DataType(value.type.tensor_type.elem_type)
                assert port.dtype == ("bool" if kind == ir.DataType.BOOL else kind.numpy().name)
                dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
                assert list(port.shape) == dims, port.name
                if port.kind == "tensor":
                    tensor = manifest.tensor(port.ref)
                    assert (tensor.shape, manifest.arena(tensor.arena).dtype) == (port.shape, port.dtype)
                elif port.kind in ("arena", "slice"):
                    assert manifest.arena(port.ref).dtype == port.dtype
                elif port.kind == "segment":
                    assert all(port.ref in segment.scalars for segment in manifest.segments)
                elif port.kind == "result" and name == "update":
                    assert port.ref in results
        sources = {port.name: port for port in ports.inputs}
        for port in ports.outputs:
            if port.alias is not None:
                assert (sources[port.alias].kind, sources[port.alias].ref) == (port.kind, port.ref)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_layout(model, level, dtype):
    """Aligned, disjoint, padded; low copies are the prefixes of their groups."""
    groups = [Group("0.*", lr_factor=0.5), {"match": "re:.*bias", "weight_decay": 0.0, "name": "biases"}]
    manifest = build(model, loss="cross_entropy", optimizer="adamw", level=level, dtype=dtype, groups=groups).manifest
    for arena in manifest.arenas:
        end = 0
        for tensor in manifest.tensors_in(arena.name):
            assert tensor.offset >= end
            assert tensor.offset * ITEM_SIZE[arena.dtype] % ALIGNMENT == 0
            end = tensor.offset + tensor.size
        assert end <= arena.elements
    length = manifest.arena("master").elements
    assert length % BLOCK == 0
    masters = {tensor.name: tensor for tensor in manifest.tensors_in("master")}
    for role in ("gradient", "exp_avg", "exp_avg_sq"):
        assert manifest.arena(role).elements == length
        assert {t.name: t.offset for t in manifest.tensors_in(role)} == {n: t.offset for n, t in masters.items()}
    names = [arena.name for arena in manifest.arenas]
    assert names.index("window") == names.index("gradient") + 1
    assert manifest.arena("window").after == "gradient"

    lows = {tensor.name: tensor for tensor in manifest.tensors_in("low")}
    assert bool(lows) == (level in ("O2", "O3"))
    covered = 0
    for segment in manifest.segments:
        assert segment.start == covered
        assert segment.start % PARAMETER_ALIGNMENT == segment.stop % PARAMETER_ALIGNMENT == 0
        covered = segment.stop
        for name, tensor in masters.items():
            if segment.start <= tensor.offset < segment.stop:
                assert (name in lows) == (segment.low_start is not None)
                if name in lows:
                    assert lows[name].offset - segment.low_start == tensor.offset - segment.start
    by_group = {segment.group: segment.scalars for segment in manifest.segments}
    assert by_group["0.*"]["lr_factor"] == 0.5
    assert by_group["0.*"]["weight_decay"] == 0.01
    assert (by_group["biases"]["lr_factor"], by_group["biases"]["weight_decay"]) == (1.0, 0.0)
    first = next(segment for segment in manifest.segments if segment.group == "0.*")
    assert {n for n, t in masters.items() if t.offset < first.stop} <= {"0.weight", "0.bias"}


def test_the_state_is_the_model(model):
    bundle = build(model, loss="cross_entropy", optimizer="adamw", ema=0.9, seed=42, loss_scale="deepspeed")
    initial = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for tensor in bundle.manifest.tensors:
        if tensor.arena in ("master", "ema", "statistics"):
            np.testing.assert_array_equal(bundle.state[tensor.key], initial[tensor.name])
    assert {name for name in initial if "running" in name} == {
        tensor.name for tensor in bundle.manifest.tensors_in("statistics")
    }
    assert bundle.state["counters/seed"] == 42
    assert bundle.state["scalars/loss_scale"] == 65536
    assert (bundle.state["counters/growth_tracker"], bundle.state["counters/hysteresis"]) == (-1, 2)
    assert not any(key.startswith(("exp_avg", "gradient", "low")) for key in bundle.state)


def test_saves_and_loads(model, tmp_path):
    bundle = build(
        model, loss=CrossEntropy(label_smoothing=0.1), optimizer=AdamW(), schedule=Warmup(3, Cosine(10)), dtype="bf16"
    )
    saved = bundle.save(tmp_path / "deep" / "bundle")
    loaded = Bundle.load(tmp_path / "deep" / "bundle")
    assert loaded.manifest == bundle.manifest
    assert loaded.path == saved.path == tmp_path / "deep" / "bundle"
    assert loaded.state.keys() == bundle.state.keys()
    for key, value in bundle.state.items():
        assert (loaded.state[key].shape, loaded.state[key].dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(loaded.state[key], value)
    for name, graph in bundle.graphs.items():
        assert [node.name for node in loaded.graphs[name].graph] == [node.name for node in graph.graph]
    assert [value.name for value in loaded.model.graph.outputs] == ["y"]
    assert sorted(path.name for path in saved.path.iterdir()) == [
        "eval.onnx", "grad.onnx", "manifest.json", "model.onnx", "reduce.onnx", "state.safetensors", "update.onnx",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="exists already"):
        bundle.save(saved.path)
    bundle.save(saved.path, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="not a bundle"):
        bundle.save(tmp_path / "other", overwrite=True)


def test_a_window_of_one_micro_batch_needs_no_accumulators(model):
    bundle = build(model, loss="cross_entropy", optimizer="adamw")
    graph = bundle.graphs["grad"].clone()
    AssumePass("amp.first", True)(graph)
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    read = {value.name for value in graph.graph.inputs if value.uses()}
    assert "stat/2.running_mean" in read
    assert not {name for name in read if name.startswith(("acc/", "stat_work/", "amp.first", "amp.window"))}
    assert [value.name for value in graph.graph.outputs] == [p.name for p in bundle.manifest.graphs["grad"].outputs]


def test_two_builds_are_equal(model, tmp_path):
    for name in ("a", "b"):
        build(model, loss="cross_entropy", optimizer="adamw").save(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("failing", [1, 2])
def test_replacing_a_bundle_never_loses_it(model, tmp_path, monkeypatch, failing):
    """The first rename sets the old one aside, the second one puts the new one in its place."""
    old, new = (build(model, loss="cross_entropy", optimizer="sgd", level="O0", seed=seed) for seed in (1, 2))
    folder = old.save(tmp_path / "b").path
    before = (folder / "manifest.json").read_bytes()
    real, calls = os.replace, []

    def rename(source, target):
        if os.fspath(tmp_path / "b") in (os.fspath(source), os.fspath(target)):
            calls.append(target)
            if len(calls) == failing:
                raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(RuntimeMissingError, match="No space left"):
        new.save(folder, overwrite=True)
    monkeypatch.undo()
    assert (folder / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    # Killed between the two renames: the bundle lies aside, and comes back.
    os.replace(folder, tmp_path / ".b.before")
    with pytest.raises(UsageError, match="exists already"):
        new.save(folder)
    assert (folder / "manifest.json").read_bytes() == before
    new.save(folder, overwrite=True)
    assert (folder / "manifest.json").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_the_manifest_stands_for_the_frozen_weights_too(model):
    def digest(source):
        return build(source, loss="cross_entropy", optimizer="sgd", frozen="*", trainable="4.weight").manifest.content

    other = ir.to_proto(io.load(model))
    frozen = next(tensor for tensor in other.graph.initializer if tensor.name == "0.weight")
    first = digest(other)
    assert first == digest(other)
    frozen.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(frozen) * 2, frozen.name))
    assert digest(other) != first


def test_broken_bundles(model, tmp_path):
    folder = build(model, loss="cross_entropy", optimizer="sgd", level="O0").save(tmp_path / "b").path
    with pytest.raises(UsageError, match="not a bundle"):
        Bundle.load(tmp_path)
    text = (folder / "manifest.json").read_text()
    for broken, sentence in (
        ("{", "not a bundle's manifest"),
        (text.replace('"arenas"', '"arena"'), "not a bundle's manifest"),
        (json.dumps(json.loads(text) | {"version": 1}), "another version of onnxamp .format version 1; this one reads"),
    ):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(ModelError, match=sentence):
            Bundle.load(folder)
    (folder / "manifest.json").write_text(text)
    (folder / "state.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match="broken"):
        Bundle.load(folder)
    (folder / "update.onnx").unlink()
    with pytest.raises(ModelError, match=r"lost update\.onnx"):
        Bundle.load(folder)


def test_manifest_goes_to_json_and_back(model):
    manifest = build(model, loss="cross_entropy", optimizer="adamw", groups=[Group("0.*", frozen=True)]).manifest
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(text).to_json() == text
    again = {key: manifest.options[key] for key in ("loss", "optimizer", "schedule", "loss_scale")}
    assert choices.loss(again["loss"]) == CrossEntropy()
    assert choices.optimizer(again["optimizer"]) == AdamW()
    assert choices.loss_scale(again["loss_scale"], "O2", "fp16") == DynamicLossScale()


def test_the_options_build_the_same_bundle(model):
    first = build(model, loss={"name": "cross_entropy", "label_smoothing": 0.2}, optimizer={"name": "sgd", "momentum": 0.5},
                  schedule={"name": "warmup", "total_iters": 3, "after": {"name": "cosine", "T_max": 9}}, clip_norm=1.0,
                  groups=[Group("0.*", lr_factor=2)], frozen="4.bias", keep_op=["Relu"])  # fmt: skip
    options = json.loads(first.manifest.to_json())["options"]
    assert build(model, **options).manifest == first.manifest


def test_graphs_name_their_producer_without_the_version_of_another(model):
    graphs = build(model, loss="cross_entropy", optimizer="sgd", level="O0").graphs
    assert {(graph.producer_name, graph.producer_version) for graph in graphs.values()} == {("onnxamp", None)}


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


def test_tensors_that_do_not_train_are_told(export):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rest = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 3)

        def forward(self, x):
            return self.rest(x + self.table[: x.shape[1]]) * 0.7  # a learned table behind a Slice, and a number

    model = export(Net(), torch.randn(2, 5, 4))
    (note,) = build(model, loss="mse", optimizer="sgd", level="O0").manifest.notes
    assert "1 float tensor is not trained: table (--trainable table trains it;" in note
    assert not build(model, loss="mse", optimizer="sgd", level="O0", trainable="table").manifest.notes
    assert not build(model, loss="mse", optimizer="sgd", level="O0", frozen="table").manifest.notes


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


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"loss": "cros_entropy"}, UsageError, "did you mean cross_entropy"),
        ({"loss": {"name": "mse", "delta": 1}}, UsageError, "mse has no argument 'delta'"),
        ({"loss": 3}, UsageError, "3 is no loss"),
        ({"optimizer": "lamb"}, UsageError, "Unknown optimizer 'lamb'"),
        ({"optimizer": {"name": "adamw", "momentum": 1}}, UsageError, "no argument 'momentum'"),
        ({"schedule": "cosine"}, UsageError, "T_max"),
        ({"schedule": {"name": "warmup"}}, UsageError, "needs total_iters"),
        ({"level": "O4"}, UsageError, "Unknown level"),
        ({"dtype": "fp8"}, UsageError, "Unknown dtype"),
        (
            {"overflow": "micro", "loss_scale": {"name": "fixed", "drop_overflow_update": False}},
            UsageError,
            "choose one",
        ),
        ({"overflow": "never"}, UsageError, "Unknown overflow"),
        ({"batch_norm": "sync"}, UsageError, "Unknown batch_norm"),
        ({"ema": 1.0}, UsageError, "below 1"),
        ({"clip_norm": 0}, UsageError, "clip_norm is 0"),
        ({"frozen": "5.*"}, UsageError, "No parameter matches frozen '5"),
        ({"trainable": "0.weigth"}, UsageError, "did you mean 0.weight"),
        ({"frozen": "*"}, UsageError, "No parameter trains"),
        ({"output": "z"}, UsageError, "no output 'z'"),
        ({"loss": "model_output"}, UsageError, "not a scalar"),
        ({"groups": [{"match": "*", "lr": 1}]}, UsageError, "no entry 'lr'"),
        ({"groups": [{"lr_factor": 1}]}, UsageError, "needs match"),
        ({"groups": [Group("a"), Group("a")]}, UsageError, "taken twice"),
        ({"seed": 2**64}, UsageError, "64 bits"),
    ],
)
def test_bad_arguments(model, options, error, sentence):
    with pytest.raises(error, match=sentence):
        build(model, **{"loss": "cross_entropy", "optimizer": "adamw", **options})


def test_an_old_opset_is_refused(export):
    with pytest.raises(UnsupportedError, match="opset 13"):
        build(export(nn.Linear(5, 3), torch.randn(2, 5), opset=11), loss="mse", optimizer="sgd")


def test_operators_without_gradient_are_named(export):
    model = export(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), torch.randn(2, 5))
    model.graph.node[-1].CopyFrom(h.make_node("Det", [model.graph.node[-1].input[0]], ["y"], name="my_det"))
    model.graph.node[-1].CopyFrom(
        h.make_node("Inverse", [model.graph.node[-1].input[0]], ["y"], "my_inverse", domain="x.y")
    )
    model.opset_import.append(h.make_opsetid("x.y", 1))
    with pytest.raises((UnsupportedError, UsageError), match=r"my_inverse|type of"):
        build(model, loss="mse", optimizer="sgd", level="O0")
