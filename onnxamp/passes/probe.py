"""Probes: what rounding does to each node alone, measured beside the exact computation in one graph.

Rules:

1. The model computes as before; its outputs are replaced by the readings.
2. Every node with an fp32 tensor result that a plan makes 16-bit gets a twin. The twin reads the exact operands, rounded to the
   16-bit type where the plan reads them so (the constant of a mask is clamped before, as a conversion does), and its result is
   rounded likewise (unless it only moves data).
3. Readings for a result y and its twin y': the sums of squares ``Σ y²`` and ``Σ (y' - y)²``, and the number of elements. Overflow of
   the twin makes the second infinite or NaN.
4. Nodes with bodies, and nodes that draw random numbers, get no twin. Results that carry a mask are compared above the number that a
   conversion clamps masks to.
5. Inside a body the twin stands in the body, and the readings are added up over all its runs (`onnxamp.passes.lift`). Where that is
   not to be had (SequenceMap, below opset 11), there is no reading.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.model.constants import add_initializer, constant_tensor
from onnxamp.model.signatures import operator_name
from onnxamp.model.tensors import ConvertedTensor
from onnxamp.model.units import all_nodes, bodies
from onnxamp.passes.append import Appender
from onnxamp.passes.emulate import moves_data
from onnxamp.passes.lift import Lift
from onnxamp.policy.plan import Plan

FLOAT = ir.DataType.FLOAT
_RANDOM = frozenset(
    ["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"]
)
# What carries a mask on to its softmax.
_CARRIES = frozenset(
    [
        *("Add", "Sub", "Mul", "Where", "Cast", "Concat", "Expand", "Gather"),
        *("Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The readings of one result.

    Attributes:
        node: The node in the plan's model.
        value: Its result there.
        signal: Name of the output with ``Σ y²``.
        noise: Name of the output with ``Σ (y' - y)²``; empty if the node has no twin.
        size: Name of the output with the number of elements.
    """

    node: ir.Node
    value: ir.Value
    signal: str
    noise: str
    size: str


def probe(plan: Plan) -> tuple[ir.Model, list[Reading]]:
    """A copy of the plan's model that gives readings in place of its outputs, and what they are.

    Args:
        plan: The plan of a model in which a node's 16-bit units are those whose rounding is to be measured; level O3 for all that is legal.
    """
    model = plan.graph.model.clone()
    instrument = _Instrument(plan, model)
    readings = instrument.run()
    return model, readings


class _Instrument:
    """One run of the pass over a private copy."""

    def __init__(self, plan: Plan, model: ir.Model) -> None:
        self.plan = plan
        self.model = model
        self.graph = model.graph
        self.low: FloatType = plan.options.low
        self.rounded: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        self.append = Appender(model, "onnxamp.probe")
        self.floor: ir.Value | None = None
        self.lift = Lift(self.append)

    def run(self) -> list[Reading]:
        """Add twins and readings."""
        masked = self.masked()
        originals = list(all_nodes(self.plan.graph.model.graph))
        copies = list(all_nodes(self.graph))
        outputs: list[ir.Value] = []
        readings = []
        for original, node in zip(originals, copies, strict=True):
            graph = node.graph
            if not isinstance(graph, ir.Graph) or not self.lift.reaches(graph):
                continue
            twin = self.twin(original, node, graph)
            for index, value in enumerate(original.outputs):
                exact = node.outputs[index]
                if not _is_fp32(value) or operator_name(node) == "Constant":
                    continue
                mine = [self.reduced(graph, exact), self.append.node(graph, "Size", [exact], ir.DataType.INT64)]
                if twin is not None:
                    other = twin.outputs[index]
                    if not moves_data(node):
                        other = self.round(graph, other)
                    mine.append(self.reduced(graph, self.difference(graph, other, exact, value in masked)))
                mine = [self.lift.sum(reading) for reading in mine]
                names = [reading.name or "" for reading in mine]
                outputs += mine
                readings.append(Reading(original, value, names[0], names[2] if len(names) > 2 else "", names[1]))
        self.graph.outputs.clear()
        self.graph.outputs.extend(outputs)
        return readings

    def twin(self, original: ir.Node, node: ir.Node, graph: ir.Graph) -> ir.Node | None:
        """`node` again with rounded operands, at the end of its graph; None if its 16-bit result is not to be had."""
        units = [unit for unit in self.plan.graph.of.get(original, ()) if self.plan.decisions[unit].precision != "fp32"]
        if not units or operator_name(node) in _RANDOM or any(True for _ in bodies(original)):
            return None
        if not any(map(_is_fp32, node.outputs)):
            return None
        low = {read.index for unit in units for read in unit.reads if read.site is original}
        operands = [
            self.rounded_operand(graph, original.inputs[index], value)
            if index in low and value is not None and _is_fp32(value)
            else value
            for index, value in enumerate(node.inputs)
        ]
        twin = ir.Node(
            node.domain,
            node.op_type,
            operands,
            list(node.attributes.values()),
            overload=node.overload,
            outputs=[
                ir.Value(name=self.append.name(), type=value.type) if value.name else ir.Value()
                for value in node.outputs
            ],
            name=self.append.name(),
        )
        for fresh, value in zip(twin.outputs, node.outputs, strict=True):
            if not value.name:
                fresh.name = ""
        graph.append(twin)
        return twin

    def rounded_operand(self, graph: ir.Graph, original: ir.Value | None, value: ir.Value) -> ir.Value:
        """What a 16-bit reader of `value` gets: the constant of a mask is clamped first, or an infinity times 0 would be NaN."""
        clamp = self.plan.clamped.get(original) if original is not None else None
        tensor = constant_tensor(original) if clamp is not None and original is not None else None
        if clamp is None or tensor is None:
            return self.round(graph, value)
        if (self.graph, value) not in self.rounded:
            low = ConvertedTensor(tensor, self.low, clamp.limit).numpy().astype(np.float32)
            self.rounded[self.graph, value] = add_initializer(self.graph, self.append.name(), low)
        return self.rounded[self.graph, value]

    def round(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """`value` to 16 bits and back, where `graph` sees it."""
        if (graph, value) not in self.rounded:
            down = self.append.node(graph, "Cast", [value], self.low.ir, to=self.low.ir)
            self.rounded[graph, value] = self.append.node(graph, "Cast", [down], FLOAT, to=FLOAT)
        return self.rounded[graph, value]

    def reduced(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """The sum of squares of all elements."""
        return self.append.node(graph, "ReduceSumSquare", [value], FLOAT, keepdims=0)

    def difference(self, graph: ir.Graph, twin: ir.Value, value: ir.Value, masked: bool) -> ir.Value:
        """The twin's error; of a mask, above the number that a conversion clamps masks to."""
        if masked:
            if self.floor is None:
                floor = -max(clamp.limit for clamp in self.plan.clamped.values())
                self.floor = add_initializer(self.graph, self.append.name(), np.array([floor], np.float32))
            twin, value = (self.append.node(graph, "Max", [side, self.floor], FLOAT) for side in (twin, value))
        return self.append.node(graph, "Sub", [twin, value], FLOAT)

    def masked(self) -> set[ir.Value]:
        """The results that carry a mask which a conversion clamps."""
        found: set[ir.Value] = set(self.plan.clamped)
        for node in all_nodes(self.plan.graph.model.graph):
            if operator_name(node) in _CARRIES and any(value in found for value in node.inputs if value is not None):
                found.update(node.outputs)
        return found


def _is_fp32(value: ir.Value) -> bool:
    return bool(value.name) and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT
