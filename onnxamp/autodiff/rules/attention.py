"""Gradients of Attention: the scores are computed anew, as memory-saving attention does, not kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.reverse import defined
from onnxamp.autodiff.rules.rotary import rotate, steps

MS = "com.microsoft"


@defined("Attention", inputs=(0, 1, 2, 3, 4, 5))
def attention(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Y = softmax(scale·Q·Kᵀ + mask)·V with past keys and values, shared heads, soft cap, causal and sliding masks."""
    q, k, v, mask, past_k, past_v, filled = [*node.inputs, None, None, None, None][:7]
    assert q is not None
    assert k is not None
    assert v is not None
    q_heads = split_heads(op, q, node.attributes.get_int("q_num_heads", 0))
    k_heads, v_heads = (split_heads(op, value, node.attributes.get_int("kv_num_heads", 0)) for value in (k, v))
    k_heads = k_heads if past_k is None else op.Concat(past_k, k_heads, axis=2)
    v_heads = v_heads if past_v is None else op.Concat(past_v, v_heads, axis=2)
    count = op.dims(q_heads)[1]
    op.refuse(not isinstance(count, int), "the heads are not static")
    assert isinstance(count, int)
    keys, values = (_repeat(op, value, count) for value in (k_heads, v_heads))
    capped, mode = node.attributes.get_float("softcap", 0.0) > 0.0, node.attributes.get_int("qk_matmul_output_mode", 0)
    op.refuse(capped and mode == 0 and len(node.outputs) > 3, "softcap with the scores before it as output")
    shown = scores = _scores(op, node, q_heads, keys)
    if mask is not None:
        scores = _masked(op, scores, mask)
    scores = _hidden(op, scores, _allowed(op, node, q_heads, keys, past_k, filled))
    masked = scores is not shown
    shown = scores if mode == 2 else shown
    weights = _weights(op, scores, masked)
    shown = weights if mode == 3 else shown
    y = op.MatMul(weights, values)
    if op.rank(q) == 3:
        y = join_heads(op, y)
    return [y, k_heads, v_heads, shown]


def _scores(op: Builder, node: ir.Node, q: ir.Value, k: ir.Value) -> ir.Value:
    """scale·Q·Kᵀ of heads [B, H, S, D], with the soft cap of the node."""
    size = op.dims(q)[3]
    op.refuse(not isinstance(size, int), "the heads are not static")
    assert isinstance(size, int)
    scores = op.Mul(op.MatMul(q, op.swap(k)), node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(size))
    cap = node.attributes.get_float("softcap", 0.0)
    return op.Mul(op.Tanh(op.Mul(scores, 1.0 / cap)), cap) if cap > 0.0 else scores


def _hidden(op: Builder, scores: ir.Value, allowed: Sequence[ir.Value]) -> ir.Value:
    """`scores`, and −∞ where one of `allowed` is false."""
    for seen in allowed:
        scores = op.Where(seen, scores, op.scalar(-math.inf, scores.dtype))
    return scores


def _masked(op: Builder, scores: ir.Value, mask: ir.Value) -> ir.Value:
    """`scores` with a mask, which may be shorter than the keys: what it leaves out is not seen."""
    lowest = op.scalar(-math.inf, scores.dtype)
    own, keys = op.dims(mask)[-1], op.dims(scores)[-1]
    lack = keys - own if isinstance(own, int) and isinstance(keys, int) and own > 1 else 0
    if lack == 0 and mask.dtype == ir.DataType.BOOL:
        return op.Where(mask, scores, lowest)
    if mask.dtype == ir.DataType.BOOL:
        mask = op.Where(mask, op.scalar(0.0, scores.dtype), lowest)
    if lack:
        mask = op.Pad(mask, [0] * (2 * op.rank(mask) - 1) + [lack], lowest)
    return op.Add(scores, mask)


def _weights(op: Builder, scores: ir.Value, masked: bool) -> ir.Value:
    """Softmax over the keys; rows that are masked whole give 0."""
    if not masked:
        return op.Softmax(scores, axis=-1)
    zero = op.scalar(0.0, scores.dtype)
    dead = op.Equal(op.reduce("ReduceMax", scores, [3]), op.scalar(-math.inf, scores.dtype))
    return op.Where(dead, zero, op.Softmax(op.Where(dead, zero, scores), axis=-1))


