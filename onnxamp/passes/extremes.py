"""Extremes: how large values inside bodies of If, Loop and Scan become, as outputs; the values themselves never leave the bodies.

Rules:

1. Each value gets four numbers beside it: how many elements there are, how many are NaN, how many infinite, and the largest finite size.
2. They are added up, or compared, over all runs of the body (`onnxamp.passes.lift`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxamp.passes.append import Appender
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
        self.append = Appender(model, "onnxamp.extremes")
        self.lift = Lift(self.append)

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
        node, constant = functools.partial(self.append.node, graph), functools.partial(self.append.constant, graph)
        size = node("Abs", [node("Cast", [value], float32, to=float32)], float32)
        finite = node("Less", [size, constant(np.array(math.inf, np.float32))], bits)
        nan = node("IsNaN", [size], bits)
        infinite = node("Not", [node("Or", [finite, nan], bits)], bits)
        sizes = node("Where", [finite, size, constant(np.array(-math.inf, np.float32))], float32)
        flat = node("Reshape", [sizes, constant(np.array([-1]))], float32)
        # One element more: the largest of none is no number.
        some = node("Concat", [constant(np.array([-math.inf], np.float32)), flat], float32, axis=0)
        return (
            node("Size", [value], ir.DataType.INT64),
            self.total(graph, nan),
            self.total(graph, infinite),
            node("ReduceMax", [some], float32, keepdims=0),
        )

    def total(self, graph: ir.Graph, condition: ir.Value) -> ir.Value:
        """How many elements are true."""
        ones = self.append.node(graph, "Cast", [condition], ir.DataType.INT64, to=ir.DataType.INT64)
        return self.append.node(graph, "ReduceSum", [ones], ir.DataType.INT64, keepdims=0)
