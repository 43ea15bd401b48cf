"""Both models of a comparison as the boxes and edges of one graph view."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import onnx_ir as ir

from onnxamp.comparison import attributes, text
from onnxamp.comparison.casts import describe, shape_text
from onnxamp.comparison.compare import Comparison, decision
from onnxamp.comparison.numbers import ValueNumbers
from onnxamp.comparison.records import GraphDiff
from onnxamp.comparison.side import Scope, Side, bodies, type_name
from onnxamp.model.units import SHAPE_ONLY
from onnxamp.report import Box, Graph

Fact = tuple[str, list[tuple[str, str, str]]]


class Builder:
    """Boxes and edges of both models, scope by scope."""

    def __init__(self, comparison: Comparison, result: GraphDiff) -> None:
        self.a, self.b, self.match = comparison.a, comparison.b, comparison.match
        self.codes: dict[str, None] = {}
        self.ids: dict[tuple[bool, str, int], str] = {}  # (second model?, scope, index) -> id of its box
        self.value_ids: dict[
            str, str
        ] = {}  # value in the main graph of the second model -> id of the box that makes it
        self._used: set[str] = set()
        self._islands = {
            (island.change == "added", ref.scope, ref.index): k
            for k, island in enumerate(result.islands, 1)
            for ref in island.nodes
        }
        self._edits = collections.defaultdict(list)
        for edit in result.edited:
            self._edits[edit.counterpart.scope, edit.counterpart.index].append((edit.what, edit.before, edit.after))
        for moved in result.moved:
            place = str(moved.node.index), str(moved.counterpart.index)
            self._edits[moved.counterpart.scope, moved.counterpart.index].append(("position", *place))
        # Of the main graph, by the value's name in the second model: a body may name its nodes alike.
        self._numbers = {v.counterpart: v for v in result.numbers.values} if result.numbers is not None else {}

    def functions(self) -> Iterator[tuple[str, Graph]]:
        """The functions of both models."""
        ours, theirs = self.a.model.functions, self.b.model.functions
        for key in dict.fromkeys([*ours, *theirs]):
            one, other = ours.get(key), theirs.get(key)
            pair = self.a.at(one) if one is not None else None, self.b.at(other) if other is not None else None
            yield "::".join(filter(None, key)), self.graph(*pair)

    def graph(self, one: Scope | None, other: Scope | None) -> Graph:
        """Both scopes in one graph: the second model's nodes in order, and those that only the first has among them."""
        boxes: list[Box] = []
        place: dict[object, int] = {}
        edges: dict[tuple[int, int], tuple[str, str]] = {}
        side, scope = (self.b, other) if other is not None else (self.a, one)
        assert scope is not None
        for value in scope.graph.inputs:
            if not value.is_initializer():
                place[value] = len(boxes)
                boxes.append(self._port("input", value, side))
        for node, own in self._order(one, other):
            place[node] = len(boxes)
            boxes.append(self._box(node, self.b if own else self.a))
        for item, k in place.items():
            if not isinstance(item, ir.Node):
                continue
            own = item in self.b.index
            for read in (*item.inputs, *_captured(item)):
                source = self._source(read, place, own)
                if read is not None and source is not None:
                    kind = type_name(read.dtype) if own else "removed"
                    edges.setdefault((source, k), (_value(read), kind))
            for result in () if own else item.outputs:
                for reader, _ in result.uses():
                    image = self.match.nodes.get(reader)
                    if image in place:
                        edges.setdefault((k, place[image]), (_value(result), "removed"))
        for leaving in scope.graph.outputs:
            source = self._source(leaving, place, other is not None)
            boxes.append(self._port("output", leaving, side))
            if source is not None:
                edges[source, len(boxes) - 1] = _value(leaving), type_name(leaving.dtype)
        return Graph(boxes, [(*pair, *label) for pair, label in edges.items()])

    def _order(self, one: Scope | None, other: Scope | None) -> Iterator[tuple[ir.Node, bool]]:
        """(node, whether it is the second model's)."""
        if other is None:
            yield from ((node, False) for node in _in_order(one)) if one else ()
            return
        lone: dict[ir.Node | None, list[ir.Node]] = collections.defaultdict(list)
        last: ir.Node | None = None
        for node in _in_order(one) if one else ():
            image = self.match.nodes.get(node)
            if image is None:
                lone[last].append(node)
            elif self.b.scope[image] is other:
                last = image
        yield from ((node, False) for node in lone[None])
        for node in _in_order(other):
            yield node, True
            yield from ((gone, False) for gone in lone[node])

    def _source(self, value: ir.Value | None, place: dict[object, int], own: bool) -> int | None:
        if value is None:
            return None
        if value in place:
            return place[value]
        producer = value.producer()
        if producer in place:
            return place[producer]
        if own:
            return None
        image = self.match.nodes.get(producer) if producer is not None else self.match.values.get(value)
        return place.get(image)

    def _id(self, wanted: str) -> str:
        name, k = wanted, 2
        while name in self._used:
            name, k = f"{wanted}#{k}", k + 1
        self._used.add(name)
        return name

    def _port(self, kind: str, value: ir.Value, side: Side) -> Box:
        other = None
        if side is self.b:
            other = self.match.values_back.get(side.root(value))
            if kind == "output":
                other = next((v for v in self.a.model.graph.outputs if v.name == value.name), other)
        before = type_name(other.dtype) if other is not None else ""
        after = type_name(value.dtype)
        changed = bool(before) and before != after
        facts: list[Fact] = [(kind, [("value", _value(other or value), _value(value))])]
        return Box(
            id=self._id(f"{kind}:{value.name}"),
            op=kind,
            name=value.name or "",
            precision=after if after in ("fp32", "fp16", "bf16") else "",
            before=before if changed else "",
            status="changed" if changed else "same",
            kind="port",
            facts=facts,
        )

    def _box(self, node: ir.Node, side: Side) -> Box:
        own = side is self.b
        ref = side.ref(node)
        name = self._id(str(ref))
        self.ids[own, ref.scope, ref.index] = name
        other = self.match.nodes_back.get(node) if own else None
        if own and not ref.scope:
            self.value_ids |= {value.name: name for value in node.outputs if value.name}
        made = decision(node)
        if made is not None:
            self.codes[made.code] = None
        if side.is_cast(node):
            return self._cast_box(node, side, name, other)
        before, after = (
            (side.precision(node), side.precision(node))
            if other is None
            else (self.a.precision(other), self.b.precision(node))
        )
        slots = attributes.retyped_slots(other, node) if other is not None and node.op_type not in SHAPE_ONLY else ()
        edits = self._edits.get((ref.scope, ref.index), []) if own else []
        renamed = other is not None and (other.name or "") != (node.name or "")
        if renamed and other is not None:
            edits = [*edits, ("name", other.name or "", node.name or "")]
        measured = self._measured(node) if other is not None else []
        theirs = dict(bodies(other)) if other is not None else {}
        inner = []
        for label, body in bodies(node):
            if own:
                pair = self.a.at(theirs[label]) if label in theirs else None, self.b.at(body)
            else:
                pair = self.a.at(body), None  # type: ignore[assignment]  # the other order of None
            inner.append((label, self.graph(*pair)))
        return Box(
            id=name,
            op=ref.op,
            name=ref.name,
            precision=after,
            before=before if before != after else "",
            status=_status(own, other is not None, bool(edits), bool(slots)),
            island=self._islands.get((own, ref.scope, ref.index), 0),
            facts=self._facts(node, other, edits, measured),
            rule=made.code if made else "",
            heat=max(map(_heat, measured)) if measured else None,
            bodies=inner,
        )

    def _cast_box(self, node: ir.Node, side: Side, name: str, other: ir.Node | None) -> Box:
        own = side is self.b
        retyped = other is not None and bool(attributes.retyped_slots(other, node))
        record = describe(
            side, node, "added" if own else "removed", self.match.values_back if own else self.match.values
        )
        return Box(
            id=name,
            op="Cast",
            name=record.node.name,
            precision=record.target,
            before=record.source or "?",
            status=_status(own, other is not None, False, retyped),
            kind="cast",
            facts=[("Cast", [(label, v, v) for label, v in _cast_facts(record.tensor, text.cast_row(record))])],
        )

    def _measured(self, node: ir.Node) -> list[ValueNumbers]:
        """The errors of a node's results, if the node is in the main graph of the second model."""
        if self.b.scope[node].path:
            return []
        return [self._numbers[value.name] for value in node.outputs if value.name in self._numbers]

    def _facts(
        self, node: ir.Node, other: ir.Node | None, edits: list[tuple[str, str, str]], measured: list[ValueNumbers]
    ) -> list[Fact]:
        before = other if other is not None else node
        facts: list[Fact] = []
        if edits:
            facts.append(("Changes", edits))
        made = decision(node)
        if made is not None:
            rows = [("precision", made.precision, made.precision)]
            rows += [(str(k), str(v), str(v)) for k, v in made.evidence.items()]
            facts.append((f"Decision {made.code}", rows))
        for number in measured:
            pairs = [
                ("max error", f"{number.max_error:.4g}"),
                ("max value", f"{number.scale:.4g}"),
                ("SNR", number.ratio),
            ]
            heading = "Numbers" if len(measured) == 1 else f"Numbers of {number.counterpart}"
            facts.append((heading, [(label, v, v) for label, v in pairs]))
        for heading, ours, theirs in (
            ("Inputs", before.inputs, node.inputs),
            ("Outputs", before.outputs, node.outputs),
        ):
            rows = []
            for k in range(max(len(ours), len(theirs))):
                was, now = (_value(values[k]) if k < len(values) else "" for values in (ours, theirs))
                rows.append((str(k), was, now))
            if rows:
                facts.append((heading, rows))
        names = dict.fromkeys([*before.attributes, *node.attributes])
        plain = [n for n in names if not any(_is_body(x.attributes.get(n)) for x in (before, node))]
        if plain:
            rows = [
                (n, attributes.text(before.attributes.get(n)), attributes.text(node.attributes.get(n))) for n in plain
            ]
            facts.append(("Attributes", rows))
        return facts


