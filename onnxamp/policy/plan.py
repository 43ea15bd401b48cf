"""The plan of a conversion: a decision for every unit, with the constants that change and the traffic that results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxamp.dtypes import BY_IR, BY_NAME
from onnxamp.errors import UsageError
from onnxamp.model.metadata import noted
from onnxamp.model.signatures import operator_name
from onnxamp.model.traffic import Traffic
from onnxamp.model.units import Read, TypeGraph, Unit
from onnxamp.policy import codes, targets
from onnxamp.policy.affine import join_affine
from onnxamp.policy.assign import Groups, dissolve, follow_inputs, minimum_cut
from onnxamp.policy.decision import Decision
from onnxamp.policy.facts import Facts
from onnxamp.policy.legality import castable, choices, interface_decision, is_setting
from onnxamp.policy.marks import Marks
from onnxamp.policy.masks import find_masks
from onnxamp.policy.operators import Kind
from onnxamp.policy.options import Options, matches
from onnxamp.policy.pages import title
from onnxamp.policy.resolve import resolve
from onnxamp.policy.rules import BINDING, NUMERICAL
from onnxamp.policy.user import check_dims, label, nearest, wishes

__all__ = ["Bytes", "Clamp", "Decision", "NodeDecision", "Options", "Plan", "make_plan"]


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
class Bytes:
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
        traffic: Modelled bytes.
        dims: The sizes that the traffic model took for unknown dimensions, by name.
        ranges: The largest sizes of values by name that were given.
        apart: Reads of biases behind a layer normalization that ONNX Runtime must not fuse with it (see `passes.unfuse`).
    """

    graph: TypeGraph
    options: Options
    decisions: dict[Unit, Decision]
    clamped: dict[ir.Value, Clamp] = dataclasses.field(default_factory=dict)
    traffic: Bytes = Bytes(0, 0, 0)
    dims: dict[str, int] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, float] = dataclasses.field(default_factory=dict)
    apart: tuple[Read, ...] = ()

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

    def casts(self, read: Read) -> bool:
        """Whether a constant that is read here in another precision is cast at run time; else it is converted."""
        return _casts_constant(self.graph, self.options, read)


def primary_unit(units: tuple[Unit, ...]) -> Unit:
    """The unit that stands for a node: the first that writes, else the first."""
    return next((unit for unit in units if unit.writes), units[0])


def make_plan(
    graph: TypeGraph,
    options: Options,
    ranges: Mapping[str, float] | None = None,
    *,
    prices: Mapping[str, int] | None = None,
) -> Plan:
    """Decide the precision of every unit of `graph`.

    Authority, highest first: legality, target, user, rules, level.

    Args:
        graph: The model's type graph.
        options: What was asked for.
        ranges: Largest sizes of values by name, as calibration saw them.
        prices: What 16 bits cost besides traffic, in elements, by the label of nodes that neither a numerical rule nor the
            level holds: at O2 the minimum cut decides.

    Raises:
        UsageError: The options contradict each other, or name a node that cannot be what they ask for.
    """
    if options.level == "O0":
        untouched = {unit: Decision(BY_IR[unit.dtype].name, codes.LEVEL_O0) for unit in graph.units}
        return Plan(graph, options, untouched, ranges=ranges or {})
    target = targets.table(options.target)
    facts = Facts(graph, options.low, ranges, options.headroom)
    decisions = _interface(graph, options)
    legal = {node: choices(node, graph, options.low, target) for node in graph.of}
    for node, found in legal.items():
        decisions.update(_kept(graph.of[node]) or found.blocked)
    marks = Marks(facts, find_masks(facts), decisions)
    for rule in BINDING:
        rule(marks)
    asked = _apply_wishes(graph, options, decisions)
    priced = _priced(graph, decisions, prices or {})
    forced = _apply_rules_and_level(marks, options, priced)
    groups = resolve(graph, legal, decisions, options.dtype, target.name)
    _check_asked(graph, options, decisions, asked)
    model = _traffic(graph, options)
    low = _assign(graph, groups, model, options, priced, decisions)
    before = _bytes(model, options, decisions)
    if options.level in ("O1", "O2"):
        dissolved = Decision("fp32", codes.DISSOLVED)
        for group in dissolve(graph, groups, low, {unit for unit in forced if decisions[unit].precision != "fp32"}):
            decisions.update(dict.fromkeys(groups.members[group], dissolved))
    apart = join_affine(facts, decisions)
    ordered = {unit: decisions[unit] for unit in graph.units}
    return Plan(
        graph,
        options,
        ordered,
        _clamps(marks, ordered),
        Bytes(model.bytes(lambda unit: unit.dtype), before, _bytes(model, options, ordered)),
        model.dims,
        ranges or {},
        apart,
    )


