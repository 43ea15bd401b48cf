"""Geometry of sliding windows: what Conv, ConvTranspose and the pooling operators share."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, Dim


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that moves over the spatial dimensions of a map.

    Attributes:
        kernel: Extent per spatial dimension.
        strides: Step per spatial dimension.
        dilations: Distance of neighbouring taps.
        begin: Padding before.
        end: Padding after; with ceil_mode as much as the last window reaches.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from the first to the last tap."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def padded(self) -> bool:
        """Whether there is any padding."""
        return any(self.begin) or any(self.end)

    @property
    def overlaps(self) -> bool:
        """Whether two windows can share an element."""
        return any(reach + 1 > s for reach, s in zip(self.reach, self.strides, strict=True))


def window_of(op: Builder, node: ir.Node, x: ir.Value, y: ir.Value, kernel: tuple[int, ...]) -> Window:
    """The window of a Conv or pooling node that maps `x` to `y`, automatic padding and ceil_mode resolved.

    Raises:
        UnsupportedError: The padding depends on sizes that are known only at run time.
    """
    n = len(kernel)
    strides = tuple(node.attributes.get_ints("strides", (1,) * n))
    dilations = tuple(node.attributes.get_ints("dilations", (1,) * n))
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    pads = tuple(node.attributes.get_ints("pads", (0,) * 2 * n)) if auto == "NOTSET" else (0,) * 2 * n
    begin, end = list(pads[:n]), list(pads[n:])
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    sizes, results = op.dims(x)[2:], op.dims(y)[2:]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        for axis in range(n):
            total = _same_total(op, sizes[axis], strides[axis], reach[axis])
            small, large = total // 2, total - total // 2
            begin[axis], end[axis] = (small, large) if auto == "SAME_UPPER" else (large, small)
    if node.attributes.get_int("ceil_mode", 0):
        for axis in range(n):
            size, result = sizes[axis], results[axis]
            op.refuse(not isinstance(size, int) or not isinstance(result, int), "ceil_mode needs static sizes")
            assert isinstance(size, int)
            assert isinstance(result, int)
            end[axis] = max(end[axis], (result - 1) * strides[axis] + reach[axis] + 1 - size - begin[axis])
    return Window(kernel, strides, dilations, tuple(begin), tuple(end))


def _same_total(op: Builder, size: Dim, stride: int, reach: int) -> int:
    if stride == 1:
        return reach
    op.refuse(not isinstance(size, int), "auto_pad SAME with a stride needs static sizes")
    assert isinstance(size, int)
    return max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)


def spread_back(op: Builder, g: ir.Value, weight: ir.Value, x: ir.Value, window: Window, group: int) -> ir.Value:
    """The gradient of a convolution's input: every window's value back onto the elements that it covers.

    Args:
        op: The builder.
        g: Gradient of the output, [N, M, ...].
        weight: [M, C/group, ...].
        x: The input whose shape the result has, [N, C, ...].
        window: The window.
        group: Number of groups.

    With stride 1 a Conv with the flipped, transposed kernel, which runs on the fast kernels; else a ConvTranspose.
    """
    static = [
        (i, o) for i, o in zip(op.dims(x)[2:], op.dims(g)[2:], strict=True) if isinstance(i, int) and isinstance(o, int)
    ]
    if all(stride == 1 for stride in window.strides):
        return _spread_by_conv(op, g, weight, x, window, group)
    attributes = {"strides": window.strides, "dilations": window.dilations, "group": group}
    if len(static) == window.rank:
        slack = [
            size - ((result - 1) * stride + reach + 1 - begin - end)
            for (size, result), stride, reach, begin, end in zip(
                static, window.strides, window.reach, window.begin, window.end, strict=True
            )
        ]
        if all(0 <= s < stride for s, stride in zip(slack, window.strides, strict=True)):
            pads = [*window.begin, *window.end]
            result = op.ConvTranspose(g, weight, pads=pads, output_padding=slack, **attributes)
            result.shape = x.shape
            return result
    # Sizes at run time, or an end that no output_padding reaches: the whole spread, then the part that `x` covers.
    whole = op.ConvTranspose(g, weight, output_padding=[s - 1 for s in window.strides], **attributes)
    spatial = list(range(2, 2 + window.rank))
    ends = op.join([op.total([op.dim(x, axis), op.join([window.begin[axis - 2]])]) for axis in spatial])
    result = op.Slice(whole, list(window.begin), ends, spatial)
    result.shape = x.shape
    return result


def _spread_by_conv(op: Builder, g: ir.Value, weight: ir.Value, x: ir.Value, window: Window, group: int) -> ir.Value:
    n = window.rank
    kernel = weight
    taps = [axis + 2 for axis in range(n) if window.kernel[axis] > 1]
    if taps:
        last = [-1] * len(taps)
        kernel = op.Slice(kernel, last, [-(2**63) + 1] * len(taps), taps, last)
        kernel.shape = weight.shape
    order = list(range(2, n + 2))
    if group == 1:
        kernel = op.transpose(kernel, [1, 0, *order])
    else:
        outputs, inputs = op.dims(weight)[:2]
        op.refuse(not isinstance(outputs, int) or not isinstance(inputs, int), "the channels are not static")
        assert isinstance(outputs, int)
        assert isinstance(inputs, int)
        if outputs != group or inputs != 1:
            split = op.Reshape(kernel, [group, outputs // group, inputs, *window.kernel])
            split = op.transpose(split, [0, 2, 1, *(axis + 1 for axis in order)])
            kernel = op.Reshape(split, [group * inputs, outputs // group, *window.kernel])
    begin = [reach - pad for reach, pad in zip(window.reach, window.begin, strict=True)]
    end = [reach - pad for reach, pad in zip(window.reach, window.end, strict=True)]
    if min(*begin, *end) < 0:  # more padding than the kernel reaches: windows that saw only padding are cut off
        spatial = list(range(2, n + 2))
        ends = [pad if pad < 0 else 2**63 - 1 for pad in end]
        g = op.Slice(g, [max(-pad, 0) for pad in begin], ends, spatial)
        begin, end = [max(pad, 0) for pad in begin], [max(pad, 0) for pad in end]
    attributes = {"pads": [*begin, *end], "dilations": window.dilations, "group": group}
    result = op.Conv(g, kernel, kernel_shape=window.kernel, **attributes)
    result.shape = x.shape
    return result


def tap_slice(
    op: Builder, padded: ir.Value, tap: tuple[int, ...], like: ir.Value, window: Window, first: int
) -> ir.Value:
    """The elements of `padded` that one tap of the window meets, one for each spatial element of `like`.

    Args:
        op: The builder.
        padded: Padded map with its spatial dimensions from `first` on.
        tap: Position in the kernel.
        like: A map with the output's spatial dimensions from 2 on.
        window: The window.
        first: First spatial dimension of `padded`.
    """
    starts: list[int] = []
    ends: list[int | ir.Value] = []
    for axis in range(window.rank):
        start, stride = tap[axis] * window.dilations[axis], window.strides[axis]
        starts.append(start)
        size = op.dims(like)[axis + 2]
        if isinstance(size, int):
            ends.append(start + (size - 1) * stride + 1)
        elif stride == 1:
            rest = window.reach[axis] - start
            ends.append(-rest if rest else 2**63 - 1)
        else:
            extent = op.Mul(op.dim(like, axis + 2), op.join([stride]))
            ends.append(op.Add(extent, op.join([start + 1 - stride])))
    steps = [] if all(stride == 1 for stride in window.strides) else [list(window.strides)]
    axes = list(range(first, first + window.rank))
    return op.Slice(padded, starts, op.join(ends), axes, *steps)
