"""Masks in front of a softmax: constants so large that only their sign means something."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.tensors import blocks
from onnxamp.model.units import Unit
from onnxamp.policy.facts import SINGLE_MOVES, Facts
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
        constants: Mask constants to clamp, with the units that carry them on: finite elements are beyond the 16-bit type, and nothing but
            the region and the softmax reads the constant or a value that carries it.
        sums: Units that add two masks, or carry one that cannot be clamped since no constant holds it.
    """

    region: frozenset[Unit]
    constants: dict[ir.Value, tuple[Unit, ...]]
    sums: tuple[Unit, ...]


def find_masks(facts: Facts) -> Masks:
    """The masks of a graph: walk back from each softmax through sums, selections, moves and (1 - m) * c."""
    region: dict[Unit, None] = {}
    anchors = {(node, index) for node in facts.graph.nodes({*_SOFTMAX_OPERANDS, "Exp"}) for index in _anchors(node)}
    pending = [value for node, index in anchors if (value := node.inputs[index]) is not None]
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
    return _collect(facts, region, anchors)


def _anchors(node: ir.Node) -> list[int]:
    """The operands of a softmax that are scores or are added to them."""
    indices = _SOFTMAX_OPERANDS.get(operator_name(node), ())
    if operator_name(node) == "Exp" and any(_normalizes(user, node.outputs[0]) for user, _ in node.outputs[0].uses()):
        indices = (0,)
    return [index for index in indices if index < len(node.inputs) and node.inputs[index] is not None]


def is_mask_operand(node: ir.Node, index: int) -> bool:
    """Whether the operator adds this operand to its scores, or takes it for them."""
    return index in _SOFTMAX_OPERANDS.get(operator_name(node), ())


def _normalizes(user: ir.Node, exponential: ir.Value) -> bool:
    """Whether `user` sums the exponentials that it is then divided by."""
    return operator_name(user) == "ReduceSum" and any(
        operator_name(u) == "Div" and u.inputs[0] is exponential for u, _ in exponential.uses()
    )


def _carries(facts: Facts, node: ir.Node) -> bool:
    if operator_name(node) in _ADDITIVE or (operator(node).kind is Kind.MOVE and "body" not in node.attributes):
        return True
    return operator_name(node) in ("Mul", "Div") and (_is_scaled_flag(facts, node) or _is_switched(facts, node))


def _is_switched(facts: Facts, node: ir.Node) -> bool:
    """Whether a product is a whole mask times a flag, which switches it off: the mask of a cache, say, while there is no cache."""
    if operator_name(node) != "Mul":
        return False
    flags = [value is not None and facts.scalar(value) is None and _is_flag(facts, value) for value in node.inputs]
    return sum(flags) == 1


def _is_scaled_flag(facts: Facts, node: ir.Node) -> bool:
    """Whether a product is a flag times a number: m * c, (1 - m) * c or (m - 1) * c.

    A float input of the graph counts as a flag in (1 - m) * c only: many exports leave the mask to the caller.
    """
    operands = [value for value in node.inputs if value is not None]
    flags = [value for value in operands if facts.scalar(value) is None]
    if len(flags) != 1 or len(operands) != 2 or (operator_name(node) == "Div" and flags[0] is not operands[0]):
        return False
    if _is_flag(facts, flags[0]):
        return True
    source = facts.source(flags[0])
    if source is None or operator_name(source) != "Sub":
        return False
    left, right = source.inputs
    assert left is not None
    assert right is not None
    if facts.scalar(left) == 1.0:
        return facts.through_moves(right) in facts.graph.model.graph.inputs
    return facts.scalar(right) == 1.0 and _is_flag(facts, left)


def _is_flag(facts: Facts, value: ir.Value, depth: int = 8) -> bool:
    """Whether all elements are 0 or 1: casts of integers and truth values count as that, with what keeps it."""
    node = value.producer()
    if depth == 0:
        return False
    if node is None or operator_name(node) == "Constant":
        tensor = facts.tensor(value)
        return tensor is not None and all(bool(np.isin(block, (0, 1)).all()) for block in blocks(tensor))
    name = operator_name(node)
    operand = node.inputs[0] if node.inputs else None
    kind = operand.dtype if operand is not None and name in ("Cast", "CastLike") else None
    if kind is not None and not kind.is_floating_point():
        return True
    if name == "ConstantOfShape":
        fill = node.attributes.get("value")
        return fill is None or fill.as_tensor().numpy().item() in (0, 1)
    parts = node.inputs
    if name == "Sub":
        if facts.scalar(operand) != 1.0:
            return False
    elif name == "Where":
        parts = node.inputs[1:]
    elif name in SINGLE_MOVES or name == "Trilu":
        parts = node.inputs[:1]
    elif name not in ("Mul", "Min", "Max", "Concat"):
        return False
    return all(part is not None and _is_flag(facts, part, depth - 1) for part in parts)


def _collect(facts: Facts, region: dict[Unit, None], anchors: set[tuple[ir.Node, int]]) -> Masks:
    constants: set[ir.Value] = set()
    origin: dict[ir.Value, set[ir.Value]] = {}  # carried values, and the constants that their mask comes from
    computed: set[ir.Value] = set()  # carried values whose mask no constant holds
    followers: dict[ir.Value, list[Unit]] = {}
    carriers: list[tuple[Unit, set[ir.Value], int, bool]] = []
    fills = {node for node in facts.graph.nodes(("ConstantOfShape",)) if _fills_beyond(facts, node)}
    for unit in facts.graph.units if region or fills else ():
        if unit not in region:
            if unit.node in fills:
                origin.update((value, set()) for value in unit.writes)
                computed.update(unit.writes)
            continue
        sources: set[ir.Value] = set()
        masks, held = 0, True
        for read in unit.reads:
            value = read.value
            if value in facts.constants and facts.extent(value).over:
                constants.add(value)
                masks, sources = masks + 1, sources | {value}
            elif value in origin:
                masks, sources, held = masks + 1, sources | origin[value], held and value not in computed
        if masks:
            carriers.append((unit, sources, masks, held))
            for value in unit.writes:
                origin[value] = sources
                if not held:
                    computed.add(value)
            for source in sources:
                followers.setdefault(source, []).append(unit)
    leaking: set[ir.Value] = set()  # constants whose size is seen by more than a softmax
    for value, sources in (*((value, {value}) for value in constants), *origin.items()):
        if not all(_stays(unit, value, region, anchors) for unit in facts.graph.readers.get(value, ())):
            leaking |= sources
    sums: list[Unit] = []
    for unit, sources, masks, held in carriers:
        assert unit.node is not None
        if not held or sources & leaking or (masks > 1 and operator_name(unit.node) in ("Add", "Sub", "Sum")):
            sums.append(unit)
    clamped = {v: tuple(followers[v]) for v in facts.graph.constants if v in followers and v not in leaking}
    return Masks(frozenset(region), clamped, tuple(sums))


def _stays(unit: Unit, value: ir.Value, region: dict[Unit, None], anchors: set[tuple[ir.Node, int]]) -> bool:
    """Whether what the unit reads of `value` goes to a softmax."""
    return unit in region or all(
        isinstance(read.site, ir.Node) and (read.site, read.index) in anchors
        for read in unit.reads
        if read.value is value
    )


def _fills_beyond(facts: Facts, node: ir.Node) -> bool:
    attribute = node.attributes.get("value")
    if attribute is None:
        return False
    fill = abs(float(attribute.as_tensor().numpy().reshape(-1)[0]))
    return facts.low.max < fill < float("inf")
