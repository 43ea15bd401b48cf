"""Gradients of operators that read a map at fractional positions: GridSample, AffineGrid, DeformConv, RoiAlign; and of MaxRoiPool.

Each is written out as gathers with weights, and differentiated with respect to the map and to the positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.reverse import defined

INT64 = ir.DataType.INT64


def _extents(op: Builder, x: ir.Value) -> list[ir.Value]:
    """The spatial sizes of `x` as float scalars of its type."""
    sizes = []
    for axis in range(2, op.rank(x)):
        count = op.count(x, [axis])
        assert x.dtype is not None
        sizes.append(op.cast(count, x.dtype) if isinstance(count, ir.Value) else op.scalar(count, x.dtype))
    return sizes


def _read(op: Builder, flat: ir.Value, extents: Sequence[ir.Value], positions: Sequence[ir.Value]) -> ir.Value:
    """Elements of `flat`, [N, C, H·W...], at whole positions inside the map, one [N, P] per spatial axis: [N, C, P].

    Places in a large map are no FP32 numbers, so they are counted in integers.
    """
    index, *rest = (op.cast(position, INT64) for position in positions)
    for size, position in zip(extents[1:], rest, strict=True):
        index = op.Add(op.Mul(index, op.cast(size, INT64)), position)
    rows = op.Unsqueeze(index, [1])
    return op.GatherElements(flat, op.Expand(rows, op.join([1, op.dim(flat, 1), 1])), axis=2)


def _flat(op: Builder, x: ir.Value) -> ir.Value:
    """[N, C, H, W...] as [N, C, H·W...]."""
    return op.Reshape(x, op.join([0, 0, -1]))


def interpolate(
    op: Builder,
    x: ir.Value,
    positions: Sequence[ir.Value],
    mode: str = "linear",
    padding: str = "zeros",
    corners: int = 1,
) -> ir.Value:
    """Values of `x`, [N, C, H, W...], at `positions`, one [N, P] of pixel units per spatial axis: [N, C, P].

    Args:
        op: The builder.
        x: The map.
        positions: Where to read.
        mode: ``nearest``, ``linear`` or ``cubic`` (a = -0.75).
        padding: What lies outside: ``zeros``, ``border`` or ``reflection``.
        corners: Reflect at the centres of the outer pixels (1) or at their edges (0).
    """
    extents, flat = _extents(op, x), _flat(op, x)
    if mode == "nearest":
        positions = [op.Round(position) for position in positions]
    if padding == "border" and mode != "cubic":  # of cubic only the taps are brought in, as ONNX Runtime and PyTorch do
        positions = [_bring_in(op, p, size, corners) for p, size in zip(positions, extents, strict=True)]
    elif padding == "reflection":
        positions = [_reflect(op, p, size, corners) for p, size in zip(positions, extents, strict=True)]
    taps: list[list[tuple[ir.Value, ir.Value | None]]] = []
    for position in positions:
        if mode == "nearest":
            taps.append([(position, None)])
            continue
        below = op.Floor(position)
        weights = (_linear if mode == "linear" else _cubic)(op, op.Sub(position, below))
        first = 0 if mode == "linear" else -1
        taps.append([(op.Add(below, float(first + i)) if first + i else below, w) for i, w in enumerate(weights)])
    total: ir.Value | None = None
    for corner in itertools.product(*taps):
        value = _pixel(op, flat, extents, [place for place, _ in corner], padding, corners)
        weight: ir.Value | None = None
        for _, factor in corner:
            if factor is not None:
                weight = factor if weight is None else op.Mul(weight, factor)
        if weight is not None:
            value = op.Mul(value, op.Unsqueeze(weight, [1]))
        total = value if total is None else op.Add(total, value)
    assert total is not None
    return total


def _pixel(
    op: Builder, flat: ir.Value, extents: Sequence[ir.Value], places: Sequence[ir.Value], padding: str, corners: int
) -> ir.Value:
    """Elements at whole positions that may lie outside."""
    inside: ir.Value | None = None
    kept = []
    for place, size in zip(places, extents, strict=True):
        last = op.Sub(size, 1.0)
        if padding == "zeros":
            here = op.And(op.GreaterOrEqual(place, 0.0), op.LessOrEqual(place, last))
            inside = here if inside is None else op.And(inside, here)
        elif padding == "reflection":
            place = op.Floor(_reflect(op, place, size, corners))
        kept.append(op.Clip(place, 0.0, last))
    value = _read(op, flat, extents, kept)
    return value if inside is None else op.mask(op.Unsqueeze(inside, [1]), value)


def _bring_in(op: Builder, place: ir.Value, size: ir.Value, corners: int) -> ir.Value:
    """`place`, or the nearest pixel's where it lies beyond the map's border."""
    last = op.Sub(size, 1.0)
    inner = op.Clip(place, 0.0, last)
    if corners:
        return inner
    outside = op.Or(op.Less(place, -0.5), op.Greater(place, op.Sub(size, 0.5)))
    return op.Where(outside, inner, place)


def _reflect(op: Builder, place: ir.Value, size: ir.Value, corners: int) -> ir.Value:
    """`place` reflected at the borders of the map until it lies inside.

    Between the centres of a single pixel there is nothing to reflect in: every place is 0.
    """
    low = 0.0 if corners else -0.5
    span = op.Sub(size, 1.0) if corners else size
    distance = op.Abs(op.Sub(place, low))
    if corners:
        distance, span = op.mask(op.Greater(span, 0.0), distance), op.Max(span, 1.0)
    folds = op.Floor(op.Div(distance, span))
    rest = op.Sub(distance, op.Mul(folds, span))
    odd = op.Greater(op.Sub(folds, op.Mul(op.Floor(op.Mul(folds, 0.5)), 2.0)), 0.5)
    return op.Add(op.Where(odd, op.Sub(span, rest), rest), low)


def _linear(op: Builder, t: ir.Value) -> list[ir.Value]:
    return [op.Sub(1.0, t), t]


def _cubic(op: Builder, t: ir.Value) -> list[ir.Value]:
    a = -0.75

    def near(s: ir.Value) -> ir.Value:
        return op.Add(op.Mul(op.Mul(op.Sub(op.Mul(s, a + 2), a + 3), s), s), 1.0)

    def far(s: ir.Value) -> ir.Value:
        return op.Sub(op.Mul(op.Add(op.Mul(op.Sub(op.Mul(s, a), 5 * a), s), 8 * a), s), 4 * a)

    back = op.Sub(1.0, t)
    return [far(op.Add(t, 1.0)), near(t), near(back), far(op.Add(back, 1.0))]


@defined("GridSample")
def grid_sample(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Y at each place of the grid, whose coordinates run from -1 to 1 over the map."""
    x, grid = op.wide(required(node)), op.wide(required(node, 1))
    rank = op.rank(x) - 2
    mode = node.attributes.get_string("mode", "linear").removeprefix("bi")
    corners = node.attributes.get_int("align_corners", 0)
    places = op.Reshape(grid, op.join([0, -1, rank]))
    positions = []
    for axis, size in enumerate(_extents(op, x)):
        n = op.Squeeze(op.Slice(places, [rank - 1 - axis], [rank - axis], [2]), [2])
        ahead = op.Add(n, 1.0)
        if corners:
            positions.append(op.Mul(op.Mul(ahead, op.Sub(size, 1.0)), 0.5))
        else:
            positions.append(op.Mul(op.Sub(op.Mul(ahead, size), 1.0), 0.5))
    padding = node.attributes.get_string("padding_mode", "zeros")
    values = interpolate(op, x, positions, mode, padding, corners)
    extent = [op.dim(x, 0), op.dim(x, 1), *(op.dim(grid, axis) for axis in range(1, rank + 1))]
    assert node.outputs[0].dtype is not None
    return [op.cast(op.Reshape(values, op.join(extent)), node.outputs[0].dtype)]


