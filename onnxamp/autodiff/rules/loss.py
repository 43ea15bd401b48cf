"""Gradients of the loss operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("SoftmaxCrossEntropyLoss", inputs=(0,))
def softmax_cross_entropy(op: Builder, node: ir.Node, g: ir.Value, g_log: ir.Value | None = None) -> Gradients:
    """loss = −Σ c·log softmax(x)[label]: dx = c·(softmax(x) − onehot(label)), c as in `_coefficients`.

    The second output, log softmax(x), adds g' − softmax(x)·Σ g'.
    """
    x = required(node)
    has_log = len(node.outputs) > 1 and bool(node.outputs[1].name)
    logarithm = node.outputs[1] if has_log else op.LogSoftmax(x, axis=1)
    if logarithm.shape is None:
        logarithm.shape = x.shape
    probability = op.Exp(logarithm)
    factor, hit = _coefficients(op, node, x, g)
    dx = op.Mul(factor, op.Sub(probability, hit))
    if g_log is not None:
        dx = op.Add(dx, op.Sub(g_log, op.Mul(probability, op.sum(g_log, [1]))))
    return [dx]


@gradient("NegativeLogLikelihoodLoss", inputs=(0,))
def negative_log_likelihood(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """loss = −Σ c·x[label]: dx = −c·onehot(label)."""
    x = required(node)
    factor, hit = _coefficients(op, node, x, g)
    return [op.Neg(op.Mul(factor, hit))]


def _coefficients(op: Builder, node: ir.Node, x: ir.Value, g: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The factor of each position, [N, 1, ...], and onehot(label), [N, C, ...], in the type of `x`.

    The factor is g·w[label] (reduction none, sum) or g·w[label]/Σ w[label] (mean); 0 for ignored labels.
    """
    labels, weight = [*node.inputs, None][1:3]
    assert labels is not None
    classes = op.dims(x)[1]
    assert x.dtype is not None
    rank = op.rank(x)
    ignore = node.attributes["ignore_index"].as_int() if "ignore_index" in node.attributes else None
    labels = op.int64(labels)
    kept = None if ignore is None else op.Not(op.Equal(labels, op.index(ignore)))
    safe = labels if kept is None else op.Where(kept, labels, op.index(0))
    if weight is not None:
        counts = op.Gather(weight, safe, axis=0)
    else:
        counts = op.expand(op.scalar(1.0, x.dtype), labels)
    if kept is not None:
        counts = op.mask(kept, counts)
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "mean":
        total = op.sum(counts, range(rank - 1), keepdims=False)
        g = op.Div(g, total)
    factor = op.Unsqueeze(op.Mul(counts, g), [1])
    spread = [1, -1, *[1] * (rank - 2)]
    if isinstance(classes, int):
        names = op.constant(np.arange(classes).reshape(spread), "classes")
    else:
        names = op.Reshape(op.Range(op.index(0), op.Squeeze(op.dim(x, 1), [0]), op.index(1)), spread)
    hit = op.Equal(op.Unsqueeze(safe, [1]), names)
    return factor, op.cast(hit, x.dtype)
