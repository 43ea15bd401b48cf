"""Adapters: gradients against PyTorch in float64, merging, what trains, and files of adapters alone."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.numpy import save_file
from torch import nn

from onnxamp.commands.merge_adapter import command
from onnxamp.errors import ModelError, UsageError
from onnxamp.trainer.adapter import merged_model, write_adapter
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import SGD, Lora, build
from onnxamp.training.lora import inject, lora


class _Net(nn.Module):
    """Convolutions of every form (strided, grouped, pointwise), Linear layers as Gemm and as MatMul, one used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.point = nn.Conv2d(8, 6, 1)
        self.token = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.tanh(self.point(torch.tanh(self.grouped(torch.tanh(self.conv(x))))))
        x = x.flatten(2).transpose(1, 2)
        x = torch.tanh(self.token(torch.tanh(self.token(x))))
        return self.head(x.mean(1))


@pytest.fixture
def model(export):
    return export(_Net(), torch.randn(2, 4, 6, 6))


def _batch(rows=6):
    rng = np.random.default_rng(1)
    return {"x0": rng.normal(size=(rows, 4, 6, 6)).astype(np.float32), "labels": rng.integers(0, 5, rows)}


def _state(net):
    """Weights by the name and form that the model has them in: the exporter turns weights of MatMul round."""
    return {name: value.detach().numpy() for name, value in net.named_parameters()}


def _adapted(net, adapters, parameters):
    """The weights of `net` with their adapters, as PyTorch sees them, and what the gradient is asked of."""
    leaves, weights = {}, {}
    for adapter in adapters:
        a, b = (
            torch.tensor(parameters[name], dtype=torch.float64, requires_grad=True) for name in (adapter.a, adapter.b)
        )
        leaves |= {adapter.a: a, adapter.b: b}
        name = next(n for n, p in net.named_parameters() if n == adapter.weight or _same(p, adapter))
        base = net.get_parameter(name).double()
        if adapter.form == "conv":
            down = a.reshape(adapter.groups, -1, *a.shape[1:])
            up = b.reshape(adapter.groups, -1, down.shape[1])
            delta = torch.einsum("gor,grcij->gocij", up, down).reshape(base.shape)
        else:
            delta = (a @ b).T
        weights[name] = base + adapter.scale * delta
    return leaves, weights


def _same(parameter, adapter):
    return adapter.weight.startswith("onnx::MatMul") and tuple(parameter.shape) == (6, 6)


