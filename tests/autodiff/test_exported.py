"""Models of the usual kinds by both of PyTorch's exporters, in training and inference mode: gradients of all parameters against
float64 autograd, at two batch sizes."""

from __future__ import annotations

import copy
import importlib.util
import io
import pathlib
import sys
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from onnxamp.autodiff import gradient_model

MATRIX = [
    (kind, dynamo, training)
    for kind in ("lstm", "unet", "mobilenet", "vit", "llama", "scan")
    for dynamo in (True, False)
    for training in (True, False)
    if dynamo or kind != "scan"  # the other exporter does not know torch.scan
]
# What runs without --exported-all: the exporter on torch.export takes seconds a model, and test_models has it.
SAMPLE = {
    ("lstm", False, False), ("unet", False, True), ("unet", False, False), ("mobilenet", False, True), ("mobilenet", False, False),
    ("vit", False, False), ("llama", False, True), ("llama", False, False),
}  # fmt: skip


@pytest.fixture(scope="module")
def architectures():
    path = pathlib.Path(__file__).parents[2] / "models" / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["architectures"] = module
    spec.loader.exec_module(module)
    return module


def export(module, data, dynamo):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = tuple({0: torch.export.Dim("batch")} for _ in data)
            # The optimizer would merge BatchNorm into convolutions.
            program = torch.onnx.export(
                module, data, dynamo=True, verbose=False, optimize=not module.training, dynamic_shapes=shapes
            )
            return program.model_proto
        buffer = io.BytesIO()
        torch.onnx.export(
            module, data, buffer, dynamo=False, input_names=["x", "t"], dynamic_axes={"x": {0: "batch"}, "t": {0: "batch"}},
            training=torch.onnx.TrainingMode.PRESERVE if module.training else torch.onnx.TrainingMode.EVAL,
            do_constant_folding=not module.training, opset_version=17,
        )  # fmt: skip
        return onnx.load_from_string(buffer.getvalue())


def to_training_form(proto):
    """The exporter on torch.export writes inference BatchNormalization whatever the module's mode."""
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization" and not any(a.name == "training_mode" for a in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_var"])


def merged(module):
    """The module with BatchNorm merged into the convolutions, as exporters do in inference mode."""
    result = copy.deepcopy(module)
    for parent in list(result.modules()):
        if isinstance(parent, nn.Sequential) and len(parent) > 1 and isinstance(parent[1], nn.BatchNorm2d):
            parent[0], parent[1] = fuse_conv_bn_eval(parent[0], parent[1]), nn.Identity()
    return result.requires_grad_()


def lifted(proto):
    """Constants of parameters as initializers."""
    for node in list(proto.graph.node):
        if node.op_type == "Constant" and node.attribute[0].type == onnx.AttributeProto.TENSOR:
            tensor = node.attribute[0].t
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 0:
                proto.graph.initializer.append(tensor)
                proto.graph.initializer[-1].name = node.output[0]
                proto.graph.node.remove(node)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "dynamo", "training"), MATRIX)
def test_gradients_equal_autograd(kind, dynamo, training, architectures, request, record_property):
    if (kind, dynamo, training) not in SAMPLE and not request.config.getoption("exported_all"):
        pytest.skip("runs with --exported-all")
    torch.manual_seed(1)
    make, data = architectures.KINDS[kind]
    module = architectures.WithLoss(make()).train(training)
    with torch.no_grad():  # fresh scales are all ones: exporters merge equal tensors
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    def batch(n):
        x = data(n)
        with torch.no_grad():
            return x, architectures.targets(copy.deepcopy(module).module(x), module.last)

    reference = copy.deepcopy(module)  # an export in training mode moves the running statistics
    traced = batch(4)
    proto = export(module, traced, dynamo)
    lifted(proto)
    if training:
        to_training_form(proto)
    else:
        reference = merged(reference)
    held = architectures.held(proto, reference)
    result = gradient_model(proto, proto.graph.output[0].name, list(held))
    final = ir.to_proto(result)
    onnx.checker.check_model(final)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(final.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    errors = []
    for samples in (traced, batch(3)):
        feeds = {value.name: x.numpy() for value, x in zip(proto.graph.input, samples, strict=True)}
        got = dict(zip(names, session.run(None, feeds), strict=True))
        exact, single = copy.deepcopy(reference).double(), copy.deepcopy(reference)
        exact(*(x.double() if x.is_floating_point() else x for x in samples)).backward()
        single(*samples).backward()
        double, own = ({n: p.grad.numpy() for n, p in m.named_parameters()} for m in (exact, single))
        for key, form in held.items():
            want, torch_own = form(double.__getitem__), form(own.__getitem__)
            value = got[f"grad/{key}"].reshape(want.shape)
            norm = np.linalg.norm(want)
            assert norm > 1e-7, key
            error, torch_error = (np.linalg.norm(x - want) / norm for x in (value, torch_own))
            assert error <= max(1e-4, 2 * torch_error), f"{key}: {error:.2e}, PyTorch fp32 {torch_error:.2e}"
            errors.append(float(error))
    record_property("parameters", len(held))  # with --junitxml they are kept
    record_property("largest_error", max(errors))
