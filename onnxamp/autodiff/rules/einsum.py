"""Gradient of Einsum."""

from __future__ import annotations

import string

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Einsum")
def einsum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient of one operand is the Einsum of the others and of g onto its indices; an index that only it has is
    a sum, whose gradient is repeated along it."""
    operands = [value for value in node.inputs if value is not None]
    terms, result = _indices(op, node, operands)
    gradients: list[ir.Value | None] = []
    for position, own in enumerate(terms):
        if position not in op.wanted:
            gradients.append(None)
            continue
        others = [term for index, term in enumerate(terms) if index != position]
        values = [value for index, value in enumerate(operands) if index != position]
        own = _told_apart(op, own, operands[position], "".join(terms) + result, others, values)
        present = set(result).union(*others)
        kept = "".join(index for index in own if index in present)
        equation = f"{','.join([result, *others])}->{kept}"
        d = g if not others and kept == result else op.Einsum(g, *values, equation=equation)
        missing = [axis for axis, index in enumerate(own) if index not in present]
        if missing:
            d = op.Unsqueeze(d, missing)
        gradients.append(op.expand(d, operands[position]) if missing else d)
    return gradients


def _told_apart(op: Builder, own: str, value: ir.Value, used: str, others: list[str], values: list[ir.Value]) -> str:
    """The indices of an operand, a repeated one under a new letter that a unit matrix among the operands ties to the first."""
    free = iter(letter for letter in string.ascii_letters if letter not in used)
    result = ""
    for axis, index in enumerate(own):
        if index in result:
            size = op.dims(value)[axis]
            op.refuse(not isinstance(size, int), "an operand repeats an index of unknown size")
            assert isinstance(size, int)
            assert value.dtype is not None
            new = next(free)
            others.append(index + new)
            values.append(op.constant(np.eye(size, dtype=value.dtype.numpy())))
            index = new
        result += index
    return result


def _indices(op: Builder, node: ir.Node, operands: list[ir.Value]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, the ellipsis written out, the implicit result made explicit."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    shared = max((op.rank(v) - len(t) + 3 for v, t in zip(operands, terms, strict=True) if "..." in t), default=0)
    letters = "".join(free[:shared])
    explicit = []
    for value, term in zip(operands, terms, strict=True):
        if "..." in term:
            extent = op.rank(value) - len(term) + 3
            dims = op.dims(value)
            start = term.index("...")
            op.refuse(extent < shared or 1 in dims[start : start + extent], "an Einsum that broadcasts its ellipsis")
            term = term.replace("...", letters[shared - extent :])
        explicit.append(term)
    if not arrow:
        joined = "".join(explicit)
        right = letters + "".join(sorted(i for i in set(joined) - set(letters) if joined.count(i) == 1))
    return explicit, right.replace("...", letters)
