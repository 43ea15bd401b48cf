"""What PyTorch's exporter makes of modules that are common and easily mistaken: one step is PyTorch's, of the same parameters."""

import copy
import itertools

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from onnxamp.trainer.inference import inference_model
from onnxamp.training import build
from onnxamp.training.optimizers import SGD

SCOPES = "pkg.torch.onnx.name_scopes"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


class TwoNorms(nn.Module):
    """Two fresh norms, with equal parameters and statistics, which the exporter merges."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + 2 * torch.tanh(self.second(x * x)))


class SameInput(TwoNorms):
    """Their statistics stay equal; the parameters of the norms do not."""

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) - torch.sigmoid(self.second(x)))


class Codebook(nn.Module):
    """Codes are only chosen by their distance, under a copy of their own in the file: ArgMin has no gradient, but it needs them."""

    def __init__(self):
        super().__init__()
        self.head, self.codes = nn.Linear(4, 3), nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        distance = (self.codes**2).sum(1) - 2 * x @ self.codes.t()
        return self.head(x + self.codes[distance.argmin(1)])


class Routed(nn.Module):
    """A router that only chooses, and never trains in PyTorch either."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, x):
        return torch.einsum("bi,bij->bj", x, self.experts[self.router(x).argmax(1)])


class Steps(nn.Module):
    """A recurrence whose steps are counted at run time and kept in lists."""

    def __init__(self):
        super().__init__()
        self.enter, self.again, self.last = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.size(0), 8, dtype=x.dtype)
        states, squares = [], []
        for t in range(x.size(1)):
            h = torch.tanh(self.enter(x[:, t : t + 1]) + self.again(h))
            states.append(h)
            squares.append(h * h)
        return self.last(torch.stack(states, 1).mean(1) + torch.stack(squares, -1).amax(2))


class Unrolled(nn.Module):
    """A recurrence of two steps, written out, from a state of zeros: of the first product only the bias is left."""

    def __init__(self):
        super().__init__()
        self.enter, self.again, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.enter(x) + self.again(torch.zeros(8, 8, dtype=x.dtype)))
        return self.last(torch.tanh(self.enter(x) + self.again(h)))


def plain(norm, *shape):
    """A norm without scale or bias, or without one of them."""
    return nn.Sequential(
        nn.Linear(4, 8), *([nn.Unflatten(1, shape)] if shape else []), norm, nn.Flatten(), nn.Linear(8, 3)
    )


def merge(proto, noted, fresh):
    """Read the first of equal tensors everywhere, as PyTorch's newer exporter does, with its notes or without any."""
    kept, instead = {}, {}
    for tensor in list(proto.graph.initializer):
        array = numpy_helper.to_array(tensor)
        if fresh and "running" in tensor.name:  # tracing has moved it
            array = np.full(array.shape, "var" in tensor.name, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        if array.size > 1:
            first = kept.setdefault((array.shape, array.tobytes()), tensor.name)
            if first != tensor.name:
                instead[tensor.name] = first
                proto.graph.initializer.remove(tensor)
    for node in proto.graph.node:
        node.input[:] = [instead.get(name, name) for name in node.input]
        if noted:
            node.metadata_props.add(key=SCOPES, value=repr(["", *node.name.split("/")[1:-1], node.op_type]))
        else:
            node.name = ""
    for tensor in proto.graph.initializer if noted else ():
        kind = "BUFFER" if "running" in tensor.name else "PARAMETER"
        tensor.metadata_props.add(key=KIND, value=kind)
    return proto


def fold(proto):
    """Compute products with constants, as PyTorch's newer exporter does."""
    made = {node.output[0]: node for node in proto.graph.node}
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    (gemm,) = (
        n
        for n in proto.graph.node
        if n.op_type == "Gemm"
        and getattr(made.get(n.input[0]), "op_type", "Constant") == "Constant"
        and n.input[0] in made
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.tile(held[gemm.input[2]], (8, 1)), "linear_1"))
    proto.graph.node.remove(gemm)
    for node in proto.graph.node:
        node.input[:] = ["linear_1" if name == gemm.output[0] else name for name in node.input]
    return proto


MODULES = {
    "a state of zeros": Unrolled,
    "scripted steps": Steps,
    "a norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "two norms": TwoNorms,
    "two norms of one input": SameInput,
    "a codebook": Codebook,
    "a router": Routed,
    "BatchNorm without affine": lambda: plain(nn.BatchNorm1d(2, affine=False), 2, 4),
    "BatchNorm of rows without affine": lambda: plain(nn.BatchNorm1d(8, affine=False)),
    "InstanceNorm without affine": lambda: plain(nn.InstanceNorm1d(2), 2, 4),
    "LayerNorm without affine": lambda: plain(nn.LayerNorm(8, elementwise_affine=False)),
    "LayerNorm without bias": lambda: plain(nn.LayerNorm(8, bias=False)),
    "fresh GroupNorms": lambda: nn.Sequential(
        nn.Linear(4, 8),
        nn.Unflatten(1, (8, 1)),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "fresh LayerNorms": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)
    ),
}


