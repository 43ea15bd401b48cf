"""Layers that were copied, layers that are one, and tied weights, in real exports: each trains as in PyTorch."""

import copy
import io
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn

from onnxamp.trainer.inference import take_weights
from onnxamp.trainer.state_dict import names_of
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import build
from onnxamp.training.forward import training_form
from onnxamp.training.optimizers import SGD


class Layers(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Backwards(Layers):
    """The last layer first: modules are not called in the order in which they were made."""

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Two(nn.Module):
    """Two modules under names of their own, the second one first if it is asked for."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.mix, self.second = first, nn.Linear(4, 4), second

    def forward(self, x):
        return self.second(torch.tanh(self.mix(torch.sin(self.first(x)))))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mix = norm, nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.norm(self.mix(x)))


class LastNormFirst(nn.Module):
    """The norm that is called last is made first."""

    def __init__(self):
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(4), nn.ModuleList([Block(nn.LayerNorm(4)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Cloned(nn.Module):
    """A copy of a weight is the weight."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.w.clone()) @ self.w


class Repeated(nn.Module):
    """A parameter that begins as the rows of another one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.query = nn.Parameter(self.mix.bias.detach().repeat(3, 1))

    def forward(self, x):
        return torch.tanh(self.mix(x)) + torch.sin(self.query + x.mean()).sum(0)


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Reused(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Attention(nn.Module):
    """Its parts are called in another order than they were made; fresh biases are zeros, those of the other layers too."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        for part in (self.q, self.k):
            nn.init.zeros_(part.bias)

    def forward(self, x):
        k = self.k(torch.sin(x))
        return torch.exp(self.q(x)) * k


def copies(layer, count=2):
    return Layers(*(copy.deepcopy(layer) for _ in range(count)))


def tied(first, second):
    second.weight, second.bias = first.weight, first.bias
    return Layers(first, second)


def weight_tied(first, second):
    second.weight = first.weight
    return first, second


def twice(module, make=Two):
    return make(module, module)


def unbiased():
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    nn.init.normal_(layer.self_attn.out_proj.bias)  # zeros are left out by the newer exporter
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODULES = {
    "copied": lambda: copies(nn.Linear(4, 4), 3),
    "one twice": lambda: Layers(*[nn.Linear(4, 4)] * 2),
    "reused": Reused,
    "tied": lambda: tied(nn.Linear(4, 4), nn.Linear(4, 4)),
    "copied, without bias": lambda: copies(unbiased()),
    "one twice, without bias": lambda: Layers(*[unbiased()] * 2),
    "fresh": lambda: Layers(Attention(), Attention()),
    "encoder": encoder,
    "copied, backwards": lambda: Backwards(*copies(nn.Linear(4, 4), 3).layers),
    "one twice, backwards": lambda: twice(nn.Linear(4, 4), Backwards),
    "tied weights, own biases": lambda: Layers(*weight_tied(nn.Linear(4, 4), nn.Linear(4, 4))),
    "tied weights, own biases, two names": lambda: Two(*weight_tied(nn.Linear(4, 4), nn.Linear(4, 4))),
    "tied weights, own biases, backwards": lambda: Backwards(*weight_tied(nn.Linear(4, 4), nn.Linear(4, 4))),
    "fresh norms": lambda: Two(nn.LayerNorm(4), nn.LayerNorm(4)),
    "fresh norms, the last first": LastNormFirst,
    "one norm, two names": lambda: twice(nn.LayerNorm(4)),
    "one norm in two blocks": lambda: Two(Block(norm := nn.LayerNorm(4)), Block(norm)),
    "fresh RMS norms": lambda: Two(Rms(), Rms()),
    "one RMS norm, two names": lambda: twice(Rms()),
    "fresh slopes": lambda: Two(nn.PReLU(), nn.PReLU()),
    "cloned": Cloned,
    "repeated": Repeated,
}
TRAINABLE = {"cloned": "*", "repeated": "*"}
"""What has no place of a parameter is asked for."""


# A Linear is a Gemm, or MatMul and Add. In two dimensions the newer exporter computes once what equal encoders share, and drops zeros.
CASES = [
    (kind, dims)
    for kind in MODULES
    for dims in ((2, 4), (2, 3, 4))
    if kind not in ("encoder", "fresh") or len(dims) == 3
]


def exported(module, x, exporter):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter != "TorchScript":
            optimize = exporter == "torch.export"
            return torch.onnx.export(
                module, (x,), dynamo=True, verbose=False, optimize=optimize, input_names=["x"]
            ).model_proto
        buffer = io.BytesIO()
        torch.onnx.export(module, (x,), buffer, dynamo=False, input_names=["x"], opset_version=17)
        return onnx.load_from_string(buffer.getvalue())


@pytest.mark.parametrize("exporter", ["TorchScript", "torch.export", "torch.export, not optimized"])
@pytest.mark.parametrize(("kind", "dims"), CASES)
def test_steps_are_those_of_pytorch(kind, dims, exporter, tmp_path):
    torch.manual_seed(2)
    module, x, labels = MODULES[kind]().eval(), torch.randn(dims), torch.randn(dims)
    proto = exported(module, x, exporter)
    held = [tensor.name for tensor in proto.graph.initializer]
    bundle = build(proto, loss="mse", optimizer=SGD(lr=0.5), level="O0", trainable=TRAINABLE.get(kind))
    assert [tensor.name for tensor in proto.graph.initializer] == held
    trainer = Trainer(bundle, "cpu", threads=1)
    parameters = trainer.parameters()
    assert sum(value.size for value in parameters.values()) == sum(p.numel() for p in module.parameters())
    optimizer = torch.optim.SGD(module.double().train().parameters(), lr=0.5)
    for _ in range(3):
        expected = nn.functional.mse_loss(module(x.double()), labels.double())
        assert trainer.micro_step({"x": x.numpy(), "labels": labels.numpy()}).loss == pytest.approx(
            expected.item(), rel=1e-5
        )
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], module(x.double()).detach(), atol=1e-5)


