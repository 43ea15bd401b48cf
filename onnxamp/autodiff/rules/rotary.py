"""Gradients of rotary positions in ONNX Runtime's forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.reverse import defined

MS = "com.microsoft"


@defined("RotaryEmbedding", MS, inputs=(0,))
def rotary_embedding(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Pairs of each head turned by the angle of their position: (a·cos − b·sin, a·sin + b·cos)."""
    x, places, cosines, sines = (required(node, position) for position in range(4))
    op.refuse(bool(node.attributes.get_int("is_packed_batching", 0)), "packed batches")
    op.refuse(node.attributes.get_float("scale", 1.0) != 1.0, "a scale")
    heads = x
    if op.rank(x) == 3:
        width, half = op.dims(x)[2], op.dims(cosines)[1]
        op.refuse(not isinstance(width, int) or not isinstance(half, int), "the width is not static")
        assert isinstance(width, int)
        assert isinstance(half, int)
        count = node.attributes.get_int("num_heads", 0) or width // (2 * half)
        heads = op.transpose(op.Reshape(x, [0, 0, count, width // count]), [0, 2, 1, 3])
    if op.dims(places) == [1]:
        places = op.Unsqueeze(op.Add(steps(op, heads), places), [0])
    turned = node.attributes.get_int("rotary_embedding_dim", 0)
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    result = rotate(op, heads, (cosines, sines), places, interleaved, turned)
    if op.rank(x) == 3:
        result = op.Reshape(op.transpose(result, [0, 2, 1, 3]), np.asarray([0, 0, -1], np.int64))
    return [result]


def steps(op: Builder, heads: ir.Value) -> ir.Value:
    """0, 1, ... for the positions of [B, H, S, D]."""
    return op.Range(op.index(0), op.Squeeze(op.dim(heads, 2), [0]), op.index(1))


def rotate(
    op: Builder,
    heads: ir.Value,
    tables: tuple[ir.Value, ir.Value],
    places: ir.Value,
    interleaved: bool,
    turned: int = 0,
) -> ir.Value:
    """[B, H, S, D] turned by the angles of `places`, [B or 1, S].

    Args:
        op: The builder.
        heads: What is turned.
        tables: Cosines and sines, [positions, half of the turned width].
        places: Rows of the tables.
        interleaved: Pairs are neighbours; else they lie half of the turned width apart.
        turned: How many of the D are turned, from the first; 0 for as many as the tables have.
    """
    half, size = op.dims(tables[0])[1], op.dims(heads)[3]
    op.refuse(not isinstance(half, int), "the width of the tables is not static")
    assert isinstance(half, int)
    turned = turned or 2 * half
    cos, sin = (op.Unsqueeze(op.Gather(table, places, axis=0), [1]) for table in tables)
    rest = None
    if size != turned:
        heads, rest = op.Slice(heads, [0], [turned], [3]), op.Slice(heads, [turned], [2**63 - 1], [3])
    if interleaved:
        pairs = op.Reshape(heads, op.join([0, 0, 0, half, 2]))
        a, b = (op.Squeeze(op.Slice(pairs, [i], [i + 1], [4]), [4]) for i in range(2))
        first, second = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(a, sin), op.Mul(b, cos))
        joined = op.Concat(op.Unsqueeze(first, [4]), op.Unsqueeze(second, [4]), axis=4)
        result = op.Reshape(joined, [0, 0, 0, turned])
    else:
        a, b = op.Slice(heads, [0], [half], [3]), op.Slice(heads, [half], [turned], [3])
        result = op.Concat(op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(a, sin), op.Mul(b, cos)), axis=3)
    return result if rest is None else op.Concat(result, rest, axis=3)
