"""Gradients of arithmetic with broadcasting, and of choices between operands."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Add", broadcast=True)
def add(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(a + b) = da + db."""
    return [g, g]


@gradient("Sub", broadcast=True)
def sub(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(a − b) = da − db."""
    return [g, op.Neg(g) if 1 in op.wanted else None]


@gradient("Mul", broadcast=True)
def mul(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(a·b) = b·da + a·db."""
    a, b = node.inputs
    return [op.Mul(g, b) if 0 in op.wanted else None, op.Mul(g, a) if 1 in op.wanted else None]


@gradient("Div", broadcast=True)
def div(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(a / b) = da / b − (a / b)·db / b."""
    b = node.inputs[1]
    quotient = op.Div(g, b)
    return [quotient, op.Neg(op.Mul(quotient, node.outputs[0])) if 1 in op.wanted else None]


@gradient("Neg")
def neg(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(−x) = −dx."""
    return [op.Neg(g)]


@gradient("Identity")
def identity(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dx."""
    return [g]


@gradient("Cast")
def cast(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient of a Cast is a Cast back to the type of its source."""
    source = required(node)
    assert source.dtype is not None
    return [op.cast(g, source.dtype)]


@gradient("CastLike", inputs=(0,), zero=(1,))
def cast_like(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The same as Cast; the second input only gives a type."""
    return cast(op, node, g)


@gradient("Pow", broadcast=True)
def pow_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(xᵉ) = e·xᵉ⁻¹·dx + xᵉ·ln x·de; the part of e is 0 where x ≤ 0."""
    x, e = node.inputs
    assert x is not None
    assert e is not None
    exponent = op.known(e)
    base: ir.Value | None = None
    if 0 in op.wanted:
        if exponent is not None and exponent.size == 1:
            number = float(exponent.reshape(()))
            if number == 2.0:
                base = op.Mul(g, op.Mul(x, 2.0))
            elif number == 1.0:
                base = g
            elif number == 0.0:
                base = op.zeros(x)  # 0·0⁻¹ is NaN and the derivative of x⁰ is 0
            elif number == 0.5:
                base = op.Div(op.Mul(g, 0.5), node.outputs[0])
            elif number == 3.0:
                base = op.Mul(g, op.Mul(op.Mul(x, x), 3.0))
            else:
                base = op.Mul(g, op.Mul(op.Pow(x, op.scalar(number - 1.0, x.dtype)), number))
        else:
            assert x.dtype is not None
            typed = op.cast(e, x.dtype)
            slope = op.Mul(typed, op.Pow(x, op.Sub(typed, 1.0)))
            zero = op.Equal(typed, 0.0)
            base = op.Mul(g, op.Where(zero, op.scalar(0.0, x.dtype), slope))
    power: ir.Value | None = None
    if 1 in op.wanted:
        positive = op.Greater(x, 0.0)
        logarithm = op.Log(op.Where(positive, x, op.scalar(1.0, x.dtype)))
        power = op.Mul(op.Mul(g, node.outputs[0]), logarithm)
    return [base, power]


@gradient("Mod", broadcast=True)
def mod(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(a mod b) = da − ⌊a / b⌋·db for fmod=0, with truncation for fmod=1 (the form that floats have)."""
    a, b = node.inputs
    quotient = op.Div(op.Sub(a, node.outputs[0]), b) if 1 in op.wanted else None
    return [g, None if quotient is None else op.Neg(op.Mul(g, op.Round(quotient)))]


@gradient("Sum", broadcast=True)
def sum_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Every operand receives the gradient."""
    return [g] * len(node.inputs)


@gradient("Mean", broadcast=True)
def mean(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Every one of n operands receives g / n."""
    return [op.divide(g, float(len(node.inputs)))] * len(node.inputs)


@gradient("Max", broadcast=True)
def max_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The operands that equal the maximum share the gradient evenly."""
    return _extremum(op, node, g)


@gradient("Min", broadcast=True)
def min_(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The operands that equal the minimum share the gradient evenly."""
    return _extremum(op, node, g)


def _extremum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    operands = [value for value in node.inputs if value is not None]
    if len(operands) == 1:
        return [g]
    hits = [op.Equal(value, node.outputs[0]) for value in operands]
    one, zero = op.scalar(1.0, g.dtype), op.scalar(0.0, g.dtype)
    number = op.Where(hits[0], one, zero)
    for hit in hits[1:]:
        number = op.Add(number, op.Where(hit, one, zero))
    share = op.Div(g, number)
    return [op.mask(hit, share) for hit in hits]


@gradient("Where", inputs=(1, 2), broadcast=True)
def where(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Each branch receives the gradient where it was chosen."""
    condition = node.inputs[0]
    zero = op.scalar(0.0, g.dtype)
    return [
        None,
        op.Where(condition, g, zero) if 1 in op.wanted else None,
        op.Where(condition, zero, g) if 2 in op.wanted else None,
    ]


@gradient("Clip")
def clip(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dx where min ≤ x ≤ max; dmin where x < min ≤ max; dmax where x > max or min > max, as ONNX then gives max."""
    x, low, high = [*node.inputs, None, None][:3]
    assert x is not None
    dx = dlow = dhigh = above = None
    if 0 in op.wanted:
        inside = [op.GreaterOrEqual(x, low)] if low is not None else []
        inside += [op.LessOrEqual(x, high)] if high is not None else []
        dx = g if not inside else op.mask(inside[0] if len(inside) == 1 else op.And(*inside), g)
    if high is not None and not op.wanted.isdisjoint((1, 2)):
        above = op.Greater(x, high) if low is None else op.Or(op.Greater(x, high), op.Greater(low, high))
    if low is not None and 1 in op.wanted:
        below = op.Less(x, low)
        dlow = op.unbroadcast(op.mask(below if above is None else op.And(below, op.Not(above)), g), low, [x])
    if high is not None and above is not None and 2 in op.wanted:
        dhigh = op.unbroadcast(op.mask(above, g), high, [x])
    return [dx, dlow, dhigh]
