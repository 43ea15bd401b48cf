"""Masks in front of a softmax: constants so large that only their sign means something."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.model.units import Unit
from onnxamp.policy.facts import Facts
from onnxamp.policy.legality import operator_name
from onnxamp.policy.operators import Kind, operator

# Operands that are added to scores before a softmax (or are the scores), by operator.
_SOFTMAX_OPERANDS = {
    "Softmax": (0,),
    "LogSoftmax": (0,),
    "Attention": (3,),
    "com.microsoft.MultiHeadAttention": (5,),
    "com.microsoft.GroupQueryAttention": (10,),
    "com.microsoft.BiasSoftmax": (0, 1),
}
_ADDITIVE = frozenset({"Add", "Sub", "Where", "Sum"})


@dataclasses.dataclass(frozen=True)
class Masks:
    """What lies between mask constants and a softmax.

    Attributes:
        region: Units that carry a mask to a softmax.
        constants: Mask constants to clamp, with the units that carry them on: finite elements are beyond the 16-bit type, and all readers
            are in the region.
        sums: Units that add two masks, or carry one that cannot be clamped since no constant holds it.
    """

    region: frozenset[Unit]
    constants: dict[ir.Value, tuple[Unit, ...]]
    sums: tuple[Unit, ...]


def find_masks(facts: Facts) -> Masks:
    """The masks of a graph: walk back from each softmax through sums, selections, moves and (1 - m) * c."""
    region: dict[Unit, None] = {}
    pending = [value for node in facts.graph.of for value in _anchors(facts, node)]
    seen = set(pending)
    while pending:
        unit = facts.graph.writer.get(pending.pop())
        if unit is None or unit.node is None or not _carries(facts, unit.node):
            continue
        region[unit] = None
        for read in unit.reads:
            if read.value not in seen:
                seen.add(read.value)
                pending.append(read.value)
    return _collect(facts, region)


def _anchors(facts: Facts, node: ir.Node) -> list[ir.Value]:
    indices = _SOFTMAX_OPERANDS.get(operator_name(node), ())
    if node.op_type == "Exp" and any(_normalizes(user, node.outputs[0]) for user, _ in node.outputs[0].uses()):
        indices = (0,)
    return [value for i in indices if i < len(node.inputs) and (value := node.inputs[i]) is not None]


def _normalizes(user: ir.Node, exponential: ir.Value) -> bool:
    """Whether `user` sums the exponentials that it is then divided by."""
    return user.op_type == "ReduceSum" and any(
        u.op_type == "Div" and u.inputs[0] is exponential for u, _ in exponential.uses()
    )


def _carries(facts: Facts, node: ir.Node) -> bool:
    if node.op_type in _ADDITIVE or (
        operator(node).kind is Kind.MOVE and not any(node.attributes.get(b) for b in ("body",))
    ):
        return True
    return node.op_type in ("Mul", "Div") and _is_scaled_flag(facts, node)


def _is_scaled_flag(facts: Facts, node: ir.Node) -> bool:
    """Whether a product is (1 - m) * c, or m * c with m from a comparison or an integer mask."""
    operands = [value for value in node.inputs if value is not None]
    flags = [value for value in operands if facts.scalar(value) is None]
    if len(flags) != 1 or len(operands) != 2:
        return False
    source = facts.through_moves(flags[0]).producer()
    if source is None:
        return False
    if source.op_type == "Sub":
        return any(facts.scalar(value) == 1.0 for value in source.inputs)
    operand = source.inputs[0] if source.inputs else None
    return (
        source.op_type == "Cast"
        and operand is not None
        and operand.dtype is not None
        and not operand.dtype.is_floating_point()
    )


def _collect(facts: Facts, region: dict[Unit, None]) -> Masks:
    constants: dict[ir.Value, set[Unit]] = {}
    for unit in region:
        for read in unit.reads:
            if read.value in facts.constants and facts.extent(read.value).over:
                constants.setdefault(read.value, set()).add(unit)
    clamped = {value for value in constants if set(facts.graph.readers[value]) <= constants[value]}
    carried: dict[ir.Value, bool] = {}  # carried values, and whether their mask is clamped
    followers: dict[ir.Value, list[Unit]] = {value: [] for value in clamped}
    origin: dict[ir.Value, set[ir.Value]] = {}
    sums: dict[Unit, None] = {}
    for unit in facts.graph.units:
        if unit not in region:
            if unit.node is not None and unit.node.op_type == "ConstantOfShape" and _fills_beyond(facts, unit.node):
                carried.update(dict.fromkeys(unit.writes, False))
            continue
        sources: set[ir.Value] = set()
        masks, held = 0, True
        for read in unit.reads:
            if read.value in constants:
                masks, held = masks + 1, held and read.value in clamped
                sources |= {read.value} & clamped
            elif read.value in carried:
                masks, held = masks + 1, held and carried[read.value]
                sources |= origin.get(read.value, set())
        if masks:
            assert unit.node is not None
            if not held or (masks > 1 and unit.node.op_type in ("Add", "Sub", "Sum")):
                sums[unit] = None
            carried.update(dict.fromkeys(unit.writes, held))
            for value in unit.writes:
                origin[value] = sources
            for source in sources:
                followers[source].append(unit)
    return Masks(
        frozenset(region), {value: tuple(followers[value]) for value in constants if value in clamped}, tuple(sums)
    )


def _fills_beyond(facts: Facts, node: ir.Node) -> bool:
    attribute = node.attributes.get("value")
    if attribute is None:
        return False
    fill = abs(float(attribute.as_tensor().numpy().reshape(-1)[0]))
    return facts.low.max < fill < float("inf")
