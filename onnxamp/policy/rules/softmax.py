"""AMP105, AMP106: softmax and log-sum-exp written out; AMP117: sums of masks."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.facts import Facts
from onnxamp.policy.marks import Marks


def softmaxes(marks: Marks) -> None:
    """Exponentials divided by their sum, and logarithms of such sums, stay fp32 with the subtraction of the maximum before them.

    1. Div(Exp(s), ReduceSum(Exp(s))) is a softmax.
    2. Log(ReduceSum(Exp(s))) is a log-sum-exp.
    """
    facts = marks.facts
    for node in facts.graph.nodes(("Div", "Log")):
        if node.op_type == "Div" and (total := _sum_of_exponentials(facts, node.inputs[1])):
            numerator = node.inputs[0]
            if numerator is not None and facts.through_moves(numerator) is total[1].outputs[0]:
                _mark(marks, codes.SOFTMAX, node, *total)
        elif node.op_type == "Log" and (total := _sum_of_exponentials(facts, node.inputs[0])):
            _mark(marks, codes.LOG_SUM_EXP, node, *total)


def _sum_of_exponentials(facts: Facts, value: ir.Value | None) -> tuple[ir.Node, ir.Node] | None:
    node = facts.source(value)
    if node is not None and operator_name(node) in ("Add", "Max", "Clip"):  # an epsilon
        summand = next((value for value in node.inputs if value is not None and facts.scalar(value) is None), None)
        node = facts.source(summand)
    if node is None or operator_name(node) != "ReduceSum":
        return None
    exponential = facts.source(node.inputs[0])
    return (node, exponential) if exponential is not None and operator_name(exponential) == "Exp" else None


def _mark(marks: Marks, code: str, *nodes: ir.Node) -> None:
    end = nodes[0].name or nodes[0].outputs[0].name
    for node in nodes:
        marks.node(node, code, end=end)
    exponent = nodes[-1].inputs[0]
    difference = exponent.producer() if exponent is not None else None
    if difference is not None and operator_name(difference) == "Sub":
        marks.node(difference, code, end=end)


def mask_sums(marks: Marks) -> None:
    """A sum of two masks stays fp32, and so does the path of a mask that no constant holds, up to the softmax."""
    for unit in marks.masks.sums:
        marks.fp32(unit, codes.MASK_SUM)
