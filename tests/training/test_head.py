"""Replacing the last layer: shapes, names, distribution, and everything else untouched."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h
import onnx.reference
import pytest
import torch
from torch import nn

import onnxamp
from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.model import io
from onnxamp.training import build


class _MatMulHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.weight = nn.Parameter(torch.randn(8, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.softmax(torch.relu(self.body(x)) @ self.weight + self.bias, -1)


class _Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        return self.head(self.embedding(ids))


CASES = {
    "Gemm": (nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 5)),
    "Gemm without bias": (nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), torch.randn(2, 5)),
    "MatMul, Add, Softmax": (_MatMulHead(), torch.randn(2, 5)),
    "MatMul of tokens": (_Tokens(), torch.randint(0, 11, (2, 4))),
    "Conv, pool, flatten": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        torch.randn(2, 2, 6, 6),
    ),
}


def _run(model, feeds):
    return onnx.reference.ReferenceEvaluator(io.to_proto(model)).run(None, feeds)


@pytest.mark.parametrize("name", CASES)
def test_replaces_the_last_layer(export, name):
    net, x = CASES[name]
    source = export(net, x)
    result = onnxamp.replace_head(source, "y", 7)
    proto = io.to_proto(result)
    onnx.checker.check_model(proto, full_check=True)
    assert [output.name for output in proto.graph.output] == ["y"]
    (y,) = _run(result, {"x0": x.numpy()})
    assert y.shape == (*net(x).shape[:-1], 7)
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    after = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    changed = {key for key in before if key in after and not np.array_equal(before[key], after[key])}
    assert before.keys() <= after.keys()
    assert len(changed) == (1 if "without" in name else 2)
    assert all(7 in after[key].shape for key in changed)
    dims = proto.graph.output[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[-1].dim_value) == ("batch", 7)


def test_the_weights_are_drawn_as_torch_does(export):
    net = nn.Linear(400, 3)
    model = onnxamp.replace_head(export(net, torch.randn(2, 400)), None, 500)
    weight, bias = (model.graph.initializers[name].const_value.numpy() for name in ("weight", "bias"))
    other = nn.Linear(400, 500)
    for ours, theirs in ((weight, other.weight), (bias, other.bias)):
        assert ours.shape == tuple(theirs.shape)
        assert ours.std() == pytest.approx(theirs.std().item(), rel=0.1)
        assert abs(ours).max() <= 1 / 20
    again = onnxamp.replace_head(export(net, torch.randn(2, 400)), "y", 500)
    np.testing.assert_array_equal(again.graph.initializers["weight"].const_value.numpy(), weight)
    other_seed = onnxamp.replace_head(export(net, torch.randn(2, 400)), "y", 500, seed=1)
    assert not np.array_equal(other_seed.graph.initializers["weight"].const_value.numpy(), weight)


@pytest.mark.parametrize("init", ["xavier_uniform", "normal", "zeros"])
def test_other_inits(export, init):
    model = onnxamp.replace_head(export(nn.Linear(100, 3), torch.randn(2, 100)), "y", 50, init)
    weight, bias = (model.graph.initializers[name].const_value.numpy() for name in ("weight", "bias"))
    expected = {"xavier_uniform": np.sqrt(2 / 150), "normal": 0.02, "zeros": 0.0}[init]
    assert weight.std() == pytest.approx(expected, rel=0.1)
    assert not bias.any()


def test_a_shared_weight_is_not_touched(export):
    """A head that is tied to the embedding becomes its own tensor."""
    net = _Tokens()
    net.head.weight = net.embedding.weight
    source = export(net, torch.randint(0, 11, (2, 4)))
    weight = onnx.numpy_helper.to_array(next(t for t in source.graph.initializer if t.name == "embedding.weight"))
    node = next(node for node in source.graph.node if node.op_type == "MatMul")
    node.input[1] = "embedding.weight_t"
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(weight.T), "embedding.weight_t"))
    clone = h.make_node("MatMul", [node.input[0], "embedding.weight_t"], ["z"])
    source.graph.node.append(clone)
    source.graph.output.append(h.make_tensor_value_info("z", 1, None))
    model = onnxamp.replace_head(source, "y", 5)
    y, z = _run(model, {"x0": np.zeros((2, 4), np.int64)})
    assert (y.shape[-1], z.shape[-1]) == (5, 11)


def test_trains_the_new_head_alone(export, drive):
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    model = onnxamp.replace_head(export(net, torch.randn(2, 5)), "y", 4)
    bundle = build(model, loss="cross_entropy", optimizer="adamw", frozen="*", trainable="2.*", level="O0")
    assert [tensor.name for tensor in bundle.manifest.tensors_in("master")] == ["2.weight", "2.bias"]
    assert set(bundle.manifest.frozen) == {"0.weight", "0.bias"}
    assert bundle.manifest.labels[0].classes == 4
    driver = drive(bundle)
    rng = np.random.default_rng(0)
    batch = {"x0": rng.normal(size=(8, 5)).astype(np.float32), "labels": rng.integers(0, 4, 8)}
    losses = [driver.step(batch)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("output", "units", "options", "error", "sentence"),
    [
        ("z", 3, {}, UsageError, "no output 'z'"),
        ("y", 0, {}, UsageError, "at least one unit"),
        ("y", 3, {"init": "ones"}, UsageError, "Unknown init 'ones'"),
    ],
)
def test_bad_arguments(export, output, units, options, error, sentence):
    with pytest.raises(error, match=sentence):
        onnxamp.replace_head(export(nn.Linear(5, 3), torch.randn(2, 5)), output, units, **options)


def test_no_last_layer(export):
    class Net(nn.Module):
        def forward(self, x):
            return torch.cat([x, x * 2], 1)

    with pytest.raises(UnsupportedError, match=r"Concat .* is in the way"):
        onnxamp.replace_head(export(Net(), torch.randn(2, 5)), "y", 3)
