"""Gradients of Fourier transforms. Complex numbers are pairs in the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import defined


@gradient("DFT", inputs=(0,))
def dft(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = F·x is linear: dx = F*·g, the transform of the other direction without its factor; the real part for real x.

    One half of a spectrum is the whole one with a gradient of 0 in the other half. What was cut off at the end of x gets 0, what was added
    is left out.
    """
    x = required(node)
    rank = op.rank(x)
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    axis = node.attributes.get_int("axis", 1)
    if op.opset >= 20:
        given = op.known(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.asarray(-2)
        op.refuse(given is None, "an axis that is computed at run time")
        assert given is not None
        axis = int(given.reshape(()))
    axis %= rank
    length = node.inputs[1] if len(node.inputs) > 1 else None
    count = op.dim(x, axis) if length is None else op.Reshape(op.int64(length), [1])
    wide = op.wide(g)
    if inverse and onesided:
        return [_from_whole(op, x, wide, axis)]
    if onesided:
        missing = op.Div(op.Sub(count, [1]), [2])
        wide = op.Pad(wide, op.join([*[0] * (rank + axis), missing, *[0] * (rank - 1 - axis)]))
    back = transform(op, wide, axis, inverse=not inverse)
    # The transform of the other direction has 1/N where it is the inverse one, where the adjoint has none, and the other way round.
    back = _divided(op, back, count) if inverse else _multiplied(op, back, count)
    if op.dims(x)[-1] == 1:
        back = op.Slice(back, [0], [1], [rank - 1])
    if length is not None:
        back = op.Slice(back, [0], op.dim(x, axis), [axis])
        lack = op.Max(op.Sub(op.dim(x, axis), count), [0])
        back = op.Pad(back, op.join([*[0] * (rank + axis), lack, *[0] * (rank - 1 - axis)]))
    back.shape = x.shape
    return [back]


def _from_whole(op: Builder, x: ir.Value, g: ir.Value, axis: int) -> ir.Value:
    """The adjoint of half a spectrum → real signal: the transform of g, where each term but those without a mirror image counts twice.

    What lies beyond the half that a length asks for has no share.
    """
    half, count, rank = op.dims(x)[axis], op.dims(g)[axis], op.rank(x)
    op.refuse(not isinstance(half, int) or not isinstance(count, int), "half a spectrum needs static sizes")
    assert isinstance(half, int)
    assert isinstance(count, int)
    terms = min(half, count // 2 + 1)
    weight = np.full(terms, 2.0 / count)
    weight[0] = 1.0 / count
    if count % 2 == 0 and terms == count // 2 + 1:
        weight[-1] = 1.0 / count
    shape = [1] * rank
    shape[axis] = terms
    spectrum = op.Slice(transform(op, g, axis), [0], [terms], [axis])
    assert g.dtype is not None
    result = op.Mul(spectrum, op.constant(weight.reshape(shape).astype(g.dtype.numpy())))
    result = op.Pad(result, [*[0] * (rank + axis), half - terms, *[0] * (rank - 1 - axis)]) if half > terms else result
    result.shape = x.shape
    return result


def transform(op: Builder, x: ir.Value, axis: int, inverse: bool = False, onesided: bool = False) -> ir.Value:
    """A DFT node of any opset."""
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    if op.opset >= 20:
        return op.emit("DFT", [x, None, op.index(axis)], attributes)[0]
    return op.emit("DFT", [x], {**attributes, "axis": axis})[0]


def _count(op: Builder, count: ir.Value, like: ir.Value) -> ir.Value:
    """An int64 tensor of one element as a float scalar."""
    content = op.known(count)
    if content is not None:
        return op.scalar(float(content.reshape(())), like.dtype)
    ones = op.Expand(op.scalar(1.0, like.dtype), count)
    return op.sum(ones, [0], keepdims=False)


def _divided(op: Builder, value: ir.Value, count: ir.Value) -> ir.Value:
    return op.Div(value, _count(op, count, value))


def _multiplied(op: Builder, value: ir.Value, count: ir.Value) -> ir.Value:
    return op.Mul(value, _count(op, count, value))


@defined("STFT", inputs=(0, 2))
def stft(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Frames of the signal, gathered, times the window, transformed."""
    signal, step, window, length = [*node.inputs, None, None][:4]
    assert signal is not None
    hop = op.known(step)
    size = op.known(length) if length is not None else None
    if size is None and window is not None and isinstance(op.dims(window)[0], int):
        size = np.asarray(op.dims(window)[0])
    samples = op.dims(signal)[1]
    op.refuse(
        hop is None or size is None or not isinstance(samples, int), "it needs constant sizes, except for the batch"
    )
    assert hop is not None
    assert size is not None
    assert isinstance(samples, int)
    width, stride = int(size.reshape(())), int(hop.reshape(()))
    frames = 1 + (samples - width) // stride
    places = np.arange(frames)[:, None] * stride + np.arange(width)[None]
    pieces = op.Gather(op.wide(signal), places.astype(np.int64), axis=1)
    if op.rank(signal) == 2:
        pieces = op.Unsqueeze(pieces, [3])
    if window is not None:
        pieces = op.Mul(pieces, op.Unsqueeze(op.wide(window), [1]))
    result = transform(op, pieces, 2, onesided=bool(node.attributes.get_int("onesided", 1)))
    assert signal.dtype is not None
    return [op.cast(result, signal.dtype)]
