"""Gradient of If."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import captured, through


@gradient("If")
def if_(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """Another If with the same condition: each branch is computed anew and gives the gradients of what it captured."""
    values = captured(node)
    wanted = [position for position in range(len(values)) if position + 1 in op.wanted]
    branches = {}
    for name in ("then_branch", "else_branch"):
        body = op.body(name)
        found = _branch(body, node.attributes[name].as_graph(), gradients, [values[p] for p in wanted])
        body.graph.outputs.extend(found)
        branches[name] = body.graph
    results = op.emit("If", [node.inputs[0]], branches, outputs=len(wanted))
    slopes: list[ir.Value | None] = [None] * (1 + len(values))
    for position, result in zip(wanted, results, strict=True):
        result.type, result.shape = values[position].type, values[position].shape
        slopes[position + 1] = result
    return slopes


def _branch(
    body: Builder, source: ir.Graph, gradients: Sequence[ir.Value | None], values: Sequence[ir.Value]
) -> list[ir.Value]:
    """Write the nodes of a branch into `body` and give the gradients of `values`; zeros where there is none."""
    actual: dict[ir.Value, ir.Value] = {}
    for value in source.initializers.values():
        assert value.const_value is not None
        actual[value] = body.constant(value.const_value.numpy())
    for step in source:
        body.refuse(
            any(attr.type == ir.AttributeType.GRAPH for attr in step.attributes.values()), "a branch with bodies"
        )
        inputs = [None if value is None else actual.get(value, value) for value in step.inputs]
        attributes = dict(step.attributes)
        results = body.emit(step.op_type, inputs, attributes, outputs=len(step.outputs), domain=step.domain)
        for old, new in zip(step.outputs, results, strict=True):
            actual[old] = new
            if new.type is None:
                new.type = old.type
            if old.shape is not None and new.shape is None:
                new.shape = old.shape
    body.wanted = frozenset(range(len(values)))
    outputs = [actual.get(value, value) for value in source.outputs]
    found = through(body, outputs, gradients, values)
    given: list[ir.Value] = []
    for g, value in zip(found, values, strict=True):
        g = body.zeros(value) if g is None else g
        given.append(body.Identity(g) if g.graph is not body.graph or g in given or g.is_initializer() else g)
    return given
