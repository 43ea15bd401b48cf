"""Gradients of Softmax and its family."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Softmax")
def softmax(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dx = y·(g − Σ y·g) over the axis."""
    y = node.outputs[0]
    axis = node.attributes.get_int("axis", -1) % op.rank(y)
    weighted = op.Mul(y, g)
    return [op.Sub(weighted, op.Mul(y, op.sum(weighted, [axis])))]


@gradient("LogSoftmax")
def log_softmax(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dx = g − softmax(x)·Σ g over the axis."""
    y = node.outputs[0]
    axis = node.attributes.get_int("axis", -1) % op.rank(y)
    return [op.Sub(g, op.Mul(op.Exp(y), op.sum(g, [axis])))]
