"""Gradients of pooling."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.windows import Window, spread_back, tap_slice, window_of


def _pool_window(op: Builder, node: ir.Node) -> Window:
    kernel = tuple(node.attributes["kernel_shape"].as_ints())
    return window_of(op, node, required(node), node.outputs[0], kernel)


def _spread(op: Builder, g: ir.Value, x: ir.Value, window: Window) -> ir.Value:
    """Every value of `g` added onto all elements of its window: channels are a batch of single maps."""
    assert x.shape is not None
    assert g.shape is not None
    n = window.rank
    maps = [op.Reshape(value, op.join([-1, 1, *(op.dim(value, axis) for axis in range(2, n + 2))])) for value in (g, x)]
    for single, value in zip(maps, (g, x), strict=True):
        single.shape = ir.Shape([None, 1, *value.shape[2:]])  # type: ignore[index]  # asserted above
    ones = op.Expand(op.scalar(1.0, g.dtype), [1, 1, *window.kernel])
    return op.reshape(spread_back(op, maps[0], ones, maps[1], window, 1), x)


@gradient("AveragePool")
def average_pool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Every element of a window receives g / n, n the number of elements that the mean counted."""
    x = required(node)
    window = _pool_window(op, node)
    include = bool(node.attributes.get_int("count_include_pad", 0))
    ceil = bool(node.attributes.get_int("ceil_mode", 0))
    whole = float(np.prod(window.kernel))
    if not window.padded or (include and not ceil):
        return [_spread(op, op.Mul(g, 1.0 / whole), x, window)]
    return [_spread(op, op.Mul(g, _inverse_counts(op, node, g, window, include)), x, window)]


def _inverse_counts(op: Builder, node: ir.Node, g: ir.Value, window: Window, include: bool) -> ir.Value:
    """1 / (number of elements that count) for each window position; a product over the dimensions."""
    pads = node.attributes.get_ints("pads", (0,) * 2 * window.rank)
    result: ir.Value | None = None
    for axis in range(window.rank):
        size, steps = op.dims(required(node))[axis + 2], op.dims(g)[axis + 2]
        op.refuse(
            not isinstance(size, int) or not isinstance(steps, int),
            "a padded mean without its padding needs static sizes",
        )
        assert isinstance(size, int)
        assert isinstance(steps, int)
        starts = np.arange(steps)[:, None] * window.strides[axis] - window.begin[axis]
        taps = starts + np.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-window.begin[axis], size + pads[window.rank + axis]) if include else (0, size)
        counts = ((taps >= low) & (taps < high)).sum(1)
        shape = [-1 if other == axis else 1 for other in range(window.rank)]
        factor = op.cast(op.constant((1.0 / np.maximum(counts, 1)).reshape(shape)), g.dtype or ir.DataType.FLOAT)
        result = factor if result is None else op.Mul(result, factor)
    assert result is not None
    return result


@gradient("LpPool")
def lp_pool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = (Σ|x|ᵖ)^(1/p): dx = sign(x)·|x|ᵖ⁻¹·Σ over windows of g·y¹⁻ᵖ."""
    x, y, g = op.wide(required(node)), op.wide(node.outputs[0]), op.wide(g)
    p = node.attributes.get_int("p", 2)
    window = _pool_window(op, node)
    if p == 1:
        return [op.Mul(op.Sign(x), _spread(op, g, x, window))]
    zero = op.Equal(y, 0.0)
    safe = op.Where(zero, op.scalar(1.0, y.dtype), y)
    if p == 2:
        return [op.Mul(x, _spread(op, op.Div(g, safe), x, window))]
    power = op.Mul(op.Sign(x), op.Pow(op.Abs(x), float(p - 1)))
    return [op.Mul(power, _spread(op, op.Div(g, op.Pow(safe, float(p - 1))), x, window))]


@gradient("MaxPool")
def max_pool(op: Builder, node: ir.Node, g: ir.Value, _: ir.Value | None = None) -> Gradients:
    """The gradient goes to the element that was the maximum: its index is an output of the forward node."""
    x = required(node)
    window = _pool_window(op, node)
    op.refuse(bool(node.attributes.get_int("storage_order", 0)), "storage_order 1")
    indices = _indices(op, node)
    wide = op.wide(g) if window.overlaps else g
    empty = op.Reshape(op.expand(op.scalar(0.0, wide.dtype), x), [-1])
    places, values = op.Reshape(indices, [-1]), op.Reshape(wide, [-1])
    if window.overlaps:
        op.refuse(op.opset < 16, "overlapping windows need opset 16 or later")
        total = op.ScatterElements(empty, places, values, axis=0, reduction="add")
    else:
        total = op.ScatterElements(empty, places, values, axis=0)
    return [op.Reshape(total, op.shape(x))]


def _indices(op: Builder, node: ir.Node) -> ir.Value:
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    indices = node.outputs[1]
    if not indices.name:
        indices.name = op.unique(f"{node.outputs[0].name}/indices")
        indices.type, indices.shape = ir.TensorType(ir.DataType.INT64), node.outputs[0].shape
    return indices


@gradient("GlobalAveragePool")
def global_average_pool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Every element of a map receives g / (elements of the map)."""
    x = required(node)
    return [op.expand(op.divide(g, op.count(x, list(range(2, op.rank(x))))), x)]