def _status(own: bool, matched: bool, edited: bool, retyped: bool) -> str:
    if not own:
        return "removed"
    if not matched:
        return "added"
    return "changed" if edited else "retyped" if retyped else "same"


def _heat(value: ValueNumbers) -> float:
    """0 at an SNR of 90 dB and above, 1 at 10 dB and below and where values of its own are NaN or infinite."""
    return 1.0 if value.nonfinite else min(1.0, max(0.0, (90.0 - value.decibels) / 80.0))


def _in_order(scope: Scope) -> list[ir.Node]:
    """The nodes of a scope, each just behind what it reads (depth first), so that neighbours are near each other."""
    wanted = set(scope.nodes)
    found: list[ir.Node] = []
    seen: set[ir.Node] = set()
    for last in (node for node in scope.graph if node in wanted):
        if any(reader in wanted for value in last.outputs for reader in value.consumers()):
            continue
        seen.add(last)
        stack = [(last, _above(last))]
        while stack:
            above = stack[-1][1]
            step = next((n for n in above if n in wanted and n not in seen), None)
            if step is None:
                found.append(stack.pop()[0])
            else:
                seen.add(step)
                stack.append((step, _above(step)))
    return found


def _above(node: ir.Node) -> Iterator[ir.Node]:
    """What produces the operands of a node and what its bodies read from around it."""
    for value in (*node.inputs, *_captured(node)):
        if value is not None and (producer := value.producer()) is not None:
            yield producer


def _value(value: ir.Value | None) -> str:
    if value is None:
        return ""
    return " ".join(filter(None, (value.name or "?", type_name(value.dtype), shape_text(value.shape))))


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """What the bodies of a node read from around it, and more; values defined inside have no box outside."""
    for _, body in bodies(node):
        for inner in body.all_nodes():
            yield from (value for value in inner.inputs if value is not None)
        yield from body.outputs


def _is_body(attribute: ir.Attr | None) -> bool:
    return attribute is not None and not attribute.is_ref() and attribute.type.name.startswith("GRAPH")


def _cast_facts(tensor: str, row: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        ("tensor", tensor),
        ("direction", row[1]),
        ("shape", row[3]),
        ("bytes", row[4]),
        ("reads", row[5]),
        ("redundant", row[6]),
    ]
