"""Gradients of gathers and scatters. Sums over repeated indices run in FP32: an index may be hit thousands of times."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


def _needs_add(op: Builder) -> None:
    op.refuse(op.opset < 16, "sums over repeated indices need opset 16 or later")


@gradient("Gather", inputs=(0,))
def gather(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient rows are added at their indices, in FP32. One constant index: the gradient between zeros."""
    data, indices = required(node), node.inputs[1]
    assert indices is not None
    rank = op.rank(data)
    axis = node.attributes.get_int("axis", 0) % rank
    content = op.known(indices)
    if content is not None and content.size == 1:
        if content.ndim == 0:
            g = op.Unsqueeze(g, [axis])
        elif content.ndim > 1:
            g = op.Squeeze(g, list(range(axis + 1, axis + content.ndim)))
        return [_place(op, g, data, axis, int(content.reshape(())))]
    _needs_add(op)
    order = list(range(rank))
    order.insert(0, order.pop(axis))
    index_rank = op.rank(indices)
    moved = [*range(axis, axis + index_rank), *range(axis), *range(axis + index_rank, rank - 1 + index_rank)]
    rows = op.transpose(op.wide(g), moved)
    sizes = [op.dim(data, other) for other in order]
    rows = op.Reshape(rows, op.join([-1, *sizes[1:]]))
    places = op.Reshape(op.int64(indices), [-1, 1])
    empty = op.Expand(op.scalar(0.0, rows.dtype), op.join(sizes))
    total = op.ScatterND(empty, places, rows, reduction="add")
    return [op.transpose(total, np.argsort(order).tolist())]


def _place(op: Builder, g: ir.Value, data: ir.Value, axis: int, index: int) -> ir.Value:
    rank, size = op.rank(data), op.dims(data)[axis]
    before: list[int | ir.Value] = [0] * rank
    after: list[int | ir.Value] = [0] * rank
    if isinstance(size, int):
        before[axis], after[axis] = index % size, size - 1 - index % size
    elif index >= 0:
        before[axis], after[axis] = index, op.Sub(op.dim(data, axis), [index + 1])
    else:
        before[axis], after[axis] = op.Add(op.dim(data, axis), [index]), -1 - index
    return op.Pad(g, op.join([*before, *after]))