def _interface(graph: TypeGraph, options: Options) -> dict[Unit, Decision]:
    """The decisions of graph inputs and outputs.

    Raises:
        UsageError: A pattern for the interface matches nothing, or Cast does not know the type.
    """
    ends = {(unit.writes or [unit.reads[0].value])[0].name or "" for unit in graph.units if unit.node is None}
    for entry in options.io if isinstance(options.io, tuple) else ():
        glob = entry.rpartition("=")[0]
        if not any(matches(glob, name) for name in ends):
            raise UsageError(f"The io pattern {glob!r} matches no float input or output{nearest(glob, ends)}")
    decisions = {}
    for unit in graph.units:
        if unit.node is None:
            value = unit.writes[0] if unit.writes else unit.reads[0].value
            source = BY_IR[unit.dtype].name
            dtype = source if unit.fixed == "overridable" else options.interface_type(value.name or "", source)
            if dtype != source and not castable(graph.model, options.low):
                if options.io != "low":
                    raise UsageError(
                        f"{value.name!r} cannot become {dtype}: Cast knows it from opset 13 on; raise the model's opset."
                    )
                dtype = source
            decisions[unit] = interface_decision(unit, dtype)
    return decisions


def _kept(units: tuple[Unit, ...]) -> dict[Unit, Decision]:
    """The decisions that an earlier conversion left on a node."""
    node = units[0].node if units else None
    metadata = {} if node is None else node.metadata_props
    if node is None or ("onnxamp.precision" not in metadata and "onnxamp.cast" not in metadata):
        return {}
    code = metadata.get("onnxamp.code", codes.KEPT_DECISION)
    evidence = noted(metadata, "evidence", f"node {node.name!r}")
    return {unit: Decision(BY_IR[unit.dtype].name, code, evidence) for unit in units}


def _apply_wishes(graph: TypeGraph, options: Options, decisions: dict[Unit, Decision]) -> list[ir.Node]:
    """Add what the user asked for; the nodes that must become 16-bit, since they are named one by one."""
    asked = []
    for node, wish in wishes(graph, options).items():
        decision = Decision(options.dtype if wish.low else "fp32", wish.code, {"pattern": wish.pattern})
        for unit in graph.of[node]:
            if not wish.low and unit in decisions and decisions[unit].code == codes.OPSET:
                decisions[unit] = decision  # the opset is not raised for what shall be fp32 anyway
            decisions.setdefault(unit, decision)
        if wish.low and wish.exact and graph.of[node]:
            asked.append(node)
    return asked


def _check_asked(graph: TypeGraph, options: Options, decisions: dict[Unit, Decision], asked: Iterable[ir.Node]) -> None:
    """What is named one by one to become 16-bit is an error if it does not.

    Raises:
        UsageError: The node with the reason.
    """
    for node in asked:
        units = graph.of[node]
        decision = decisions[primary_unit(units)]
        if decision.precision == "fp32":
            why = [decisions[unit] for unit in units if unit in decisions]
            cause = next((d for d in why if d.precision == "fp32" and d.code != codes.NO_MIXED_KERNEL), decision)
            raise UsageError(
                f"Node {label(node)!r} ({node.op_type}) cannot become {options.dtype}: {title(cause.code)} "
                f"({cause.code}); leave it out of --lower."
            )


