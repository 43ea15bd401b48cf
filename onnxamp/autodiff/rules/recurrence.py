"""LSTM, GRU and RNN in all their variants, written out as a Scan of plain operators.

Sequence lengths, peepholes, clipping, other activations and the layout with the batch first take this way; the usual forms have rules of
their own (`recurrent`), which know the forward node's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder

Activation = Callable[[Builder, ir.Value], ir.Value]
Step = Callable[[Builder, list[ir.Value], list[ir.Value]], tuple[list[ir.Value], list[ir.Value]]]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_USUAL = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
# Parameters of each activation with their defaults.
_PARAMETERS: dict[str, dict[str, float]] = {
    "affine": {"alpha": 1.0, "beta": 0.0},
    "elu": {"alpha": 1.0},
    "hardsigmoid": {"alpha": 0.2, "beta": 0.5},
    "leakyrelu": {"alpha": 0.01},
    "scaledtanh": {"alpha": 1.0, "beta": 1.0},
    "thresholdedrelu": {"alpha": 1.0},
}
_NAMES = {
    "elu": "Elu", "hardsigmoid": "HardSigmoid", "leakyrelu": "LeakyRelu", "relu": "Relu", "sigmoid": "Sigmoid", "softplus": "Softplus",
    "softsign": "Softsign", "tanh": "Tanh", "thresholdedrelu": "ThresholdedRelu",
}  # fmt: skip


def is_usual(node: ir.Node) -> bool:
    """Whether `recurrent` has the node's form."""
    names = [name.lower() for name in node.attributes.get_strings("activations", ())]
    usual = list(_USUAL[node.op_type])
    same = all(a == b for a, b in zip(names, usual * 2, strict=False)) or (
        node.op_type == "RNN" and set(names) == {"relu"}
    )
    extra = [4, 7] if node.op_type == "LSTM" else [4]
    return (
        same
        and all(len(node.inputs) <= position or node.inputs[position] is None for position in extra)
        and not any(name in node.attributes for name in ("clip", "activation_alpha", "activation_beta"))
        and not any(node.attributes.get_int(name, 0) for name in ("layout", "input_forget"))
    )


def write_out(op: Builder, node: ir.Node) -> list[ir.Value]:
    """All outputs of the node, from its inputs, by plain operators."""
    batch_first = bool(node.attributes.get_int("layout", 0))
    x, w, r, bias, lengths, *rest = [*node.inputs, *[None] * 8][:8]
    assert x is not None
    assert w is not None
    assert r is not None
    h0, c0 = rest[0], rest[1] if node.op_type == "LSTM" else None
    peepholes = rest[2] if node.op_type == "LSTM" else None
    if batch_first:
        x = op.transpose(x, [1, 0, 2])
        h0, c0 = (None if value is None else op.transpose(value, [1, 0, 2]) for value in (h0, c0))
    kind = node.attributes.get_string("direction", "forward")
    ways = [False, True] if kind == "bidirectional" else [kind == "reverse"]
    activations = _activations(op, node, len(ways))
    seen = None if lengths is None else _seen(op, x, lengths)
    columns: list[list[ir.Value]] = []
    for index, backwards in enumerate(ways):
        own = [pick(op, value, index) for value in (w, r, bias, peepholes, h0, c0)]
        functions = activations[index * len(_USUAL[node.op_type]) :]
        columns.append(_direction(op, node, x, own, seen, functions, backwards))
    ys, *finals = (list(column) for column in zip(*columns, strict=True))
    y = op.Concat(*[op.Unsqueeze(value, [1]) for value in ys], axis=1)
    results = [y, *(op.Concat(*[op.Unsqueeze(value, [0]) for value in values], axis=0) for values in finals)]
    if batch_first:
        results = [op.transpose(y, [2, 0, 1, 3]), *(op.transpose(value, [1, 0, 2]) for value in results[1:])]
    return results


def pick(op: Builder, value: ir.Value | None, index: int, axis: int = 0) -> ir.Value | None:
    """Direction `index` of a tensor with a dimension of directions."""
    if value is None:
        return None
    if op.dims(value)[axis] == 1:
        return op.Squeeze(value, [axis])
    return op.Squeeze(op.Slice(value, [index], [index + 1], [axis]), [axis])


