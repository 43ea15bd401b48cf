"""Gradients of Loop and Scan.

The forward node gives the states before each step as further, stacked outputs. The backward node goes through the steps from the
last to the first: it computes a step anew from its states and differentiates it there, so that no other intermediate result
is kept. The number of steps is the length of the stack, whatever ended the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.bodies import close, rebuild, varying
from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import captured, through


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What the two rules share.

    Attributes:
        source: The forward body.
        states: Its inputs that are carried from step to step.
        after: What they become.
        initial: Their first values.
        last: Gradient of what the node gives for each state.
        active: Positions of the states that carry a gradient.
        captured: Values of outer graphs whose gradient is wanted.
        skip: Outputs of the body before the states.
    """

    source: ir.Graph
    states: list[ir.Value]
    after: list[ir.Value]
    initial: list[ir.Value]
    last: Sequence[ir.Value | None]
    active: list[int]
    captured: list[ir.Value]
    skip: int

    def carried(self, op: Builder) -> list[ir.Value]:
        """First values of what the backward node carries: gradients of the states, FP32 sums for what was captured."""
        slopes = [self.last[j] for j in self.active]
        seeds = [op.zeros(self.initial[j]) if g is None else g for j, g in zip(self.active, slopes, strict=True)]
        return seeds + [op.zeros(op.wide(value)) for value in self.captured]


