"""Every elementwise gradient under strict FP16 emulation: finite and right wherever the true one is, at the ends of the range."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxamp.autodiff import gradient_model
from onnxamp.passes.emulate import emulate

ENDS = [300.0, 65504.0, 257.0, 200.0, 11.5, 3.5, 1.0, 0.3, 1e-3, 6.1e-5, 6e-8, 2e-7]
POINTS = np.asarray([0.0, *ENDS, *(-x for x in ENDS)], np.float16)


def swish(alpha):
    return lambda x: x * torch.sigmoid(alpha * x)


UNARY = {
    "Relu": torch.relu,
    "LeakyRelu": F.leaky_relu,
    "ThresholdedRelu": lambda x: torch.where(x > 1, x, 0 * x),
    "Elu": F.elu,
    "Selu": F.selu,
    "Celu": F.celu,
    "Sigmoid": torch.sigmoid,
    "HardSigmoid": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "HardSwish": F.hardswish,
    "Softplus": lambda x: F.softplus(x, threshold=1e9),
    "Softsign": F.softsign,
    "Mish": F.mish,
    "Swish": swish(1.0),
    "Swish<alpha=1.702>": swish(1.702),
    "Shrink": lambda x: torch.where(x.abs() > 0.5, x, 0 * x),
    "Gelu": F.gelu,
    'Gelu<approximate="tanh">': lambda x: F.gelu(x, approximate="tanh"),
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Erf": torch.erf,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Clip": lambda x: x * 1.0,
}
REST = {
    "y = Pow(x, e2)": lambda x: x**2,
    "y = Pow(x, e3)": lambda x: x**3,
    "y = Pow(x, e0)": lambda x: x**0,
    "y = Pow(x, h)": lambda x: x**0.5,
    "y = Pow(x, m)": lambda x: x**-1,
    "y = Max(x, one)": lambda x: x.clamp(min=1),
    "y = Div(x, e3)": lambda x: x / 3,
    "y = Mul(x, x)": lambda x: x * x,
    "y = ReduceL2(u, last)": lambda x: x.abs(),
    "y = ReduceProd(u, last)": lambda x: x * 1.0,
    "y = LpNormalization<axis=1>(u)": lambda x: torch.sign(x) + 0 * x,
    "y = GlobalLpPool(u4)": lambda x: x.abs(),
    "y = LRN<size=1, alpha=1.0>(u4)": lambda x: x * (1 + x * x) ** -0.75,
}
CASES = {**{f"y = {op.partition('<')[0]}{op[len(op.partition('<')[0]) :]}(x)": f for op, f in UNARY.items()}, **REST}


def gradient(body):
    before = ""
    if "u4" in body:
        before = "u4 = Reshape(x, s4)"
    elif "u" in body.partition("(")[2]:
        before = "u = Reshape(x, s2)"
    text = f"""<ir_version: 10, opset_import: ["" : {24 if "Swish" in body else 21}]>
        g (float16[{POINTS.size}] x) => (float16 z)
        <int64[1] last = {{1}}, int64[2] s2 = {{-1, 1}}, int64[4] s4 = {{-1, 1, 1, 1}}>
        {{ {before} {body} z = ReduceSum<keepdims=0>(y) }}"""
    proto = onnx.parser.parse_model(text)
    for name, number in {"e0": 0, "e2": 2, "e3": 3, "h": 0.5, "m": -1, "one": 1}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(number, np.float16), name))
    model = emulate(gradient_model(proto, wrt=["x"]))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["grad/x"], {"x": POINTS})[0].astype(np.float64)


@pytest.mark.parametrize("body", CASES)
def test_finite_and_right_wherever_the_true_gradient_is(body):
    x = torch.tensor(POINTS.astype(np.float64), requires_grad=True)
    y = CASES[body](x)
    y.sum().backward()
    want = x.grad.numpy()
    with np.errstate(over="ignore"):
        sure = np.isfinite(want.astype(np.float16)) & np.isfinite(y.detach().numpy().astype(np.float16))
    kinks = {0.0, 0.5, 1.0, -0.5, 3.0}
    sure &= ~np.isin(POINTS, list(kinks)) | (np.asarray([body.split("(")[0][4:] in ("Gelu", "Mish", "Exp")]))
    assert sure.sum() >= 3
    got = gradient(body)
    bad = sure & ~np.isfinite(got)
    assert not bad.any(), f"{body}: {dict(zip(POINTS[bad].tolist(), got[bad].tolist(), strict=True))}"
    np.testing.assert_allclose(got[sure], want[sure], rtol=0.02, atol=math.ldexp(1, -9))


def test_number_of_cases():
    assert len(CASES) == 49
