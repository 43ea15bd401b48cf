"""Operators that ONNX defines by a function: what their bodies say of 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx
import onnx.defs
import onnx_ir as ir

from onnxamp.model.signatures import signature


@functools.cache
def body(domain: str, op_type: str, since: int) -> onnx.FunctionProto | None:
    """The function that defines an operator, where it is the same for all types."""
    try:
        schema = onnx.defs.get_schema(op_type, since, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None
    return schema.function_body if schema.has_function else None  # type: ignore[attr-defined]  # missing in the stubs


def body_opset(function: onnx.FunctionProto) -> int:
    """The version of ai.onnx that the body is written in."""
    return next((entry.version for entry in function.opset_import if entry.domain in ("", "ai.onnx")), 0)


def types_agree(function: onnx.FunctionProto, kinds: Mapping[str, ir.DataType]) -> bool:
    """Whether the body is of one type wherever its operators ask for one, with the operands `kinds` by name.

    Some bodies hold fp32 constants and never cast them: MeanVarianceNormalization adds an fp32 epsilon to whatever its operand is.
    A runtime that writes such a function out refuses it in 16 bits.
    """
    known: dict[str, ir.DataType] = dict(kinds)
    opset = body_opset(function)
    for node in function.node:
        signed = signature(node.domain, node.op_type, opset)
        if node.op_type in ("Constant", "Cast", "CastLike") or signed is None:
            if (kind := _kind(node, known)) is not None:
                known[node.output[0]] = kind
            continue
        bound: dict[str, ir.DataType] = {}
        for index, name in enumerate(node.input):
            formal = signed.input(index)
            if formal is None or formal.variable not in signed.types or not formal.homogeneous or name not in known:
                continue
            if bound.setdefault(formal.variable, known[name]) != known[name]:
                return False
        for index, name in enumerate(node.output):
            formal = signed.output(index)
            if formal is not None and formal.variable in bound:
                known[name] = bound[formal.variable]
    return True


def _kind(node: onnx.NodeProto, known: Mapping[str, ir.DataType]) -> ir.DataType | None:
    """The type of a constant or Cast; None if an attribute of the function says it."""
    if node.op_type == "CastLike":
        return known.get(node.input[1])
    for attribute in node.attribute:
        if attribute.name.startswith("value_float"):
            return ir.DataType.FLOAT
        if attribute.name == "value" and not attribute.ref_attr_name:
            return ir.DataType(attribute.t.data_type)
        if attribute.name == "to" and not attribute.ref_attr_name:
            return ir.DataType(attribute.i)
    return None