def _seen(op: Builder, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """[T, B, 1]: whether a step lies within its sequence."""
    steps = op.Range(op.index(0), op.Squeeze(op.dim(x, 0), [0]), op.index(1))
    mask = op.Less(op.Unsqueeze(steps, [1]), op.Unsqueeze(op.int64(lengths), [0]))
    mask = op.Unsqueeze(mask, [2])
    if x.shape is not None:
        mask.shape = ir.Shape([x.shape[0], x.shape[1], 1])
    return mask


def _activations(op: Builder, node: ir.Node, ways: int) -> list[Activation]:
    """The activation functions of all directions, with their parameters, which come in the order in which functions need them."""
    usual = _USUAL[node.op_type]
    names = [name.lower() for name in node.attributes.get_strings("activations", ())] or list(usual) * ways
    names = names if len(names) >= len(usual) * ways else names * ways
    given = {name: list(node.attributes.get_floats(f"activation_{name}", ())) for name in ("alpha", "beta")}
    functions = []
    for name in names:
        op.refuse(name not in _NAMES and name not in _PARAMETERS, f"activation {name}")
        own = {key: given[key].pop(0) if given[key] else default for key, default in _PARAMETERS.get(name, {}).items()}
        functions.append(_activation(name, own))
    return functions


def _activation(name: str, own: dict[str, float]) -> Activation:
    def apply(op: Builder, x: ir.Value) -> ir.Value:
        if name == "affine":
            return op.Add(op.Mul(x, own["alpha"]), own["beta"])
        if name == "scaledtanh":
            return op.Mul(op.Tanh(op.Mul(x, own["beta"])), own["alpha"])
        return op.emit(_NAMES[name], [x], dict(own))[0]

    return apply


def _direction(
    op: Builder,
    node: ir.Node,
    x: ir.Value,
    own: Sequence[ir.Value | None],
    seen: ir.Value | None,
    functions: Sequence[Activation],
    backwards: bool,
) -> list[ir.Value]:
    """States of all steps, last hidden state and, of an LSTM, last cell state."""
    w, r, bias, peepholes, h0, c0 = own
    assert w is not None
    assert r is not None
    gates = _GATES[node.op_type]
    hidden = op.dims(r)[1]
    op.refuse(not isinstance(hidden, int), "the hidden size is not static")
    assert isinstance(hidden, int)
    from_x = op.MatMul(x, op.swap(w))
    from_h = None
    if bias is not None:
        from_x = op.Add(from_x, op.Slice(bias, [0], [gates * hidden], [0]))
        from_h = op.Slice(bias, [gates * hidden], [2 * gates * hidden], [0])
    bound = node.attributes.get_float("clip", 0.0)

    def clip(b: Builder, value: ir.Value) -> ir.Value:
        return b.Clip(value, -bound, bound) if bound else value

    cells = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
    cell = cells[node.op_type](op, node, op.swap(r), from_h, peepholes, hidden, functions, clip)

    def step(b: Builder, state: list[ir.Value], slices: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        after = cell(b, state, slices[0])
        shown = after[0]
        if len(slices) > 1:
            shown = b.mask(slices[1], after[0])
            after = [b.Where(slices[1], new, old) for new, old in zip(after, state, strict=True)]
        return after, [b.Identity(shown)]

    zeros = op.Expand(op.scalar(0.0, x.dtype), op.join([op.dim(x, 1), hidden]))
    if x.shape is not None:
        zeros.shape = ir.Shape([x.shape[1], hidden])
    states = [zeros if h0 is None else h0]
    if node.op_type == "LSTM":
        states.append(zeros if c0 is None else c0)
    lasts, (y,) = run_steps(op, states, [from_x] if seen is None else [from_x, seen], step, backwards)
    return [y, *lasts]


Clip = Callable[[Builder, ir.Value], ir.Value]
Cell = Callable[[Builder, list[ir.Value], ir.Value], list[ir.Value]]


def _parts(b: Builder, value: ir.Value, size: int, count: int) -> list[ir.Value]:
    axis = b.rank(value) - 1
    return [b.Slice(value, [i * size], [(i + 1) * size], [axis]) for i in range(count)]


def _lstm(
    op: Builder, node: ir.Node, r: ir.Value, bias: ir.Value | None, peepholes: ir.Value | None, hidden: int,
    functions: Sequence[Activation], clip: Clip,
) -> Cell:  # fmt: skip
    coupled = bool(node.attributes.get_int("input_forget", 0))
    f, g, h = functions[:3]
    eyes = [None] * 3 if peepholes is None else _parts(op, peepholes, hidden, 3)

    def cell(b: Builder, state: list[ir.Value], x: ir.Value) -> list[ir.Value]:
        before, c = state
        whole = b.Add(x, b.MatMul(before, r))
        i, o, forget, new = _parts(b, whole if bias is None else b.Add(whole, bias), hidden, 4)

        def gate(value: ir.Value, eye: ir.Value | None, seen: ir.Value, function: Activation) -> ir.Value:
            return function(b, clip(b, value if eye is None else b.Add(value, b.Mul(eye, seen))))

        i = gate(i, eyes[0], c, f)
        forget = b.Sub(1.0, i) if coupled else gate(forget, eyes[2], c, f)
        after = b.Add(b.Mul(forget, c), b.Mul(i, g(b, clip(b, new))))
        o = gate(o, eyes[1], after, f)
        return [b.Mul(o, h(b, after)), after]

    return cell


def _gru(
    op: Builder, node: ir.Node, r: ir.Value, bias: ir.Value | None, _: ir.Value | None, hidden: int,
    functions: Sequence[Activation], clip: Clip,
) -> Cell:  # fmt: skip
    linear = bool(node.attributes.get_int("linear_before_reset", 0))
    f, g = functions[:2]
    for_gates, for_new = op.Slice(r, [0], [2 * hidden], [1]), op.Slice(r, [2 * hidden], [3 * hidden], [1])
    gate_bias = new_bias = None
    if bias is not None:
        gate_bias, new_bias = op.Slice(bias, [0], [2 * hidden], [0]), op.Slice(bias, [2 * hidden], [3 * hidden], [0])

    def cell(b: Builder, state: list[ir.Value], x: ir.Value) -> list[ir.Value]:
        (before,) = state
        xz, xr, xn = _parts(b, x, hidden, 3)
        gates = b.MatMul(before, for_gates)
        hz, hr = _parts(b, gates if gate_bias is None else b.Add(gates, gate_bias), hidden, 2)
        z, reset = f(b, clip(b, b.Add(xz, hz))), f(b, clip(b, b.Add(xr, hr)))
        met = b.MatMul(before if linear else b.Mul(reset, before), for_new)
        met = met if new_bias is None else b.Add(met, new_bias)
        new = g(b, clip(b, b.Add(xn, b.Mul(reset, met) if linear else met)))
        return [b.Add(b.Mul(b.Sub(1.0, z), new), b.Mul(z, before))]

    return cell


def _rnn(
    op: Builder, node: ir.Node, r: ir.Value, bias: ir.Value | None, _: ir.Value | None, hidden: int,
    functions: Sequence[Activation], clip: Clip,
) -> Cell:  # fmt: skip
    def cell(b: Builder, state: list[ir.Value], x: ir.Value) -> list[ir.Value]:
        whole = b.Add(x, b.MatMul(state[0], r))
        return [functions[0](b, clip(b, whole if bias is None else b.Add(whole, bias)))]

    return cell


def run_steps(
    op: Builder, states: list[ir.Value], slices: list[ir.Value], step: Step, backwards: bool
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Run `step` over dimension 0 of `slices`: final states, and what each step gives, stacked in the order of the input."""
    body = op.body("step")
    own = [body.argument(value) for value in states]
    xs = [body.argument(value, drop=1) for value in slices]
    after, given = step(body, own, xs)
    body.graph.outputs.extend([*after, *given])
    for value, like in zip(after, states, strict=True):
        value.shape = like.shape
    ways = {"scan_input_directions": [1] * len(slices), "scan_output_directions": [1] * len(given)} if backwards else {}
    attributes = {"body": body.graph, "num_scan_inputs": len(slices), **ways}
    results = op.emit("Scan", [*states, *slices], attributes, outputs=len(after) + len(given))
    for value, like in zip(results, [*states, *given], strict=True):
        value.type = like.type
        value.shape = like.shape
    for value, like in zip(results[len(after) :], given, strict=True):
        time = slices[0].shape
        if time is not None and like.shape is not None:
            value.shape = ir.Shape([time[0], *like.shape])
    return list(results[: len(after)]), list(results[len(after) :])
