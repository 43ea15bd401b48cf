"""AMP110: integers held as floats."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.units import Unit
from onnxamp.policy import codes
from onnxamp.policy.facts import Facts
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import Kind, row

_WIDE = frozenset(ir.DataType[name] for name in ("INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"))
_INTEGERS = frozenset({*_WIDE, ir.DataType.INT8, ir.DataType.UINT8})
_EXACT = frozenset({"Add", "Sub", "Mul", "Mod", "Neg", "Abs"})
_LINEAR = frozenset({*_EXACT, "Div", "MatMul", "Einsum", "Gemm"})


def float_ids(marks: Marks) -> None:
    """Positions and ids in floats stay fp32 while exactness matters.

    1. Integer-valued floats are results of Cast from an integer type, of Range, and of moves and sums, differences and products of such.
    2. Arithmetic between two of them, or of one with a constant above 2 in size, stays fp32, unless it belongs to a mask.
    3. What leads from one to Sin or Cos through linear arithmetic stays fp32, the product of positions and frequencies (a MatMul in most
       exports) included.
    4. What a Cast to an integer type reads stays fp32, back to the last heavy operator.
    """
    facts = marks.facts
    integral: set[ir.Value] = set()
    fixed: set[ir.Value] = set()  # computed from constants only
    linear: dict[ir.Value, Unit] = {}
    for unit in facts.graph.units:
        node = unit.node
        if node is None:
            continue
        name = facts.graph.operators[node]
        if _makes_integers(name, node, unit):
            integral.update(unit.writes)
            linear.update(dict.fromkeys(unit.writes, unit))
            continue
        if name == "Cast" and unit.reads and not unit.writes and node.outputs[0].dtype in _INTEGERS:
            marks.fp32(unit, codes.FLOAT_IDS, reader="Cast to an integer")
            for source in facts.backward([unit.reads[0].value]):
                marks.fp32(source, codes.FLOAT_IDS, reader="Cast to an integer")
            continue
        computed = [v for v in facts.computed(unit) if v not in fixed]
        if not computed:
            if unit.reads:
                fixed.update(unit.writes)
            continue
        moves = row(name).kind is Kind.MOVE
        if (moves or name in _EXACT) and all(v in integral for v in computed):
            integral.update(unit.writes)
            if name in _EXACT and unit not in marks.masks.region and _matters(facts, unit, computed):
                marks.fp32(unit, codes.FLOAT_IDS, reader=node.op_type)
        if moves or name in _LINEAR:
            if all(v in linear for v in computed):
                linear.update(dict.fromkeys(unit.writes, unit))
        elif name in ("Sin", "Cos") and computed[0] in linear:
            _mark_path(marks, linear, computed[0], node.op_type)


def _makes_integers(name: str, node: ir.Node, unit: Unit) -> bool:
    if name == "Cast":
        return bool(unit.writes) and node.inputs[0] is not None and node.inputs[0].dtype in _WIDE
    return name == "Range"


def _matters(facts: Facts, unit: Unit, computed: list[ir.Value]) -> bool:
    numbers = [facts.scalar(read.value) for read in unit.reads if read.value not in computed]
    return len(computed) > 1 or any(number is None or abs(number) > 2 for number in numbers)


def _mark_path(marks: Marks, linear: dict[ir.Value, Unit], value: ir.Value, reader: str) -> None:
    pending = [value]
    while pending:
        unit = linear.get(pending.pop())
        if unit is not None and unit not in marks.decisions:
            marks.fp32(unit, codes.FLOAT_IDS, reader=reader)
            pending.extend(read.value for read in unit.reads)
