"""What onnx-shape-inference does not know: ONNX Runtime's fused operators, which give what they were fused from, QGemm with a
zero point, and a Loop without a condition."""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

_Rule = Callable[[ShapeInferenceContext, ir.Node], None]
_DOMAIN = "com.microsoft"
# Operators with the operands and the result of a standard one, and the version of that.
_LIKE = {
    "FusedConv": ("Conv", 11),
    "FusedGemm": ("Gemm", 13),
    "Pad": ("Pad", 13),
    "Trilu": ("Trilu", 14),
    "BiasSoftmax": ("Add", 14),
}
_LIKE |= dict.fromkeys(("ComplexMul", "ComplexMulConj"), ("Add", 14))
_SAME = ("BiasDropout", "Inverse")
# An end from here on means "to the end": TensorFlow's exporters write 10**9, others the largest integer.
_FAR = 10**9


@functools.cache
def register() -> None:
    """Make them known; once is enough."""
    registry.collect()
    for name, (standard, version) in _LIKE.items():
        rule = registry.get("", standard, version=version)
        if rule is not None:
            registry.register(_DOMAIN, name)(rule)
    for name in _SAME:
        registry.register(_DOMAIN, name)(_as_operand)
    quantized = registry.get(_DOMAIN, "QGemm", version=1)
    if quantized is not None:
        registry.register(_DOMAIN, "QGemm")(functools.partial(_with_zero_point, quantized))
    loop = registry.get("", "Loop", version=1)
    if loop is not None:
        registry.register("", "Loop")(functools.partial(_with_condition, loop))
    for version in (10, 11, 13):
        cut = registry.get("", "Slice", version=version)
        if cut is not None:
            registry.register("", "Slice", since_version=version)(functools.partial(_within, cut))


def _as_operand(context: ShapeInferenceContext, node: ir.Node) -> None:
    source = node.inputs[0]
    if source is not None and source.dtype is not None:
        context.set_shape_and_dtype(node.outputs[0], source.shape, source.dtype)


def _with_zero_point(rule: _Rule, context: ShapeInferenceContext, node: ir.Node) -> None:
    """The rule of QGemm, which gives floats, though the result has the type of its zero point where there is one."""
    rule(context, node)
    zero = node.inputs[8] if len(node.inputs) > 8 else None
    if zero is not None and zero.dtype is not None:
        context.set_shape_and_dtype(node.outputs[0], node.outputs[0].shape, zero.dtype)


def _with_condition(rule: _Rule, context: ShapeInferenceContext, node: ir.Node) -> None:
    """The rule of Loop, which refuses a node without a condition, though ONNX takes that for true."""
    if len(node.inputs) < 2 or node.inputs[1] is not None:
        rule(context, node)
        return
    node.replace_input_with(1, ir.Value(type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
    try:
        rule(context, node)
    finally:
        node.replace_input_with(1, None)


def _within(rule: _Rule, context: ShapeInferenceContext, node: ir.Node) -> None:
    """The rule of Slice, which takes every end for one that an axis of unknown length has; here nothing is longer than that axis.

    A single element is taken for one that the axis has.
    """
    rule(context, node)
    data, result = node.inputs[0], node.outputs[0].shape
    starts, ends, axes, steps = (_integers(node, place) for place in range(1, 5))
    if data is None or data.shape is None or data.dtype is None or result is None or starts is None or ends is None:
        return
    axes = list(range(len(starts))) if len(node.inputs) < 4 or node.inputs[3] is None else axes
    steps = [1] * len(starts) if len(node.inputs) < 5 or node.inputs[4] is None else steps
    if axes is None or steps is None:
        return
    dims = list(result.dims)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        whole = data.shape[axis]
        seen = dims[axis]
        if isinstance(seen, int) and seen > 1 and not isinstance(whole, int) and whole.value is not None:
            # here the rule saw 0 <= start < end and a step above 0
            limit = whole.value if end >= _FAR else f"Min({end}, {whole.value})"
            length = ir.SymbolicDim(f"Max(0, {limit} - {start})" if start else limit)
            dims[axis] = length if step == 1 else -((-length) // step)
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), data.dtype)


def _integers(node: ir.Node, place: int) -> list[int] | None:
    """The numbers of a constant operand; None for one that is computed or absent."""
    value = node.inputs[place] if place < len(node.inputs) else None
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return [int(number) for number in tensor.numpy().reshape(-1)] if tensor is not None else None
