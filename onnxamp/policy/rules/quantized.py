"""AMP208, AMP213: what runs in integers once Q and DQ are fused, and sums of integers before they are scaled."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.policy import codes
from onnxamp.policy.facts import SINGLE_MOVES, Facts
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import HEAVY

_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
_INTEGER_PRODUCTS = frozenset({"MatMulInteger", "ConvInteger", "com.microsoft.MatMulInteger16"})


def quantized_heavy(marks: Marks) -> None:
    """A heavy node whose data operands all come from DequantizeLinear stays fp32, so that the runtime can fuse it to integers.

    In whatever opset: another would not make it 16-bit.
    """
    for node in marks.facts.graph.nodes(HEAVY):
        if all(_dequantized(marks.facts, value) for value in node.inputs[:2]):
            for unit in marks.facts.graph.of.get(node, ()):
                if unit in marks.decisions and marks.decisions[unit].code == codes.OPSET:
                    del marks.decisions[unit]
            marks.node(node, codes.QUANTIZED_HEAVY, operator=operator_name(node))


def integer_sums(marks: Marks) -> None:
    """The sums of an integer product stay fp32 up to the product with their scale, and so does what the scale is computed from.

    ONNX Runtime's dynamic quantization writes ``Cast(MatMulInteger(a, b)) * (a_scale * b_scale)``: a sum of 768 terms of up to 255 * 127
    is infinite in fp16, and the scale is below its normal numbers.
    """
    facts = marks.facts
    for cast in facts.graph.nodes(("Cast",)):
        if _sums_integers(facts, cast.inputs[0]):
            for scaling, total in _scalings(marks, cast):
                scales = [value for value in scaling.inputs if value is not None and value is not total]
                for unit in facts.backward(scales):
                    marks.fp32(unit, codes.INTEGER_SUM, scale=True)


def _sums_integers(facts: Facts, value: ir.Value | None) -> bool:
    """Whether `value` is the result of an integer product, with integers added to it perhaps."""
    pending, seen = [value], set[ir.Node]()
    while pending:
        value = pending.pop()
        node = facts.source(value) if value is not None and value.dtype in _INTEGERS else None
        if node is None or node in seen:
            continue
        if operator_name(node) in _INTEGER_PRODUCTS:
            return True
        seen.add(node)
        pending += node.inputs if operator_name(node) in ("Add", "Sub") else ()
    return False


def _scalings(marks: Marks, cast: ir.Node) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Where the sums that `cast` makes floats are scaled, with the value that holds them; all up to there is marked."""
    marks.node(cast, codes.INTEGER_SUM)
    pending = [cast.outputs[0]]
    seen: set[ir.Node] = {cast}
    while pending:
        value = pending.pop()
        for user, _ in value.uses():
            op = operator_name(user)
            scales = op in ("Mul", "Div")
            if user in seen or not (scales or op in SINGLE_MOVES or op in ("Add", "Sub")):
                continue
            seen.add(user)
            marks.node(user, codes.INTEGER_SUM)
            if scales:
                yield user, value
            else:
                pending.append(user.outputs[0])


def _dequantized(facts: Facts, value: ir.Value | None) -> bool:
    node = facts.source(value)
    return node is not None and operator_name(node) == "DequantizeLinear"