def test_gradients_equal_torch(model, drive):
    """Of A and B of every form, at a point where B is not zero."""
    bundle = build(model, loss="cross_entropy", optimizer=SGD(lr=0.0), level="O0", lora=Lora(rank=3, alpha=6))
    adapters = bundle.manifest.adapters
    assert {adapter.form for adapter in adapters} == {"conv", "matmul"}
    assert sorted(adapter.groups for adapter in adapters) == [1, 1, 1, 1, 2]
    driver, batch = drive(bundle), _batch()
    rng = np.random.default_rng(2)
    parameters = {}
    for tensor in driver.manifest.tensors_in("master"):
        if tensor.name.endswith("/B"):
            driver.view(tensor.key)[...] = rng.normal(size=tensor.shape) * 0.3
        parameters[tensor.name] = driver.view(tensor.key).copy()
    assert len(parameters) == 10
    report = driver.step(batch)
    net = _Net()
    leaves, weights = _adapted(net, adapters, parameters)
    fixed = {name: value.double() for name, value in net.named_parameters()} | weights
    logits = torch.func.functional_call(net.double(), fixed, torch.tensor(batch["x0"]).double())
    loss = F.cross_entropy(logits, torch.tensor(batch["labels"]))
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)
    factor = float(driver.view("scalars/seed_divisor")) / float(driver.view("window/window")[0])
    for name, leaf in leaves.items():
        got, expected = driver.view(f"gradient/{name}") * factor, leaf.grad.numpy()
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected), name


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_merged_export_is_the_adapted_model(model, tmp_path, level):
    """After some steps; before them the adapted model is the model. The file of the adapters alone does the same."""
    bundle = build(model, loss="cross_entropy", optimizer=SGD(lr=0.3), level=level, lora="rank=2,alpha=8,target=*",
                   trainable="head.bias", loss_scale=64)  # fmt: skip
    trainer, batch = Trainer(bundle, "cpu", threads=1), _batch()
    plain = _outputs(model, batch)
    tolerance = 1e-5 if level == "O0" else 2e-2
    np.testing.assert_allclose(trainer.predict(batch)["y"], plain, atol=tolerance)
    losses = [trainer.micro_step(batch).loss for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    adapted = trainer.predict(batch)["y"]
    assert np.abs(adapted - plain).max() > 0.1
    trainer.export(tmp_path / "merged.onnx")
    np.testing.assert_allclose(_outputs(onnx.load(tmp_path / "merged.onnx"), batch), adapted, atol=tolerance)
    merged = onnx.load(tmp_path / "merged.onnx")
    assert [node.op_type for node in merged.graph.node] == [node.op_type for node in model.graph.node]
    assert trainer.evaluate(batch, weights="master")["loss"] == pytest.approx(trainer.evaluate(batch)["loss"], rel=1e-2)
    write_adapter(trainer.trained, tmp_path / "adapter.safetensors")
    again = ir.to_proto(merged_model(ir.from_proto(model), tmp_path / "adapter.safetensors"))
    np.testing.assert_array_equal(_outputs(again, batch), _outputs(merged, batch))
    assert (tmp_path / "adapter.safetensors").stat().st_size < 10_000
    onnx.save(model, tmp_path / "base.onnx")
    arguments = [str(tmp_path / name) for name in ("base.onnx", "adapter.safetensors")]
    result = CliRunner().invoke(command, [*arguments, "-o", str(tmp_path / "out.onnx")], standalone_mode=False)
    assert result.exception is None
    np.testing.assert_array_equal(_outputs(onnx.load(tmp_path / "out.onnx"), batch), _outputs(merged, batch))


def _outputs(model, batch):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x0": batch["x0"]})[0]


def test_only_adapters_train(model):
    """Trained bytes as the shapes say; everything else is frozen with its reason, unless it is named."""
    rank = 3
    bundle = build(model, loss="cross_entropy", optimizer="adamw", lora=Lora(rank, 6), trainable="*.bias")
    shapes = {"conv": (8, 36), "grouped": (8, 2 * 36), "point": (6, 8), "token": (6, 6), "head": (5, 6)}
    adapters = sum(rank * (out + into) for out, into in shapes.values())
    biases = 8 + 8 + 6 + 6 + 5
    assert bundle.summary()["trained_bytes"] == 4 * (adapters + biases)
    assert bundle.summary()["adapters"] == 5
    assert bundle.manifest.frozen["conv.weight"] == "only adapters train"
    lows = {tensor.name for tensor in bundle.manifest.tensors_in("low")}
    assert {adapter.a for adapter in bundle.manifest.adapters} <= lows
    gradients = {tensor.name for tensor in bundle.manifest.tensors_in("gradient")}
    assert not gradients & {"conv.weight", "head.weight"}


def test_targets(model):
    def weights(target):
        manifest = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(2, 2, target)).manifest
        return [adapter.weight for adapter in manifest.adapters]

    assert weights("head.*") == ["head.weight"]
    assert weights(("point.*", "/conv/Conv")) == ["conv.weight", "point.weight"]
    with pytest.raises(UsageError, match=r"matches lora's target 'heat\.\*'; there are conv\.weight"):
        weights("heat.*")


# What else reads the weight w: float[4, 4] of /gemm (y = Gemm(h, w)).
SHARED = {
    "Gather 'other'": "t = Gather(w, ids) h = Add(x, t)",  # a tied embedding
    "Gemm '/gemm'": "t = MatMul(x, w) h = Tanh(t)",  # the MatMul comes first, and the Gemm reads it the other way round
    "Add 'other'": "t = Add(x, w) h = Tanh(t)",
    "the output 'u'": "u = Identity(w) h = Tanh(x)",
    "Add 'inner'": """t = If(flag) <then_branch = yes () => (float[4, 4] p) { p = Add(x, w) },
        else_branch = no () => (float[4, 4] q) { q = Identity(x) }> h = Tanh(t)""",
}


