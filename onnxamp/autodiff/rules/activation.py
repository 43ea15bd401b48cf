"""Gradients of activation functions. At a kink the derivative is one of the two one-sided ones."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Relu")
def relu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d = g·sign(y); a product because Sign exists in every type and is cheaper than Greater and Where. Where g has overflowed
    already, it is not finite at a dead unit either."""
    return [op.Mul(g, op.Sign(node.outputs[0]))]


@gradient("LeakyRelu")
def leaky_relu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g where x ≥ 0, else α·g."""
    alpha = node.attributes.get_float("alpha", 0.01)
    return [op.Where(op.Less(required(node), 0.0), op.Mul(g, alpha), g)]


@gradient("PRelu", broadcast=True)
def prelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dx = g where x ≥ 0, else slope·g; dslope = g·x where x < 0."""
    x, slope = node.inputs
    negative = op.Less(x, 0.0)
    return [op.Where(negative, op.Mul(g, slope), g), op.mask(negative, op.Mul(g, x)) if 1 in op.wanted else None]


@gradient("ThresholdedRelu")
def thresholded_relu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g where x > α, else 0."""
    return [op.mask(op.Greater(required(node), node.attributes.get_float("alpha", 1.0)), g)]


@gradient("Elu")
def elu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g where x ≥ 0, else (y + α)·g, since y = α(eˣ − 1) there."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return [op.Where(op.Less(required(node), 0.0), op.Mul(g, op.Add(node.outputs[0], alpha)), g)]


@gradient("Selu")
def selu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """γ·g where x > 0, else (y + γα)·g."""
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    low = op.Add(node.outputs[0], alpha * gamma)
    return [op.Mul(g, op.Where(op.Greater(required(node), 0.0), op.scalar(gamma, g.dtype), low))]


@gradient("Celu")
def celu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g where x ≥ 0, else (y/α + 1)·g."""
    alpha = node.attributes.get_float("alpha", 1.0)
    low = op.Add(op.Mul(node.outputs[0], 1.0 / alpha), 1.0)
    return [op.Where(op.Less(required(node), 0.0), op.Mul(g, low), g)]