@gradient("GlobalMaxPool")
def global_max_pool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The elements that equal the maximum share the gradient evenly."""
    x = required(node)
    hits = op.cast(
        op.Equal(x, node.outputs[0]), ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    )
    number = op.sum(hits, list(range(2, op.rank(x))))  # may be beyond FP16's range
    return [op.Mul(hits, op.Div(op.wide(g), number))]


@gradient("GlobalLpPool")
def global_lp_pool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = (Σ|x|ᵖ)^(1/p) over a map: dx = sign(x)·|x|ᵖ⁻¹·y¹⁻ᵖ·g."""
    x, y, g = op.wide(required(node)), op.wide(node.outputs[0]), op.wide(g)
    p = node.attributes.get_int("p", 2)
    if p == 1:
        return [op.Mul(op.Sign(x), g)]
    safe = op.Where(op.Equal(y, 0.0), op.scalar(1.0, y.dtype), y)
    if p == 2:
        return [op.Mul(x, op.Div(g, safe))]
    power = op.Mul(op.Sign(x), op.Pow(op.Abs(x), float(p - 1)))
    return [op.Mul(power, op.Div(g, op.Pow(safe, float(p - 1))))]


@gradient("MaxUnpool", inputs=(0,))
def max_unpool(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Each element receives the gradient of the place that it was put to.

    Places count in the map that the window alone gives; an output_shape only adds to its end.
    """
    x, indices = node.inputs[:2]
    assert x is not None
    assert indices is not None
    kernel = node.attributes["kernel_shape"].as_ints()
    n = len(kernel)
    strides = node.attributes.get_ints("strides", (1,) * n)
    pads = node.attributes.get_ints("pads", (0,) * 2 * n)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        ends = []
        for axis in range(n):
            reach = op.Mul(op.Sub(op.dim(x, axis + 2), [1]), [strides[axis]])
            ends.append(op.Add(reach, [kernel[axis] - pads[axis] - pads[n + axis]]))
        g = op.Slice(g, [0] * n, op.join(ends), list(range(2, n + 2)))
    picked = op.Gather(op.Reshape(g, [-1]), op.int64(indices), axis=0)
    picked.shape = x.shape
    return [picked]


@gradient("Col2Im", inputs=(0,))
def col2im(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The patches of the gradient: what each column was added to."""
    x = required(node)
    block = op.known(node.inputs[2])
    op.refuse(block is None, "its block is computed at run time")
    assert block is not None
    kernel = tuple(block.reshape(-1).tolist())
    n = len(kernel)
    pads = node.attributes.get_ints("pads", (0,) * 2 * n)
    strides = tuple(node.attributes.get_ints("strides", (1,) * n))
    dilations = tuple(node.attributes.get_ints("dilations", (1,) * n))
    window = Window(kernel, strides, dilations, tuple(pads[:n]), tuple(pads[n:]))
    sizes = op.dims(g)[2:]
    op.refuse(not all(isinstance(size, int) for size in sizes), "the size of the image is not static")
    counts = [
        (int(size) + b + e - reach - 1) // stride + 1  # type: ignore[arg-type]  # refused above
        for size, b, e, reach, stride in zip(sizes, window.begin, window.end, window.reach, strides, strict=True)
    ]
    like = ir.Value(name="columns", type=g.type, shape=ir.Shape([1, 1, *counts]))
    padded = op.Pad(g, [0, 0, *window.begin, 0, 0, *window.end]) if window.padded else g
    taps = [tap_slice(op, padded, tap, like, window, 2) for tap in itertools.product(*map(range, kernel))]
    flat = [op.Unsqueeze(op.Reshape(tap, [0, 0, -1]), [2]) for tap in taps]
    return [op.reshape(op.Concat(*flat, axis=2), x)]