def _allowed(
    op: Builder, node: ir.Node, q: ir.Value, k: ir.Value, past: ir.Value | None, filled: ir.Value | None
) -> list[ir.Value]:
    """Which keys each query may see: those that are filled, not later ones, those in a window."""
    causal = bool(node.attributes.get_int("is_causal", 0))
    left, right = (node.attributes.get_int(f"{side}_window_size", -1) for side in ("left", "right"))
    found = []
    columns = steps(op, k)
    if filled is not None:
        filled = op.Reshape(op.int64(filled), [-1, 1, 1, 1])
        found.append(op.Less(columns, filled))
    if causal or left >= 0 or right >= 0:
        rows = op.Unsqueeze(steps(op, q), [1])
        if past is not None:
            rows = op.Add(rows, op.dim(past, 2))
        elif filled is not None:
            rows = op.Add(rows, op.Sub(filled, op.dim(q, 2)))
        if causal:
            found.append(op.LessOrEqual(columns, rows))
        if left >= 0:
            found.append(op.LessOrEqual(op.Sub(rows, columns), op.index(left)))
        if right >= 0:
            found.append(op.LessOrEqual(op.Sub(columns, rows), op.index(right)))
    return found


def split_heads(op: Builder, value: ir.Value, count: int) -> ir.Value:
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


def join_heads(op: Builder, value: ir.Value) -> ir.Value:
    """[B, H, S, D] as [B, S, H·D]."""
    return op.Reshape(op.transpose(value, [0, 2, 1, 3]), [0, 0, -1])


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


@defined("MultiHeadAttention", MS, inputs=(0, 1, 2, 3, 5, 6, 7))
def multi_head_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """ONNX Runtime's attention on projected queries, keys and values, which may come packed in one tensor."""
    q, k, v, bias, padding, added, past_k, past_v, length, cache = [*node.inputs, *[None] * 10][:10]
    assert q is not None
    op.refuse(length is not None or cache is not None, "buffers of past keys")
    heads = node.attributes["num_heads"].as_int()
    if k is None:  # [B, S, H, 3, D]
        q, k, v = (join_heads(op, value) for value in _unpacked(op, q, 3))
    elif v is None:  # [B, S, H, 2, D]
        k, v = (join_heads(op, value) for value in _unpacked(op, k, 2))
    assert v is not None
    if bias is not None:
        sizes = [op.dims(value)[2] if op.rank(value) == 3 else None for value in (q, k, v)]
        op.refuse(not all(isinstance(size, int) for size in sizes), "a bias on keys of unknown width")
        parts, start = [], 0
        for value, size in zip((q, k, v), sizes, strict=True):
            assert isinstance(size, int)
            parts.append(op.Add(value, op.Slice(bias, [start], [start + size], [0])))
            start += size
        q, k, v = parts
    return _attend(op, node, [split_heads(op, value, heads) for value in (q, k, v)], padding, added, (past_k, past_v))


def _unpacked(op: Builder, value: ir.Value, count: int) -> list[ir.Value]:
    """[B, S, H, count, D] as `count` of [B, H, S, D]."""
    parts = [op.Squeeze(op.Slice(value, [i], [i + 1], [3]), [3]) for i in range(count)]
    return [op.transpose(part, [0, 2, 1, 3]) for part in parts]


