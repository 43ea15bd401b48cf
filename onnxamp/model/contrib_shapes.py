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
