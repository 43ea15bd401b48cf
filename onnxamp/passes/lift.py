"""Lift: numbers that bodies of If, Loop and Scan compute become values of the top graph.

Rules, from the inside out:

1. If: the number is one more output of the node; the branch that is not taken gives the neutral number (0 of a sum, -inf of a maximum).
2. Loop, Scan: the number is one more scan output, a vector with one element an iteration, which is reduced behind the node; with no
   iteration the result is the neutral number.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxamp.model.signatures import operator_name, standard_opset
from onnxamp.model.units import all_nodes, bodies
from onnxamp.passes.append import Appender

# Scan had a batch axis before opset 9, and comparisons of floats are whole from 11 on.
_OPSET = 11


class Lift:
    """The pass over one model; every number is lifted by a call of its own.

    Args:
        append: Adds to the model, which is changed in place.
    """

    def __init__(self, append: Appender) -> None:
        self._append = append
        self._owner = {body: node for node in all_nodes(append.model.graph) for body in bodies(node)}
        self._opset = standard_opset(append.model)

    def reaches(self, graph: ir.Graph | None) -> bool:
        """Whether numbers of `graph` can be lifted: it is the top graph, or all around it are If, Loop and Scan of today's form."""
        while graph in self._owner:
            node = self._owner[graph]
            if (
                operator_name(node) not in ("If", "Loop", "Scan")
                or self._opset < _OPSET
                or not isinstance(node.graph, ir.Graph)
            ):
                return False
            graph = node.graph
        return graph is not None

    def sum(self, value: ir.Value) -> ir.Value:
        """The sum of a scalar (shape []) over all runs of the bodies that it is in."""
        return self._lift(value, 0.0)

    def largest(self, value: ir.Value) -> ir.Value:
        """The largest that a scalar becomes in all runs of the bodies that it is in."""
        return self._lift(value, -math.inf)

    def _lift(self, value: ir.Value, neutral: float) -> ir.Value:
        assert value.dtype is not None
        kind = value.dtype
        while (producer := value.producer()) is not None and (graph := producer.graph) in self._owner:
            assert isinstance(graph, ir.Graph)
            node = self._owner[graph]
            inside = bodies(node) if operator_name(node) == "If" else (graph,)
            for body in inside:
                body.outputs.append(value if body is graph else self._append.constant(body, _number(neutral, kind, [])))
            value = self._output(node, graph, kind)
            if operator_name(node) != "If":
                value = self._reduced(node, value, neutral, kind)
        return value

    def _output(self, node: ir.Node, body: ir.Graph, kind: ir.DataType) -> ir.Value:
        """The node's output for the last output of `body`."""
        loop = operator_name(node) == "Loop"
        node.resize_outputs(len(body.outputs) - loop)
        for output in node.outputs:
            output.name = output.name or self._append.name()
        value = node.outputs[-1]
        value.type = ir.TensorType(kind)
        for key in ("scan_output_axes", "scan_output_directions"):
            if key in node.attributes:
                node.attributes[key] = ir.AttrInt64s(key, [*node.attributes[key].as_ints(), 0])
        return value

    def _reduced(self, node: ir.Node, vector: ir.Value, neutral: float, kind: ir.DataType) -> ir.Value:
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        start = self._append.constant(graph, _number(neutral, kind, [1]))
        whole = self._append.node(graph, "Concat", [start, vector], kind, axis=0)
        return self._append.node(graph, "ReduceSum" if neutral == 0 else "ReduceMax", [whole], kind, keepdims=0)


def _number(number: float, kind: ir.DataType, shape: list[int]) -> np.ndarray:
    return np.full(shape, number, kind.numpy())
