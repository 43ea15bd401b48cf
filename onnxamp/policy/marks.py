"""The marks that legality, user and rules put on units before the level decides the rest."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.units import Unit
from onnxamp.policy.decision import Decision
from onnxamp.policy.facts import Facts
from onnxamp.policy.masks import Masks


class Marks:
    """Decisions made so far; the first mark on a unit stays.

    Attributes:
        facts: The graph.
        decisions: The decided units.
        masks: What lies between mask constants and a softmax.
    """

    def __init__(self, facts: Facts, masks: Masks, decisions: dict[Unit, Decision]) -> None:
        self.facts = facts
        self.masks = masks
        self.decisions = decisions

    def fp32(self, unit: Unit, code: str, **evidence: object) -> None:
        """Mark one unit fp32 unless it is decided."""
        if unit not in self.decisions:
            self.decisions[unit] = Decision("fp32", code, evidence)

    def node(self, node: ir.Node, code: str, **evidence: object) -> None:
        """Mark all open units of a node fp32."""
        for unit in self.facts.graph.of.get(node, ()):
            self.fp32(unit, code, **evidence)

    def is_fp32(self, unit: Unit) -> bool:
        """Whether the unit is decided and stays fp32."""
        decision = self.decisions.get(unit)
        return decision is not None and decision.precision == "fp32"
