"""From marks and choices to groups: units of one node that schema or kernel wants alike get one label."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import TypeGraph, Unit
from onnxamp.policy import codes
from onnxamp.policy.assign import Groups
from onnxamp.policy.decision import Decision
from onnxamp.policy.legality import Choices


def resolve(
    graph: TypeGraph, choices: dict[ir.Node, Choices], decisions: dict[Unit, Decision], low: str, target: str
) -> Groups:
    """Group the open units, and complete `decisions` where a node's decided units leave no choice for its others.

    A node whose decided units cannot be mixed becomes fp32.
    """
    tied: dict[Unit, Unit] = {}
    for node, legal in choices.items():
        if len(legal.units) > 1 and legal.allowed is not None:
            evidence: dict[str, object] = {"operator": operator_name(node), "target": target}
            mixture = _Mixture(legal.units, legal.allowed, decisions)
            mixture.settle(Decision("fp32", codes.NO_MIXED_KERNEL, evidence), Decision(low, codes.TIED, evidence))
            free = mixture.free()
            if len(free) > 1 and len(mixture.together(free)) < 1 << len(free):
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


@dataclasses.dataclass(frozen=True)
class _Mixture:
    """The open units of one node, the sets of them that may be 16-bit together, and the decisions so far."""

    units: tuple[Unit, ...]
    allowed: frozenset[frozenset[Unit]]
    decisions: dict[Unit, Decision]

    def free(self) -> list[Unit]:
        """The undecided units."""
        return [unit for unit in self.units if unit not in self.decisions]

    def low(self) -> set[Unit]:
        """The units decided to be 16-bit."""
        return {unit for unit in self.units if unit in self.decisions and self.decisions[unit].precision != "fp32"}

    def together(self, free: list[Unit]) -> set[frozenset[Unit]]:
        """What the free units may be together, given the decided ones."""
        decided, low = set(self.units) - set(free), self.low()
        return {subset & frozenset(free) for subset in self.allowed if subset & decided == low}

    def settle(self, fp32: Decision, low: Decision) -> None:
        """Decide units until the free ones are independent or may be all alike."""
        decided_low = self.low()
        decided_fp32 = set(self.units) - set(self.free()) - decided_low
        candidates = [subset for subset in self.allowed if not subset & decided_fp32]
        if not any(decided_low <= subset for subset in candidates):
            best = max(candidates, key=lambda subset: (len(subset & decided_low), len(subset)))
            self.decisions.update(dict.fromkeys(decided_low - best, fp32))
        while free := self.free():
            together = self.together(free)
            if len(together) == 1 << len(free) or together >= {frozenset(), frozenset(free)}:
                return
            largest = max(together, key=lambda subset: (len(subset), [unit in subset for unit in free]))
            if never := [unit for unit in free if unit not in largest]:
                self.decisions.update(dict.fromkeys(never, fp32))
            else:
                smallest = min(together, key=lambda subset: (len(subset), [unit not in subset for unit in free]))
                self.decisions.update(dict.fromkeys(smallest, low))
