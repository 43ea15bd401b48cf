"""Attributes of paired nodes: types that changed, other edits, doc strings and metadata."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.comparison import constants
from onnxamp.comparison.side import type_name
from onnxamp.dtypes import BY_IR
from onnxamp.model.signatures import TYPE_ATTRIBUTES


def retyped_slots(node: ir.Node, other: ir.Node) -> tuple[tuple[str, str, str], ...]:
    """Operands, results and attributes of two paired nodes whose float types differ: (slot, before, after)."""
    slots = []
    for kind, ours, theirs in (("input", node.inputs, other.inputs), ("output", node.outputs, other.outputs)):
        for k, (one, two) in enumerate(zip(ours, theirs, strict=False)):
            if one is None or two is None or one.dtype == two.dtype:
                continue
            if one.dtype in BY_IR and two.dtype in BY_IR:
                slots.append((f"{kind} {k}", type_name(one.dtype), type_name(two.dtype)))
    for name in sorted({*node.attributes, *other.attributes}):
        pair = _types(name, node, other)
        if pair and pair[0] != pair[1]:
            slots.append((f"attribute {name}", type_name(pair[0]), type_name(pair[1])))
    return tuple(slots)


def _types(name: str, node: ir.Node, other: ir.Node) -> tuple[ir.DataType, ir.DataType] | None:
    """The float types that an attribute sets on both sides; where it is absent, the type of the result stands for it."""
    one, two = node.attributes.get(name), other.attributes.get(name)
    if one is not None and two is not None:
        return _float_types(name, one, two)
    if name in TYPE_ATTRIBUTES or (node.op_type == "ConstantOfShape" and name == "value"):
        pair = node.outputs[0].dtype, other.outputs[0].dtype
        if pair[0] in BY_IR and pair[1] in BY_IR and pair[0] != pair[1]:
            return pair  # type: ignore[return-value]  # neither is None: both are in BY_IR
    return None


def _float_types(name: str, one: ir.Attr, other: ir.Attr) -> tuple[ir.DataType, ir.DataType] | None:
    """The float types of an attribute that names a type or holds a tensor, on both sides."""
    if one.is_ref() or other.is_ref() or one.type != other.type:
        return None
    if name in TYPE_ATTRIBUTES and one.type == ir.AttributeType.INT:
        try:
            pair = ir.DataType(one.as_int()), ir.DataType(other.as_int())
        except ValueError:
            return None
    elif one.type == ir.AttributeType.TENSOR:
        pair = one.as_tensor().dtype, other.as_tensor().dtype
    else:
        return None
    return pair if pair[0] in BY_IR and pair[1] in BY_IR else None


def edits(node: ir.Node, other: ir.Node) -> list[tuple[str, str, str]]:
    """Attributes that differ, as (what, before, after); a float type that changed is a matter of `retyped_slots`."""
    rows = []
    names = dict.fromkeys([*node.attributes, *other.attributes])
    for name in names:
        one, two = node.attributes.get(name), other.attributes.get(name)
        if one is None or two is None:
            if _types(name, node, other) and _default(one or two):
                continue
            if not (one or two).type.name.startswith("GRAPH"):  # type: ignore[union-attr]  # one of them is there
                rows.append((f"attribute {name}", text(one), text(two)))
            else:
                rows.append((f"attribute {name}", "graph" if one else "", "graph" if two else ""))
            continue
        if not _same_attribute(name, one, two):
            rows.append((f"attribute {name}", text(one), text(two)))
    return rows


def _default(attribute: ir.Attr | None) -> bool:
    """Whether an attribute sets nothing but a type: ConstantOfShape's value is 0 if it is absent."""
    if attribute is None or attribute.is_ref():
        return False
    if attribute.type != ir.AttributeType.TENSOR:
        return True
    return not np.any(attribute.as_tensor().numpy())


def _same_attribute(name: str, one: ir.Attr, two: ir.Attr) -> bool:
    if one.is_ref() or two.is_ref():
        return one.is_ref() == two.is_ref() and one.ref_attr_name == two.ref_attr_name
    if one.type != two.type:
        return False
    if one.type.name.startswith("GRAPH"):
        return one.type == ir.AttributeType.GRAPH or len(one.as_graphs()) == len(two.as_graphs())
    pair = _float_types(name, one, two)
    if one.type == ir.AttributeType.TENSOR:
        change = constants.compare(("x", one.as_tensor()), ("x", two.as_tensor()), (), "")
        return change is None or (pair is not None and not change.altered)
    if pair is not None:
        return True
    if one.type.name.startswith("FLOAT"):
        return bool(np.array_equal(np.asarray(one.value), np.asarray(two.value), equal_nan=True))
    if one.type.name.startswith("TENSOR"):
        return all(
            constants.compare(("x", x), ("x", y), (), "") is None
            for x, y in zip(one.as_tensors(), two.as_tensors(), strict=False)
        ) and len(one.as_tensors()) == len(two.as_tensors())
    return str(one.value) == str(two.value)


def text(attribute: ir.Attr | None) -> str:
    """An attribute's value as text; "" for none."""
    if attribute is None:
        return ""
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        shown = str(tensor.numpy().tolist()) if tensor.size <= 8 else "…"
        return f"{type_name(tensor.dtype)} [{','.join(map(str, tensor.shape.numpy()))}] {shown}"
    value = str(attribute.value)
    return value if len(value) <= 200 else value[:199] + "…"


def notes(node: ir.Node, other: ir.Node) -> list[tuple[str, str, str]]:
    """Doc strings and metadata, without onnxamp's own keys."""
    rows = []
    if (node.doc_string or "") != (other.doc_string or ""):
        rows.append(("doc_string", node.doc_string or "", other.doc_string or ""))
    ours, theirs = node.metadata_props, other.metadata_props
    for key in sorted({*ours, *theirs}):
        if not key.startswith("onnxamp.") and ours.get(key) != theirs.get(key):
            rows.append((f"metadata {key}", ours.get(key, ""), theirs.get(key, "")))
    return rows