@gradient("Loop")
def loop(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """A Loop over the steps in reverse: step k starts from the stacked states and receives row k of the stacked gradients."""
    source = node.attributes["body"].as_graph()
    values, count = captured(node), len(node.inputs) - 2
    wanted = [value for p, value in enumerate(values) if p + len(node.inputs) in op.wanted]
    states, after = list(source.inputs)[2:], list(source.outputs)[1 : 1 + count]
    entered = {state for j, state in enumerate(states) if j + 2 in op.wanted}
    steps = _Steps(
        source, states, after, [required(node, j) for j in range(2, len(node.inputs))], gradients[:count],
        sorted(varying(source, entered | set(wanted), list(zip(states, after, strict=True)))), wanted, 1,
    )  # fmt: skip
    _same_shapes(op, steps)
    stacks = _stack(op, node, source, [source.inputs[0], *states])
    total = op.Size(stacks[0])  # of one number a step
    carried = steps.carried(op)
    body = op.body("step")
    number = body.argument(op.index(0))
    condition = body.argument(op.constant(np.asarray(True)))
    own = [body.argument(value) for value in carried]
    back = body.Sub(body.index(-1), number)  # rows from the end: their number is on the CPU, whatever the device

    def row(stack: ir.Value, like: ir.Value) -> ir.Value:
        value = body.Gather(stack, back, axis=0)
        value.type, value.shape = like.type, like.shape if like.shape is not None else value.shape
        return value

    actual = {state: row(stack, state) for state, stack in zip([source.inputs[0], *states], stacks, strict=True)}
    actual[source.inputs[1]] = body.constant(np.asarray(True))
    slices = [
        None if g is None else row(g, out)
        for g, out in zip(gradients[count:], source.outputs[1 + count :], strict=False)
    ]
    results, _ = _step(body, steps, actual, own, slices, [])
    graph = close(body, [body.emit("Identity", [condition])[0], *results])
    found = op.emit("Loop", [total, None, *carried], {"body": graph}, outputs=len(carried))
    return _collected(node, values, steps, _like(found, carried), 2)


@gradient("Scan")
def scan(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """A Scan in reverse over the stacked states, the inputs and the gradients of the outputs."""
    source = node.attributes["body"].as_graph()
    number = node.attributes["num_scan_inputs"].as_int()
    values, count = captured(node), len(node.inputs) - number
    wanted = [value for p, value in enumerate(values) if p + len(node.inputs) in op.wanted]
    states, slices = list(source.inputs)[:count], list(source.inputs)[count:]
    after = list(source.outputs)[:count]
    outputs = len(source.outputs) - count
    entered = {value for j, value in enumerate([*states, *slices]) if j in op.wanted}
    steps = _Steps(
        source, states, after, [required(node, j) for j in range(count)], gradients[:count],
        sorted(varying(source, entered | set(wanted), list(zip(states, after, strict=True)))), wanted, 0,
    )  # fmt: skip
    inputs = [required(node, j) for j in range(count, len(node.inputs))]
    in_axes = list(node.attributes.get_ints("scan_input_axes", (0,) * number))
    in_ways = list(node.attributes.get_ints("scan_input_directions", (0,) * number))
    out_axes = list(node.attributes.get_ints("scan_output_axes", (0,) * outputs))
    out_ways = list(node.attributes.get_ints("scan_output_directions", (0,) * outputs))
    stacks = _stack(op, node, source, states)
    for name, values_ in (("scan_output_axes", out_axes), ("scan_output_directions", out_ways)):
        node.attributes[name] = ir.AttrInt64s(name, [*values_, *([0] * len(stacks))])
    carried = steps.carried(op)
    body = op.body("step")
    own = [body.argument(value) for value in carried]
    before = [body.argument(value) for value in states]
    xs = [body.argument(value) for value in slices]
    held = [j for j, g in enumerate(gradients[count : count + outputs]) if g is not None]
    seeds = {j: body.argument(source.outputs[count + j]) for j in held}
    actual = dict(zip([*states, *slices], [*before, *xs], strict=True))
    chosen = [j for j in range(number) if count + j in op.wanted and slices[j].dtype in FLOATS]
    results, given = _step(
        body, steps, actual, own, [seeds.get(j) for j in range(outputs)], [xs[j] for j in chosen]
    )  # fmt: skip
    attributes = {
        "body": close(body, [*results, *given]),
        "num_scan_inputs": len(stacks) + number + len(held),
        "scan_input_axes": [*([0] * len(stacks)), *in_axes, *(out_axes[j] for j in held)],
        "scan_input_directions": [
            *([1] * len(stacks)),
            *(1 - way for way in in_ways),
            *(1 - out_ways[j] for j in held),
        ],
    }
    if chosen:
        attributes["scan_output_axes"] = [in_axes[j] for j in chosen]
        attributes["scan_output_directions"] = [1 - in_ways[j] for j in chosen]
    read = [*carried, *stacks, *inputs, *(gradients[count + j] for j in held)]
    found = op.emit("Scan", read, attributes, outputs=len(carried) + len(chosen))
    parts = _collected(node, values, steps, _like(found, carried), 0)
    for j, g in zip(chosen, _like(found[len(carried) :], [inputs[j] for j in chosen]), strict=True):
        parts[count + j] = g
    return parts


def _same_shapes(op: Builder, steps: _Steps) -> None:
    """Refuse states that are known to grow: they cannot be stacked."""
    for own, after, initial in zip(steps.states, steps.after, steps.initial, strict=True):
        if own.shape is None and initial.shape is not None and after.shape is not None:
            op.refuse(len(initial.shape) != len(after.shape), f"the state {own.name!r} changes its shape")
            own.shape = initial.shape
        if own.shape is not None and after.shape is not None:
            pairs = zip(own.shape, after.shape, strict=False)
            changed = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
            op.refuse(changed or len(own.shape) != len(after.shape), f"the state {own.name!r} changes its shape")


def _stack(op: Builder, node: ir.Node, source: ir.Graph, states: Sequence[ir.Value]) -> list[ir.Value]:
    """Further outputs of the forward node: the states before each step, [steps, ...]."""
    found = []
    for state in states:
        copy = ir.node("Identity", [state], name=op.unique(f"{source.name}/{state.name}/kept"))
        source.append(copy)
        value = copy.outputs[0]
        value.name, value.type, value.shape = op.unique(f"{state.name}/kept"), state.type, state.shape
        source.outputs.append(value)
        node.resize_outputs(len(node.outputs) + 1)
        stack = node.outputs[-1]
        stack.name, stack.type = op.unique(f"{node.name or node.op_type}/{state.name}"), state.type
        if state.shape is not None:
            stack.shape = ir.Shape([None, *state.shape])
        found.append(stack)
    return found


def _step(
    body: Builder,
    steps: _Steps,
    actual: dict[ir.Value, ir.Value],
    carried: Sequence[ir.Value],
    slices: Sequence[ir.Value | None],
    extra: Sequence[ir.Value],
) -> tuple[list[ir.Value], list[ir.Value]]:
    """One step: gradients of the states and sums for captured values after it, and the gradients of `extra`.

    Args:
        body: The builder.
        steps: The loop.
        actual: What the inputs of the forward body stand for.
        carried: Gradients of the active states, then sums for captured values.
        slices: Gradient of each output that the forward node stacks, or None.
        extra: Further values whose gradient is wanted.
    """
    before = [actual[steps.states[j]] for j in steps.active]
    outputs = rebuild(body, steps.source, actual)[steps.skip :]
    seeds: list[ir.Value | None] = [None] * len(steps.after)
    for j, g in zip(steps.active, carried, strict=False):
        seeds[j] = g
    wrt = [*before, *steps.captured, *extra]
    body.wanted = frozenset(range(len(wrt)))
    found = through(body, outputs, [*seeds, *slices], wrt)
    slopes = [body.zeros(value) if g is None else g for value, g in zip(wrt, found, strict=True)]
    sums = list(carried)[len(before) :]
    parts = found[len(before) : len(before) + len(sums)]
    totals = [a if g is None else body.Add(a, body.cast(g, _type(a))) for a, g in zip(sums, parts, strict=True)]
    return slopes[: len(before)] + totals, slopes[len(before) + len(sums) :]


def _type(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _like(found: Sequence[ir.Value], carried: Sequence[ir.Value]) -> list[ir.Value]:
    for value, like in zip(found, carried, strict=False):
        value.type, value.shape = like.type, like.shape
    return list(found[: len(carried)])


def _collected(
    node: ir.Node, values: Sequence[ir.Value], steps: _Steps, found: Sequence[ir.Value], first: int
) -> list[ir.Value | None]:
    """One gradient per input of the node, then one per captured value."""
    result: list[ir.Value | None] = [None] * (len(node.inputs) + len(values))
    for j, g in zip(steps.active, found, strict=False):
        result[first + j] = g
    for value, g in zip(steps.captured, found[len(steps.active) :], strict=True):
        result[len(node.inputs) + values.index(value)] = g
    return result
