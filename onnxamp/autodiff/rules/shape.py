"""Gradients of data movement: shapes, joins and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Reshape", inputs=(0,))
def reshape(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient in the shape of the input."""
    return [op.reshape(g, required(node))]


@gradient("Flatten")
def flatten(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient in the shape of the input."""
    return [op.reshape(g, required(node))]


@gradient("Squeeze", inputs=(0,))
def squeeze(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The removed dimensions come back."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return [op.Unsqueeze(g, node.inputs[1])]
    return [op.reshape(g, required(node))]


@gradient("Unsqueeze", inputs=(0,))
def unsqueeze(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The added dimensions go."""
    return [op.Squeeze(g, node.inputs[1])]


@gradient("Transpose")
def transpose(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The inverse permutation."""
    rank = op.rank(required(node))
    perm = node.attributes.get_ints("perm", tuple(reversed(range(rank))))
    return [op.transpose(g, np.argsort(perm).tolist())]


@gradient("Expand", inputs=(0,))
def expand(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The sum over the dimensions that were repeated."""
    return [op.unbroadcast_dims(g, required(node), [op.dims(node.outputs[0])])]


@gradient("Concat")
def concat(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Each input receives its piece."""
    axis = node.attributes["axis"].as_int()
    parts = [value for value in node.inputs if value is not None]
    axis %= op.rank(parts[0])
    sizes = [op.dims(value)[axis] for value in parts]
    if len(op.wanted) == 1 or not all(isinstance(size, int) for size in sizes):
        return [_piece(op, g, parts, axis, position) for position in range(len(parts))]
    return op.emit("Split", [g, np.asarray(sizes, np.int64)], {"axis": axis}, outputs=len(parts))


def _piece(op: Builder, g: ir.Value, parts: Sequence[ir.Value], axis: int, position: int) -> ir.Value | None:
    if position not in op.wanted:
        return None
    start = op.total([op.dim(value, axis) for value in parts[:position]])
    end = op.total([op.dim(value, axis) for value in parts[: position + 1]])
    return op.Slice(g, start, end, [axis])


@gradient("Split", inputs=(0,))
def split(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """The pieces joined; those without a gradient are 0."""
    axis = node.attributes.get_int("axis", 0)
    parts = [op.zeros(out) if g is None else g for out, g in zip(node.outputs, gradients, strict=True)]
    return [op.Concat(*parts, axis=axis)]


@gradient("Slice", inputs=(0,))
def slice_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient put back into zeros: Pad where the step is 1, else ScatterElements along the axis."""
    x = required(node)
    starts, ends, axes, steps = (op.known(value) for value in [*node.inputs[1:], None, None, None][:4])
    inputs = [*node.inputs, None, None][:5]
    rank = op.rank(x)
    if inputs[3] is None and starts is not None:
        axes = np.arange(starts.size)
    if inputs[4] is None and axes is not None:
        steps = np.ones(axes.size, np.int64)
    if (
        axes is not None
        and steps is not None
        and starts is not None
        and ends is not None
        and all(step == 1 for step in steps.reshape(-1))
    ):
        return [_unslice_pad(op, g, x, [int(axis) % rank for axis in axes.reshape(-1)], starts, ends)]
    if axes is None:
        number = op.dims(inputs[1])[0] if inputs[1] is not None else None
        op.refuse(not isinstance(number, int) or inputs[3] is not None, "its axes are computed at run time")
        axes = np.arange(number)  # type: ignore[arg-type]  # refused above
    for index, axis in reversed(list(enumerate(int(axis) % rank for axis in axes.reshape(-1)))):
        # Along each axis: the positions that the forward Slice took, found by slicing the positions themselves.
        size = op.dim(x, axis)
        positions = op.Range(op.index(0), op.Squeeze(size, [0]), op.index(1))
        pick = [op.Slice(value, [index], [index + 1], [0]) if value is not None else None for value in inputs[1:]]
        first, last, step = pick[0], pick[1], pick[3]
        assert first is not None
        assert last is not None
        taken = op.Slice(positions, op.int64(first), op.int64(last), [0], [1] if step is None else op.int64(step))
        extent = [op.dim(g, other) if other != axis else size for other in range(rank)]
        zeros = op.Expand(op.scalar(0.0, g.dtype), op.join(extent))
        index_shape = [1] * rank
        index_shape[axis] = -1
        places = op.Expand(op.Reshape(taken, index_shape), op.shape(g))
        g = op.ScatterElements(zeros, places, g, axis=axis)
    g.shape = x.shape
    return [g]


def _unslice_pad(
    op: Builder, g: ir.Value, x: ir.Value, axes: list[int], starts: np.ndarray, ends: np.ndarray
) -> ir.Value:
    """Pad with zeros before and after; amounts are constants where sizes are static, else computed."""
    rank = op.rank(x)
    before: list[int | ir.Value] = [0] * rank
    after: list[int | ir.Value] = [0] * rank
    for axis, start, end in zip(axes, starts.reshape(-1).tolist(), ends.reshape(-1).tolist(), strict=True):
        size = op.dims(x)[axis]
        if isinstance(size, int):
            first, last, _ = slice(start, end).indices(size)
            before[axis], after[axis] = first, size - max(last, first)
            continue
        extent = op.dim(x, axis)
        if start != 0:
            before[axis] = op.Min(extent, [start]) if start > 0 else op.Max(op.Add(extent, [start]), [0])
        if end < 2**31 - 1:  # whatever is missing in g and is not before it lies after it
            missing = op.Sub(extent, op.dim(g, axis))
            after[axis] = op.Sub(missing, op.join([before[axis]])) if start != 0 else missing
    amounts = [*before, *after]
    if all(isinstance(amount, int) for amount in amounts):
        if not any(amounts):
            return g
        pads: ir.Value = op.constant(np.asarray(amounts, np.int64), "pads")
    else:
        pads = op.join(amounts)
    result = op.Pad(g, pads)
    result.shape = x.shape
    return result


@gradient("Pad")
def pad(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Constant padding: the gradient without the border, and the sum over the border for the constant. Reflect, edge and wrap:
    the border's gradient is added to the elements that were copied into it; the constant is not read."""
    dx = _pad_source(op, node, g) if 0 in op.wanted else None
    constant = node.inputs[2] if len(node.inputs) > 2 else None
    if constant is None or 2 not in op.wanted:
        return [dx]
    if node.attributes.get_string("mode", "constant") != "constant":
        return [dx, None, op.zeros(constant)]
    border = op.Pad(op.zeros(required(node)), node.inputs[1], op.scalar(1.0, g.dtype), *node.inputs[3:4])
    total = op.emit("ReduceSum", [op.Mul(g, border)], {"keepdims": 0})[0]
    return [dx, None, op.reshape(total, constant)]


def _pad_source(op: Builder, node: ir.Node, g: ir.Value) -> ir.Value:
    x = required(node)
    rank = op.rank(x)
    mode = node.attributes.get_string("mode", "constant")
    pads = op.known(node.inputs[1])
    axes = op.known(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else np.arange(rank)
    op.refuse(axes is None, "the axes of Pad are computed at run time")
    assert axes is not None
    where = [int(axis) % rank for axis in axes.reshape(-1)]
    if mode == "constant" and pads is None:
        padding = node.inputs[1]
        begin = op.Slice(padding, [0], [len(where)], [0])
        end = op.Slice(op.Shape(g), [0], [rank], [0]) if where == list(range(rank)) else op.Gather(op.Shape(g), where)
        return op.Slice(g, begin, op.Sub(end, op.Slice(padding, [len(where)], [2 * len(where)], [0])), where)
    op.refuse(pads is None, f"the amounts of Pad in mode {mode} are computed at run time")
    assert pads is not None
    before, after = pads.reshape(2, -1).tolist()
    if mode == "constant":
        cut = [(axis, b, a) for axis, b, a in zip(where, before, after, strict=True) if b or a]
        if not cut:
            return g
        if min(min(b, a) for _, b, a in cut) < 0:  # a negative amount crops: its gradient pads
            lead, tail = [0] * rank, [0] * rank
            for axis, b, a in cut:
                lead[axis], tail[axis] = -b, -a
            return op.Pad(g, [*lead, *tail])
        ends = [-a if a else 2**63 - 1 for _, _, a in cut]
        result = op.Slice(g, [b for _, b, _ in cut], ends, [axis for axis, _, _ in cut])
        result.shape = x.shape
        return result
    for axis, b, a in zip(where, before, after, strict=True):
        if b or a:
            g = _fold_border(op, g, x, axis, b, a, mode)
    return g


def _fold_border(op: Builder, g: ir.Value, x: ir.Value, axis: int, before: int, after: int, mode: str) -> ir.Value:
    """Sum the gradient over one axis into the positions that each padded position was copied from.

    A negative amount crops, before anything is copied into a border (ONNX Runtime).
    """
    size = op.dims(x)[axis]
    op.refuse(not isinstance(size, int), f"Pad in mode {mode} needs a static size of dimension {axis}")
    assert isinstance(size, int)
    kept = np.arange(size)[max(-before, 0) : size - max(-after, 0)]
    op.refuse(not kept.size, f"Pad in mode {mode} leaves nothing of dimension {axis} to copy into its border")
    source = np.pad(kept, (max(before, 0), max(after, 0)), mode=mode)  # type: ignore[call-overload]  # wants a literal
    selection = np.zeros((size, source.size), np.float32)
    selection[source, np.arange(source.size)] = 1.0
    matrix = op.cast(op.constant(selection), g.dtype)  # type: ignore[arg-type]  # typed graphs only
    rank = op.rank(x)
    order = [other for other in range(rank) if other != axis] + [axis]
    summed = op.MatMul(op.transpose(g, order), op.swap(matrix))
    return op.transpose(summed, np.argsort(order).tolist())


@gradient("Tile", inputs=(0,))
def tile(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The sum over the copies: [r·d] as [r, d], summed over r."""
    x = required(node)
    rank = op.rank(x)
    repeats = op.known(node.inputs[1])
    axes = [axis for axis in range(rank) if repeats is None or int(repeats.reshape(-1)[axis]) != 1]
    if not axes:
        return [g]
    extent: list[int | ir.Value] = []
    summed = []
    for axis in range(rank):
        if axis in axes:
            summed.append(len(extent))
            if repeats is None:
                extent.append(op.Slice(node.inputs[1], [axis], [axis + 1], [0]))
            else:
                extent.append(int(repeats.reshape(-1)[axis]))
        extent.append(op.dim(x, axis))
    result = op.sum(op.Reshape(g, op.join(extent)), summed, keepdims=False)
    result.shape = x.shape
    return [result]


@gradient("Trilu", inputs=(0,))
def trilu(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The same triangle of the gradient."""
    return [op.Trilu(g, *node.inputs[1:], upper=node.attributes.get_int("upper", 1))]


@gradient("DepthToSpace")
def depth_to_space(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The inverse rearrangement; mode CRD is a SpaceToDepth with the channel groups transposed."""
    block = node.attributes["blocksize"].as_int()
    x = required(node)
    back = op.SpaceToDepth(g, blocksize=block)
    if node.attributes.get_string("mode", "DCR") == "DCR":
        return [back]
    channels, *_ = op.dims(x)[1:]
    op.refuse(not isinstance(channels, int), "the number of channels is not static")
    assert isinstance(channels, int)
    depth = channels // block**2
    order = [b * depth + c for c in range(depth) for b in range(block**2)]
    return [op.Gather(back, np.asarray(order, np.int64), axis=1)]


@gradient("SpaceToDepth")
def space_to_depth(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """DepthToSpace in the same mode."""
    mode = node.attributes.get_string("mode", "DCR")
    return [op.DepthToSpace(g, blocksize=node.attributes["blocksize"].as_int(), mode=mode)]


@gradient("ReverseSequence", inputs=(0,))
def reverse_sequence(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Reversing once more."""
    batch, time = (node.attributes.get_int(name, value) for name, value in (("batch_axis", 1), ("time_axis", 0)))
    return [op.ReverseSequence(g, node.inputs[1], batch_axis=batch, time_axis=time)]
