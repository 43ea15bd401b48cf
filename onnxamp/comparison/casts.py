"""Casts between float types: what they cast, what it costs, whether they are needed."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxamp.comparison.records import CastChange, Change
from onnxamp.comparison.side import Side, type_name
from onnxamp.dtypes import BY_IR
from onnxamp.model.tensors import cast_target


def shape_text(shape: ir.Shape | None) -> str:
    """A shape as text: ``[2,N,64]``, "" if the rank is unknown, ``?`` for an unnamed dimension."""
    if shape is None:
        return ""
    sizes = [str(size) if isinstance(size, int) else str(size.value or "?") for size in shape]
    return f"[{','.join(sizes)}]"


def describe(side: Side, node: ir.Node, change: Change, others: Mapping[ir.Value, ir.Value]) -> CastChange:
    """The record of a Cast of `side`; `others` are the values of the other model, by those of this one."""
    read, result = node.inputs[0], node.outputs[0]
    assert read is not None
    target = cast_target(node)
    shape = result.shape if result.shape is not None else read.shape
    source = read.dtype
    size = traffic(side, node)
    root = side.root(result)
    return CastChange(
        change=change,
        node=side.ref(node),
        tensor=others.get(root, root).name or "",
        source=type_name(source),
        target=type_name(target),
        shape=shape_text(shape),
        bytes=size,
        assumed=shape is None or any(not isinstance(dim, int) for dim in shape),
        fan_out=len(result.uses()) + result.is_graph_output(),
        constant=root in side.constants,
        redundant=redundant(side, node),
    )


def traffic(side: Side, node: ir.Node) -> int | None:
    """Bytes that a Cast reads and writes; None if the rank is unknown."""
    read, result = node.inputs[0], node.outputs[0]
    assert read is not None
    shape = result.shape if result.shape is not None else read.shape
    if shape is None:
        return None
    kinds = read.dtype or ir.DataType.FLOAT, cast_target(node) or ir.DataType.FLOAT
    return side.sizes.elements(shape) * sum(kind.bitwidth // 8 for kind in kinds)


def redundant(side: Side, node: ir.Node) -> str:
    """Why a Cast is not needed; "" if it is.

    A Cast is redundant if it changes no type, if nothing reads it, if another of the same value to the same type stands
    before it in the same graph, or if it only narrows again what a Cast has just widened. A narrowing Cast that is widened
    again at once rounds its value, and nothing else.
    """
    read, result = node.inputs[0], node.outputs[0]
    assert read is not None
    target = cast_target(node)
    if read.dtype is not None and read.dtype == target:
        return "it changes no type"
    if not result.uses() and not result.is_graph_output():
        return "nothing reads it"
    for other, _ in read.uses():
        if (
            other is not node
            and other in side.index
            and side.is_cast(other)
            and side.scope[other] is side.scope[node]
            and cast_target(other) == target
            and side.index[other] < side.index[node]
        ):
            return f"it repeats {other.name or other.outputs[0].name}"
    producer = read.producer()
    if producer is not None and side.is_cast(producer):
        origin = producer.inputs[0]
        assert origin is not None
        if origin.dtype == target and read.dtype in BY_IR and target in BY_IR:
            if BY_IR[target].bits < BY_IR[read.dtype].bits:
                return f"it undoes {producer.name or read.name}"
            return f"with {producer.name or read.name} it only rounds {origin.name}"
    return ""
