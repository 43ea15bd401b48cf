"""Pairs the float Casts of two models whose values are paired.

Of the Casts of paired values those of one name go together first, retyped or not, then those of equal types, in order.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence

import onnx_ir as ir

from onnxamp.comparison.side import Side
from onnxamp.model.tensors import cast_target


def cast_pairs(a: Side, b: Side, values: Mapping[ir.Value, ir.Value]) -> dict[ir.Node, ir.Node]:
    """Casts of `a` with their counterparts in `b`; `values` are the pairs of what they cast."""
    theirs = _by_root(b)
    pairs: dict[ir.Node, ir.Node] = {}
    for root, mine in _by_root(a).items():
        counterpart = values.get(root)
        if counterpart in theirs:
            pairs |= _among(mine, theirs[counterpart])
    return pairs


def _by_root(side: Side) -> dict[ir.Value, list[ir.Node]]:
    """The Casts of a model by the value that they start from."""
    found: dict[ir.Value, list[ir.Node]] = collections.defaultdict(list)
    for node in side.casts:
        found[side.root(node.outputs[0])].append(node)
    return found


def _among(ours: Sequence[ir.Node], theirs: Sequence[ir.Node]) -> dict[ir.Node, ir.Node]:
    """Pairs of Casts of one value."""
    pairs: dict[ir.Node, ir.Node] = {}
    keys: tuple[Callable[[ir.Node], Hashable], ...] = (lambda node: (_types(node), _names(node)), _names, _types)
    for key in keys:
        free: dict[Hashable, collections.deque[ir.Node]] = collections.defaultdict(collections.deque)
        taken = set(pairs.values())
        for node in theirs:
            if node not in taken:
                free[key(node)].append(node)
        for node in ours:
            if node not in pairs and free[key(node)]:
                pairs[node] = free[key(node)].popleft()
    return pairs


def _names(node: ir.Node) -> Hashable:
    return node.name, node.outputs[0].name


def _types(node: ir.Node) -> Hashable:
    assert node.inputs[0] is not None
    return node.inputs[0].dtype, cast_target(node)
