"""AMP120: distances between rows by way of a product of matrices."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.facts import SINGLE_MOVES, Facts
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import HEAVY
from onnxamp.policy.rules.norms import squared

_SUMS = frozenset({"Add", "Sub", "Sum"})
_LINEAR = frozenset({*_SUMS, "Neg", "Mul", "Div"})
_STEPS = 8


def distances(marks: Marks) -> None:
    """The product in x² - 2xy + y² stays fp32 with what leads from it to the sum.

    A sum of squares of x, through moves, factors and further sums, is added to a product that reads x, or is a part of what a product
    reads beside x (``[-2x, x², 1] @ [y, 1, y²]``).
    """
    facts = marks.facts
    for reduction in facts.graph.nodes(("ReduceSum", "ReduceSumSquare")):
        base = _squares(facts, reduction)
        if base is not None:
            for member in _products(facts, reduction.outputs[0], base):
                marks.node(member, codes.DISTANCE, squares=reduction.name or reduction.outputs[0].name)


def _squares(facts: Facts, reduction: ir.Node) -> ir.Value | None:
    """The value whose squares a reduction sums."""
    if operator_name(reduction) == "ReduceSumSquare":
        return _unscaled(facts, reduction.inputs[0])
    square = facts.source(reduction.inputs[0])
    return _unscaled(facts, squared(facts, square)) if square is not None else None


def _unscaled(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """What `value` is a copy or a multiple of."""
    for _ in range(_STEPS):
        if value is None:
            return None
        value = facts.through_moves(value)
        node = value.producer()
        rest = _factors(facts, node) if node is not None and operator_name(node) in ("Neg", "Mul", "Div") else []
        if len(rest) != 1:
            return value
        value = rest[0]
    return value


def _factors(facts: Facts, node: ir.Node) -> list[ir.Value]:
    """The operands that are not one number."""
    return [value for value in node.inputs if value is not None and facts.scalar(value) is None]


def _products(facts: Facts, total: ir.Value, base: ir.Value) -> Iterator[ir.Node]:
    """The products of `base` that meet the sum of its squares, with the nodes from there to the meeting."""
    pending, seen = [(total, _STEPS)], {total}
    while pending:
        value, steps = pending.pop()
        for user, index in value.uses() if steps else ():
            op = operator_name(user)
            if op in HEAVY:
                yield from _reading(facts, user, index, base)
            elif op in SINGLE_MOVES or op in ("Concat", "Neg") or (op in _LINEAR and _passes(facts, user, op)):
                if op in _SUMS:
                    for other in user.inputs:
                        if other is not None and other is not value:
                            yield from _leading(facts, other, base, _STEPS)
                fresh = [output for output in user.outputs if output not in seen]
                seen.update(fresh)
                pending.extend((output, steps - 1) for output in fresh)


def _passes(facts: Facts, node: ir.Node, op: str) -> bool:
    return op in _SUMS or len(_factors(facts, node)) == 1


def _reading(facts: Facts, product: ir.Node, index: int, base: ir.Value) -> Iterator[ir.Node]:
    """A product that reads the squares: as its third operand, or as part of one in which `base` is another."""
    reads = [value for position, value in enumerate(product.inputs) if value is not None and position < 2]
    if index < 2:
        parts = facts.source(product.inputs[index])
        reads = list(filter(None, parts.inputs)) if parts is not None and operator_name(parts) == "Concat" else []
    if any(_unscaled(facts, value) is base for value in reads):
        yield product


def _leading(facts: Facts, value: ir.Value, base: ir.Value, steps: int) -> list[ir.Node]:
    """The nodes from a product of `base` to `value`; none if there is no such product."""
    node = value.producer()
    if node is None or not steps:
        return []
    op = operator_name(node)
    if op in HEAVY:
        return [node] if any(_unscaled(facts, operand) is base for operand in node.inputs[:2]) else []
    if op not in SINGLE_MOVES and op not in _LINEAR:
        return []
    found = [member for operand in _factors(facts, node) for member in _leading(facts, operand, base, steps - 1)]
    return [node, *found] if found else []