@defined("GroupQueryAttention", MS, inputs=(0, 1, 2, 10, 11))
def group_query_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """ONNX Runtime's causal attention of decoders on whole sequences: shared key heads, rotary positions, a window, a sink."""
    q, k, v, past_k, past_v, last, _, cosines, sines, places, added, sink, *rest = [*node.inputs, *[None] * 17][:17]
    assert q is not None
    assert last is not None
    op.refuse(past_k is not None or past_v is not None, "past keys")
    op.refuse(any(value is not None for value in rest), "scales of a cache, norms of heads, or lengths of queries")
    op.refuse(len(node.outputs) > 3 and bool(node.outputs[3].name), "the scores as output")
    count, shared = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    if k is None or v is None:  # [B, S, (H + 2·shared)·D]
        width = op.dims(q)[2]
        op.refuse(not isinstance(width, int), "the width is not static")
        assert isinstance(width, int)
        one = width // (count + 2 * shared)
        ends = [0, count * one, (count + shared) * one, width]
        q, k, v = (op.Slice(q, [start], [stop], [2]) for start, stop in itertools.pairwise(ends))
    q, k, v = split_heads(op, q, count), split_heads(op, k, shared), split_heads(op, v, shared)
    if node.attributes.get_int("do_rotary", 0):
        assert cosines is not None
        assert sines is not None
        places = op.Unsqueeze(steps(op, q), [0]) if places is None else places
        interleaved = bool(node.attributes.get_int("rotary_interleaved", 0))
        q, k = (rotate(op, value, (cosines, sines), places, interleaved) for value in (q, k))
    keys, values = (_repeat(op, value, count) for value in (k, v))
    scores = _scores(op, node, q, keys)
    if added is not None:
        scores = op.Add(scores, added)
    columns = steps(op, keys)
    rows = op.Unsqueeze(steps(op, q), [1])
    window = node.attributes.get_int("local_window_size", -1)
    allowed = [op.LessOrEqual(columns, rows), op.LessOrEqual(columns, op.Reshape(op.int64(last), [-1, 1, 1, 1]))]
    if window >= 0:
        allowed.append(op.Less(op.Sub(rows, columns), op.index(window)))
    scores = _hidden(op, scores, allowed)
    smooth = node.attributes.get_int("smooth_softmax", 0)
    if sink is not None or smooth:
        one_each = op.scalar(0.0, scores.dtype) if sink is None else op.Reshape(sink, [1, count, 1, 1])
        column = op.Expand(one_each, op.join([op.dim(scores, 0), count, op.dim(scores, 2), 1]))
        weights = op.Slice(op.Softmax(op.Concat(scores, column, axis=3), axis=-1), [0], [-1], [3])
    else:
        weights = _weights(op, scores, masked=True)
    return [join_heads(op, op.MatMul(weights, values)), k, v]


@defined("Attention", MS, inputs=(0, 1, 2, 4, 5))
def projected_attention(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """ONNX Runtime's attention with its projection: queries, keys and values are parts of x·W + b."""
    x, weight, bias, padding, past, added, length = [*node.inputs, *[None] * 7][:7]
    assert x is not None
    assert weight is not None
    op.refuse(length is not None, "buffers of past keys")
    op.refuse(bool(node.attributes.get_int("do_rotary", 0)), "do_rotary")
    width = op.dims(weight)[1]
    op.refuse(not isinstance(width, int), "the width is not static")
    assert isinstance(width, int)
    heads = node.attributes["num_heads"].as_int()
    sizes = list(node.attributes.get_ints("qkv_hidden_sizes", (width // 3,) * 3))
    whole = op.MatMul(x, weight)
    whole = whole if bias is None else op.Add(whole, bias)
    parts, start = [], 0
    for size in sizes:
        parts.append(split_heads(op, op.Slice(whole, [start], [start + size], [2]), heads))
        start += size
    before: tuple[ir.Value | None, ir.Value | None] = (None, None)
    if past is not None:
        before = op.Squeeze(op.Slice(past, [0], [1], [0]), [0]), op.Squeeze(op.Slice(past, [1], [2], [0]), [0])
    y, k, v = _attend(op, node, parts, padding, added, before)
    return [y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)] if len(node.outputs) > 1 else [y]


def _attend(
    op: Builder,
    node: ir.Node,
    parts: Sequence[ir.Value],
    padding: ir.Value | None,
    added: ir.Value | None,
    past: tuple[ir.Value | None, ir.Value | None],
) -> list[ir.Value]:
    """Output, keys and values of the two operators of ONNX Runtime, from heads."""
    q, k, v = parts
    k = k if past[0] is None else op.Concat(past[0], k, axis=2)
    v = v if past[1] is None else op.Concat(past[1], v, axis=2)
    scores = _scores(op, node, q, k)
    if added is not None:
        scores = op.Add(scores, added)
    if padding is not None:
        op.refuse(op.rank(padding) not in (2, 3), f"a mask of {op.rank(padding)} dimensions")
        seen = op.Greater(padding, op.constant(np.zeros((), np.int32)))
        lowest = op.scalar(node.attributes.get_float("mask_filter_value", -10000.0), scores.dtype)
        fill = op.Where(seen, op.scalar(0.0, scores.dtype), lowest)
        scores = op.Add(scores, op.Unsqueeze(fill, [1, 2] if op.rank(padding) == 2 else [1]))
    masked = bool(node.attributes.get_int("unidirectional", 0))
    if masked:
        rows = op.Unsqueeze(steps(op, q), [1])
        rows = rows if past[0] is None else op.Add(rows, op.dim(past[0], 2))
        scores = _hidden(op, scores, [op.LessOrEqual(steps(op, k), rows)])
    return [join_heads(op, op.MatMul(_weights(op, scores, masked), v)), k, v]