@defined("AffineGrid", inputs=(0,))
def affine_grid(op: Builder, node: ir.Node) -> list[ir.Value]:
    """The places of a regular grid, (x, y, 1) or (x, y, z, 1), times theta."""
    theta, size = required(node), required(node, 1)
    shape = op.known(size)
    op.refuse(shape is None, "its size is computed at run time")
    assert shape is not None
    corners = node.attributes.get_int("align_corners", 0)
    axes = []
    for extent in shape.reshape(-1)[2:].tolist():
        steps = np.arange(extent)
        axes.append(2 * steps / max(extent - 1, 1) - 1 if corners else (2 * steps + 1) / extent - 1)
    mesh = np.meshgrid(*axes, indexing="ij")
    assert theta.dtype is not None
    base = np.stack([*mesh[::-1], np.ones_like(mesh[0])], -1).reshape(-1, len(axes) + 1).astype(theta.dtype.numpy())
    places = op.MatMul(op.constant(base), op.swap(theta))
    return [op.Reshape(places, [-1, *shape.reshape(-1)[2:].tolist(), len(axes)])]


@defined("DeformConv")
def deform_conv(op: Builder, node: ir.Node) -> list[ir.Value]:
    """A convolution whose taps read at shifted positions: the patches, times the weights as a matrix."""
    x, weight, offset, bias, mask = [*node.inputs, None, None][:5]
    assert x is not None
    assert weight is not None
    assert offset is not None
    op.refuse(op.rank(x) != 4, "only two spatial dimensions")
    group = node.attributes.get_int("group", 1)
    parts = node.attributes.get_int("offset_group", 1)
    strides = node.attributes.get_ints("strides", (1, 1))
    dilations = node.attributes.get_ints("dilations", (1, 1))
    pads = node.attributes.get_ints("pads", (0, 0, 0, 0))
    outputs, inner, kh, kw = op.dims(weight)
    channels, (rows, columns) = op.dims(x)[1], op.dims(offset)[2:]
    static = (outputs, inner, kh, kw, channels, rows, columns)
    op.refuse(not all(isinstance(size, int) for size in static), "it needs static sizes, except for the batch")
    outputs, inner, kh, kw, channels, rows, columns = (int(size) for size in static)  # type: ignore[arg-type]  # refused above
    taps, places = kh * kw, rows * columns
    shifts = op.Reshape(op.wide(offset), [-1, taps, 2, places])
    data = op.Reshape(op.wide(x), op.join([-1, channels // parts, op.dim(x, 2), op.dim(x, 3)]))
    positions = []
    for axis, (kernel, count) in enumerate(((kh, rows), (kw, columns))):
        tap = np.arange(kernel) * dilations[axis]
        place = np.arange(count) * strides[axis] - pads[axis]
        grid = np.zeros((kh, kw, rows, columns))
        grid += tap[:, None, None, None] if axis == 0 else tap[None, :, None, None]
        grid += place[None, None, :, None] if axis == 0 else place[None, None, None, :]
        assert data.dtype is not None
        own = op.Squeeze(op.Slice(shifts, [axis], [axis + 1], [2]), [2])
        fixed = op.constant(grid.reshape(1, taps, places).astype(data.dtype.numpy()))
        positions.append(op.Reshape(op.Add(own, fixed), [-1, taps * places]))
    patches = interpolate(op, data, positions)  # [N·parts, C/parts, taps·places]
    patches = op.Reshape(patches, [-1, parts, channels // parts, taps, places])
    if mask is not None:
        patches = op.Mul(patches, op.Reshape(op.wide(mask), [-1, parts, 1, taps, places]))
    patches = op.Reshape(patches, [-1, group, inner * taps, places])
    matrix = op.Reshape(op.wide(weight), [group, outputs // group, inner * taps])
    result = op.Reshape(op.MatMul(matrix, patches), [-1, outputs, rows, columns])
    if bias is not None:
        result = op.Add(result, op.Reshape(op.wide(bias), [outputs, 1, 1]))
    assert x.dtype is not None
    return [op.cast(result, x.dtype)]


@defined("RoiAlign", inputs=(0, 1))
def roi_align(op: Builder, node: ir.Node) -> list[ir.Value]:
    """The mean (or, of weighted corners, the maximum) of samples in each bin of each box."""
    x, rois, batch = (required(node, position) for position in range(3))
    height, width = (node.attributes.get_int(f"output_{name}", 1) for name in ("height", "width"))
    samples = node.attributes.get_int("sampling_ratio", 0)
    op.refuse(samples <= 0, "a sampling_ratio that follows from the boxes")
    scale = node.attributes.get_float("spatial_scale", 1.0)
    default = "half_pixel" if op.opset >= 16 else "output_half_pixel"
    half = node.attributes.get_string("coordinate_transformation_mode", default) == "half_pixel"
    data, boxes = op.Gather(op.wide(x), op.int64(batch), axis=0), op.wide(rois)
    edges = op.Sub(op.Mul(boxes, scale), 0.5) if half else op.Mul(boxes, scale)
    corner = [op.Slice(edges, [i], [i + 1], [1]) for i in range(4)]  # x1, y1, x2, y2, [R, 1] each
    placed = []
    for start, end, bins in ((corner[1], corner[3], height), (corner[0], corner[2], width)):
        length = op.Sub(end, start)
        length = length if half else op.Max(length, op.scalar(1.0, length.dtype))
        share = (np.arange(bins * samples) + 0.5) / (bins * samples)
        assert length.dtype is not None
        placed.append(op.Add(start, op.Mul(length, op.constant(share.astype(length.dtype.numpy())[None]))))
    count = height * samples * width * samples
    extent = [-1, height * samples, width * samples]
    unit = op.scalar(0.0, data.dtype)
    grids = [
        op.Reshape(op.Add(op.Unsqueeze(placed[0], [2]), op.Expand(unit, [1, 1, extent[2]])), [-1, count]),
        op.Reshape(op.Add(op.Unsqueeze(placed[1], [1]), op.Expand(unit, [1, extent[1], 1])), [-1, count]),
    ]
    inside: ir.Value | None = None
    for place, size in zip(grids, _extents(op, data), strict=True):
        here = op.And(op.GreaterOrEqual(place, -1.0), op.LessOrEqual(place, size))
        inside = here if inside is None else op.And(inside, here)
    assert inside is not None
    shown = op.Unsqueeze(inside, [1])
    channels = op.dim(x, 1)
    shape = op.join([-1, channels, height, samples, width, samples])
    if node.attributes.get_string("mode", "avg") == "avg":
        values = op.mask(shown, interpolate(op, data, grids, padding="border"))
        pooled = op.reduce("ReduceMean", op.Reshape(values, shape), [3, 5], keepdims=False)
    else:
        pooled = _largest_corner(op, data, grids, shown, shape)
    assert node.outputs[0].dtype is not None
    return [op.cast(pooled, node.outputs[0].dtype)]


def _largest_corner(
    op: Builder, data: ir.Value, grids: Sequence[ir.Value], shown: ir.Value, shape: ir.Value
) -> ir.Value:
    """Mode max: the largest of the weighted corners of all samples of a bin."""
    extents, flat = _extents(op, data), _flat(op, data)
    taps = []
    for place, size in zip(grids, extents, strict=True):
        last = op.Sub(size, 1.0)
        kept = op.Clip(place, 0.0, last)
        below = op.Floor(kept)
        t = op.Sub(kept, below)
        taps.append([(below, op.Sub(1.0, t)), (op.Min(op.Add(below, 1.0), last), t)])
    values = []
    for (y, wy), (x, wx) in itertools.product(*taps):
        value = op.Mul(_read(op, flat, extents, [y, x]), op.Unsqueeze(op.Mul(wy, wx), [1]))
        values.append(op.Reshape(op.mask(shown, value), shape))
    return op.reduce("ReduceMax", op.Max(*values), [3, 5], keepdims=False)


@defined("MaxRoiPool", inputs=(0,), zero=(1,))
def max_roi_pool(op: Builder, node: ir.Node) -> list[ir.Value]:
    """The largest pixel in each bin of each box, whose corners are rounded to pixels; 0 where a bin has none."""
    x, rois = required(node), required(node, 1)
    data, boxes = op.wide(x), op.wide(rois)
    scale = node.attributes.get_float("spatial_scale", 1.0)
    batch, *corner = (op.Slice(boxes, [i], [i + 1], [1]) for i in range(5))  # x1, y1, x2, y2, [R, 1] each
    corner = [_nearest(op, op.Mul(value, scale)) for value in corner]
    pooled = op.Gather(data, op.cast(op.Squeeze(batch, [1]), INT64), axis=0)  # [R, C, H, W]
    filled: ir.Value | None = None
    lowest = op.scalar(-np.inf, data.dtype)
    for axis, (first, last) in enumerate(((corner[1], corner[3]), (corner[0], corner[2]))):
        bins = node.attributes["pooled_shape"].as_ints()[axis]
        width = op.Div(op.Max(op.Add(op.Sub(last, first), 1.0), op.scalar(1.0, boxes.dtype)), float(bins))
        assert boxes.dtype is not None
        low, high = (op.constant((np.arange(bins) + i)[None].astype(boxes.dtype.numpy())) for i in range(2))
        start, stop = op.Floor(op.Mul(width, low)), op.Ceil(op.Mul(width, high))
        start, stop = (op.cast(op.Add(edge, first), INT64) for edge in (start, stop))  # [R, bins]
        size = op.dim(data, 2 + axis)
        places = op.Range(op.index(0), op.Squeeze(size, [0]), op.index(1))
        inside = op.And(
            op.GreaterOrEqual(places, op.Unsqueeze(start, [2])), op.Less(places, op.Unsqueeze(stop, [2]))
        )  # [R, bins, H]
        inside = op.Unsqueeze(inside, [1, 4] if axis == 0 else [1, 2])
        kept = op.Where(inside, op.Unsqueeze(pooled, [2 + axis]), lowest)
        pooled = op.reduce("ReduceMax", kept, [3 + axis], keepdims=False)
        some = op.And(op.Less(start, size), op.And(op.Greater(stop, op.index(0)), op.Less(start, stop)))
        some = op.Unsqueeze(some, [1, 3] if axis == 0 else [1, 2])
        filled = some if filled is None else op.And(filled, some)
    assert filled is not None
    assert x.dtype is not None
    return [op.cast(op.mask(filled, pooled), x.dtype)]


def _nearest(op: Builder, value: ir.Value) -> ir.Value:
    """Rounded to the nearest whole number, halves away from 0."""
    return op.Mul(op.Sign(value), op.Floor(op.Add(op.Abs(value), 0.5)))