@pytest.mark.parametrize("exporter", ["TorchScript", "torch.export", "torch.export, not optimized"])
def test_a_batch_norm_without_scale_reads_the_batch(exporter):
    torch.manual_seed(2)
    module, x, labels = Two(nn.BatchNorm1d(4, affine=False), nn.Tanh()), torch.randn(8, 4) + 1, torch.randn(8, 4)
    proto = exported(module.eval(), x, exporter)
    trainer = Trainer(build(proto, loss="mse", optimizer=SGD(lr=0.5), level="O0"), "cpu", threads=1)
    optimizer = torch.optim.SGD(module.double().train().parameters(), lr=0.5)
    for _ in range(3):
        expected = nn.functional.mse_loss(module(x.double()), labels.double())
        assert trainer.micro_step({"x": x.numpy(), "labels": labels.numpy()}).loss == pytest.approx(
            expected.item(), rel=1e-5
        )
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


@pytest.mark.parametrize("exporter", ["TorchScript", "torch.export"])
def test_copied_layers_match_a_state_dict(exporter, tmp_path):
    """Transposed weights of copied layers have neither names nor numbers of their own: what reads them tells."""
    torch.manual_seed(2)
    module = encoder().eval()
    safetensors.torch.save_file(module.state_dict(), tmp_path / "state.safetensors")
    model = ir.from_proto(exported(module, torch.randn(2, 3, 4), exporter))
    names = names_of(model, tmp_path / "state.safetensors")
    assert not names.absent
    assert len({inner for inner, _ in names.tensors.values()}) == len(names.tensors)


@pytest.mark.parametrize("exporter", ["TorchScript", "torch.export"])
def test_adapters_and_weights_of_copied_layers_find_their_place(exporter, tmp_path):
    """The file has one weight for several layers; what is trained goes back to each."""
    torch.manual_seed(2)
    x, labels = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    proto = exported(copies(nn.Linear(4, 4), 3).eval(), x, exporter)
    outputs = []
    for options in ({"lora": "rank=2,alpha=2,target=*", "optimizer": "adam"}, {"optimizer": "sgd"}):
        trainer = Trainer(build(proto, loss="mse", level="O0", **options), "cpu", threads=1)
        for _ in range(3):
            trainer.micro_step({"x": x.numpy(), "labels": labels.numpy()})
        trainer.export(tmp_path / "trained.onnx", overwrite=True)
        session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x.numpy()})[0])
        np.testing.assert_allclose(
            outputs[-1], trainer.predict({"x": x.numpy()})[proto.graph.output[0].name], atol=1e-5
        )
    model = ir.from_proto(proto)
    assert not take_weights(model, ir.load(tmp_path / "trained.onnx"))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x.numpy()})[0], outputs[-1])


@pytest.mark.parametrize(
    ("operator", "operands", "count"), [("MatMul", "xt", 2), ("MatMul", "tx", 1), ("Where", "cxt", 1)]
)
def test_only_weights_without_names_come_apart(operator, operands, count):
    """A mask or a table that each layer reads may be large, and stays one."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 2] x, bool[2, 2] c) => (float[2, 2] y) { y = Relu(x) }""")
    table = np.array([[1, 2], [3, 4]], np.float32)
    numbers = {"onnx::MatMul_7": table, "layers.0.bias": table[0], "layers.1.bias": table[0]}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in numbers.items())
    value = proto.graph.node.pop().input[0]
    for layer in "01":
        read = [{"x": value, "t": "onnx::MatMul_7"}.get(operand, operand) for operand in operands]
        name, value = f"/layers.{layer}/{operator}", "y" if layer == "1" else "h"
        proto.graph.node.append(onnx.helper.make_node(operator, read, [f"o{layer}"], name))
        proto.graph.node.append(
            onnx.helper.make_node("Add", [f"o{layer}", f"layers.{layer}.bias"], [value], f"/layers.{layer}/Add")
        )
    assert sum(name.startswith("onnx") for name in training_form(proto).graph.initializers) == count
