"""The plan of a conversion: a decision for every unit, with the constants that change and the traffic that results."""

from __future__ import annotations

import dataclasses
import functools

import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.model.units import Read, TypeGraph, Unit
from onnxamp.policy import codes, targets
from onnxamp.policy.decision import Decision
from onnxamp.policy.legality import choices, interface_decision
from onnxamp.policy.options import Options

__all__ = ["Clamp", "Decision", "NodeDecision", "Options", "Plan", "make_plan"]


@dataclasses.dataclass(frozen=True)
class Clamp:
    """Finite elements of a constant are clipped to [-limit, limit], in every precision; infinities and NaN stay.

    Attributes:
        limit: Half the largest value of the 16-bit type.
        elements: How many elements change.
        extreme: The finite element of largest size before.
    """

    limit: float
    elements: int
    extreme: float


@dataclasses.dataclass(frozen=True)
class NodeDecision:
    """What the plan says of one node: the decision of its primary unit, and of the others where they differ.

    Attributes:
        node: The node.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        code: The reason's code.
        evidence: The facts behind it.
        operands: The precision of each type variable, in signature order.
    """

    node: ir.Node
    precision: str
    code: str
    evidence: dict[str, object]
    operands: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Modelled bytes that one run reads and writes (see `onnxamp.model.traffic`).

    Attributes:
        source: The model as it came.
        cut: After the assignment, before low regions without purpose are dissolved.
        result: The plan as it is.
    """

    source: int
    cut: int
    result: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for one model.

    Attributes:
        graph: The type graph that was decided.
        options: What was asked for.
        decisions: The decision of every unit of the graph.
        clamped: Mask constants to clamp, in every precision in which they are used.
        uncast: Reads of constants that shape inference looks at: the constant is converted, never cast at run time.
        traffic: Modelled bytes.
        dims: The sizes that the traffic model took for unknown dimensions, by name.
    """

    graph: TypeGraph
    options: Options
    decisions: dict[Unit, Decision]
    clamped: dict[ir.Value, Clamp] = dataclasses.field(default_factory=dict)
    uncast: frozenset[Read] = frozenset()
    traffic: Traffic = Traffic(0, 0, 0)
    dims: dict[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def nodes(self) -> dict[ir.Node, NodeDecision]:
        """Every node that computes with floats, in graph order, bodies after their node."""
        result = {}
        for node, units in self.graph.of.items():
            if units:
                primary = self.decisions[primary_unit(units)]
                operands = {unit.variable: self.decisions[unit].precision for unit in units}
                result[node] = NodeDecision(node, primary.precision, primary.code, primary.evidence, operands)
        return result

    def precision(self, value: ir.Value) -> str | None:
        """The precision in which a value is written; None for constants and for values that take no part."""
        writer = self.graph.writer.get(value)
        return self.decisions[writer].precision if writer else None


def primary_unit(units: tuple[Unit, ...]) -> Unit:
    """The unit that stands for a node: the first that writes, else the first."""
    return next((unit for unit in units if unit.writes), units[0])


def make_plan(graph: TypeGraph, options: Options) -> Plan:
    """Decide the precision of every unit of `graph`.

    Authority, highest first: legality, target, user, rules, level.

    Raises:
        UsageError: The options contradict each other, or name a node that cannot be what they ask for.
    """
    decisions: dict[Unit, Decision] = {}
    if options.level == "O0":
        decisions = {unit: Decision(BY_IR[unit.dtype].name, codes.LEVEL_O0) for unit in graph.units}
        return Plan(graph, options, decisions)
    for unit in graph.units:
        if unit.node is None:
            values = [read.value for read in unit.reads] + list(unit.writes)
            source = BY_IR[unit.dtype].name
            dtype = source if unit.fixed == "overridable" else options.interface_type(values[0].name or "", source)
            decisions[unit] = interface_decision(unit, dtype)
    target = targets.table(options.target)
    for node in graph.of:
        legal = choices(node, graph, options.low, target)
        decisions.update(legal.blocked)
        best = max(legal.allowed, key=len)
        for unit in legal.units:
            low = unit in best
            decisions[unit] = Decision(options.dtype if low else "fp32", codes.LEVEL_O3 if low else codes.TIED)
    return Plan(graph, options, {unit: decisions[unit] for unit in graph.units})
