"""fp32 islands: connected fp32 nodes between Casts, with the codes that hold them and what would dissolve them."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.comparison.casts import traffic
from onnxamp.comparison.records import Change, Island, counted
from onnxamp.comparison.side import Side
from onnxamp.dtypes import LOW
from onnxamp.errors import few
from onnxamp.model.tensors import cast_target

# Operators that only move data: an exporter's Identity of a weight, a Transpose before a product.
_MOVES = frozenset(
    ["Constant", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"]
)


@dataclasses.dataclass(frozen=True)
class Region:
    """The nodes and boundary Casts of an island."""

    nodes: tuple[ir.Node, ...]
    entering: tuple[ir.Node, ...]
    leaving: tuple[ir.Node, ...]


def regions(side: Side) -> list[Region]:
    """Connected components of fp32 nodes that at least one Cast joins to 16-bit nodes, in order of their first node.

    Two nodes are connected if one reads a result of the other, or both read the same fp32 result of a Cast. Nodes whose
    operands and results are of several types belong to no island.
    """
    parent: dict[ir.Node, ir.Node] = {}

    def find(node: ir.Node) -> ir.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in side.index:
        if not side.is_cast(node) and side.precision(node) == "fp32":
            parent[node] = node
    entering: dict[ir.Node, list[ir.Node]] = {}
    leaving: dict[ir.Node, list[ir.Node]] = {}
    for node in parent:
        for value in node.inputs:
            if value is not None and value.dtype == ir.DataType.FLOAT and (producer := value.producer()) in parent:
                assert producer is not None
                parent[find(node)] = find(producer)
    for cast in side.casts:
        read = cast.inputs[0]
        assert read is not None
        if cast_target(cast) == ir.DataType.FLOAT and (read.dtype in LOW or read.dtype is None):
            members = [reader for reader in cast.outputs[0].consumers() if reader in parent]
            for member in members[1:]:
                parent[find(member)] = find(members[0])
    for cast in side.casts:
        read = cast.inputs[0]
        assert read is not None
        if cast_target(cast) in LOW:
            if (producer := read.producer()) in parent and _reaches_low(side, cast):
                assert producer is not None
                leaving.setdefault(find(producer), []).append(cast)
        elif side.root(read).dtype in LOW:
            owners = [find(reader) for reader in cast.outputs[0].consumers() if reader in parent]
            for owner in dict.fromkeys(owners):
                entering.setdefault(owner, []).append(cast)
    members_of: dict[ir.Node, list[ir.Node]] = {}
    for node in parent:
        members_of.setdefault(find(node), []).append(node)
    return [
        Region(tuple(nodes), tuple(entering.get(owner, ())), tuple(leaving.get(owner, ())))
        for owner, nodes in members_of.items()
        if owner in entering or owner in leaving
    ]


def _reaches_low(side: Side, cast: ir.Node) -> bool:
    """Whether something but a Cast reads a Cast's result: a round trip through 16 bits bounds no island."""
    result = cast.outputs[0]
    return result.is_graph_output() or any(not side.is_cast(reader) for reader in result.consumers())


def island(side: Side, region: Region, change: Change) -> Island:
    """The record of a region of `side`."""
    sizes = [traffic(side, cast) for cast in (*region.entering, *region.leaving)]
    codes = counted([node.metadata_props.get("onnxamp.code", "") for node in region.nodes])
    return Island(
        change=change,
        head=side.ref(min(region.nodes, key=_tells)),
        nodes=tuple(map(side.ref, region.nodes)),
        entering=tuple(map(side.ref, region.entering)),
        leaving=tuple(map(side.ref, region.leaving)),
        bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        codes=codes,
        remedies=remedies(side, region),
    )


def _tells(node: ir.Node) -> tuple[int, bool]:
    """Sort key of how much a node says about its island: numerical rules before legality, target and user, then what only follows."""
    code = node.metadata_props.get("onnxamp.code", "")
    family = code.removeprefix("AMP")[:1]
    rank = {"0": 8, "": 9}.get(family, int(family) if family.isdigit() else 7)
    return rank, node.op_type in _MOVES


def remedies(side: Side, region: Region) -> tuple[str, ...]:
    """What would dissolve an island: the nodes with a code of their own hold it; the rest follows them."""
    held: dict[str, list[str]] = {}
    for node in region.nodes:
        code = node.metadata_props.get("onnxamp.code", "")
        held.setdefault(code, []).append(node.name or node.outputs[0].name or node.op_type)
    found = []
    for code, names in held.items():
        if not code:
            continue
        text = remedy(code)
        if text:
            found.append(f"{code} ({few(names, 3)}): {text}")
    return tuple(found)


def remedy(code: str) -> str:
    """What a user can do about a rule, by the rule's own page."""
    from onnxamp.comparison.rules import rule

    page = rule(code)
    return page.remedy if page else ""
