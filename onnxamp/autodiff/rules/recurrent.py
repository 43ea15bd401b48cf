"""Gradients of LSTM, GRU and RNN.

All hidden states are outputs of the forward node, so the gates of all steps are computed anew in one product; only what is
really sequential runs in a Scan, whose length may be known at run time only. The gradients of the weights are again
products over all steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import through
from onnxamp.autodiff.rules.recurrence import is_usual, pick, run_steps, write_out


@dataclasses.dataclass(frozen=True)
class _Direction:
    """One direction of a recurrent node.

    Attributes:
        index: Its position in the weights.
        backwards: It runs from the last step to the first.
        w, r: Weights of the input, [G·H, I], and of the state, [G·H, H].
        wb, rb: Biases, [G·H] each, or None.
        h, before: States after and before each step, [T, B, H].
        dy: Gradient of the states after each step, [T, B, H], or None.
        dh: Gradient of the last state, [B, H], or None.
    """

    index: int
    backwards: bool
    w: ir.Value
    r: ir.Value
    wb: ir.Value | None
    rb: ir.Value | None
    h: ir.Value
    before: ir.Value
    dy: ir.Value | None
    dh: ir.Value | None


@gradient("LSTM", inputs=(0, 1, 2, 3, 5, 6, 7))
def lstm(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """c' = f·c + i·g, h' = o·tanh c', with i, o, f = σ and g = tanh of x·Wᵀ + h·Rᵀ + b.

    From dh' and dc': dc = dc' + dh'·o·(1 − tanh² c'), then the pre-activations i: dc·g·i(1 − i), o: dh'·tanh c'·o(1 − o),
    f: dc·c·f(1 − f), g: dc·i·(1 − g²); dh = d·R, dc ← dc·f.
    """
    if not is_usual(node):
        return through(op, write_out(op, node), gradients, node.inputs)
    dc_last = [*gradients, None, None][2]
    parts = []
    for way in _directions(op, node, gradients):
        pre = _pre_activations(op, node, way)
        i, o, f, g = op.emit("Split", [pre], {"axis": -1, **_number(op, 4)}, outputs=4)
        i, o, f, g = op.Sigmoid(i), op.Sigmoid(o), op.Sigmoid(f), op.Tanh(g)
        start = _initial(op, node, 6, way)

        def cell(b: Builder, state: list[ir.Value], x: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            c = b.Add(b.Mul(x[0], state[0]), x[1])
            return [c], [b.Identity(c)]  # one value as two outputs of a body is read wrongly by ONNX Runtime

        _, (c,) = run_steps(op, [start], [f, op.Mul(i, g)], cell, way.backwards)
        before = _shifted(op, c, start, way.backwards)
        t = op.Tanh(c)
        factors = [
            op.Mul(o, op.Sub(1.0, op.Mul(t, t))),
            op.Mul(op.Mul(g, i), op.Sub(1.0, i)),
            op.Mul(op.Mul(t, o), op.Sub(1.0, o)),
            op.Mul(op.Mul(before, f), op.Sub(1.0, f)),
            op.Mul(i, op.Sub(1.0, op.Mul(g, g))),
            f,
        ]
        r = way.r

        def step(
            b: Builder, state: list[ir.Value], x: list[ir.Value], r: ir.Value = r
        ) -> tuple[list[ir.Value], list[ir.Value]]:
            dh = b.Add(state[0], x[6]) if len(x) > 6 else state[0]
            dc = b.Add(state[1], b.Mul(dh, x[0]))
            d = b.Concat(b.Mul(dc, x[1]), b.Mul(dh, x[2]), b.Mul(dc, x[3]), b.Mul(dc, x[4]), axis=-1)
            return [b.MatMul(d, r), b.Mul(dc, x[5])], [d]

        states = [_or_zeros(op, way.dh, start), _or_zeros(op, pick(op, dc_last, way.index, 0), start)]
        slopes = factors if way.dy is None else [*factors, way.dy]
        (dh, dc), (d,) = run_steps(op, states, slopes, step, not way.backwards)
        parts.append(_weight_gradients(op, node, way, d, d, dh, dc))
    return _joined(op, node, parts)


@gradient("GRU", inputs=(0, 1, 2, 3, 5))
def gru(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """h' = (1 − z)·n + z·h with z, r = σ, n = tanh(x·Wᵀ + b + (r·h)·Rᵀ + c), or r·(h·Rᵀ + c) for linear_before_reset.

    dn = dh'·(1 − z)·(1 − n²), dz = dh'·(h − n)·z(1 − z); then dr and dh through the form of n.
    """
    if not is_usual(node):
        return through(op, write_out(op, node), gradients, node.inputs)
    linear = bool(node.attributes.get_int("linear_before_reset", 0))
    parts = []
    for way in _directions(op, node, gradients):
        size = _hidden(op, node)
        x = required(node)
        from_x = op.MatMul(x, op.swap(way.w))
        from_x = from_x if way.wb is None else op.Add(from_x, way.wb)
        weights = op.Slice(way.r, [0], [2 * size], [0]), op.Slice(way.r, [2 * size], [3 * size], [0])
        biases: tuple[ir.Value | None, ir.Value | None] = (None, None)
        if way.rb is not None:
            biases = op.Slice(way.rb, [0], [2 * size], [0]), op.Slice(way.rb, [2 * size], [3 * size], [0])
        xzr, xn = op.Slice(from_x, [0], [2 * size], [-1]), op.Slice(from_x, [2 * size], [3 * size], [-1])
        hzr = op.MatMul(way.before, op.swap(weights[0]))
        hzr = hzr if biases[0] is None else op.Add(hzr, biases[0])
        zr = op.Sigmoid(op.Add(xzr, hzr))
        z, r = op.emit("Split", [zr], {"axis": -1, **_number(op, 2)}, outputs=2)
        hn = op.MatMul(way.before if linear else op.Mul(r, way.before), op.swap(weights[1]))
        hn = hn if biases[1] is None else op.Add(hn, biases[1])
        n = op.Tanh(op.Add(xn, op.Mul(r, hn) if linear else hn))
        factors = [
            op.Mul(op.Sub(1.0, z), op.Sub(1.0, op.Mul(n, n))),
            op.Mul(op.Mul(op.Sub(way.before, n), z), op.Sub(1.0, z)),
            op.Mul(op.Mul(hn if linear else way.before, r), op.Sub(1.0, r)),
            r,
            z,
        ]

        def step(
            b: Builder,
            state: list[ir.Value],
            x: list[ir.Value],
            weights: tuple[ir.Value, ir.Value] = weights,
            whole: ir.Value = way.r,
        ) -> tuple[list[ir.Value], list[ir.Value]]:
            dh = b.Add(state[0], x[5]) if len(x) > 5 else state[0]
            dn, dz, kept = b.Mul(dh, x[0]), b.Mul(dh, x[1]), b.Mul(dh, x[4])
            if linear:
                state_side = b.Concat(dz, b.Mul(dn, x[2]), b.Mul(dn, x[3]), axis=-1)
                input_side = b.Concat(dz, b.Mul(dn, x[2]), dn, axis=-1)
                return [b.Add(kept, b.MatMul(state_side, whole))], [input_side, state_side]
            through = b.MatMul(dn, weights[1])
            gates = b.Concat(dz, b.Mul(through, x[2]), axis=-1)
            back = b.Add(b.Add(kept, b.Mul(through, x[3])), b.MatMul(gates, weights[0]))
            return [back], [b.Concat(gates, dn, axis=-1)]

        slopes = factors if way.dy is None else [*factors, way.dy]
        start = _initial(op, node, 5, way)
        (dh,), outs = run_steps(op, [_or_zeros(op, way.dh, start)], slopes, step, not way.backwards)
        reset = None if linear else (op.Mul(r, way.before), size)
        parts.append(_weight_gradients(op, node, way, outs[0], outs[-1], dh, None, reset))
    return _joined(op, node, parts)


@gradient("RNN", inputs=(0, 1, 2, 3, 5))
def rnn(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """h' = f(x·Wᵀ + h·Rᵀ + b) with f = tanh (slope 1 − h'²) or Relu (slope sign h')."""
    if not is_usual(node):
        return through(op, write_out(op, node), gradients, node.inputs)
    names = [name.lower() for name in node.attributes.get_strings("activations", ("Tanh",))]
    parts = []
    for way in _directions(op, node, gradients):
        slope = op.Sub(1.0, op.Mul(way.h, way.h)) if names[0] == "tanh" else op.Sign(way.h)
        r = way.r

        def step(
            b: Builder, state: list[ir.Value], x: list[ir.Value], r: ir.Value = r
        ) -> tuple[list[ir.Value], list[ir.Value]]:
            d = b.Mul(b.Add(state[0], x[1]) if len(x) > 1 else state[0], x[0])
            return [b.MatMul(d, r)], [d]

        slopes = [slope] if way.dy is None else [slope, way.dy]
        start = _initial(op, node, 5, way)
        (dh,), (d,) = run_steps(op, [_or_zeros(op, way.dh, start)], slopes, step, not way.backwards)
        parts.append(_weight_gradients(op, node, way, d, d, dh, None))
    return _joined(op, node, parts)


def _hidden(op: Builder, node: ir.Node) -> int:
    weights = required(node, 2)
    size = op.dims(weights)[-1]
    op.refuse(not isinstance(size, int), "the hidden size is not static")
    assert isinstance(size, int)
    return size


def _number(op: Builder, count: int) -> dict[str, int]:
    return {"num_outputs": count} if op.opset >= 18 else {}


def _directions(op: Builder, node: ir.Node, gradients: Sequence[ir.Value | None]) -> list[_Direction]:
    kind = node.attributes.get_string("direction", "forward")
    x, w, r = node.inputs[:3]
    assert x is not None
    assert w is not None
    assert r is not None
    bias = node.inputs[3] if len(node.inputs) > 3 else None
    states = _states(op, node, x, r)
    ways = [False, True] if kind == "bidirectional" else [kind == "reverse"]
    result = []
    for index, backwards in enumerate(ways):
        wb = rb = None
        if bias is not None:
            both = pick(op, bias, index, 0)
            wb, rb = op.emit("Split", [both], {"axis": 0, **_number(op, 2)}, outputs=2)
        w_own, r_own, h = pick(op, w, index, 0), pick(op, r, index, 0), pick(op, states, index, 1)
        assert w_own is not None
        assert r_own is not None
        assert h is not None
        dy, dh = [*gradients, None][:2]
        start = node.inputs[5] if len(node.inputs) > 5 else None
        first = pick(op, start, index, 0)
        if first is None:
            first = _zeros_state(op, x, r_own)
        result.append(
            _Direction(
                index, backwards, w_own, r_own, wb, rb, h, _shifted(op, h, first, backwards),
                pick(op, dy, index, 1), pick(op, dh, index, 0),
            )
        )  # fmt: skip
    return result


def _states(op: Builder, node: ir.Node, x: ir.Value, r: ir.Value) -> ir.Value:
    """The output with all states, [T, D, B, H], added where the node did not give it."""
    y = node.outputs[0]
    if not y.name:
        y.name = op.unique(f"{node.name or node.outputs[-1].name}/states")
    if y.dtype is None:
        y.type = x.type
    if y.shape is None and x.shape is not None and r.shape is not None:
        y.shape = ir.Shape([x.shape[0], r.shape[0], x.shape[1], r.shape[2]])
    return y


def _zeros_state(op: Builder, x: ir.Value, r: ir.Value) -> ir.Value:
    return op.Expand(op.scalar(0.0, x.dtype), op.join([op.dim(x, 1), op.dim(r, 1)]))


def _initial(op: Builder, node: ir.Node, position: int, way: _Direction) -> ir.Value:
    value = node.inputs[position] if len(node.inputs) > position else None
    x = required(node)
    picked = pick(op, value, way.index, 0)
    return _zeros_state(op, x, way.r) if picked is None else picked


def _or_zeros(op: Builder, value: ir.Value | None, like: ir.Value) -> ir.Value:
    return op.zeros(like) if value is None else value


def _shifted(op: Builder, states: ir.Value, first: ir.Value, backwards: bool) -> ir.Value:
    """The state before each step."""
    head = op.Unsqueeze(first, [0])
    if backwards:
        result = op.Concat(op.Slice(states, [1], [2**63 - 1], [0]), head, axis=0)
    else:
        result = op.Concat(head, op.Slice(states, [0], [-1], [0]), axis=0)
    result.shape = states.shape
    return result


def _pre_activations(op: Builder, node: ir.Node, way: _Direction) -> ir.Value:
    result = op.Add(op.MatMul(node.inputs[0], op.swap(way.w)), op.MatMul(way.before, op.swap(way.r)))
    return result if way.wb is None else op.Add(result, op.Add(way.wb, way.rb))


def _weight_gradients(
    op: Builder,
    node: ir.Node,
    way: _Direction,
    from_x: ir.Value,
    from_h: ir.Value,
    dh: ir.Value,
    dc: ir.Value | None,
    reset: tuple[ir.Value, int] | None = None,
) -> list[ir.Value | None]:
    """Gradients of x, W, R, B, h₀ and c₀ from those of the pre-activations of all steps.

    `reset` = (r·h, H): the last H rows of R met r·h instead of h.
    """
    x = required(node)
    dx = op.MatMul(from_x, way.w)
    width = op.dims(way.w)[0]
    flat = op.Reshape(from_x, [-1, width])
    dw = op.Gemm(flat, op.rows(x, way.w, 1), transA=1)
    flat_h = flat if from_h is from_x else op.Reshape(from_h, [-1, width])
    before = op.rows(way.before, way.r, 1)
    if reset is None:
        dr = op.Gemm(flat_h, before, transA=1)
    else:
        met, size = reset
        gates, last = op.Slice(flat_h, [0], [2 * size], [1]), op.Slice(flat_h, [2 * size], [3 * size], [1])
        rows = op.rows(met, way.r, 1)
        dr = op.Concat(op.Gemm(gates, before, transA=1), op.Gemm(last, rows, transA=1), axis=0)
    db = None
    if way.wb is not None:
        db = op.Concat(op.sum(flat, [0], keepdims=False), op.sum(flat_h, [0], keepdims=False), axis=0)
    return [dx, dw, dr, db, dh, dc]


def _joined(op: Builder, node: ir.Node, parts: list[list[ir.Value | None]]) -> Gradients:
    """One gradient per input of the node: x summed over directions, the others stacked."""
    columns = list(zip(*parts, strict=True))
    dx = [value for value in columns[0] if value is not None]
    stacked: list[ir.Value | None] = []
    for column in columns[1:]:
        rows = [op.Unsqueeze(value, [0]) for value in column if value is not None]
        stacked.append(None if not rows else rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0))
    dw, dr, db, dh, dc = stacked
    return [dx[0] if len(dx) == 1 else op.Add(*dx), dw, dr, db, None, dh, dc][: len(node.inputs)]