def _shared(reader):
    outputs = ", float[4, 4] u" if "u =" in reader else ""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[4, 4] x, int64[4] ids, bool flag) => (float[4, 4] y{outputs})
        <float[4, 4] w = {{{", ".join(str(i % 7 - 3) for i in range(16))}}}, float[4, 4] v = {{{", ".join("1" * 16)}}}>
        {{ {reader} a = MatMul(h, v) y = Gemm<transB=1>(a, w) }}"""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        names = {"Gemm": "/gemm", "MatMul": "plain"} if node.input[1:] == ["v"] else {"Gemm": "/gemm"}
        node.name = names.get(node.op_type, "other" if "w" in node.input else node.output[0])
        for attribute in node.attribute:
            for inner in attribute.g.node:
                inner.name = "inner"
    return model


@pytest.mark.parametrize("other", SHARED)
def test_a_weight_that_something_else_reads_gets_no_adapter(other):
    model = _shared(SHARED[other])
    options = {"loss": "mse", "optimizer": SGD(lr=0.1), "level": "O0", "output": "y"}
    with pytest.raises(UsageError, match=f"'w' gets no adapter: {other} reads it too"):
        build(model, lora=Lora(2, 2, "w"), **options)
    bundle = build(model, lora=Lora(2, 2), **options)
    assert [adapter.weight for adapter in bundle.manifest.adapters] == ["v"]
    assert any(f"'w' gets no adapter: {other}" in note for note in bundle.manifest.notes)
    trainer = Trainer(bundle, "cpu", threads=1)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 4)).astype(np.float32), "ids": np.array([0, 3, 1, 1]), "flag": np.array(True)}
    fed = {port.name for port in bundle.manifest.graphs["grad"].of_kind("data")}
    batch = {name: value for name, value in batch.items() if name in fed}
    for _ in range(5):
        trainer.micro_step({**batch, "labels": np.zeros((4, 4), np.float32)})
    session = onnxruntime.InferenceSession(
        ir.to_proto(trainer.trained.model()).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    read = {"x": np.zeros((4, 4), np.float32), "ids": np.zeros(4, np.int64), "flag": np.array(True), **batch}
    np.testing.assert_allclose(session.run(["y"], read)[0], trainer.predict(batch)["y"], rtol=1e-5, atol=1e-5)


def test_a_head_that_the_loss_does_not_read_has_no_adapter_to_export(tmp_path):
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x) => (float[n, 2] y, float[n, 2] other) <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 5}>
        { y = MatMul(x, w)  other = MatMul(x, v) }""")
    bundle = build(proto, loss="cross_entropy", output="y", optimizer="sgd", level="O0", lora="rank=1,alpha=2,target=*")
    assert [adapter.weight for adapter in bundle.manifest.adapters] == ["w"]
    assert any("do not reach the loss" in note for note in bundle.manifest.notes)
    trainer = Trainer(bundle, "cpu", threads=1)
    trainer.micro_step({"x": np.ones((2, 2), np.float32), "labels": np.array([0, 1])})
    trainer.export(tmp_path / "merged.onnx")
    held = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(tmp_path / "merged.onnx").graph.initializer
    }
    np.testing.assert_array_equal(held["v"], [[1, 2], [3, 5]])


def test_a_node_s_name_stands_for_its_weight(model):
    """Both nodes of `token` get the adapter of their weight where one of them is named."""
    bundle = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(2, 2, "/token/MatMul"))
    ups = [node for node in bundle.graphs["eval"].graph if node.name.endswith("/lora/up")]
    assert len(bundle.manifest.adapters) == 1
    assert len(ups) == 2


