"""The bundle: interface, layout, state, files, options."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxamp.errors import ModelError, RuntimeMissingError, UsageError
from onnxamp.model import io
from onnxamp.passes.assume import AssumePass
from onnxamp.training import (
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
