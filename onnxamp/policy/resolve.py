"""From marks and choices to groups: units of one node that schema or kernel wants alike get one label."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.units import TypeGraph, Unit
from onnxamp.policy import codes
from onnxamp.policy.assign import Groups
from onnxamp.policy.decision import Decision
from onnxamp.policy.legality import Choices, operator_name


def resolve(
    graph: TypeGraph, choices: dict[ir.Node, Choices], decisions: dict[Unit, Decision], low: str, target: str
) -> Groups:
    """Group the open units, and complete `decisions` where a node's decided units leave no choice for its others.

    A node whose decided units cannot be mixed becomes fp32.
    """
    tied: dict[Unit, Unit] = {}
    for node, legal in choices.items():
        units = legal.units
        if len(units) > 1:
            evidence: dict[str, object] = {"operator": operator_name(node), "target": target}
            _settle(
                legal, decisions, Decision("fp32", codes.NO_MIXED_KERNEL, evidence), Decision(low, codes.TIED, evidence)
            )
            free = [unit for unit in units if unit not in decisions]
            if len(free) > 1 and len(_projections(legal, decisions, free)) < 1 << len(free):
                tied.update((unit, free[0]) for unit in free[1:])
    of: dict[Unit, int] = {}
    members: list[list[Unit]] = []
    for unit in graph.units:
        head = tied.get(unit, unit)
        if head is not unit:
            of[unit] = of[head]
            members[of[head]].append(unit)
        else:
            of[unit] = len(members)
            members.append([unit])
    return Groups(of, members, {of[unit]: decision.precision != "fp32" for unit, decision in decisions.items()})


def _projections(legal: Choices, decisions: dict[Unit, Decision], free: list[Unit]) -> set[frozenset[Unit]]:
    """What the free units may be together, given the decided ones."""
    low = {unit for unit in legal.units if unit in decisions and decisions[unit].precision != "fp32"}
    decided = {unit for unit in legal.units if unit in decisions}
    return {subset & frozenset(free) for subset in legal.allowed if subset & decided == low}


def _settle(legal: Choices, decisions: dict[Unit, Decision], fp32: Decision, low: Decision) -> None:
    """Decide units until the free ones are independent or all alike."""
    decided_low = {unit for unit in legal.units if unit in decisions and decisions[unit].precision != "fp32"}
    decided_fp32 = {unit for unit in legal.units if unit in decisions} - decided_low
    if not any(decided_low <= subset and not subset & decided_fp32 for subset in legal.allowed):
        candidates = [subset for subset in legal.allowed if not subset & decided_fp32]
        best = max(candidates, key=lambda subset: (len(subset & decided_low), len(subset)))
        decisions.update(dict.fromkeys(decided_low - best, fp32))
    while free := [unit for unit in legal.units if unit not in decisions]:
        together = _projections(legal, decisions, free)
        largest = max(together, key=lambda subset: (len(subset), [unit in subset for unit in free]))
        if len(together) == 1 << len(free) or together >= {frozenset(), frozenset(free)}:
            return
        if never := [unit for unit in free if unit not in largest]:
            decisions.update(dict.fromkeys(never, fp32))
        else:
            smallest = min(together, key=lambda subset: (len(subset), [unit not in subset for unit in free]))
            decisions.update(dict.fromkeys(smallest, low))