def test_each_node_has_its_own_scale():
    """Factors of Gemm that differ after six digits, and types that differ."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[1, 1] x, float16[1, 1] k) => (float[1, 1] y, float16[1, 1] z)
        <float[1, 1] v = {1}, float[1, 1] w = {1}, float16[1, 1] u = {1}>
        { a = Gemm<alpha=0.5000001>(x, v) y = Gemm<alpha=0.5>(a, w) z = Gemm<alpha=0.5>(k, u) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph:
        node.name = f"to_{node.outputs[0].name}"
    inject(model, Lora(1, 1), 0)
    scales = [node.inputs[1].const_value.numpy() for node in model.graph if node.name.endswith("/lora/scale")]
    assert [scale.dtype for scale in scales] == [np.float32, np.float32, np.float16]
    assert scales == [np.float32(0.5000001), 0.5, 0.5]


def test_the_start_is_within_the_bounds_of_a_linear_layer(model):
    bundle = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(16, 16, "conv.*"), seed=3)
    a, b = bundle.state["master/lora/conv.weight/A"], bundle.state["master/lora/conv.weight/B"]
    bound = 1 / math.sqrt(36)
    assert 0.9 * bound < np.abs(a).max() <= bound
    assert not b.any()
    other = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(16, 16, "conv.*"), seed=4)
    assert not np.array_equal(other.state["master/lora/conv.weight/A"], a)


def test_the_options_build_the_same_bundle(model):
    first = build(
        model, loss="cross_entropy", optimizer="sgd", level="O0", lora="rank=2,alpha=4,target=re:(conv|head).*,?"
    )
    assert lora("rank=2,alpha=4,target=re:(conv|head).*,?") == Lora(2, 4.0, "re:(conv|head).*,?")
    assert build(model, **first.manifest.options).manifest == first.manifest


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("rank=x", "is not rank=N"),
        ("size=3", "is not rank=N"),
        ({"rank": 0}, "at least 1"),
        ({"rank": 2, "alpha": -1}, "above 0"),
        ({"ranks": 2}, "lora takes rank, alpha, target"),
    ],
)
def test_bad_specifications(spec, sentence):
    with pytest.raises(UsageError, match=sentence):
        lora(spec)


def test_an_adapter_of_another_model_is_refused(model, export, tmp_path):
    bundle = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(2, 2, "head.*"))
    write_adapter(Trainer(bundle, "cpu", threads=1).trained, tmp_path / "a.safetensors")
    other = export(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    with pytest.raises(UsageError, match=r"no weight 'head\.weight'"):
        merged_model(ir.from_proto(other), tmp_path / "a.safetensors")
    plain = Trainer(build(model, loss="cross_entropy", optimizer="sgd", level="O0"), "cpu", threads=1)
    with pytest.raises(UsageError, match="has no adapters"):
        write_adapter(plain.trained, tmp_path / "b.safetensors")


def _cut(name):
    return lambda values, entries: values.pop(name)


def _set(name, change):
    return lambda values, entries: values.update({name: change(values[name])})


def _say(**fields):
    return lambda values, entries: entries[0].update(fields)


A, B = "lora/head.weight/A", "lora/head.weight/B"


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (_cut(A), ModelError, "lacks the tensor 'lora/head.weight/A'"),
        (_cut(B), ModelError, "lacks the tensor 'lora/head.weight/B'"),
        (_set(B, lambda b: b * np.nan), ModelError, "NaN or infinite values in 'lora/head.weight/B'"),
        (_set("head.bias", lambda b: b + np.inf), ModelError, "NaN or infinite values in 'head.bias'"),
        (_set(A, lambda a: a.astype(np.float64)), ModelError, "'lora/head.weight/A' as float64"),
        (_set(A, lambda a: a[:, :1]), UsageError, "do not fit together"),
        (_set("head.bias", lambda b: b[:2]), ModelError, "no parameter 'head.bias' of shape"),
        (_say(weight=["head.weight"]), ModelError, "no file of adapters"),
        (_say(scale=float("nan")), ModelError, "scale nan"),
        (_say(form="dense"), ModelError, "form 'dense'"),
        (_say(form="conv", groups=0), ModelError, "groups 0"),
        (_say(groups=True), ModelError, "groups is True"),
        (_say(form="conv"), UsageError, "do not fit together"),
    ],
)
def test_a_damaged_file_of_adapters_is_refused(model, tmp_path, damage, error, sentence):
    bundle = build(model, loss="cross_entropy", optimizer="sgd", level="O0", lora=Lora(2, 2, "head.weight"),
                   trainable="head.bias")  # fmt: skip
    values = {key.removeprefix("master/"): value for key, value in bundle.state.items() if key.startswith("master/")}
    entries = [dataclasses.asdict(adapter) for adapter in bundle.manifest.adapters]
    assert {A, B, "head.bias"} == {*values}
    file = tmp_path / "adapter.safetensors"

    def merge():
        save_file(values, file, {"onnxamp.adapters": json.dumps(entries)})
        return merged_model(ir.from_proto(model), file)

    merge()
    damage(values, entries)
    with pytest.raises(error, match=sentence):
        merge()
