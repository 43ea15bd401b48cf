"""Gradients of convolutions."""

from __future__ import annotations

import itertools
import math

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.windows import Window, spread_back, tap_slice, window_of


def _kernel(op: Builder, weight: ir.Value) -> tuple[int, ...]:
    sizes = op.dims(weight)[2:]
    op.refuse(not all(isinstance(size, int) for size in sizes), "the kernel's shape is not static")
    return tuple(size for size in sizes if isinstance(size, int))


@gradient("Conv")
def conv(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dX: Conv with the flipped, transposed kernel (stride 1) or ConvTranspose; dW: one matrix product per tap of the
    kernel, or a single one where windows lie side by side; db = Σ g over batch and space."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    group = node.attributes.get_int("group", 1)
    window = window_of(op, node, x, node.outputs[0], _kernel(op, weight))
    dx = spread_back(op, g, weight, x, window, group) if 0 in op.wanted else None
    dw = _weight_gradient(op, x, g, weight, window, group) if 1 in op.wanted else None
    db = op.sum(g, [0, *range(2, window.rank + 2)], keepdims=False) if 2 in op.wanted else None
    return [dx, dw, db]


@gradient("ConvTranspose")
def conv_transpose(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The transposed operator: dX = Conv(g, W); dW as Conv's, with the roles of x and g exchanged; db = Σ g."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    group = node.attributes.get_int("group", 1)
    window = _transposed_window(op, node, x, _kernel(op, weight))
    dx = None
    if 0 in op.wanted:
        pads = [*window.begin, *window.end]
        dx = op.Conv(g, weight, strides=window.strides, dilations=window.dilations, pads=pads, group=group)
        spatial = list(range(2, window.rank + 2))
        if any(node.attributes.get_ints("output_padding", ())) or "output_shape" in node.attributes:
            ends = op.join([op.dim(x, axis) for axis in spatial])
            dx = op.Slice(dx, [0] * window.rank, ends, spatial)
        dx.shape = x.shape
    dw = _weight_gradient(op, g, x, weight, window, group) if 1 in op.wanted else None
    db = op.sum(g, [0, *range(2, window.rank + 2)], keepdims=False) if 2 in op.wanted else None
    return [dx, dw, db]


def _transposed_window(op: Builder, node: ir.Node, x: ir.Value, kernel: tuple[int, ...]) -> Window:
    n = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", (1,) * n))
    dilations = tuple(node.attributes.get_ints("dilations", (1,) * n))
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    pads = tuple(node.attributes.get_ints("pads", (0,) * 2 * n)) if auto == "NOTSET" else (0,) * 2 * n
    begin, end = pads[:n], pads[n:]
    if auto in ("SAME_UPPER", "SAME_LOWER") or "output_shape" in node.attributes:
        extra = node.attributes.get_ints("output_padding", (0,) * n)
        sizes, results = op.dims(x)[2:], op.dims(node.outputs[0])[2:]
        totals = []
        for axis in range(n):
            size, result = sizes[axis], results[axis]
            op.refuse(not isinstance(size, int) or not isinstance(result, int), "its padding needs static sizes")
            assert isinstance(size, int)
            assert isinstance(result, int)
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            totals.append(max(strides[axis] * (size - 1) + extra[axis] + reach - result, 0))
        # The specification gives SAME_UPPER the smaller half before, every other mode the larger one.
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        begin, end = (small, large) if auto == "SAME_UPPER" else (large, small)
    return Window(kernel, strides, dilations, begin, end)


def _weight_gradient(op: Builder, x: ir.Value, g: ir.Value, weight: ir.Value, window: Window, group: int) -> ir.Value:
    """dW[m, c, tap] = Σ over batch and positions p of g[m, p]·x[c, p·stride + tap·dilation].

    The maps are transposed once to [C, ..., N], so that every tap is a matrix product over all positions of the batch. With
    the batch innermost a slice copies whole blocks, also where it strides over space.
    """
    outputs, inputs = op.dims(weight)[:2]
    op.refuse(not isinstance(outputs, int) or not isinstance(inputs, int), "the channels are not static")
    assert isinstance(outputs, int)
    assert isinstance(inputs, int)
    n = window.rank
    taps = list(itertools.product(*(range(k) for k in window.kernel)))
    if group == outputs and inputs == 1 and group > 1:
        return _depthwise_weight_gradient(op, x, g, weight, window, taps)
    if group == 1 and len(taps) == 1 and not window.padded and all(s == 1 for s in window.strides):
        positions = [size for size in op.dims(g)[2:] if isinstance(size, int)]
        if len(positions) == n and outputs * inputs < math.prod(positions) * (outputs + inputs):
            left, right = op.Reshape(g, [0, outputs, -1]), op.Reshape(x, [0, inputs, -1])
            return op.Reshape(op.sum(op.MatMul(left, op.swap(right)), [0], keepdims=False), op.target(weight))
    if group == 1 and len(taps) > 1 and window.kernel == window.strides and all(d == 1 for d in window.dilations):
        return _patch_weight_gradient(op, x, g, weight, window)
    order = [*range(1, n + 2), 0]
    maps = op.transpose(x, order)
    if window.padded:
        maps = op.Pad(maps, [0, *window.begin, 0, 0, *window.end, 0])
    per_group = outputs // group
    rows = op.Reshape(op.transpose(g, order), [group, per_group, -1] if group > 1 else [outputs, -1])
    products = []
    for tap in taps:
        met = tap_slice(op, maps, tap, g, window, 1) if len(taps) > 1 or any(s > 1 for s in window.strides) else maps
        if group > 1:
            met = op.Reshape(met, [group, inputs, -1])
            products.append(op.MatMul(rows, op.swap(met)))
        else:
            products.append(op.Gemm(rows, op.Reshape(met, [inputs, -1]), transB=1))
    if len(products) == 1:
        return op.Reshape(products[0], op.target(weight))
    stacked = op.Reshape(op.Concat(*products, axis=0), [len(taps), outputs, inputs])
    return op.Reshape(op.transpose(stacked, [1, 2, 0]), op.target(weight))


def _patch_weight_gradient(op: Builder, x: ir.Value, g: ir.Value, weight: ir.Value, window: Window) -> ir.Value:
    """Windows that lie side by side, as those of patch embeddings: the map is cut into patches, and one product is left."""
    n, (outputs, inputs) = window.rank, op.dims(weight)[:2]
    assert isinstance(outputs, int)
    assert isinstance(inputs, int)
    cut = op.Pad(x, [0, 0, *window.begin, 0, 0, *window.end]) if window.padded else x
    sizes = [size if isinstance(size, int) else op.dim(g, axis + 2) for axis, size in enumerate(op.dims(g)[2:])]
    covered = [
        s * k if isinstance(s, int) else op.Mul(s, op.join([k])) for s, k in zip(sizes, window.kernel, strict=True)
    ]
    whole = [
        size + before + after if isinstance(size, int) else None
        for size, before, after in zip(op.dims(x)[2:], window.begin, window.end, strict=True)
    ]
    if whole != covered:  # rows and columns that no window reaches
        cut = op.Slice(cut, [0] * n, op.join(covered), list(range(2, n + 2)))
    blocks = [size for pair in zip(sizes, window.kernel, strict=True) for size in pair]
    split = op.Reshape(cut, op.join([0, inputs, *blocks]))
    patches = op.transpose(split, [1, *range(3, 2 * n + 3, 2), 0, *range(2, 2 * n + 2, 2)])
    columns = op.Reshape(patches, [inputs * math.prod(window.kernel), -1])
    rows = op.Reshape(op.transpose(g, [1, 0, *range(2, n + 2)]), [outputs, -1])
    return op.Reshape(op.Gemm(rows, columns, transB=1), op.target(weight))


def _depthwise_weight_gradient(
    op: Builder, x: ir.Value, g: ir.Value, weight: ir.Value, window: Window, taps: list[tuple[int, ...]]
) -> ir.Value:
    """One channel meets one channel: a sum of products per tap, with nothing to transpose."""
    padded = op.Pad(x, [0, 0, *window.begin, 0, 0, *window.end]) if window.padded else x
    others = [0, *range(2, window.rank + 2)]
    sums = []
    for tap in taps:
        met = tap_slice(op, padded, tap, g, window, 2)
        sums.append(op.Unsqueeze(op.sum(op.Mul(g, met), others, keepdims=False), [1]))
    return op.Reshape(op.Concat(*sums, axis=1) if len(sums) > 1 else sums[0], op.target(weight))
