"""Constants that the 16-bit type cannot hold (AMP210), flushes to zero (AMP113) or rounds away (AMP114)."""

from __future__ import annotations

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import Read, Unit
from onnxamp.policy import codes
from onnxamp.policy.facts import float_attributes
from onnxamp.policy.marks import Marks

# A tensor that loses more than this, relative to its norm, does not mean the same any more (rounding alone costs 2^-12).
LOSS_LIMIT = 0.01
# A tensor with more than this share of its elements flushed to zero has lost its small part.
FLUSH_LIMIT = 0.5
# The operand that is only added, by operator.
BIAS = {
    "Conv": 2,
    "ConvTranspose": 2,
    "Gemm": 2,
    "LSTM": 3,
    "GRU": 3,
    "RNN": 3,
    "com.microsoft.FusedConv": 2,
    "com.microsoft.FusedGemm": 2,
}


def out_of_range(marks: Marks) -> None:
    """A unit that reads a finite constant beyond the type's largest value stays fp32; mask constants are clamped instead."""
    facts = marks.facts
    clamped = marks.masks.constants
    for unit in facts.graph.units:
        if unit in marks.decisions or unit.node is None:
            continue
        for read in unit.reads:
            if read.value in facts.constants and read.value not in clamped and facts.extent(read.value).over:
                largest = facts.extent(read.value).largest
                marks.fp32(unit, codes.OUT_OF_RANGE, constant=read.value.name, largest=largest, limit=facts.low.max)
        for name, number in float_attributes(unit.node).items():
            if abs(number) > facts.low.max:
                marks.fp32(unit, codes.OUT_OF_RANGE, constant=name, largest=abs(number), limit=facts.low.max)


def lossy_weights(marks: Marks) -> None:
    """A unit that reads a constant which mostly becomes zero, or loses too much of its norm, stays fp32.

    Added constants do not count: what they lose is below 1e-7, and where that matters it is an epsilon.
    """
    facts = marks.facts
    for unit in facts.graph.units:
        if unit in marks.decisions or unit.node is None:
            continue
        for read in unit.reads:
            if read.value not in facts.constants or _is_added(unit, read):
                continue
            found = facts.extent(read.value)
            if found.nonzero and found.flushed > FLUSH_LIMIT * found.nonzero:
                share = round(found.flushed / found.nonzero, 4)
                marks.fp32(unit, codes.WEIGHT_FLUSHED, constant=read.value.name, flushed=share)
            elif found.loss > LOSS_LIMIT:
                marks.fp32(unit, codes.WEIGHT_LOST, constant=read.value.name, loss=float(f"{found.loss:.3g}"))


def _is_added(unit: Unit, read: Read) -> bool:
    assert unit.node is not None
    return operator_name(unit.node) in ("Add", "Sub", "Sum") or BIAS.get(operator_name(unit.node)) == read.index
