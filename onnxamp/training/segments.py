"""Where the forward half of a gradient graph can be cut, and what the segments between the cuts hold and cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS, is_random
from onnxamp.autodiff.reverse import captured
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


class ForwardHalf:
    """Which nodes of a gradient graph are its forward half, and who reads what they give.

    Args:
        graph: A gradient graph in topological order.
        loss: What the forward half ends in.
        seed: What the backward half starts from.

    Attributes:
        graph: The graph.
        nodes: What depends on data and leads to the loss, in order.
        place: The positions of these.
        order: The positions of all nodes of the graph.
        once: Those of `nodes` that cannot be repeated: they draw at random, or have bodies.
        backward: What depends on `seed`.
        later: What the loss does not need: `backward`, and what reads forward values for it before any gradient is there
            (exp(−x²) for the gradient of Erf).
        reads: What each node reads, its bodies included.
        outer: The node of the graph in whose bodies a node lies.
    """

    def __init__(self, graph: ir.Graph, loss: Sequence[ir.Value], seed: ir.Value) -> None:
        self.graph = graph
        everything = list(graph)
        self.order = {node: index for index, node in enumerate(everything)}
        self.reads = {
            node: [*(value for value in node.inputs if value is not None), *captured(node)] for node in everything
        }
        self._users: dict[ir.Value, list[ir.Node]] = {}
        for node, values in self.reads.items():
            for value in values:
                self._users.setdefault(value, []).append(node)
        self.outer = {inner: node for node in everything for body in bodies(node) for inner in all_nodes(body)}
        self._data = frozenset(v for v in graph.inputs if not str(v.name).startswith(_STATE))
        reached, active = self.ancestors(loss), self._descendants(self._data)
        self.backward = self._descendants([seed])
        self.later = {node for node in everything if node not in reached}
        self.nodes = [node for node in everything if node in reached and node in active and node not in self.backward]
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.once = {node for node in self.nodes if is_random(node) or any(bodies(node))}

    def users(self, value: ir.Value) -> Sequence[ir.Node]:
        """The nodes of the graph that read `value`, themselves or in their bodies."""
        return self._users.get(value, ())

    def read_back(self, value: ir.Value) -> bool:
        """Whether the backward half needs `value`."""
        return any(user in self.later for user in self.users(value))

    def readers(self, values: Iterable[ir.Value]) -> set[ir.Node]:
        """The nodes of the backward half that read `values`, or what is made of them before."""
        found: set[ir.Node] = set()
        stack = list(values)
        while stack:
            for user in self.users(stack.pop()):
                if user in self.backward:
                    found.add(user)
                elif user in self.later:
                    stack += user.outputs
        return found

    def is_activation(self, value: ir.Value) -> bool:
        """Whether `value` depends on data, with a type that can be selected."""
        producer = value.producer()
        if producer is None:
            return value in self._data and (value.dtype in FLOATS or value.dtype in _INTEGERS)
        return value.dtype in FLOATS and producer in self.place

    def ancestors(self, values: Iterable[ir.Value], within: set[ir.Node] | None = None) -> set[ir.Node]:
        """The nodes that `values` are made by; only those of `within`, if that is given."""
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
        """The nodes that depend on `values`."""
        found: set[ir.Node] = set()
        stack = list(values)
        while stack:
            for node in self.users(stack.pop()):
                if node not in found:
                    found.add(node)
                    stack += node.outputs
        return found


@dataclasses.dataclass(frozen=True)
class Segment:
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


class Segments:
    """Ways to cut a forward half into segments, and what they cost.

    Args:
        half: The forward half.
        dims: Sizes of free dimensions; see `Sizes`.

    Attributes:
        sizes: The sizes that are taken.
        kept: Bytes that the backward half reads.
        work: What the forward half costs to compute.
    """

    def __init__(self, half: ForwardHalf, dims: Mapping[str, int]) -> None:
        self._half = half
        self.sizes = Sizes(dims)
        for value in half.graph.inputs:
            if value.shape is not None:
                self.sizes.elements(value.shape)
        self._costs = [self._work(node) for node in half.nodes]
        self.work = sum(self._costs)
        self._saved = [0] * len(half.nodes)  # bytes that are read back, by position of their node
        self._alive = [0] * len(half.nodes)  # bytes alive after each position
        self._long = 0  # bytes that live across many cuts
        self.kept = 0
        self._measure()

    def plans(self) -> Iterable[list[Segment]]:
        """Ways to cut, each with the fewest bytes at its cuts for a largest segment."""
        alive, final = self._alive, len(self._alive) - 1
        ends = [-1, *(p for p in range(final) if alive[p] <= min(alive[max(p - 1, 0)], alive[p + 1])), final]
        total = np.concatenate([[0], np.cumsum(self._saved)])
        saved = np.array([total[end + 1] for end in ends])
        for step in range(1, _LIMITS + 1):
            limit = self.kept / 1.4**step
            best, before = [0.0] + [math.inf] * (len(ends) - 1), [0] * len(ends)
            for right in range(1, len(ends)):
                cost = alive[ends[right]] if right < len(ends) - 1 else 0
                for left in range(right - 1, -1, -1):
                    if saved[right] - saved[left] > limit and left < right - 1:
                        break
                    if best[left] + cost < best[right]:
                        best[right], before[right] = best[left] + cost, left
            plan, right = [], len(ends) - 1
            while right:
                left = before[right]
                start, stop = ends[left] + 1, ends[right] + 1
                plan.append(Segment(start, stop, int(saved[right] - saved[left]), sum(self._costs[start:stop])))
                right = left
            plan.reverse()
            plan[-1] = dataclasses.replace(plan[-1], again=False)  # its backward half follows at once
            yield plan

    def peak(self, plan: Sequence[Segment]) -> int:
        """Bytes at the worst moment: what is alive at the cuts, what is kept, and the largest segment that is repeated."""
        cuts = sum(self._alive[segment.stop - 1] for segment in plan[:-1])
        kept = sum(segment.saved for segment in plan if not segment.again)
        largest = max((segment.saved for segment in plan if segment.again), default=0)
        # Where nothing is repeated yet, the kept last segment is still there; afterwards it is not.
        return self._long + cuts + kept - plan[-1].saved + max(largest, plan[-1].saved)

    def relaxed(self, plan: list[Segment], budget: int) -> list[Segment]:
        """The plan with as many segments kept as the budget allows, the costliest for their bytes first."""
        order = sorted(range(len(plan) - 1), key=lambda index: plan[index].saved / max(plan[index].work, 1e-9))
        for index in order:
            trial = [*plan[:index], dataclasses.replace(plan[index], again=False), *plan[index + 1 :]]
            if self.peak(trial) <= budget:
                plan = trial
        return plan

    def cost(self, plan: Sequence[Segment]) -> float:
        """Work that is done twice."""
        return sum(segment.work for segment in plan if segment.again)

    def _measure(self) -> None:
        half = self._half
        far = max(len(half.nodes) // 3, 8)
        for index, node in enumerate(half.nodes):
            for value in node.outputs:
                if value is not _root(value):
                    continue
                size = self._bytes(value)
                views = _views(value)
                back = size if any(half.read_back(view) for view in views) else 0
                self.kept += back
                if node in half.once and back:  # kept until the backward half reads it
                    self._long += size
                    continue
                self._saved[index] += back
                uses = [half.place[user] for view in views for user in half.users(view) if user in half.place]
                last = max(uses, default=index)
                if last - index > far:
                    self._long += size
                    continue
                for position in range(index, min(last, len(self._alive))):
                    self._alive[position] += size

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