def _priced(graph: TypeGraph, decisions: Mapping[Unit, Decision], prices: Mapping[str, int]) -> dict[Unit, int]:
    """The prices of the open units of these nodes; a node pays once."""
    result = {}
    for node, units in graph.of.items() if prices else ():
        if (price := prices.get(label(node))) is not None:
            result.update(
                {unit: price if unit is primary_unit(units) else 0 for unit in units if unit not in decisions}
            )
    return result


def _apply_rules_and_level(marks: Marks, options: Options, priced: Mapping[Unit, int]) -> set[Unit]:
    """Add what numerical rules and the level say of all but the priced units; the units that shall be 16-bit, whoever says so."""
    decisions = marks.decisions
    if options.level != "O3":
        for rule in NUMERICAL:
            rule(marks)
        for unit in priced:
            decisions.pop(unit, None)
    for unit in marks.facts.graph.units:
        if unit not in decisions and unit not in priced and (decision := _by_level(marks.facts, unit, options)):
            decisions[unit] = decision
    forced = {unit for unit, decision in decisions.items() if decision.precision != "fp32"}
    return forced | {unit for unit in priced if marks.facts.kind(unit) is Kind.HEAVY}


def _traffic(graph: TypeGraph, options: Options) -> Traffic:
    """The traffic model with the sizes that were given.

    Raises:
        UsageError: A size is given for a dimension that the model does not have.
    """
    check_dims(graph.model.graph, dict(options.dim))
    return Traffic(graph, dict(options.dim))


def _assign(
    graph: TypeGraph,
    groups: Groups,
    model: Traffic,
    options: Options,
    priced: Mapping[Unit, int],
    decisions: dict[Unit, Decision],
) -> dict[int, bool]:
    """Decide the units that are left; which groups are 16-bit."""
    if options.level == "O1":
        low = follow_inputs(graph, groups)
        open_low, open_fp32 = Decision(options.dtype, codes.FOLLOWS_LOW), Decision("fp32", codes.FOLLOWS_FP32)
    else:
        low = minimum_cut(graph, groups, model, priced)
        open_low, open_fp32 = Decision(options.dtype, codes.CUT_LOW), Decision("fp32", codes.CUT_FP32)
    for unit in graph.units:
        decisions.setdefault(unit, open_low if low[groups.of[unit]] else open_fp32)
    return low


def _by_level(facts: Facts, unit: Unit, options: Options) -> Decision | None:
    """What the level itself says of an undecided unit; None leaves it to the assignment."""
    if options.level == "O3":
        return Decision(options.dtype, codes.LEVEL_O3)
    if facts.kind(unit) is Kind.HEAVY:
        assert unit.node is not None
        return Decision(options.dtype, codes.HEAVY, {"operator": operator_name(unit.node)})
    return Decision("fp32", codes.LEVEL_OD) if options.level == "OD" else None


def _bytes(model: Traffic, options: Options, decisions: dict[Unit, Decision]) -> int:
    return model.bytes(
        lambda unit: BY_NAME[decisions[unit].precision].ir,
        functools.partial(_casts_constant, model.graph, options),
    )


def _clamps(marks: Marks, decisions: dict[Unit, Decision]) -> dict[ir.Value, Clamp]:
    """The mask constants that some 16-bit unit carries to a softmax."""
    limit = marks.facts.low.max / 2
    clamps = {}
    for constant, carriers in marks.masks.constants.items():
        if any(decisions[unit].precision != "fp32" for unit in carriers):
            found = marks.facts.extent(constant)
            clamps[constant] = Clamp(limit, found.over, found.largest)
    return clamps


def _casts_constant(graph: TypeGraph, options: Options, read: Read) -> bool:
    """With weights that are cast: all, except where shape inference looks at them and where they are an output."""
    return options.casts_weights and read.site is not graph.model.graph and not is_setting(read)