def a_step(module, x, labels, rate):
    """The module after a step of SGD in float64, in training mode."""
    module = copy.deepcopy(module).double().train()
    nn.functional.mse_loss(module(x.double()), labels.double()).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    return module


ONE = {"a norm", "a router", *(name for name in MODULES if "without" in name)}
"""Without notes, fresh parameters of two norms cannot be told apart."""
FORMS = [
    ("eval", "O0"),
    ("train", "O0"),
    ("eval", "O2"),
    ("merged", "O0"),
    ("merged, noted", "O0"),
    ("merged, noted, moved", "O0"),
    ("folded", "O0"),
]


CASES = [
    (kind, form, level)
    for kind, (form, level) in itertools.product(MODULES, FORMS)
    if (form != "merged" or kind in ONE) and (form != "folded" or kind == "a state of zeros")
]


@pytest.mark.parametrize(("kind", "form", "level"), CASES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_step_is_that_of_pytorch(export, drive, kind, form, level):
    torch.manual_seed(5)
    module, x, labels = MODULES[kind]().eval(), torch.randn(8, 4), torch.randn(8, 3)
    exported = torch.jit.script(copy.deepcopy(module)) if kind.startswith("scripted") else copy.deepcopy(module)
    proto = export(exported, x, train=form != "eval", opset=18)
    if form in ("train", "merged, noted, moved"):
        for tensor in proto.graph.initializer:  # tracing in training mode has moved the statistics
            if "running" in tensor.name:
                module.state_dict()[tensor.name].copy_(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
    if form.startswith("merged"):
        proto = merge(proto, noted="noted" in form, fresh="moved" not in form)
    elif form == "folded":
        proto = fold(proto)
    driver = drive(build(proto, loss="mse", optimizer=SGD(lr=0.25), level=level, dtype="bf16", loss_scale=1.0))
    driver.step({"x0": x.numpy(), "labels": labels.numpy()})
    found = {tensor.name: driver.view(f"master/{tensor.name}") for tensor in driver.manifest.tensors_in("master")}
    found |= {
        tensor.name: driver.view(f"statistics/{tensor.name}") for tensor in driver.manifest.tensors_in("statistics")
    }
    stepped = a_step(module, x, labels, 0.25)
    trained = {name: value for name, value in stepped.named_parameters() if value.grad is not None}
    before = sum(value.numel() for value in trained.values())
    assert sum(value.size for name, value in found.items() if "running" not in name) == before
    close = {"rtol": 0.05, "atol": 0.02} if level == "O2" else {"rtol": 1e-5, "atol": 1e-6}
    state = {name: value.detach().numpy() for name, value in stepped.state_dict().items()}
    for name, value in found.items():
        if name in state and state[name].shape == value.shape:
            np.testing.assert_allclose(value, state[name], **close, err_msg=name)
    if form not in ("eval", "merged"):
        assert set(found) == {*trained, *(name for name in state if "running" in name)}
    result = ir.to_proto(inference_model(driver.bundle.model, {name: np.array(value) for name, value in found.items()}))
    want = stepped.eval()(x.double()).detach().numpy()
    np.testing.assert_allclose(ReferenceEvaluator(result).run(None, {"x0": x.numpy()})[0], want, **close)


@pytest.mark.parametrize(
    ("noted", "name"), list(itertools.product([False, True], ["val_3", "/norm/Constant_output_0", "gain"]))
)
def test_ones_that_no_framework_has_do_not_train(export, noted, name):
    """A file whose exporter notes parameters notes all of them; else PyTorch's older one tells its constants by their names."""
    proto = export(plain(nn.LayerNorm(8, bias=False)), torch.randn(2, 4), opset=18)
    model = ir.from_proto(proto)
    (norm,) = (node for node in model.graph if node.op_type == "LayerNormalization")
    weight = norm.inputs[1]
    weight.name = name
    for value in model.graph.initializers.values():
        if noted and value is not weight:
            value.metadata_props[KIND] = "PARAMETER"
    bundle = build(model, loss="mse", optimizer="sgd", level="O0")
    trains = name in {tensor.name for tensor in bundle.manifest.tensors_in("master")}
    assert trains == (not noted and "Constant" not in name)
