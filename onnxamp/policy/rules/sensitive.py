"""AMP101: operators that lose range or precision by themselves."""

from __future__ import annotations

from onnxamp.policy import codes
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import Kind, row


def sensitive(marks: Marks) -> None:
    """Operators of kind `SENSITIVE` stay fp32."""
    for node, name in marks.facts.graph.operators.items():
        if row(name).kind is Kind.SENSITIVE:
            marks.node(node, codes.SENSITIVE, operator=name)
