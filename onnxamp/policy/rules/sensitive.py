"""AMP101: operators that lose range or precision by themselves."""

from __future__ import annotations

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import Kind


def sensitive(marks: Marks) -> None:
    """Operators of kind `SENSITIVE` stay fp32."""
    for unit in marks.facts.graph.units:
        if marks.facts.kind(unit) is Kind.SENSITIVE:
            assert unit.node is not None
            marks.fp32(unit, codes.SENSITIVE, operator=operator_name(unit.node))
