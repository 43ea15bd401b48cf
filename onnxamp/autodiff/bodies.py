"""Bodies of control flow inside a backward half: written anew, differentiated, closed."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.emitter import is_random
from onnxamp.autodiff.reverse import active


def rebuild(
    body: Builder, source: ir.Graph, actual: dict[ir.Value, ir.Value], absent: Container[ir.Value | None] = ()
) -> list[ir.Value]:
    """Append the nodes of `source` to the graph of `body` and give what its outputs became.

    Args:
        body: The builder of the new graph.
        source: A body of the forward half; not changed.
        actual: What its inputs stand for; extended by all its values.
        absent: Inputs that are not given.

    Raises:
        UnsupportedError: The body draws random numbers, which would be others the second time.
    """
    body.refuse(any(is_random(node) for node in source), "its body draws random numbers")
    for value in source.initializers.values():
        assert value.const_value is not None
        actual[value] = body.constant(value.const_value.numpy())
    for step in source:
        inputs = [None if value is None or value in absent else actual.get(value, value) for value in step.inputs]
        attributes = {name: _rebound(attr, actual) for name, attr in step.attributes.items()}
        results = body.emit(step.op_type, inputs, attributes, outputs=len(step.outputs), domain=step.domain)
        producer = results[0].producer()
        if producer is not None and _graphs(producer):
            _infer_body(body, producer)
        for old, new in zip(step.outputs, results, strict=True):
            actual[old] = new
            if new.type is None:
                new.type = old.type
            if new.shape is None:
                new.shape = old.shape
    return [actual.get(value, value) for value in source.outputs]


def _rebound(attr: ir.Attr, actual: dict[ir.Value, ir.Value]) -> ir.Attr:
    """A copy of a graph attribute that reads what the values around it became."""
    if attr.type != ir.AttributeType.GRAPH:
        return attr
    graph = attr.as_graph().clone(allow_outer_scope_values=True)
    for inner in [graph, *(deep for node in graph.all_nodes() for deep in _graphs(node))]:
        inner.outputs[:] = [actual.get(value, value) for value in inner.outputs]
    for node in graph.all_nodes():
        for position, value in enumerate(node.inputs):
            if value in actual:
                node.replace_input_with(position, actual[value])
    return ir.AttrGraph(attr.name, graph)


def _infer_body(op: Builder, node: ir.Node) -> None:
    """Types inside a Loop or Scan whose body, being part of a function, has none, and of what it gives."""
    loop = node.op_type == "Loop"
    if not loop and node.op_type != "Scan":
        return
    graph = node.attributes["body"].as_graph()
    if all(value.type is not None for value in graph.inputs):
        return
    count = len(node.inputs) - (2 if loop else node.attributes["num_scan_inputs"].as_int())
    given = [op.index(0), op.constant(np.asarray(True)), *node.inputs[2:]] if loop else list(node.inputs)
    axes = [] if loop else node.attributes.get_ints("scan_input_axes", (0,) * (len(given) - count))
    for index, (own, value) in enumerate(zip(graph.inputs, given, strict=True)):
        if value is None or own.type is not None:
            continue
        own.type, own.shape = value.type, value.shape
        if not loop and index >= count and value.shape is not None:
            dims = list(value.shape)
            del dims[axes[index - count]]
            own.shape = ir.Shape(dims)
    for step in graph:
        op.infer(step)
        if _graphs(step):
            _infer_body(op, step)
    for index, (value, own) in enumerate(zip(node.outputs, list(graph.outputs)[1 if loop else 0 :], strict=True)):
        value.type = own.type
        if own.shape is not None:
            value.shape = own.shape if index < count else ir.Shape([None, *own.shape])


def _graphs(node: ir.Node) -> list[ir.Graph]:
    return [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]


def close(body: Builder, outputs: Sequence[ir.Value]) -> ir.Graph:
    """The finished graph of `body`: every output is a value of its own, made in it, and nothing that is not needed is left."""
    for value in outputs:
        made = value.producer() is not None and value.graph is body.graph and value not in body.graph.outputs
        body.graph.outputs.append(value if made else body.emit("Identity", [value], fresh=True)[0])
    body.prune(body.graph.outputs)
    return body.graph


def varying(source: ir.Graph, values: set[ir.Value], states: Sequence[tuple[ir.Value, ir.Value]]) -> set[int]:
    """Positions of the carried states that change with `values`, with a derivative that is not zero.

    Args:
        source: The body.
        values: Its inputs and captured values that vary.
        states: The input and the output of each state.
    """
    values = set(values)
    nodes = list(source)
    while True:
        reached = active(nodes, values)
        new = {own for own, after in states if after in reached and own not in values}
        if not new:
            return {index for index, (own, _) in enumerate(states) if own in values}
        values |= new
