"""Gradients of functions of one element: exponentials, roots, trigonometry."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


def _wide(op: Builder, node: ir.Node) -> ir.Value:
    """The operand in FP32 if it is 16-bit: its square or exponential may overflow where the gradient does not."""
    x = required(node)
    return op.wide(x)


@gradient("Abs")
def abs_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d|x| = sign(x)·dx."""
    return [op.Mul(g, op.Sign(node.inputs[0]))]


@gradient("Exp")
def exp(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(eˣ) = eˣ·dx."""
    return [op.Mul(g, node.outputs[0])]


@gradient("Log")
def log(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(ln x) = dx / x."""
    return [op.Div(g, node.inputs[0])]


@gradient("Sqrt")
def sqrt(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(√x) = dx / (2·√x)."""
    return [op.Div(op.Mul(g, 0.5), node.outputs[0])]


@gradient("Reciprocal")
def reciprocal(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(1/x) = −y²·dx with y = 1/x."""
    y = node.outputs[0]
    return [op.Neg(op.Mul(g, op.Mul(y, y)))]


@gradient("Erf")
def erf(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(erf x) = 2/√π · exp(−x²)·dx."""
    x = node.inputs[0]
    return [op.Mul(g, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2.0 / math.sqrt(math.pi)))]


@gradient("Sin")
def sin(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(sin x) = cos x·dx."""
    return [op.Mul(g, op.Cos(node.inputs[0]))]


@gradient("Cos")
def cos(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(cos x) = −sin x·dx."""
    return [op.Neg(op.Mul(g, op.Sin(node.inputs[0])))]


@gradient("Tan")
def tan(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(tan x) = (1 + tan² x)·dx."""
    y = node.outputs[0]
    return [op.Mul(g, op.Add(op.Mul(y, y), 1.0))]


@gradient("Sinh")
def sinh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(sinh x) = cosh x·dx = ½(eˣ + e⁻ˣ)·dx."""
    x = _wide(op, node)
    return [op.Mul(g, op.Mul(op.Add(op.Exp(x), op.Exp(op.Neg(x))), 0.5))]


@gradient("Cosh")
def cosh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(cosh x) = sinh x·dx = ½(eˣ − e⁻ˣ)·dx."""
    x = _wide(op, node)
    return [op.Mul(g, op.Mul(op.Sub(op.Exp(x), op.Exp(op.Neg(x))), 0.5))]


@gradient("Tanh")
def tanh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(tanh x) = (1 − tanh² x)·dx."""
    y = node.outputs[0]
    return [op.Mul(g, op.Sub(1.0, op.Mul(y, y)))]


@gradient("Asin")
def asin(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(asin x) = dx / √(1 − x²)."""
    x = node.inputs[0]
    return [op.Div(g, op.Sqrt(op.Sub(1.0, op.Mul(x, x))))]


@gradient("Acos")
def acos(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(acos x) = −dx / √(1 − x²)."""
    x = node.inputs[0]
    return [op.Neg(op.Div(g, op.Sqrt(op.Sub(1.0, op.Mul(x, x)))))]


@gradient("Atan")
def atan(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(atan x) = dx / (1 + x²)."""
    x = _wide(op, node)
    return [op.Div(g, op.Add(op.Mul(x, x), 1.0))]


@gradient("Asinh")
def asinh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(asinh x) = dx / √(x² + 1)."""
    x = _wide(op, node)
    return [op.Div(g, op.Sqrt(op.Add(op.Mul(x, x), 1.0)))]


@gradient("Acosh")
def acosh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(acosh x) = dx / √(x² − 1)."""
    x = _wide(op, node)
    return [op.Div(g, op.Sqrt(op.Sub(op.Mul(x, x), 1.0)))]


@gradient("Atanh")
def atanh(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(atanh x) = dx / (1 − x²)."""
    x = node.inputs[0]
    return [op.Div(g, op.Sub(1.0, op.Mul(x, x)))]
