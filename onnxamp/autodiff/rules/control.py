"""Gradient of If."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxamp.autodiff.bodies import close, rebuild
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
        branches[name] = _branch(body, node.attributes[name].as_graph(), gradients, [values[p] for p in wanted])
    results = op.emit("If", [node.inputs[0]], branches, outputs=len(wanted))
    slopes: list[ir.Value | None] = [None] * (1 + len(values))
    for position, result in zip(wanted, results, strict=True):
        result.type, result.shape = values[position].type, values[position].shape
        slopes[position + 1] = result
    return slopes


def _branch(
    body: Builder, source: ir.Graph, gradients: Sequence[ir.Value | None], values: Sequence[ir.Value]
) -> ir.Graph:
    """The gradients of `values` through one branch; zeros where there is none."""
    outputs = rebuild(body, source, {})
    body.wanted = frozenset(range(len(values)))
    found = through(body, outputs, gradients, values)
    return close(body, [body.zeros(value) if g is None else g for g, value in zip(found, values, strict=True)])
