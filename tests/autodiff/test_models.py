"""Whole models exported from PyTorch: gradients of all parameters against float64 autograd, at two batch sizes."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxamp.autodiff import gradient_model


class Cnn(nn.Module):
    """Convolutions with stride, groups, a skip; pooling; BatchNorm."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.skip, self.head = nn.Conv2d(8, 16, 1, stride=2), nn.Linear(16, 5)

    def forward(self, x, t):
        x = F.max_pool2d(F.relu(self.b1(self.c1(x))), 3, 2, 1)
        y = self.depthwise(F.relu(self.b2(self.c2(x)))) + self.skip(x)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(F.relu(y), 1).flatten(1)), t)


class Encoder(nn.Module):
    """nn.TransformerEncoder over an embedding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, t):
        return F.cross_entropy(self.head(self.encoder(self.table(x)).mean(1)), t)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(self.n1(x)).split(width, 2)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mask = torch.tril(torch.ones(time, time, dtype=torch.bool))
        scores = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).masked_fill(~mask, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    """Causal mask, tied embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.position = nn.Embedding(13, 16), nn.Embedding(8, 16)
        self.blocks, self.norm = nn.ModuleList(Block(16, 2) for _ in range(2)), nn.LayerNorm(16)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x, t):
        h = self.table(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), t.flatten())


def cnn_data(n):
    return torch.randn(n, 3, 12, 12), torch.randint(0, 5, (n,))


def encoder_data(n):
    return torch.randint(0, 11, (n, 6)), torch.randint(0, 3, (n,))


def gpt_data(n):
    return torch.randint(0, 13, (n, 8)), torch.randint(0, 13, (n, 8))


def export(module, data, dynamo, dynamic):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = tuple({0: "batch"} for _ in data) if dynamic else None
            options = {"dynamo": True, "verbose": False, "dynamic_shapes": shapes}
            # The optimizer would merge BatchNorm into convolutions.
            return torch.onnx.export(module, data, optimize=not module.training, **options).model_proto
        buffer = io.BytesIO()
        axes = {"x": {0: "batch"}, "t": {0: "batch"}} if dynamic else None
        mode = torch.onnx.TrainingMode.PRESERVE
        torch.onnx.export(
            module, data, buffer, dynamo=False, input_names=["x", "t"], dynamic_axes=axes, training=mode,
            do_constant_folding=not module.training, opset_version=17,
        )  # fmt: skip
        return onnx.load_from_string(buffer.getvalue())


def to_training_form(proto):
    """The TorchDynamo exporter writes inference BatchNormalization whatever the module's mode."""
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization" and not any(a.name == "training_mode" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_var"])


def tensors_of(proto, module):
    """Name of each parameter → the initializers that hold it, and whether transposed: exporters rename and fold."""
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    found = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach().numpy()
        for key, array in arrays.items():
            if array.shape == value.shape and np.array_equal(array, value):
                found.setdefault(name, []).append((key, False))
            elif array.ndim == 2 and array.T.shape == value.shape and np.array_equal(array.T, value):
                found.setdefault(name, []).append((key, True))
    return found


@pytest.mark.parametrize(
    ("kind", "data", "training", "dynamo", "dynamic"),
    [
        (Cnn, cnn_data, True, True, True),
        (Cnn, cnn_data, True, False, True),
        (Encoder, encoder_data, False, True, True),
        (Encoder, encoder_data, False, False, True),
        (Encoder, encoder_data, False, False, False),
        (Gpt, gpt_data, False, True, True),
        (Gpt, gpt_data, False, False, True),
    ],
)
def test_gradients_equal_autograd(kind, data, training, dynamo, dynamic):
    torch.manual_seed(1)
    module = kind().train(training)
    with torch.no_grad():  # fresh scales are all ones: exporters merge equal tensors
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    traced = data(4)
    reference = copy.deepcopy(module)  # an export in training mode moves the running statistics
    proto = export(module, traced, dynamo, dynamic)
    if training:
        to_training_form(proto)
    held = tensors_of(proto, reference)
    assert set(held) == {name for name, _ in reference.named_parameters()}
    result = gradient_model(proto, proto.graph.output[0].name, [key for keys in held.values() for key, _ in keys])
    final = ir.to_proto(result)
    onnx.checker.check_model(final)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(final.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for size in (4, 7) if dynamic else (4,):
        batch = traced if size == 4 else data(size)
        feeds = {v.name: x.numpy() for v, x in zip(proto.graph.input, batch, strict=True)}
        got = dict(zip(names, session.run(None, feeds), strict=True))
        exact, single = copy.deepcopy(reference).double(), copy.deepcopy(reference)
        exact(*(x.double() if x.is_floating_point() else x for x in batch)).backward()
        single(*batch).backward()
        own = dict(single.named_parameters())
        total = sum(float(p.grad.norm()) ** 2 for p in exact.parameters()) ** 0.5
        for name, parameter in exact.named_parameters():
            want = parameter.grad.numpy()
            value = sum(got[f"grad/{key}"].T if turned else got[f"grad/{key}"] for key, turned in held[name])
            norm = np.linalg.norm(want)
            assert norm > 1e-6 * total, name
            error, torch_error = (np.linalg.norm(x - want) / norm for x in (value, own[name].grad.numpy()))
            assert error <= max(1e-4, 2 * torch_error), f"{name}: {error:.2e}, PyTorch fp32 {torch_error:.2e}"


def test_running_statistics_of_training_batch_norm():
    """The decomposed operator updates mean and (biased, as ONNX defines) variance."""
    module = nn.Sequential(nn.BatchNorm1d(3)).train()
    x = torch.randn(8, 3, 5)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(module, (x,), buffer, dynamo=False, training=mode, input_names=["x"], opset_version=17)
    proto = onnx.load_from_string(buffer.getvalue())
    node = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    for name in node.output[1:]:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]))
    proto.graph.node.append(onnx.helper.make_node("ReduceSum", [node.output[0]], ["loss"], keepdims=0))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    result = ir.to_proto(gradient_model(proto, "loss", ["x"]))
    session = ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    mean, variance = session.run(list(node.output[1:]), {"x": x.numpy()})
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    old_mean, old_variance = (held[name] for name in node.input[3:])
    np.testing.assert_allclose(mean, 0.9 * old_mean + 0.1 * x.mean((0, 2)).numpy(), rtol=1e-5, atol=1e-7)
    want = 0.9 * old_variance + 0.1 * x.var((0, 2), correction=0).numpy()
    np.testing.assert_allclose(variance, want, rtol=1e-5)
