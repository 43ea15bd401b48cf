"""Hashes of what is above and below a node, by which equal structure is found whatever things are called.

The hash *above* covers a node and all that it is computed from; the hash *below* covers a node and all that is computed from
it. Float types and Casts between them do not enter. One edit changes the first for what is below it and the second for
what is above it, so every other node keeps at least one of the two.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Set

import onnx_ir as ir

from onnxamp.comparison.side import Scope, Side, attributes_key, operator

Hashes = dict[ir.Node, Hashable]


def hashes(side: Side, scope: Scope, common: Set[str]) -> tuple[Hashes, Hashes]:
    """The hashes above and below of the nodes of a scope, Casts left out.

    Args:
        side: The model.
        scope: One of its scopes.
        common: Names that count: those of constants, inputs and outputs that both models have.
    """
    nodes = [node for node in scope.graph if node in side.index and not side.is_cast(node)]
    places = {value: k for k, value in enumerate(scope.graph.inputs)}
    leaving: dict[ir.Value, list[Hashable]] = collections.defaultdict(list)
    for k, value in enumerate(scope.graph.outputs):
        leaving[side.root(value)].append(value.name if value.name in common else k)

    def name(value: ir.Value) -> str | None:
        return min(side.labels(value) & common, default=None)

    def constant(value: ir.Value | None) -> Hashable:
        root = side.root(value) if value is not None else None
        if root is None or root not in side.constants:
            return None
        return name(root) or tuple(side.constants[root].shape.numpy())

    above: Hashes = {}
    own: dict[ir.Node, Hashable] = {}

    def operand(value: ir.Value | None) -> Hashable:
        if value is None:
            return None
        root = side.root(value)
        if root in side.constants:
            return ("constant", constant(value))
        if root in places:
            return ("input", name(root) or places[root])
        producer = root.producer()
        return (above[producer], root.index()) if producer in above else "outer"

    for node in nodes:
        own[node] = (operator(node), attributes_key(node), len(node.outputs), tuple(map(constant, node.inputs)))
        above[node] = hash((own[node], tuple(map(operand, node.inputs))))
    below: Hashes = {}
    for node in reversed(nodes):
        results = []
        for value in node.outputs:
            readers = [
                (own[reader][0], slot, below[reader]) if reader in below else "inner"  # type: ignore[index]  # a Hashable, but always a tuple
                for reader, slot in side.readers.get(value, ())
            ]
            results.append((tuple(sorted(map(hash, readers))), tuple(map(str, leaving.get(value, ())))))
        below[node] = hash((own[node], tuple(results)))
    return above, below


def equal(ours: Hashes, theirs: Hashes) -> dict[ir.Node, ir.Node]:
    """Nodes whose hash occurs once on either side, with their counterparts."""
    one, other = _single(ours), _single(theirs)
    return {node: other[key] for key, node in one.items() if key in other}


def _single(found: Hashes) -> dict[Hashable, ir.Node]:
    counts = collections.Counter(found.values())
    return {key: node for node, key in found.items() if counts[key] == 1}
