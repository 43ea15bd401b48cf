"""Gradient of DequantizeLinear. QuantizeLinear rounds, so nothing flows back through it."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("DequantizeLinear", inputs=(1,))
def dequantize_linear(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = (x − zero)·scale: dscale = Σ g·(x − zero) over what shares the scale."""
    x, scale = node.inputs[:2]
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    assert x is not None
    assert scale is not None
    assert g.dtype is not None
    rank, block = op.rank(x), node.attributes.get_int("block_size", 0)
    if block:
        return [None, _of_blocks(op, x, zero, g, node.attributes.get_int("axis", 1) % rank, block, scale)]
    shape = [1] * rank
    if op.rank(scale):
        shape[node.attributes.get_int("axis", 1) % rank] = -1
    steps = op.cast(x, g.dtype)
    if zero is not None:
        steps = op.Sub(steps, op.Reshape(op.cast(zero, g.dtype), shape))
    product = op.Mul(op.wide(g), op.wide(steps))
    axes = [axis for axis in range(rank) if shape[axis] == 1]
    return [None, op.reshape(op.sum(product, axes, keepdims=False), scale)]


def _of_blocks(
    op: Builder, x: ir.Value, zero: ir.Value | None, g: ir.Value, axis: int, block: int, scale: ir.Value
) -> ir.Value:
    """The gradient of scales that each belong to a block along one axis."""
    wide = op.wide(g)
    extent = [op.dim(x, other) for other in range(op.rank(x))]
    shape = op.join([*extent[:axis], -1, block, *extent[axis + 1 :]])
    assert wide.dtype is not None
    steps = op.Reshape(op.cast(x, wide.dtype), shape)
    if zero is not None:
        steps = op.Sub(steps, op.Unsqueeze(op.cast(zero, wide.dtype), [axis + 1]))
    return op.reshape(op.sum(op.Mul(op.Reshape(wide, shape), steps), [axis + 1], keepdims=False), scale)
