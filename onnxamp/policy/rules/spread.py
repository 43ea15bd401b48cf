"""AMP116, AMP118, AMP115, AMP119: values that are too large for a while, and what must read them in fp32 until they are ordinary again.

An operator in fp32 protects nothing if its result is cast at once. So results that can leave the 16-bit range are read in fp32 up to an
operator that restores the range (a root, logarithm, reciprocal, bounded activation, normalization, division by a reduction of the same
value) or to a heavy operator.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import Unit
from onnxamp.policy import codes
from onnxamp.policy.marks import Marks
from onnxamp.policy.operators import Kind, Range, row
from onnxamp.policy.rules.norms import squared


def expanded(marks: Marks) -> None:
    """Results of powers, squares, exponentials, sums and of all other operators that expand the range.

    A square stays fp32 itself, with the difference that feeds it.
    """
    facts = marks.facts
    seeds: list[tuple[ir.Value, str]] = []
    for unit in facts.graph.units:
        node = unit.node
        if node is None or not unit.writes:
            continue
        name = facts.graph.operators[node]
        if name == "Mul" and (base := squared(facts, node)) is not None and base in facts.graph.writer:
            if facts.observed_small(unit.writes):
                continue
            marks.node(node, codes.EXPANDED, origin="a square")
            difference = facts.source(base)
            if difference is not None and operator_name(difference) == "Sub":
                marks.node(difference, codes.EXPANDED, origin="the difference that is squared")
        elif not _expands(marks, node, name):
            continue
        if marks.is_fp32(unit):
            seeds.extend((value, name) for value in unit.writes)
    _spread(marks, seeds, codes.EXPANDED)


def _expands(marks: Marks, node: ir.Node, name: str) -> bool:
    if row(name).range is not Range.EXPANDS:
        return False
    if name != "Pow":
        return True
    exponent = marks.facts.scalar(node.inputs[1])
    return exponent is None or abs(exponent) > 1


def large_factors(marks: Marks) -> None:
    """Products with a constant of 1,024 or more (128 in bf16), quotients by its inverse, sums with it: fp32 until restored.

    From there on neighbouring 16-bit numbers are a whole unit apart. Masks are another matter (see the rules on masks).
    """
    facts = marks.facts
    limit = facts.low.integers / 2
    seeds: list[tuple[ir.Value, str]] = []
    arithmetic = (unit for node in facts.graph.nodes(("Add", "Sub", "Mul", "Div")) for unit in facts.graph.of[node])
    for unit in arithmetic:
        assert unit.node is not None
        name = unit.node.op_type
        if unit in marks.masks.region or not facts.computed(unit):
            continue
        for read in unit.reads:
            if read.value not in facts.constants:
                continue
            factor = facts.extent(read.value).largest
            if name == "Div" and read.index == 1:
                number = facts.scalar(read.value)
                factor = 1 / abs(number) if number and facts.low.name == "fp16" else 0.0
            elif facts.low.name == "bf16" and name in ("Mul", "Div"):
                factor = 0.0  # bf16 has the range; products lose nothing
            if limit <= factor < math.inf:
                marks.fp32(unit, codes.LARGE_FACTOR, constant=read.value.name, size=factor, limit=limit)
                if marks.is_fp32(unit):
                    seeds.extend((value, name) for value in unit.writes)
    _spread(marks, seeds, codes.EXPANDED)


def user_islands(marks: Marks) -> None:
    """What follows a Cast to fp32 that the source had, up to the next heavy operator: someone wanted it in fp32."""
    seeds: list[tuple[ir.Value, str]] = []
    for node in marks.facts.graph.nodes(("Cast",)):
        units = marks.facts.graph.of[node]
        if [unit.dtype.bitwidth for unit in units] == [16, 32]:
            marks.fp32(units[1], codes.USER_ISLAND)
            seeds.extend((value, "a Cast in the source") for value in units[1].writes)
    _spread(marks, seeds, codes.USER_ISLAND)


def observed_ranges(marks: Marks) -> None:
    """A unit that writes values beyond the type's range, less headroom, in the calibration data stays fp32, heavy ones included."""
    facts = marks.facts
    seeds: list[tuple[ir.Value, str]] = []
    for value, unit in facts.graph.writer.items():
        largest = facts.ranges.get(value.name or "")
        if unit in marks.masks.region:  # its size means nothing: masks are clamped
            continue
        if largest is not None and largest > facts.ordinary:
            marks.fp32(unit, codes.RANGE, value=value.name, largest=largest, limit=facts.ordinary)
            if unit.node is not None:
                seeds.append((value, operator_name(unit.node)))
    _spread(marks, seeds, codes.RANGE)


def _spread(marks: Marks, seeds: list[tuple[ir.Value, str]], code: str) -> None:
    facts = marks.facts
    pending = list(seeds)
    large = {value for value, _ in seeds}
    done: set[Unit] = set()
    while pending:
        value, origin = pending.pop()
        if facts.observed_small([value]):
            continue
        for unit in facts.graph.readers.get(value, ()):
            if unit.node is None or facts.kind(unit) is Kind.HEAVY:
                continue
            marks.fp32(unit, code, origin=origin)
            if not marks.is_fp32(unit) or unit in done:
                continue
            if not facts.restores(unit.node, large):
                done.add(unit)
                fresh = [written for written in unit.writes if written not in large]
                large.update(fresh)
                pending.extend((written, origin) for written in fresh)
