"""AMP210: values that carry a number beyond the type's range on from a constant, and what must read them in fp32.

An operator in fp32 protects nothing if its result is cast at once: a row of a table, a filled tensor or the border of a Pad is as large as
the constant that it copies. So sizes are followed from such constants and attributes, forwards, through copies, sums and products, and
what reads a size beyond the range stays fp32 until a product with a constant scales it back, or an operator restores it.
"""

from __future__ import annotations

import collections
import math

import numpy as np
import onnx_ir as ir

from onnxamp.model.units import Unit
from onnxamp.policy import codes
from onnxamp.policy.facts import float_attributes
from onnxamp.policy.legality import CONTROL_FLOW
from onnxamp.policy.marks import Marks
from onnxamp.policy.masks import is_mask_operand
from onnxamp.policy.operators import Kind, row
from onnxamp.policy.rules.constants import BIAS

# Results are as large as the product of these operands' sizes.
_PRODUCTS = frozenset({"Mul", "PRelu"})
# Heavy operators whose results are no products: bounded by their activations, or means of values by softmax.
_BOUNDED = ("LSTM", "GRU", "RNN", "Attention")
# Only this operand is copied into the results.
_COPIED = {"OneHot": 2, "Mod": 0}
_LARGEST = 3.4e38


def carried_constants(marks: Marks) -> None:
    """What reads a value that a constant or attribute out of range makes too large stays fp32; mask constants are clamped instead."""
    _Carried(marks).run()


