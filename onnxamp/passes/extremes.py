"""Extremes: how large values inside bodies of If, Loop and Scan become, as outputs; the values themselves never leave the bodies.

Rules:

1. Each value gets four numbers beside it: how many elements there are, how many are NaN, how many infinite, and the largest finite size.
2. They are added up, or compared, over all runs of the body (`onnxamp.passes.lift`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxamp.model.units import all_values
from onnxamp.passes.lift import Lift


@dataclasses.dataclass(frozen=True)
class Extremes:
    """Names of the outputs that tell of one value.

    Attributes:
        count: Elements, in all runs of the body; int64, as the next two.
        nan: Those that are NaN.
        inf: Those that are infinite.
        largest: Largest finite size in fp32; -inf if there is none.
    """

    count: str
    nan: str
    inf: str
    largest: str


def add_extremes(model: ir.Model, values: Iterable[ir.Value]) -> dict[ir.Value, Extremes]:
    """Measure float values that nodes in bodies make; `model` is changed. What `Lift` cannot reach is left out of the result."""
    return _Measure(model).run(values)


class _Measure:
    """One run of the pass."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        taken = {value.name for value in all_values(model.graph)}
        names = (f"onnxamp.extremes/{number}" for number in itertools.count())
        self.name = filter(lambda name: name not in taken, names).__next__
        self.lift = Lift(model, self.name)

    def run(self, values: Iterable[ir.Value]) -> dict[ir.Value, Extremes]:
        """Add the four numbers of each value."""
        result = {}
        for value in values:
            producer = value.producer()
            graph = producer.graph if producer is not None else None
            if not isinstance(graph, ir.Graph) or not self.lift.reaches(graph):
                continue
            *counts, largest = self.numbers(graph, value)
            outputs = [*map(self.lift.sum, counts), self.lift.largest(largest)]
            self.model.graph.outputs.extend(outputs)
            result[value] = Extremes(*(output.name or "" for output in outputs))
        return result

    def numbers(self, graph: ir.Graph, value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Count, NaN, infinite and largest of one value, as scalars in its graph."""
        float32, bits = ir.DataType.FLOAT, ir.DataType.BOOL
        size = self.node(graph, "Abs", [self.node(graph, "Cast", [value], float32, to=float32)], float32)
        finite = self.node(graph, "Less", [size, self.constant(graph, np.array(math.inf, np.float32))], bits)
        nan = self.node(graph, "IsNaN", [size], bits)
        infinite = self.node(graph, "Not", [self.node(graph, "Or", [finite, nan], bits)], bits)
        sizes = self.node(
            graph, "Where", [finite, size, self.constant(graph, np.array(-math.inf, np.float32))], float32
        )
        flat = self.node(graph, "Reshape", [sizes, self.constant(graph, np.array([-1]))], float32)
        # One element more: the largest of none is no number.
        some = self.node(
            graph, "Concat", [self.constant(graph, np.array([-math.inf], np.float32)), flat], float32, axis=0
        )
        return (
            self.node(graph, "Size", [value], ir.DataType.INT64),
            self.total(graph, nan),
            self.total(graph, infinite),
            self.node(graph, "ReduceMax", [some], float32, keepdims=0),
        )

    def total(self, graph: ir.Graph, condition: ir.Value) -> ir.Value:
        """How many elements are true."""
        ones = self.node(graph, "Cast", [condition], ir.DataType.INT64, to=ir.DataType.INT64)
        return self.node(graph, "ReduceSum", [ones], ir.DataType.INT64, keepdims=0)

    def constant(self, graph: ir.Graph, array: np.ndarray) -> ir.Value:
        """A constant in a graph."""
        tensor = ir.tensor(array)
        value = ir.Value(name=self.name(), type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
        graph.append(ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], outputs=[value], name=self.name()))
        return value

    def node(self, graph: ir.Graph, op: str, inputs: list[ir.Value], kind: ir.DataType, **attributes: int) -> ir.Value:
        """The result of a new node at the end of a graph; without axes reductions are of all elements, at every opset."""
        listed = [ir.AttrInt64(key, int(number)) for key, number in attributes.items()]
        scalar = ir.Shape([]) if op == "Size" or "keepdims" in attributes else None
        value = ir.Value(name=self.name(), type=ir.TensorType(kind), shape=scalar)
        graph.append(ir.Node("", op, inputs, listed, outputs=[value], name=self.name()))
        return value