@gradient("Sigmoid")
def sigmoid(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y·(1 − y)·g."""
    y = node.outputs[0]
    return [op.Mul(g, op.Mul(y, op.Sub(1.0, y)))]


@gradient("HardSigmoid")
def hard_sigmoid(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """α·g where 0 < y < 1."""
    y = node.outputs[0]
    inside = op.And(op.Greater(y, 0.0), op.Less(y, 1.0))
    return [op.mask(inside, op.Mul(g, node.attributes.get_float("alpha", 0.2)))]


@gradient("HardSwish")
def hard_swish(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """0 where x ≤ −3, g where x ≥ 3, (x/3 + ½)·g between."""
    x = required(node)
    slope = op.Add(op.Mul(x, 1.0 / 3.0), 0.5)
    inner = op.mask(op.Greater(x, -3.0), op.Mul(g, slope))
    return [op.Where(op.Less(x, 3.0), inner, g)]


@gradient("Softplus")
def softplus(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """σ(x)·g."""
    return [op.Mul(g, op.Sigmoid(required(node)))]


@gradient("Softsign")
def softsign(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g / (1 + |x|)²; in two steps, as the square of 300 is beyond FP16."""
    d = op.Add(op.Abs(required(node)), 1.0)
    return [op.Div(op.Div(g, d), d)]


@gradient("Mish")
def mish(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x·t, t = tanh(softplus x): (t + x·(1 − t²)·σ(x))·g."""
    x = required(node)
    t = op.Tanh(op.Softplus(x))
    inner = op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(t, t)))
    return [op.Mul(g, op.Add(t, inner))]


@gradient("Swish")
def swish(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x·σ(αx): (σ + α·x·σ·(1 − σ))·g."""
    return _swish(op, node, g, node.attributes.get_float("alpha", 1.0))


@gradient("QuickGelu", domain="com.microsoft")
def quick_gelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x·σ(αx), α = 1.702 by default."""
    return _swish(op, node, g, node.attributes.get_float("alpha", 1.702))


def _swish(op: Builder, node: ir.Node, g: ir.Value, alpha: float) -> Gradients:
    x = required(node)
    scaled = x if alpha == 1.0 else op.Mul(x, alpha)
    s = op.Sigmoid(scaled)
    bend = op.Mul(x, op.Mul(s, op.Sub(1.0, s)))  # not αx·(...), which is ∞·0 where αx overflows
    return [op.Mul(g, op.Add(s, bend if alpha == 1.0 else op.Mul(bend, alpha)))]


@gradient("Shrink")
def shrink(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """g where |x| > λ, else 0."""
    return [op.mask(op.Greater(op.Abs(required(node)), node.attributes.get_float("lambd", 0.5)), g)]


@gradient("Gelu")
def gelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Exact: (Φ(x) + x·φ(x))·g; approximate="tanh": the derivative of ½x(1 + tanh(√(2/π)(x + 0.044715x³)))."""
    if node.attributes.get_string("approximate", "none") == "tanh":
        return [_gelu_tanh(op, required(node), g)]
    return [_gelu_erf(op, required(node), g)]


@gradient("Gelu", domain="com.microsoft")
def contrib_gelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The exact form."""
    return [_gelu_erf(op, required(node), g)]


@gradient("BiasGelu", domain="com.microsoft", broadcast=True)
def bias_gelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Gelu of x + b: both operands receive the same."""
    d = _gelu_erf(op, op.Add(*node.inputs), g)
    return [d, d]


@gradient("FastGelu", domain="com.microsoft", broadcast=True)
def fast_gelu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The tanh form of x, or of x + b."""
    x = op.Add(*node.inputs) if len(node.inputs) > 1 and node.inputs[1] is not None else required(node)
    return [_gelu_tanh(op, x, g)] * len(node.inputs)


def _gelu_erf(op: Builder, x: ir.Value, g: ir.Value) -> ir.Value:
    cdf = op.Mul(op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0), 0.5)
    pdf = op.Mul(op.Exp(op.Mul(op.Mul(x, x), -0.5)), 1.0 / math.sqrt(2.0 * math.pi))
    return op.Mul(g, op.Add(cdf, op.Mul(x, pdf)))


def _gelu_tanh(op: Builder, x: ir.Value, g: ir.Value) -> ir.Value:
    c = math.sqrt(2.0 / math.pi)
    square = op.Mul(x, x)
    t = op.Tanh(op.Mul(x, op.Add(op.Mul(square, c * 0.044715), c)))
    # x·c·(1 + 3·0.044715·x²)·(1 − t²) from the side that vanishes: x² overflows FP16 from 256 on, and ∞·0 is NaN.
    bell = op.Mul(x, op.Sub(1.0, op.Mul(t, t)))
    bend = op.Add(op.Mul(op.Mul(op.Mul(bell, x), x), 3 * c * 0.044715), op.Mul(bell, c))
    return op.Mul(g, op.Mul(op.Add(op.Add(t, 1.0), bend), 0.5))


@gradient("Dropout", inputs=(0,))
def dropout(op: Builder, node: ir.Node, g: ir.Value, _: ir.Value | None = None) -> Gradients:
    """Inference: g. Training: g / (1 − ratio) where the mask kept the element."""
    training = [*node.inputs, None, None][2]
    mode = op.known(training)
    if training is None or (mode is not None and not bool(mode)):
        return [g]
    op.refuse(mode is None, "the training_mode of Dropout is computed at run time")
    if len(node.outputs) == 1:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:
        mask.name = op.unique(f"{node.outputs[0].name}/mask")
        mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), node.outputs[0].shape
    ratio_input = node.inputs[1] if len(node.inputs) > 1 else None
    ratio = 0.5 if ratio_input is None else op.known(ratio_input)
    if ratio is not None:
        return [op.mask(mask, op.Mul(g, 1.0 / (1.0 - float(ratio))))]
    assert ratio_input is not None
    assert g.dtype is not None
    return [op.mask(mask, op.Div(g, op.Sub(1.0, op.cast(ratio_input, g.dtype))))]