class _Carried:
    """One run of the rule."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.facts = marks.facts
        self.limit = marks.facts.low.max
        self.factor = (
            marks.facts.low.integers / 2
        )  # products of constants from here on are followed: two may leave the range
        self.sums = frozenset(marks.masks.sums)
        self.sizes: dict[ir.Value, float] = {}

    def run(self) -> None:
        """Visit the units in order, and again where a size has grown."""
        graph = self.facts.graph
        pending = collections.deque(unit for unit in graph.units if unit.node is not None)
        waiting = set(pending)
        while pending:
            unit = pending.popleft()
            waiting.remove(unit)
            for value in self.visit(unit):
                for reader in graph.readers.get(value, ()):
                    # Operands of one type variable make results of another, except in control flow.
                    partners = graph.of[reader.node] if reader.node is not None else ()
                    fresh = [partner for partner in partners if partner not in waiting]
                    waiting.update(fresh)
                    pending.extend(fresh)

    def visit(self, unit: Unit) -> list[ir.Value]:
        """Mark one unit; the values whose size has grown."""
        node = unit.node
        assert node is not None
        kind = self.facts.kind(unit)
        for read in unit.reads:
            size = self.sizes.get(read.value, 0.0)
            if size > self.limit and not (kind is Kind.HEAVY and is_mask_operand(node, read.index)):
                if unit in self.sums:
                    self.marks.fp32(unit, codes.MASK_SUM)
                self.marks.fp32(unit, codes.OUT_OF_RANGE, carries=read.value.name, largest=size, limit=self.limit)
        if not unit.writes or (unit in self.marks.decisions and not self.marks.is_fp32(unit)):
            return []
        size = min(self.result(unit, node, self.facts.graph.operators[node]), _LARGEST)
        # Doubled at least: a factor inside a loop grows for ever.
        grown = [value for value in unit.writes if size >= max(self.factor, 2 * self.sizes.get(value, 0.0))]
        if not grown or (kind is not Kind.MOVE and self.facts.observed_small(grown)):
            return []
        if size > self.limit:
            self.marks.fp32(unit, codes.OUT_OF_RANGE, largest=size, limit=self.limit)
        self.sizes.update(dict.fromkeys(grown, size))
        return grown

    def size(self, value: ir.Value | None) -> float:
        """The size that a constant out of range gives the value; 0 for an ordinary one."""
        if value is None or value in self.marks.masks.constants:
            return 0.0
        if value in self.facts.constants:
            found = self.facts.extent(value)
            return found.largest if found.over else 0.0
        return self.sizes.get(value, 0.0)

    def result(self, unit: Unit, node: ir.Node, op: str) -> float:
        """The size of what the unit writes."""
        if op in CONTROL_FLOW:
            return max((self.size(read.value) for read in unit.reads), default=0.0)
        if op == "Cast":  # of integers too
            source = node.inputs[0]
            if (
                source is not None
                and self.facts.tensor(source) is not None
                and source not in self.marks.masks.constants
            ):
                found = self.facts.extent(source)
                return found.largest if found.over else 0.0
            return self.size(source)
        attribute = max((abs(a) for a in float_attributes(node).values()), default=0.0)
        attribute = attribute if attribute > self.limit else 0.0
        operands = [value for value in node.inputs if value is not None]
        large = {value for value in operands if self.size(value)}
        if op in ("Mul", "Div") and unit not in self.marks.masks.region and self.facts.computed(unit):
            large |= {value for value in operands if self.scales(op, node, value)}
        if not large and not attribute:
            return 0.0
        followed = op in ("Mul", "Div") or row(op).kind is Kind.MOVE
        if not followed and max([attribute, *map(self.size, operands)]) <= self.limit:
            return 0.0  # what else may be done with a size inside the range is ordinary
        if op in ("Max", "Min", "Clip"):
            return self.bounded(op, node, large)
        if op == "Sqrt":
            return math.sqrt(self.size(node.inputs[0]))
        if op == "Div" and (divisor := self.facts.scalar(node.inputs[1])):
            return (self.size(node.inputs[0]) or 1.0) / abs(divisor)
        if op == "Exp" or self.facts.restores(node, large):  # finite exponentials are those of negative numbers
            return 0.0
        if op in _PRODUCTS or row(op).kind is Kind.HEAVY:
            return self.product(op, node)
        if op in _COPIED:
            return self.size(node.inputs[_COPIED[op]])
        if op == "Div":
            return self.size(node.inputs[0])
        return max([attribute, *map(self.size, operands)])

    def product(self, op: str, node: ir.Node) -> float:
        """The size of a product (what is computed counts as 1), or of the bias that is added to it."""
        if op.endswith(_BOUNDED):
            return 0.0
        bias = node.inputs[BIAS[op]] if op in BIAS and len(node.inputs) > BIAS[op] else None
        attributes = node.attributes
        alpha, beta = (a.as_float() if (a := attributes.get(key)) is not None else 1.0 for key in ("alpha", "beta"))
        factors = [value for value in node.inputs if value is not None and value is not bias]
        found = abs(alpha)
        for value in factors:
            found *= self.size(value) or (self.facts.extent(value).largest if value in self.facts.constants else 1.0)
        large = op == "Mul" or abs(alpha) > self.limit or any(map(self.size, factors))
        return max(found if large else 0.0, abs(beta) * (self.size(bias) or float(bias is not None)))

    def scales(self, op: str, node: ir.Node, value: ir.Value) -> bool:
        """Whether this constant makes the product, or the quotient, large."""
        if value not in self.facts.constants:
            return False
        if op == "Div":
            divisor = self.facts.scalar(value) if value is node.inputs[1] else None
            return divisor is not None and 0 < abs(divisor) <= 1 / self.factor
        return self.facts.extent(value).largest >= self.factor

    def bounded(self, op: str, node: ir.Node, large: set[ir.Value]) -> float:
        """The size of a maximum or minimum: a bound on the far side of zero is seldom reached, the other one always."""
        if op == "Clip" and self.facts.restores(node, large):
            return 0.0
        below = {"Max": node.inputs, "Min": (), "Clip": node.inputs[1:2]}[op]
        above = {"Max": (), "Min": node.inputs, "Clip": node.inputs[2:3]}[op]
        bounds = {*below, *above}
        found = [self.size(value) for value in node.inputs if value not in self.facts.constants]
        found += [self.extreme(value, 1) for value in below] + [self.extreme(value, -1) for value in above]
        found += [sign * number for name, sign in (("min", 1.0), ("max", -1.0))
                  if (number := float_attributes(node).get(name)) is not None]  # fmt: skip
        found += [self.size(v) for v in node.inputs if v in self.facts.constants and v not in bounds]
        return max(found, default=0.0)

    def extreme(self, value: ir.Value | None, sign: int) -> float:
        """The largest (the smallest, with the other sign) finite element of a constant out of range."""
        tensor = self.facts.tensor(value) if self.size(value) else None
        if tensor is None:
            return 0.0
        array = tensor.numpy().astype(np.float32)
        return float(np.max(sign * array[np.isfinite(array)], initial=0.0))
