"""AMP102-104, AMP107, AMP108: normalizations written out in elementary operators."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import producer
from onnxamp.policy import codes
from onnxamp.policy.facts import Facts
from onnxamp.policy.marks import Marks

_MEANS = frozenset({"ReduceMean", "GlobalAveragePool"})
_REDUCTIONS = frozenset({*_MEANS, "ReduceSum", "ReduceSumSquare", "ReduceL2"})
_GUARDS = frozenset({"Add", "Max", "Clip", "Sub", "Mul", "Div"})
_STEPS = 12


@dataclasses.dataclass
class _Statistic:
    """A reduction of squares, with the nodes that belong to it.

    Attributes:
        reduction: The node that reduces.
        base: The value whose squares it reduces.
        members: All nodes up to the reduction.
        centred: Whether a mean was subtracted, before squaring or after.
        is_mean: Whether the squares are averaged rather than summed.
    """

    reduction: ir.Node
    base: ir.Value
    members: list[ir.Node]
    centred: bool
    is_mean: bool


def norms(marks: Marks) -> None:
    """Reductions of squares and what is normalized by them stay fp32.

    A square is x * x, Pow(x, 2), or inside ReduceSumSquare and ReduceL2. A mean is ReduceMean, or a sum times a number. A difference to a
    mean before squaring, or to the square of a mean after, makes a variance.

    1. Mean of squares, root, division of a centred value: layer normalization, or instance and group normalization when several axes are
       reduced.
    2. The same of a value that is not centred: RMS normalization.
    3. Sum of squares, root, division: L2 normalization.
    4. A variance that nothing is divided by is one all the same.
    """
    facts = marks.facts
    for node in facts.graph.nodes(_REDUCTIONS):
        found = _statistic(facts, node)
        if found is None:
            continue
        upper = _normalizers(facts, found)
        code = _code(facts, found, bool(upper))
        if code is not None:
            for member in (*found.members, *upper):
                marks.node(member, code, statistic=node.name or node.outputs[0].name)


def _statistic(facts: Facts, node: ir.Node) -> _Statistic | None:
    value = node.inputs[0]
    members = [node]
    if operator_name(node) in ("ReduceSum", *_MEANS):
        square = facts.source(value)
        value = squared(facts, square) if square is not None else None
        if square is None or value is None:
            return None
        members.append(square)
    if value is None:
        return None
    difference = facts.source(value)
    mean: list[ir.Node] = []
    if difference is not None and operator_name(difference) == "Sub":
        mean = next(filter(None, (_mean(facts, operand) for operand in difference.inputs)), [])
    if difference is not None and mean:
        members += [difference, *mean]
    return _Statistic(node, value, members, bool(mean), operator_name(node) in _MEANS)


def _mean(facts: Facts, value: ir.Value | None) -> list[ir.Node]:
    """The nodes that make `value` a mean; none if it is something else."""
    node = facts.source(value)
    if node is None:
        return []
    if operator_name(node) in _MEANS:
        return [node]
    if operator_name(node) in ("Mul", "Div"):
        total = [facts.source(v) for v in node.inputs if v is not None and facts.scalar(v) is None]
        if len(total) == 1 and total[0] is not None and operator_name(total[0]) == "ReduceSum":
            return [node, total[0]]
    return []


def squared(facts: Facts, node: ir.Node) -> ir.Value | None:
    """The value whose square `node` computes, but for a constant factor; None if it computes something else."""
    if operator_name(node) == "Pow":
        return node.inputs[0] if facts.scalar(node.inputs[1]) == 2.0 else None
    if operator_name(node) != "Mul":
        return None
    first, second = (_unscaled(facts, value) for value in node.inputs)
    return first if first is not None and first is second else None


def _unscaled(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """`value` before a factor: x of c * x."""
    node = producer(value)
    if node is not None and operator_name(node) == "Mul":
        operands = [operand for operand in node.inputs if facts.scalar(operand) is None]
        if len(operands) == 1:
            return operands[0]
    return value


def _normalizers(facts: Facts, found: _Statistic) -> list[ir.Node]:
    """The nodes from behind the reduction to the product or quotient with the inverse deviation, epsilons included.

    Notes in `found` that a number turned the sum into a mean, or that the square of a mean was subtracted.
    """
    path: list[ir.Node] = []
    value = found.reduction.outputs[0]
    rooted = operator_name(found.reduction) == "ReduceL2"
    for _ in range(_STEPS):
        users = [(user, index) for user, index in value.uses() if user.outputs]
        divisions = [
            u for u, index in users if operator_name(u) == "Div" and index == 1 and facts.scalar(u.inputs[0]) is None
        ]
        if rooted and divisions:
            return [*path, *divisions]
        if rooted and len(users) > 1 and all(operator_name(user) == "Mul" for user, _ in users):
            return [*path, *(user for user, _ in users)]
        step = next((user for user, index in users if _continues(facts, user, index)), None)
        if step is None:
            return []
        path.append(step)
        others = [v for v in step.inputs if v is not None and v is not value]
        if not rooted and operator_name(step) in ("Mul", "Div") and any(facts.scalar(v) is not None for v in others):
            found.is_mean = True
        if operator_name(step) == "Sub" and others and (extra := _squared_mean(facts, others[0])):
            found.centred, found.members = True, [*found.members, *extra]
        rooted = rooted or operator_name(step) in ("Sqrt", "Pow")
        if rooted and operator_name(step) == "Mul" and not any(facts.tensor(facts.through_moves(v)) for v in others):
            return path + [n for v in others if (n := v.producer()) is not None and operator_name(n) == "Sub"]
        value = step.outputs[0]
    return []


def _squared_mean(facts: Facts, value: ir.Value) -> list[ir.Node]:
    """The nodes of the square of a mean; none if `value` is something else."""
    square = facts.source(value)
    if square is None or squared(facts, square) is None:
        return []
    mean = _mean(facts, square.inputs[0])
    return [square, *mean] if mean else []


def _continues(facts: Facts, user: ir.Node, index: int) -> bool:
    if operator_name(user) == "Pow":
        exponent = facts.scalar(user.inputs[1])
        return index == 0 and exponent is not None and abs(exponent) == 0.5
    if operator_name(user) == "Div" and index == 1:
        return facts.scalar(user.inputs[0]) == 1.0
    return operator_name(user) in ("Sqrt", "Reciprocal", "Unsqueeze", "Reshape", "Expand", "Identity", *_GUARDS)


def _code(facts: Facts, found: _Statistic, normalizes: bool) -> str | None:
    if found.centred:
        if not normalizes:
            return codes.VARIANCE
        return codes.INSTANCE_NORM if _over_space(facts, found.reduction) else codes.LAYER_NORM
    if not normalizes:
        return None
    return codes.RMS_NORM if found.is_mean else codes.L2_NORM


def _over_space(facts: Facts, reduction: ir.Node) -> bool:
    if operator_name(reduction) == "GlobalAveragePool":
        return True
    axes = reduction.attributes.get("axes")
    if axes is not None:
        return len(axes.as_ints()) > 1
    if len(reduction.inputs) > 1 and reduction.inputs[1] is not None:
        tensor = facts.tensor(reduction.inputs[1])
        return tensor is not None and tensor.size > 1
    return False
