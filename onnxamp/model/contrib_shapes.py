"""Shapes of ONNX Runtime's fused operators that onnx-shape-inference does not know: those of what they were fused from."""

from __future__ import annotations

import functools

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

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


def _as_operand(context: ShapeInferenceContext, node: ir.Node) -> None:
    source = node.inputs[0]
    if source is not None and source.dtype is not None:
        context.set_shape_and_dtype(node.outputs[0], source.shape, source.dtype)
