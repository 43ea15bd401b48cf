"""A plan with the opset that it needs: raised for a decision that cannot be had otherwise, and never past a kernel of the target."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.model import types
from onnxamp.model.opset import HIGHEST, OpsetError, raise_opset
from onnxamp.model.signatures import operator_name, standard_opset
from onnxamp.model.units import TypeGraph, all_values, type_graph
from onnxamp.policy import codes, targets
from onnxamp.policy.decision import Decision
from onnxamp.policy.legality import choices
from onnxamp.policy.operators import Kind, operator
from onnxamp.policy.options import Options
from onnxamp.policy.plan import Plan, make_plan
from onnxamp.policy.targets import TargetTable
from onnxamp.policy.user import label, wishes

_ORIGIN = "onnxamp.origin"  # key of Value.meta in a raised copy: the value that it is a copy of
# How ONNX's inference says where it found what.
_PLACE = re.compile(r"\(op_type:(?P<operator>[^,)]+)(?:, node name: (?P<node>[^)]*))?\): *(?:\[\w+\] *)?(?P<reason>.*)")


@dataclasses.dataclass(frozen=True)
class Blocker:
    """What keeps a model below an opset: a node that would lose its kernel, or that cannot be written there."""

    node: str
    operator: str
    reason: str


def plan_at_best_opset(model: ir.Model, options: Options, ranges: Mapping[str, float] | None = None) -> Plan:
    """The plan for `model`, or for a copy of it in a later opset if that makes more of the wanted nodes 16-bit.

    Wanted are heavy nodes, those that the user lowers, and at O3 all. Of the opsets in which one of them first has the 16-bit type, up
    to the table's end, the lowest that serves the most is taken. An opset is out if an operator cannot be written in it, if a node for
    which the target has a kernel now would have none there, or if ONNX finds shapes wrong there that it does not check now.
    `Plan.graph.model` is the model that the plan is for: `model` itself unless the opset was raised. Nodes that stay fp32 for their opset
    say in their evidence what blocks it.

    Raises:
        UsageError: See `make_plan`.
    """
    graph = type_graph(model)
    wanted = _waiting(graph, options)
    if not wanted:
        return make_plan(graph, options, ranges)
    best: Plan | None = None
    problem: UsageError | None = None
    try:
        best = make_plan(graph, options, ranges)
    except UsageError as raised:  # a node that must become 16-bit, and that perhaps can in a later opset
        problem = raised
    blockers: dict[int, Blocker] = {}
    for version in sorted(wanted):
        raised_graph = _raised(graph, version, targets.table(options.target))
        if isinstance(raised_graph, Blocker):
            blockers[version] = raised_graph
            continue
        try:
            plan = make_plan(raised_graph, options, ranges)
        except UsageError as raised:
            problem = raised
            continue
        if best is None or _served(plan) > _served(best):
            best = plan
    if best is None:
        assert problem is not None
        raise problem
    return _explained(best, blockers)


def origins(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """What the values of a raised copy are copies of, for those that are."""
    return {value: value.meta[_ORIGIN] for value in all_values(model.graph) if _ORIGIN in value.meta}


def _waiting(graph: TypeGraph, options: Options) -> set[int]:
    """The opsets, in reach, that wanted nodes wait for."""
    if options.level == "O0" or not any(graph.of.values()):
        return set()
    target = targets.table(options.target)
    try:
        asked = {node for node, wish in wishes(graph, options).items() if wish.low}
    except UsageError:  # a pattern may be for a node that comes with the later opset; the plans will tell
        asked = set()
    found = set()
    for node in graph.of:
        if options.level == "O3" or node in asked or operator(node).kind is Kind.HEAVY:
            for decision in choices(node, graph, options.low, target).blocked.values():
                if decision.code == codes.OPSET:
                    found.add(decision.evidence["opset"])
    return {opset for opset in found if isinstance(opset, int) and standard_opset(graph.model) < opset <= HIGHEST}


def _raised(graph: TypeGraph, version: int, target: TargetTable) -> TypeGraph | Blocker:
    """The graph of a copy in a later opset, or what blocks it."""
    model = graph.model.clone()
    for value, copy in zip(all_values(graph.model.graph), all_values(model.graph), strict=True):
        copy.meta[_ORIGIN] = value
    try:
        raise_opset(model, version)
    except OpsetError as refused:
        return Blocker(refused.node, refused.operator, refused.reason)
    types.infer(model)
    if (wrong := types.contradiction(model)) and not types.contradiction(graph.model):
        place = _PLACE.search(wrong)
        where = (place["node"] or "", place["operator"]) if place else (model.graph.name or "", "graph")
        return Blocker(*where, f"opset {version} refuses its shapes: {place['reason'] if place else wrong}")
    after = type_graph(model)
    without = {_result(node) for node in _without_kernel(graph, target)}
    for node in _without_kernel(after, target):
        if _result(node) not in without:
            reason = f"{target.runtime} has no kernel for it at opset {version}"
            return Blocker(label(node), operator_name(node), reason)
    return after


def _without_kernel(graph: TypeGraph, target: TargetTable) -> list[ir.Node]:
    return [
        node for node, signed in graph.signatures.items() if signed is None or not target.supports(node, signed, {})
    ]


def _result(node: ir.Node) -> str:
    return next((value.name for value in node.outputs if value.name), "")


def _served(plan: Plan) -> int:
    """How many wanted nodes are 16-bit."""
    everything = plan.options.level == "O3"
    return sum(
        decision.precision != "fp32"
        and (everything or decision.code in (codes.LOWER, codes.POLICY_FILE) or operator(node).kind is Kind.HEAVY)
        for node, decision in plan.nodes.items()
    )


def _explained(plan: Plan, blockers: dict[int, Blocker]) -> Plan:
    """The plan, with what blocks the opset in the evidence of each node that would need it."""

    def explained(decision: Decision) -> Decision:
        opset = decision.evidence.get("opset")
        if decision.code != codes.OPSET or not isinstance(opset, int) or opset not in blockers:
            return decision
        return dataclasses.replace(
            decision, evidence={**decision.evidence, "blocker": dataclasses.asdict(blockers[opset])}
        )

    if not blockers:
        return plan
    return dataclasses.replace(plan, decisions={unit: explained(found) for unit, found in plan.decisions.items()})
