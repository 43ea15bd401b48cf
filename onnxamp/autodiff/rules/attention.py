"""Gradient of Attention: the scores are computed anew, as memory-saving attention does, not kept."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import through


@gradient("Attention", inputs=(0, 1, 2, 3, 4, 5))
def attention(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """Y = softmax(scale·Q·Kᵀ + mask)·V with past keys and values, shared heads, causal mask.

    The forward is written out in plain operators and differentiated; rows that are masked whole give 0.
    """
    q, k, v, mask, past_k, past_v = [*node.inputs, None, None, None, None][:6]
    assert q is not None
    assert k is not None
    assert v is not None
    op.refuse(node.attributes.get_float("softcap", 0.0) > 0.0, "softcap")
    op.refuse(len(node.inputs) > 6 and node.inputs[6] is not None, "nonpad_kv_seqlen")
    op.refuse(len(gradients) > 3 and gradients[3] is not None, "a gradient of the scores")
    q_heads = _heads(op, q, node.attributes.get_int("q_num_heads", 0))
    k_heads, v_heads = (_heads(op, value, node.attributes.get_int("kv_num_heads", 0)) for value in (k, v))
    if past_k is not None:
        k_heads = op.Concat(past_k, k_heads, axis=2)
    if past_v is not None:
        v_heads = op.Concat(past_v, v_heads, axis=2)
    size, count = op.dims(q_heads)[3], op.dims(q_heads)[1]
    op.refuse(not isinstance(size, int) or not isinstance(count, int), "the heads are not static")
    assert isinstance(size, int)
    assert isinstance(count, int)
    scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(size)
    keys, values = (_repeat(op, value, count) for value in (k_heads, v_heads))
    scores = op.Mul(op.MatMul(q_heads, op.swap(keys)), scale)
    masked = mask is not None
    lowest = op.scalar(-math.inf, scores.dtype)
    if node.attributes.get_int("is_causal", 0):
        scores = op.Where(_causal(op, q_heads, keys, past_k), scores, lowest)
        masked = True
    if mask is not None:
        scores = op.Where(mask, scores, lowest) if mask.dtype == ir.DataType.BOOL else op.Add(scores, mask)
    if masked:
        dead = op.Equal(op.reduce("ReduceMax", scores, [3]), lowest)
        zero = op.scalar(0.0, scores.dtype)
        weights = op.Where(dead, zero, op.Softmax(op.Where(dead, zero, scores), axis=-1))
    else:
        weights = op.Softmax(scores, axis=-1)
    y = op.MatMul(weights, values)
    if op.rank(q) == 3:
        y = op.Reshape(op.transpose(y, [0, 2, 1, 3]), [0, 0, -1])
    y.shape = node.outputs[0].shape if node.outputs[0].shape is not None else y.shape
    return through(op, [y, k_heads, v_heads], gradients[:3], node.inputs)


def _heads(op: Builder, value: ir.Value, count: int) -> ir.Value:
    """[B, S, H·D] as [B, H, S, D]; [B, H, S, D] as it is."""
    if op.rank(value) == 4:
        return value
    width = op.dims(value)[2]
    op.refuse(not isinstance(width, int), "the width of the heads is not static")
    assert isinstance(width, int)
    split = op.Reshape(value, [0, 0, count, width // count])
    if value.shape is not None:
        split.shape = ir.Shape([value.shape[0], value.shape[1], count, width // count])
    return op.transpose(split, [0, 2, 1, 3])


def _repeat(op: Builder, value: ir.Value, count: int) -> ir.Value:
    """Heads shared by several queries, repeated for each of them."""
    own = op.dims(value)[1]
    op.refuse(not isinstance(own, int), "the number of key heads is not static")
    assert isinstance(own, int)
    if own == count:
        return value
    batch, time, size = (op.dim(value, axis) for axis in (0, 2, 3))
    wide = op.Expand(op.Unsqueeze(value, [2]), op.join([batch, own, count // own, time, size]))
    assert value.shape is not None
    wide.shape = ir.Shape([value.shape[0], own, count // own, value.shape[2], value.shape[3]])
    result = op.Reshape(wide, op.join([batch, count, time, size]))
    result.shape = ir.Shape([value.shape[0], count, value.shape[2], value.shape[3]])
    return result


def _causal(op: Builder, q: ir.Value, k: ir.Value, past: ir.Value | None) -> ir.Value:
    """True where key j may be seen by query i: j ≤ i + number of past keys."""
    rows, columns = (op.Range(op.index(0), op.Squeeze(op.dim(value, 2), [0]), op.index(1)) for value in (q, k))
    rows = op.Unsqueeze(rows, [1])
    if past is not None:
        rows = op.Add(rows, op.dim(past, 2))
    return op.LessOrEqual(columns, rows)
