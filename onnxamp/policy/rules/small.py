"""AMP109: values that must not become zero."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import Unit
from onnxamp.policy import codes
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import Kind, operator

_STEPS = 6
_GUARDS = frozenset({"Add", "Max", "Clip", "Sub", "Where"})
_LOGARITHMS = frozenset({"Log", "ReduceLogSum"})


def epsilons(marks: Marks) -> None:
    """What keeps a logarithm, root or quotient finite stays fp32.

    1. An operator that adds an epsilon below the type's smallest normal number, or clips at one, on the way to Sqrt, Log, Reciprocal, a
       fractional power or the denominator of Div, with the operators between; what it reads stays fp32 back to the last heavy or
       sensitive operator, as small numbers matter there too.
    2. What Log reads, back to the last heavy or sensitive operator: a sigmoid of 1e-9 is zero in fp16.
    """
    facts = marks.facts

    def stop(unit: Unit) -> bool:
        return facts.kind(unit) is Kind.SENSITIVE

    for node in facts.graph.nodes(_LOGARITHMS | _GUARDS):
        if node.op_type in _LOGARITHMS and node.inputs[0] is not None:
            for unit in facts.backward([node.inputs[0]], stop):
                marks.fp32(unit, codes.EPSILON, before=node.op_type)
        elif node.op_type in _GUARDS and (epsilon := _epsilon(marks, node)) is not None:
            path = _to_singularity(marks, node)
            if path:
                reader = path[-1].op_type
                for member in (node, *path):
                    marks.node(member, codes.EPSILON, epsilon=epsilon, before=reader)
                operands = [v for v in node.inputs if v is not None]
                for unit in facts.backward(operands, stop):
                    marks.fp32(unit, codes.EPSILON, epsilon=epsilon, before=reader)


def _epsilon(marks: Marks, node: ir.Node) -> float | None:
    numbers = [marks.facts.scalar(value) for value in node.inputs if value is not None]
    numbers += [a.as_float() for name in ("min", "max") if (a := node.attributes.get(name)) is not None]
    return next((n for n in numbers if n is not None and 0 < abs(n) < marks.facts.low.tiny), None)


def _to_singularity(marks: Marks, node: ir.Node) -> list[ir.Node]:
    """The nodes from behind `node` to one whose result explodes near zero; empty if none is near."""
    path: list[ir.Node] = []
    value = node.outputs[0]
    for _ in range(_STEPS):
        for user, index in value.uses():
            if _singular(marks, user, index):
                return [*path, user]
        onward = [user for user, _ in value.uses() if operator(user).kind in (Kind.MOVE, Kind.NEUTRAL)]
        if len(onward) != 1 or not onward[0].outputs:
            return []
        path.append(onward[0])
        value = onward[0].outputs[0]
    return []


def _singular(marks: Marks, node: ir.Node, index: int) -> bool:
    if operator_name(node) == "Pow":
        exponent = marks.facts.scalar(node.inputs[1])
        return index == 0 and exponent is not None and exponent < 1
    return operator_name(node) in ("Sqrt", "Log", "Reciprocal") or (operator_name(node) == "Div" and index == 1)
