"""Which values of a graph change with its inputs, and which are computed from initializers alone."""

from __future__ import annotations

from collections.abc import Set

import onnx_ir as ir

# They read sizes, which do not change with the numbers of their input.
_SIZES = frozenset({"Shape", "Size"})
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


def varying(graph: ir.Graph) -> Set[ir.Value]:
    """The values that depend on an input of the graph or are drawn; of nodes with a body, every result.

    What follows from the sizes of inputs alone counts as computed from initializers, as a table of positions does.
    """
    waiting = [value for value in graph.inputs if not value.is_initializer()]
    for node in graph.all_nodes():
        if node.op_type in _RANDOM or node.graph is not graph or any(_is_body(a) for a in node.attributes.values()):
            waiting += node.outputs
    found: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += [out for node, _ in value.uses() if node.op_type not in _SIZES for out in node.outputs]
    return found


def _is_body(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
