"""Gradients of matrix products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("MatMul")
def matmul(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(A·B): dA = g·Bᵀ, dB = Aᵀ·g, summed over broadcast batch dimensions.

    Where B is one matrix, as a weight is, dB is one Gemm over all rows of A, with no batch of products to sum.
    """
    a, b = node.inputs
    assert a is not None
    assert b is not None
    rank_a, rank_b = op.rank(a), op.rank(b)
    if rank_a == 1 or rank_b == 1:
        return _matmul_vector(op, a, b, g)
    da = db = None
    if 0 in op.wanted:
        da = op.Gemm(g, b, transB=1) if rank_a == rank_b == 2 else op.MatMul(g, op.swap(b))
        da = _sum_batch(op, da, a, b)
    if 1 in op.wanted:
        if rank_b == 2:
            db = op.Gemm(op.rows(a, b, 0), op.rows(g, b, 1), transA=1)
        else:
            db = _sum_batch(op, op.MatMul(op.swap(a), g), b, a)
    return [da, db]


def _sum_batch(op: Builder, g: ir.Value, target: ir.Value, other: ir.Value) -> ir.Value:
    """Sum over the batch dimensions in which `target` was broadcast against `other`."""
    own, rest = op.dims(target), op.dims(other)
    if len(own) == 2 == len(rest):
        return g
    return op.unbroadcast_dims(g, target, [rest[:-2] + own[-2:]])


def _matmul_vector(op: Builder, a: ir.Value, b: ir.Value, g: ir.Value) -> Gradients:
    """A vector on the left is a row, one on the right a column: differentiate the product of matrices."""
    rank_a, rank_b = op.rank(a), op.rank(b)
    left = op.Unsqueeze(a, [0]) if rank_a == 1 else a
    right = op.Unsqueeze(b, [1]) if rank_b == 1 else b
    if rank_a == 1:
        g = op.Unsqueeze(g, [op.rank(b) - 2]) if rank_b > 1 else op.Reshape(g, [1, 1])
    if rank_b == 1 and rank_a > 1:
        g = op.Unsqueeze(g, [rank_a - 1])
    da = op.MatMul(g, op.swap(right))
    db = op.MatMul(op.swap(left), g)
    if rank_a == 1:
        da = op.Reshape(op.sum(da, range(max(rank_b, 2) - 1), keepdims=False), [-1])
    else:
        da = _sum_batch(op, da, a, right)
    if rank_b == 1:
        db = op.sum(db, range(max(rank_a, 2) - 2), keepdims=False)
        db = op.Reshape(db, [-1])
    else:
        db = _sum_batch(op, db, b, left)
    return [da, db]


@gradient("Gemm")
def gemm(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Y = α·A'·B' + β·C: dA' = α·g·B'ᵀ, dB' = α·A'ᵀ·g, dC = β·g summed over its broadcast."""
    a, b, c = [*node.inputs, None][:3]
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    trans_a, trans_b = (node.attributes.get_int(name, 0) for name in ("transA", "transB"))
    da = db = dc = None
    scale = {"alpha": alpha} if alpha != 1.0 else {}
    if 0 in op.wanted:
        if trans_a:
            da = op.Gemm(b, g, transA=trans_b, transB=1, **scale)
        else:
            da = op.Gemm(g, b, transB=1 - trans_b, **scale)
    if 1 in op.wanted:
        if trans_b:
            db = op.Gemm(g, a, transA=1, transB=trans_a, **scale)
        else:
            db = op.Gemm(a, g, transA=1 - trans_a, **scale)
    if 2 in op.wanted and c is not None:
        dc = op.unbroadcast(g if beta == 1.0 else op.Mul(g, beta), c, [c, node.outputs[0]])
    return [da, db, dc]


@gradient("Det")
def det(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The cofactors, as determinants of minors: also right where the matrix has no inverse."""
    x = required(node)
    size = op.dims(x)[-1]
    op.refuse(not isinstance(size, int) or size > 16, "it needs a static size of at most 16")
    assert isinstance(size, int)
    outer = op.Unsqueeze(g, [-2, -1])
    if size == 1:
        return [op.reshape(outer, x)]
    others = [[k for k in range(size) if k != i] for i in range(size)]
    places = np.asarray(
        [[[r * size + c for c in others[j] for r in others[i]] for j in range(size)] for i in range(size)]
    )
    rank = op.rank(x)
    lead = [op.dim(x, axis) for axis in range(rank - 2)]
    minors = op.Gather(op.Reshape(x, op.join([*lead, size * size])), places.astype(np.int64), axis=rank - 2)
    minors = op.Reshape(minors, op.join([*lead, size, size, size - 1, size - 1]))
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    assert x.dtype is not None
    cofactors = op.Mul(op.Det(minors), op.constant(signs.astype(x.dtype.numpy())))
    return [op.Mul(outer, cofactors)]