@gradient("GatherElements", inputs=(0,))
def gather_elements(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient is added at the indices along the axis, in FP32."""
    _needs_add(op)
    data = required(node)
    g = op.wide(g)
    empty = op.expand(op.scalar(0.0, g.dtype), data)
    axis = node.attributes.get_int("axis", 0)
    return [op.ScatterElements(empty, node.inputs[1], g, axis=axis, reduction="add")]


@gradient("GatherND", inputs=(0,))
def gather_nd(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient is added at the indices, in FP32; batch dimensions become leading indices."""
    _needs_add(op)
    data, indices = required(node), node.inputs[1]
    assert indices is not None
    batch = node.attributes.get_int("batch_dims", 0)
    g = op.wide(g)
    places = op.int64(indices)
    rank = op.rank(indices)
    for axis in reversed(range(batch)):
        positions = op.Range(op.index(0), op.Squeeze(op.dim(data, axis), [0]), op.index(1))
        shape = [1] * rank
        shape[axis] = -1
        extent = op.join([*(op.dim(indices, other) for other in range(rank - 1)), 1])
        places = op.Concat(op.Expand(op.Reshape(positions, shape), extent), places, axis=-1)
    empty = op.expand(op.scalar(0.0, g.dtype), data)
    return [op.ScatterND(empty, places, g, reduction="add")]


@gradient("ScatterElements", inputs=(0, 2))
def scatter_elements(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Updates receive the gradient at their indices; data keep theirs (reduction add) or lose what was overwritten."""
    axis = {"axis": node.attributes.get_int("axis", 0)}
    return _scattered(op, node, g, "ScatterElements", "GatherElements", axis)


@gradient("ScatterND", inputs=(0, 2))
def scatter_nd(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Updates receive the gradient at their indices; data keep theirs (reduction add) or lose what was overwritten."""
    return _scattered(op, node, g, "ScatterND", "GatherND", {})


def _scattered(
    op: Builder, node: ir.Node, g: ir.Value, scatter: str, gather: str, attributes: dict[str, int]
) -> Gradients:
    """The rule of both scatters. Reductions: mul gives the product of the other factors, exact where some are 0; of equal
    extremes each gets the same share."""
    data, indices, updates = node.inputs
    assert data is not None
    assert updates is not None
    kind = node.attributes.get_string("reduction", "none")

    def put(into: ir.Value, values: ir.Value, reduction: str = "none") -> ir.Value:
        own = {**attributes, "reduction": reduction} if reduction != "none" else attributes
        result = op.emit(scatter, [into, indices, values], own)[0]
        result.shape = data.shape
        return result

    def take(values: ir.Value) -> ir.Value:
        return op.emit(gather, [values, indices], attributes)[0]

    if kind in ("none", "add"):
        kept = g
        if kind == "none" and 0 in op.wanted:
            kept = put(g, op.expand(op.scalar(0.0, g.dtype), updates))
        return [kept, None, take(g) if 2 in op.wanted else None]
    g, x, u = op.wide(g), op.wide(data), op.wide(updates)
    zero, one = op.scalar(0.0, g.dtype), op.scalar(1.0, g.dtype)
    if kind == "mul":
        own, other = op.Equal(x, 0.0), op.Equal(u, 0.0)
        zeros = put(op.Where(own, one, zero), op.Where(other, one, zero), "add")
        product = put(op.Where(own, one, x), op.Where(other, one, u), "mul")

        def share(value: ir.Value, is_zero: ir.Value, zeros: ir.Value, product: ir.Value, g: ir.Value) -> ir.Value:
            alone = op.Equal(op.Sub(zeros, op.Where(is_zero, one, zero)), 0.0)  # no other factor is 0
            return op.Mul(op.mask(alone, op.Div(product, op.Where(is_zero, one, value))), g)

        dx = share(x, own, zeros, product, g)
        return [dx, None, share(u, other, take(zeros), take(product), take(g)) if 2 in op.wanted else None]
    y = op.wide(node.outputs[0])
    own, other = (op.Where(op.Equal(a, b), one, zero) for a, b in ((x, y), (u, take(y))))
    each = op.Div(g, put(own, other, "add"))
    return [op.Mul(own, each), None, op.Mul(other, take(each)) if 2 in op.wanted else None]


@gradient("TensorScatter", inputs=(0, 1))
def tensor_scatter(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The update receives the gradient of the places where it was written, the cache that of the others."""
    cache, update = required(node), node.inputs[1]
    assert update is not None
    starts = node.inputs[2] if len(node.inputs) > 2 else None
    rank = op.rank(cache)
    axis = node.attributes.get_int("axis", -2) % rank
    steps = op.Range(op.index(0), op.Squeeze(op.dim(update, axis), [0]), op.index(1))
    places = op.Reshape(steps, [-1 if other == axis else 1 for other in range(rank)])
    if starts is not None:
        places = op.Add(places, op.Reshape(op.int64(starts), [-1, *[1] * (rank - 1)]))
    if node.attributes.get_string("mode", "linear") == "circular":
        places = op.Mod(places, op.dim(cache, axis))
    places = op.Expand(places, op.shape(update))
    kept = op.ScatterElements(g, places, op.zeros(update), axis=axis) if 0 in op.wanted else None
    return [kept, op.GatherElements(g, places, axis=axis) if 1 in op.wanted else None]


@gradient("TopK", inputs=(0,))
def top_k(op: Builder, node: ir.Node, g: ir.Value, _: ir.Value | None = None) -> Gradients:
    """The gradient of the values goes to where they came from."""
    indices = node.outputs[1]
    empty = op.expand(op.scalar(0.0, g.dtype), required(node))
    return [op.ScatterElements(empty, indices, g, axis=node.attributes.get_int("axis", -1))]


@gradient("Compress", inputs=(0,))
def compress(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient of the kept slices goes back to their places."""
    data, condition = required(node), node.inputs[1]
    kept = op.NonZero(condition)
    if "axis" not in node.attributes:
        flat = op.Expand(op.scalar(0.0, g.dtype), op.Reshape(op.Size(data), [1]))
        return [op.reshape(op.ScatterElements(flat, op.Reshape(kept, [-1]), g, axis=0), data)]
    axis = node.attributes["axis"].as_int() % op.rank(data)
    shape = [1] * op.rank(data)
    shape[axis] = -1
    places = op.Expand(op.Reshape(kept, shape), op.Shape(g))
    return [op.ScatterElements(op.zeros(data), places, g, axis=axis)]


@gradient("OneHot", inputs=(2,), zero=(0, 1))
def one_hot(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """values = (off, on): doff = Σ g where the result is off, don = Σ g where it is on."""
    indices, depth, _ = node.inputs
    assert g.dtype is not None
    unit = op.constant(np.asarray([0.0, 1.0], g.dtype.numpy()))
    hit = op.OneHot(indices, depth, unit, axis=node.attributes.get_int("axis", -1))
    parts = [op.emit("ReduceSum", [op.Mul(g, mask)], {"keepdims": 0})[0] for mask in (op.Sub(1.0, hit), hit)]
    return [None, None, op.Concat(*(op.Reshape(part, [1]) for part in parts), axis=0)]


@gradient("Range", inputs=(0, 2), zero=(1,))
def range_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y_i = start + i·delta: dstart = Σ g, ddelta = Σ g·(y − start)/delta; the limit only decides the length."""
    start, _, delta = node.inputs
    assert start is not None
    assert delta is not None
    first = step = None
    if 0 in op.wanted:
        first = op.reshape(op.emit("ReduceSum", [g], {"keepdims": 0})[0], start)
    if 2 in op.wanted:
        index = op.Div(op.Sub(node.outputs[0], start), delta)
        step = op.reshape(op.emit("ReduceSum", [op.Mul(g, index)], {"keepdims": 0})[0], delta)
    return [first, None, step]


@gradient("Unique", inputs=(0,))
def unique(op: Builder, node: ir.Node, g: ir.Value, *_: ir.Value | None) -> Gradients:
    """What is kept is what occurs first: that element, or slice along `axis`, receives the gradient, and what repeats it none."""
    x = required(node)
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    first = node.outputs[1]
    if not first.name:
        first.name = op.unique(f"{node.outputs[0].name}/indices")
        first.type, first.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
    if "axis" not in node.attributes:
        total = op.ScatterElements(op.Reshape(op.zeros(x), [-1]), first, op.Reshape(g, [-1]), axis=0)
        return [op.reshape(total, x)]
    order = list(range(op.rank(x)))
    order.insert(0, order.pop(node.attributes.get_int("axis", 0)))
    rows = op.transpose(op.zeros(x), order)
    total = op.ScatterND(rows, op.Unsqueeze(first, [1]), op.transpose(g, order))
    return [op.transpose(total, np.argsort(order).tolist())]
