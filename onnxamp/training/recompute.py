"""Activation recompute (checkpointing) as a pass over a gradient graph: memory for time (Chen et al., arXiv:1604.06174).

The forward half is cut where little is alive. Between two cuts, what the backward half reads is either kept, or computed again from what
is alive at the first cut, when the gradient arrives.

A repeated node must run late, and no optimizer may find that it is its original. Both come from one node in front of it: each value that a
repeated segment starts from is read through ``Where(c, x, x)``, with a condition made of one element of the arriving gradient. It is x
whatever the condition, so gradients keep their bits. Masks and other values that do not depend on the data are not repeated. What a node
draws at random is kept, as it would be another the second time, and what a node with bodies gives, as they read values around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS
from onnxamp.errors import UsageError
from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.training.segments import ForwardHalf, Segment, Segments


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What was done.

    Attributes:
        before: Modelled bytes of activations that the backward half reads.
        after: The same at the worst moment of the changed graph.
        work: Modelled additional work, as a share of a step.
        segments: Segments that are computed twice.
        sizes: Sizes that were taken for free dimensions.
    """

    before: int
    after: int
    work: float
    segments: int
    sizes: Mapping[str, int]


def recompute(
    model: ir.Model, loss: Sequence[ir.Value], seed: ir.Value, budget: int, dims: Mapping[str, int]
) -> Recomputed:
    """Recompute segments of the forward half until its activations fit into `budget` bytes, in place.

    Args:
        model: A gradient graph in topological order.
        loss: What the forward half ends in.
        seed: What the backward half starts from.
        budget: Bytes.
        dims: Sizes of free dimensions; see `Sizes`.

    Raises:
        UsageError: No choice of segments fits.
    """
    half = ForwardHalf(model.graph, loss, seed)
    segments = Segments(half, dims)
    before = segments.kept
    if before <= budget:
        return Recomputed(before, before, 0.0, 0, segments.sizes.dims)
    plans = [plan for plan in segments.plans() if plan]
    peaks = [(segments.peak(plan), plan) for plan in plans]
    fitting = [segments.relaxed(plan, budget) for peak, plan in peaks if peak <= budget]
    if not fitting:
        least = min((peak for peak, _ in peaks), default=before)
        known = ", ".join(f"{name}={size}" for name, size in segments.sizes.dims.items())
        raise UsageError(
            f"memory_budget is {budget:,} bytes, and the activations need {least:,} with everything recomputed"
            f"{f' ({known})' if known else ''}: allow more, or use smaller batches."
        )
    plan = min(fitting, key=segments.cost)
    again = [segment for segment in plan if segment.again]
    repeater = _Repeater(model, half)
    for segment in again:
        repeater.repeat(segment)
    model.graph.sort()
    work = segments.cost(plan) / (3 * segments.work)
    return Recomputed(before, segments.peak(plan), work, len(again), segments.sizes.dims)


class _Repeater:
    """Writes segments of a forward half into the backward half once more."""

    def __init__(self, model: ir.Model, half: ForwardHalf) -> None:
        self._graph = model.graph
        self._half = half
        self._names = Names(model)
        self._constants: dict[str, ir.Value] = {}
        self._last: ir.Node | None = None

    def repeat(self, segment: Segment) -> None:
        """Compute a segment again for the backward half."""
        half = self._half
        inside = half.nodes[segment.start : segment.stop]
        nodes = [node for node in inside if node not in half.once]
        wanted = self._wanted(nodes, set(inside))
        arriving = self._arriving(wanted)
        if arriving is None:
            return
        needed = half.ancestors(wanted, set(nodes))
        # In the file they stand where the gradient arrives: some runtimes run nodes in this order.
        self._last = arriving.producer()
        condition: ir.Value | None = None
        copies: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            if node not in needed:
                continue
            for value in node.inputs:
                outside = value is not None and value.producer() not in needed
                if value is None or not outside or value in copies or not half.is_activation(value):
                    continue
                if condition is None:
                    condition = self._condition(arriving)
                copies[value] = self._add("Where", [condition, value, value], f"recompute/{value.name}", value)
            copies |= self._twin(node, copies)
        for value in wanted:
            for user, index in list(value.uses()):
                if half.outer.get(user, user) in half.later:
                    user.replace_input_with(index, copies[value])

    def _wanted(self, nodes: Sequence[ir.Node], inside: set[ir.Node]) -> list[ir.Value]:
        """What the backward half reads of a segment and no later segment does."""
        half = self._half
        return [
            value
            for node in nodes
            for value in node.outputs
            if half.read_back(value) and all(user in inside or user not in half.place for user in half.users(value))
        ]

    def _arriving(self, wanted: Sequence[ir.Value]) -> ir.Value | None:
        """The gradient with which the backward half begins to read `wanted`; None if there is none.

        What its first reader takes of the backward half depends on none of them.
        """
        half = self._half
        first = min(half.readers(wanted), key=half.order.__getitem__, default=None)
        if first is None:
            return None
        return next((v for v in half.reads[first] if v.dtype in FLOATS and v.producer() in half.backward), None)

    def _twin(self, node: ir.Node, copies: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Append `node` once more, on copies of what it reads where there are some; its results' copies."""
        inputs = [copies.get(value, value) if value is not None else None for value in node.inputs]
        name = self._names.node(f"recompute/{node.name}")
        twin = ir.node(node.op_type, inputs, domain=node.domain, num_outputs=len(node.outputs), name=name)
        twin.attributes.update(node.attributes)
        twin.metadata_props.update(node.metadata_props)
        results = dict(zip(node.outputs, twin.outputs, strict=True))
        for old, new in results.items():
            new.name = self._names.value(f"recompute/{old.name}") if old.name else ""
            new.type, new.shape = old.type, old.shape
        self._place(twin)
        return results

    def _condition(self, arriving: ir.Value) -> ir.Value:
        """A bool scalar that is there when `arriving` is."""
        name = f"recompute/after/{arriving.name}"
        every, first = self._constant("recompute/flat", np.array([-1])), self._constant("recompute/first", np.array(0))
        flat = self._add("Reshape", [arriving, every], f"{name}/flat", arriving, (-1,))
        one = self._add("Gather", [flat, first], f"{name}/first", arriving, ())
        if one.dtype != ir.DataType.FLOAT:
            one = self._add("Cast", [one], f"{name}/fp32", arriving, (), to=int(ir.DataType.FLOAT))
            one.type = ir.TensorType(ir.DataType.FLOAT)
        zero = self._constant("recompute/zero", np.array(0, np.float32))
        result = self._add("Less", [one, zero], name, arriving, ())
        result.type = ir.TensorType(ir.DataType.BOOL)
        return result

    def _add(
        self,
        op: str,
        inputs: Sequence[ir.Value],
        name: str,
        like: ir.Value,
        shape: tuple[int, ...] | None = None,
        **attributes: int,
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes or None, name=self._names.node(name))
        result = node.outputs[0]
        result.name, result.type = self._names.value(name), like.type
        result.shape = like.shape if shape is None else ir.Shape([None] if shape == (-1,) else list(shape))
        self._place(node)
        return result

    def _place(self, node: ir.Node) -> None:
        assert self._last is not None
        self._graph.insert_after(self._last, node)
        self._last = node

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = add_initializer(self._graph, self._names.value(name), array)
        return self._constants[name]
