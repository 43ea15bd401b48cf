"""AMP208: what runs in integers once Q and DQ are fused."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.facts import Facts
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import HEAVY


def quantized_heavy(marks: Marks) -> None:
    """A heavy node whose data operands all come from DequantizeLinear stays fp32, so that the runtime can fuse it to integers."""
    for node in marks.facts.graph.nodes(HEAVY):
        if all(_dequantized(marks.facts, value) for value in node.inputs[:2]):
            marks.node(node, codes.QUANTIZED_HEAVY, operator=operator_name(node))


def _dequantized(facts: Facts, value: ir.Value | None) -> bool:
    node = facts.source(value)
    return node is not None and operator_name(node) == "DequantizeLinear"
