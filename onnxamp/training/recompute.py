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
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS, is_random
from onnxamp.autodiff.reverse import captured
from onnxamp.errors import UsageError
from onnxamp.model.constants import add_initializer
from onnxamp.model.dimensions import Sizes
from onnxamp.model.units import all_nodes, bodies

# Other types that ONNX Runtime selects by Where on every provider.
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT8)
# What inputs that are not data are called.
_STATE = ("master/", "low/", "acc/", "stat/", "stat_work/", "amp.")
# Results that are another view of the memory of their first input.
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_HEAVY = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
# Multiplications in the time that one element takes to read or write; only the choice between segments depends on it.
_MACS = 16
_LIMITS = 24


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


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Forward nodes between two cuts.

    Attributes:
        start: Position of its first node.
        stop: One past its last.
        saved: Bytes in it that the backward half reads.
        work: What it costs to compute.
        again: It is computed twice.
    """

    start: int
    stop: int
    saved: int
    work: float
    again: bool = True


def recompute(
    graph: ir.Graph, loss: Sequence[ir.Value], seed: ir.Value, budget: int, dims: Mapping[str, int]
) -> Recomputed:
    """Recompute segments of the forward half until its activations fit into `budget` bytes, in place.

    Args:
        graph: A gradient graph in topological order.
        loss: What the forward half ends in.
        seed: What the backward half starts from.
        budget: Bytes.
        dims: Sizes of free dimensions; see `Sizes`.

    Raises:
        UsageError: No choice of segments fits.
    """
    forward = _Forward(graph, loss, seed, dims)
    before = forward.kept
    if before <= budget:
        return Recomputed(before, before, 0.0, 0, forward.sizes.dims)
    plans = [plan for plan in forward.plans() if plan]
    peaks = [(forward.peak(plan), plan) for plan in plans]
    fitting = [forward.relaxed(plan, budget) for peak, plan in peaks if peak <= budget]
    if not fitting:
        least = min((peak for peak, _ in peaks), default=before)
        known = ", ".join(f"{name}={size}" for name, size in forward.sizes.dims.items())
        raise UsageError(
            f"memory_budget is {budget:,} bytes, and the activations need {least:,} with everything recomputed"
            f"{f' ({known})' if known else ''}: allow more, or use smaller batches."
        )
    plan = min(fitting, key=forward.cost)
    again = [segment for segment in plan if segment.again]
    for segment in again:
        forward.repeat(segment)
    graph.sort()
    return Recomputed(
        before, forward.peak(plan), forward.cost(plan) / (3 * forward.work), len(again), forward.sizes.dims
    )


class _Forward:
    """The forward half of a gradient graph: where it can be cut, and what lies between."""

    def __init__(self, graph: ir.Graph, loss: Sequence[ir.Value], seed: ir.Value, dims: Mapping[str, int]) -> None:
        self.graph = graph
        self.sizes = Sizes(dims)
        for value in graph.inputs:
            if value.shape is not None:
                self.sizes.elements(value.shape)
        everything = list(graph)
        self.reads = {
            node: [*(value for value in node.inputs if value is not None), *captured(node)] for node in everything
        }
        self.users: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self.reads.items():
            for value in values:
                self.users.setdefault(value, []).append(node)
        self.outer = {inner: node for node in everything for body in bodies(node) for inner in all_nodes(body)}
        reached = self._ancestors(loss)
        self.data = frozenset(v for v in graph.inputs if not str(v.name).startswith(_STATE))
        active = self._descendants(self.data)
        self.backward = self._descendants([seed])
        # Others read forward values for the backward half before any gradient is there: exp(−x²) for the gradient of Erf.
        self.later = {node for node in everything if node not in reached}
        self.order = {node: index for index, node in enumerate(everything)}
        self.nodes = [node for node in everything if node in reached and node in active and node not in self.backward]
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.once = {node for node in self.nodes if is_random(node) or any(bodies(node))}
        self.costs = [self._work(node) for node in self.nodes]
        self.work = sum(self.costs)
        self.saved = [0] * len(self.nodes)
        self.alive = [0] * len(self.nodes)
        self.long = 0
        self.kept = 0
        self.last: ir.Node | None = None
        self._measure()

    def plans(self) -> Iterable[list[_Segment]]:
        """Ways to cut, each with the fewest bytes at its cuts for a largest segment."""
        cuts = [
            p for p in range(len(self.nodes) - 1) if self.alive[p] <= min(self.alive[max(p - 1, 0)], self.alive[p + 1])
        ]
        ends = [-1, *cuts, len(self.nodes) - 1]
        total = np.concatenate([[0], np.cumsum(self.saved)])
        saved = np.array([total[end + 1] for end in ends])
        for step in range(1, _LIMITS + 1):
            limit = self.kept / 1.4**step
            best, before = [0.0] + [math.inf] * (len(ends) - 1), [0] * len(ends)
            for right in range(1, len(ends)):
                cost = self.alive[ends[right]] if right < len(ends) - 1 else 0
                for left in range(right - 1, -1, -1):
                    if saved[right] - saved[left] > limit and left < right - 1:
                        break
                    if best[left] + cost < best[right]:
                        best[right], before[right] = best[left] + cost, left
            plan, right = [], len(ends) - 1
            while right:
                left = before[right]
                start, stop = ends[left] + 1, ends[right] + 1
                plan.append(_Segment(start, stop, int(saved[right] - saved[left]), sum(self.costs[start:stop])))
                right = left
            plan.reverse()
            plan[-1] = dataclasses.replace(plan[-1], again=False)  # its backward half follows at once
            yield plan

    def peak(self, plan: Sequence[_Segment]) -> int:
        """Bytes at the worst moment: what is alive at the cuts, what is kept, and the largest segment that is repeated."""
        cuts = sum(self.alive[segment.stop - 1] for segment in plan[:-1])
        kept = sum(segment.saved for segment in plan if not segment.again)
        largest = max((segment.saved for segment in plan if segment.again), default=0)
        # Where nothing is repeated yet, the kept last segment is still there; afterwards it is not.
        return self.long + cuts + kept - plan[-1].saved + max(largest, plan[-1].saved)

    def relaxed(self, plan: list[_Segment], budget: int) -> list[_Segment]:
        """The plan with as many segments kept as the budget allows, the costliest for their bytes first."""
        order = sorted(range(len(plan) - 1), key=lambda index: plan[index].saved / max(plan[index].work, 1e-9))
        for index in order:
            trial = [*plan[:index], dataclasses.replace(plan[index], again=False), *plan[index + 1 :]]
            if self.peak(trial) <= budget:
                plan = trial
        return plan

    def cost(self, plan: Sequence[_Segment]) -> float:
        """Work that is done twice."""
        return sum(segment.work for segment in plan if segment.again)

    def repeat(self, segment: _Segment) -> None:
        """Compute a segment again for the backward half."""
        inside = set(self.nodes[segment.start : segment.stop])
        nodes = [node for node in self.nodes[segment.start : segment.stop] if node not in self.once]
        wanted = [
            value
            for node in nodes
            for value in node.outputs
            if self._read_back(value) and all(user in inside or user not in self.place for user in self._users(value))
        ]
        readers = self._readers(wanted)
        if not readers:
            return
        first = min(
            readers, key=self.order.__getitem__
        )  # what it reads of the backward half depends on none of `wanted`
        arriving = next((v for v in self.reads[first] if v.dtype in FLOATS and v.producer() in self.backward), None)
        if arriving is None:
            return
        needed = self._ancestors(wanted, set(nodes))
        # In the file they stand where the gradient arrives: some runtimes run nodes in this order.
        self.last = arriving.producer()
        condition: ir.Value | None = None
        copies: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            if node not in needed:
                continue
            for value in node.inputs:
                outside = value is not None and value.producer() not in needed
                if value is None or not outside or value in copies or not self._is_activation(value):
                    continue
                if condition is None:
                    condition = self._condition(arriving)
                copies[value] = self._add("Where", [condition, value, value], f"recompute/{value.name}", value)
            inputs = [copies.get(value, value) if value is not None else None for value in node.inputs]
            twin = ir.node(
                node.op_type, inputs, domain=node.domain, num_outputs=len(node.outputs), name=f"recompute/{node.name}"
            )
            twin.attributes.update(node.attributes)
            twin.metadata_props.update(node.metadata_props)
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                new.name = f"recompute/{old.name}" if old.name else ""
                new.type, new.shape = old.type, old.shape
                copies[old] = new
            self._place(twin)
        for value in wanted:
            for user, index in list(value.uses()):
                if self.outer.get(user, user) in self.later:
                    user.replace_input_with(index, copies[value])

    def _readers(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes of the backward half that read `values`, or what is made of them before."""
        found: set[ir.Node] = set()
        stack = list(values)
        while stack:
            for user in self._users(stack.pop()):
                if user in self.backward:
                    found.add(user)
                elif user in self.later:
                    stack += user.outputs
        return found

    def _condition(self, arriving: ir.Value) -> ir.Value:
        """A bool scalar that is there when `arriving` is."""
        name = f"recompute/after/{arriving.name}"
        flat = self._add(
            "Reshape", [arriving, self._constant("recompute/flat", np.array([-1]))], f"{name}/flat", arriving, (-1,)
        )
        one = self._add("Gather", [flat, self._constant("recompute/first", np.array(0))], f"{name}/first", arriving, ())
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
        count, unique = 1, name
        known = self._names
        while unique in known:
            count += 1
            unique = f"{name}_{count}"
        known.add(unique)
        node = ir.node(op, inputs, attributes or None, name=unique)
        result = node.outputs[0]
        result.name, result.type = unique, like.type
        result.shape = like.shape if shape is None else ir.Shape([None] if shape == (-1,) else list(shape))
        self._place(node)
        return result

    def _place(self, node: ir.Node) -> None:
        assert self.last is not None
        self.graph.insert_after(self.last, node)
        self.last = node

    @property
    def _names(self) -> set[str]:
        if not hasattr(self, "_taken"):
            self._taken = {str(value.name) for node in self.graph for value in node.outputs}
        return self._taken

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.graph.initializers:
            add_initializer(self.graph, name, array)
        return self.graph.initializers[name]

    def _measure(self) -> None:
        """Bytes that are read back, by position of their node, and bytes alive after each position."""
        far = max(len(self.nodes) // 3, 8)
        for index, node in enumerate(self.nodes):
            for value in node.outputs:
                if value is not _root(value):
                    continue
                size = self._bytes(value)
                views = _views(value)
                back = size if any(self._read_back(view) for view in views) else 0
                self.kept += back
                if node in self.once and back:  # kept until the backward half reads it
                    self.long += size
                    continue
                self.saved[index] += back
                uses = [self.place[user] for view in views for user in self._users(view) if user in self.place]
                last = max(uses, default=index)
                if last - index > far:
                    self.long += size
                    continue
                for position in range(index, min(last, len(self.alive))):
                    self.alive[position] += size

    def _read_back(self, value: ir.Value) -> bool:
        return any(user in self.later for user in self._users(value))

    def _users(self, value: ir.Value) -> Sequence[ir.Node]:
        """The nodes of the main graph that read `value`, themselves or in their bodies."""
        return self.users.get(value, ())

    def _ancestors(self, values: Iterable[ir.Value], within: set[ir.Node] | None = None) -> set[ir.Node]:
        found: set[ir.Node] = set()
        stack = [value.producer() for value in values]
        while stack:
            node = stack.pop()
            if node is None or node in found or (within is not None and node not in within):
                continue
            found.add(node)
            stack += [value.producer() for value in self.reads[node]]
        return found

    def _descendants(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        found: set[ir.Node] = set()
        stack = list(values)
        while stack:
            for node in self._users(stack.pop()):
                if node not in found:
                    found.add(node)
                    stack += node.outputs
        return found

    def _is_activation(self, value: ir.Value) -> bool:
        producer = value.producer()
        if producer is None:
            return value in self.data and (value.dtype in FLOATS or value.dtype in _INTEGERS)
        return value.dtype in FLOATS and producer in self.place

    def _bytes(self, value: ir.Value) -> int:
        if value.dtype is None or value.shape is None:
            return 0
        return int(self.sizes.elements(value.shape) * value.dtype.itemsize)

    def _work(self, node: ir.Node) -> float:
        if node.op_type in _VIEWS or node.op_type == "Shape":
            return 0.0
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.shape is not None]
        moved = sum(self.sizes.elements(value.shape or ()) for value in values)
        weight = node.inputs[1] if node.op_type in _HEAVY and len(node.inputs) > 1 else None
        if weight is None or weight.shape is None or node.outputs[0].shape is None:
            return float(moved)
        result = self.sizes.elements(node.outputs[0].shape)
        sizes = [self.sizes.size(dim, axis) for axis, dim in enumerate(weight.shape)]
        inner = math.prod(sizes[1:]) if node.op_type == "Conv" else sizes[-2] if len(sizes) > 1 else sizes[-1]
        if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
            inner = sizes[-1]
        return moved + result * inner / _MACS


def _root(value: ir.Value) -> ir.Value:
    """The value whose memory `value` is a view of."""
    node = value.producer()
    while node is not None and node.op_type in _VIEWS and node.domain == "" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _views(value: ir.Value) -> list[ir.Value]:
    """`value` and all views of its memory."""
    found = [value]
    for view in found:
        found += [u.outputs[0] for u, index in view.uses() if index == 0 and u.op_type in _VIEWS and u.domain == ""]
    return found
