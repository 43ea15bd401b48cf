"""Gradients of reductions and of cumulative sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import defined
from onnxamp.autodiff.rules.recurrence import run_steps


class _Reduction:
    """A Reduce* node with its gradient and result brought back to the rank of the input."""

    def __init__(self, op: Builder, node: ir.Node, g: ir.Value) -> None:
        source = required(node)
        self.op = op
        self.x = source
        self.axes = op.reduced_axes(node)
        self._node = node
        self.keepdims = bool(node.attributes.get_int("keepdims", 1))
        self.g = self.restore(g)

    def restore(self, value: ir.Value) -> ir.Value:
        """`value`, of the shape of the output, with size-1 dimensions where the input was reduced."""
        if self.keepdims or self.axes == []:
            return value
        if self.axes is None:
            axes = self._node.inputs[1]
            assert axes is not None
            return self.op.Unsqueeze(value, axes)
        return self.op.Unsqueeze(value, self.axes)

    def sum(self, value: ir.Value, operator: str = "ReduceSum") -> ir.Value:
        """`value`, of the shape of the input, summed (or what `operator` does) over the node's axes, which are kept with size 1."""
        if self.axes is not None:
            return self.op.reduce(operator, value, self.axes)
        empty = self._node.attributes.get_int("noop_with_empty_axes", 0)
        attributes = {"keepdims": 1, "noop_with_empty_axes": empty}
        return self.op.emit(operator, [value, self._node.inputs[1]], attributes)[0]

    @property
    def y(self) -> ir.Value:
        """The result of the reduction, restored."""
        return self.restore(self._node.outputs[0])


@gradient("ReduceSum", inputs=(0,))
def reduce_sum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(Σx): every element receives g."""
    r = _Reduction(op, node, g)
    return [op.expand(r.g, r.x)]


@gradient("ReduceMean", inputs=(0,))
def reduce_mean(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(mean x): every one of n elements receives g / n."""
    r = _Reduction(op, node, g)
    if r.axes is None:
        count = r.sum(op.expand(op.scalar(1.0, r.x.dtype), r.x))
        return [op.expand(op.Div(r.g, count), r.x)]
    return [op.expand(op.divide(r.g, op.count(r.x, r.axes)), r.x)]


@gradient("ReduceSumSquare", inputs=(0,))
def reduce_sum_square(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(Σx²) = 2x·dx."""
    r = _Reduction(op, node, g)
    return [op.Mul(op.Mul(r.x, 2.0), r.g)]


@gradient("ReduceL1", inputs=(0,))
def reduce_l1(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(Σ|x|) = sign(x)·dx."""
    r = _Reduction(op, node, g)
    return [op.Mul(op.Sign(r.x), r.g)]


@gradient("ReduceL2", inputs=(0,))
def reduce_l2(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d‖x‖ = x/‖x‖·dx, and 0 where ‖x‖ = 0."""
    r = _Reduction(op, node, g)
    norm = r.y
    zero = op.Equal(norm, 0.0)
    safe = op.Where(zero, op.scalar(1.0, norm.dtype), norm)
    return [op.Mul(op.Div(r.x, safe), r.g)]  # 1/‖x‖ may overflow where x/‖x‖ does not


@gradient("ReduceLogSum", inputs=(0,))
def reduce_log_sum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(ln Σx) = dx / Σx."""
    r = _Reduction(op, node, g)
    return [op.expand(op.Div(r.g, op.Exp(r.y)), r.x)]


@gradient("ReduceLogSumExp", inputs=(0,))
def reduce_log_sum_exp(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(ln Σeˣ) = eˣ⁻ʸ·dx."""
    r = _Reduction(op, node, g)
    return [op.Mul(op.Exp(op.Sub(r.x, r.y)), r.g)]


@gradient("ReduceMax", inputs=(0,))
def reduce_max(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The elements that equal the maximum share the gradient evenly."""
    return _reduce_extremum(op, node, g)


@gradient("ReduceMin", inputs=(0,))
def reduce_min(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The elements that equal the minimum share the gradient evenly."""
    return _reduce_extremum(op, node, g)


def _reduce_extremum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    r = _Reduction(op, node, g)
    hits = op.cast(op.Equal(r.x, r.y), ir.DataType.DOUBLE if r.x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)
    return [op.Mul(hits, op.Div(op.wide(r.g), r.sum(hits)))]  # the number may be beyond FP16's range


@gradient("ReduceProd", inputs=(0,))
def reduce_prod(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(Πx) = (product of the other elements)·dx, exact where one or several elements are 0.

    Without zeros it is y/x; the other products where exactly one element is 0 are taken with that element as 1.
    """
    r = _Reduction(op, node, g)
    x = op.wide(r.x)
    one, zero = op.scalar(1.0, x.dtype), op.scalar(0.0, x.dtype)
    is_zero = op.Equal(x, 0.0)
    filled = op.Where(is_zero, one, x)
    if r.axes == []:
        return [r.g]
    own = op.Where(is_zero, one, zero)
    zeros = r.sum(own)
    others = op.Div(r.sum(filled, "ReduceProd"), filled)
    alone = op.Equal(op.Sub(zeros, own), 0.0)  # no other element is 0
    return [op.Mul(op.Where(alone, others, zero), op.wide(r.g))]


@gradient("CumSum", inputs=(0,))
def cum_sum(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient of a running sum is the running sum of the gradient from the other end."""
    reverse = 1 - node.attributes.get_int("reverse", 0)
    return [op.CumSum(g, node.inputs[1], exclusive=node.attributes.get_int("exclusive", 0), reverse=reverse)]


@defined("CumProd", inputs=(0,))
def cum_prod(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """The running product as a Scan, whose gradient is exact where factors are 0."""
    x = required(node)
    known = op.known(node.inputs[1])
    op.refuse(known is None, "its axis is computed at run time")
    assert known is not None
    rank = op.rank(x)
    axis = int(known.reshape(())) % rank
    exclusive = bool(node.attributes.get_int("exclusive", 0))
    order = [axis, *(other for other in range(rank) if other != axis)]
    rows = op.transpose(op.wide(x), order)
    first = op.scalar(1.0, rows.dtype)
    if rank > 1:
        first = op.Expand(first, op.join([op.dim(rows, other) for other in range(1, rank)]))
    if rows.shape is not None and rank > 1:
        first.shape = ir.Shape(list(rows.shape)[1:])

    def step(b: Builder, state: list[ir.Value], row: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        product = b.Mul(state[0], row[0])
        return [product], [b.Identity(state[0] if exclusive else product)]

    _, (products,) = run_steps(op, [first], [rows], step, bool(node.attributes.get_int("reverse", 0)))
    assert x.dtype is not None
    return [op.cast(op.transpose(products, np.argsort(order).tolist()), x.dtype)]
