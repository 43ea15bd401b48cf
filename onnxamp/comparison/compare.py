"""`diff`: two models in, one `GraphDiff` out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxamp.comparison import attributes, casts, constants, functions, islands, opsets, order
from onnxamp.comparison.interface import model_changes, signature_text
from onnxamp.comparison.match import Match
from onnxamp.comparison.records import (
    CastChange,
    ConstantChange,
    Decision,
    Edited,
    GraphDiff,
    Island,
    ModelInfo,
    Moved,
    NodeChange,
    Renamed,
    Retyped,
    casts_in_order,
    counted,
    nodes_in_order,
)
from onnxamp.comparison.side import Scope, Side, bodies, node_name, operator, type_name
from onnxamp.model import io, types
from onnxamp.model.signatures import standard_opset
from onnxamp.model.units import SHAPE_ONLY
from onnxamp.policy import operators

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def diff(a: Source, b: Source) -> GraphDiff:
    """What differs between two models.

    Args:
        a: The first model (the original): a path, a ModelProto or an ir.Model. It is not changed.
        b: The second model (the conversion), likewise.

    Returns:
        Retyped nodes, Casts, fp32 islands, changed constants and everything else; `diff(b, a)` is its mirror image.

    Raises:
        ModelError: A file is no ONNX model or is broken.
    """
    return Comparison(a, b).result()


class Comparison:
    """Two models, matched; `result` makes the records. Kept by those who need nodes beside records (numbers, pages)."""

    def __init__(self, a: Source, b: Source, label: str = "") -> None:
        """Read and match both; `label` is what to call `b` if it is no path."""
        self.labels = _label(a), _label(b) or label
        one, other = _load(a), _load(b)
        change = opsets.change(one[0], other[0])
        self.raised = []  # stays empty where the source cannot be raised: its opset is then a difference of the model
        if opsets.is_raised(one[0], other[0]):
            if opsets.bring(one[0], standard_opset(other[0])):
                self.raised = [change]
            else:
                one = _load(a)
        elif opsets.is_raised(other[0], one[0]):
            if opsets.bring(other[0], standard_opset(one[0])):
                self.raised = [change]
            else:
                other = _load(b)
        self.inlined = functions.align(one[0], other[0])
        self.a, self.b = Side(*one), Side(*other)
        self.match = Match(self.a, self.b)

    def result(self) -> GraphDiff:
        """The diff."""
        added, removed = self._missing()
        return GraphDiff(
            before=_info(self.a, self.labels[0]),
            after=_info(self.b, self.labels[1]),
            matched=len(self.match.nodes),
            retyped=tuple(self._retyped()),
            casts=casts_in_order(self._casts()),
            islands=tuple(self._islands()),
            constants=tuple(self._constants()),
            nodes=nodes_in_order(
                [NodeChange("removed", self.a.ref(n)) for n in removed]
                + [NodeChange("added", self.b.ref(n)) for n in added]
            ),
            renamed=tuple(self._renamed()),
            moved=tuple(self._moved()),
            edited=tuple(self._edited()),
            raised=tuple(self.raised),
            model=(*self.inlined, *model_changes(self.match, self.same_value)),
        )

    # Nodes that only one model has

    def _missing(self) -> tuple[list[ir.Node], list[ir.Node]]:
        lone = [
            [function for key, function in one.model.functions.items() if key not in other.model.functions]
            for one, other in ((self.a, self.b), (self.b, self.a))
        ]
        ours = _outermost(self.a, [n for n in self.a.index if n not in self.match.nodes], lone[0])
        theirs = _outermost(self.b, [n for n in self.b.index if n not in self.match.nodes_back], lone[1])
        return [n for n in theirs if not self.b.is_cast(n)], [n for n in ours if not self.a.is_cast(n)]

    # Precision

    def _retyped(self) -> list[Retyped]:
        found = []
        for node, other in self.match.nodes.items():
            slots = () if node.op_type in SHAPE_ONLY else attributes.retyped_slots(node, other)
            if slots:
                found.append(
                    Retyped(
                        node=self.a.ref(node),
                        counterpart=self.b.ref(other),
                        before=self.a.precision(node),
                        after=self.b.precision(other),
                        slots=slots,
                        decision_before=decision(node),
                        decision=decision(other),
                    )
                )
        return sorted(found, key=lambda item: item.node)

    def _casts(self) -> list[CastChange]:
        match = self.match
        return [casts.describe(self.a, n, "removed", match.values) for n in self.a.casts if n not in match.nodes] + [
            casts.describe(self.b, n, "added", match.values_back) for n in self.b.casts if n not in match.nodes_back
        ]

    def _islands(self) -> list[Island]:
        """Islands that the other model does not have with the same nodes and boundary."""
        ours, theirs = islands.regions(self.a), islands.regions(self.b)
        pairs = self.match.nodes

        def image(region: islands.Region) -> tuple[frozenset[ir.Node], ...] | None:
            parts = (region.nodes, region.entering, region.leaving)
            if any(node not in pairs for part in parts for node in part):
                return None
            return tuple(frozenset(pairs[node] for node in part) for part in parts)

        def key(region: islands.Region) -> tuple[frozenset[ir.Node], ...]:
            return tuple(frozenset(part) for part in (region.nodes, region.entering, region.leaving))

        mapped = {image(region) for region in ours}
        present = {key(region) for region in theirs}
        return [islands.island(self.a, r, "removed") for r in ours if image(r) not in present] + [
            islands.island(self.b, r, "added") for r in theirs if key(r) not in mapped
        ]

    # Constants

    def _constants(self) -> list[ConstantChange]:
        a, b, match = self.a, self.b, self.match
        pairs: dict[tuple[ir.Value, ir.Value], list[str]] = {}
        for one, other in match.values.items():
            if one in a.constants and other in b.constants:
                pairs.setdefault((one, other), [])
        for node, counterpart in match.nodes.items():
            for slot, (ours, theirs) in enumerate(zip(node.inputs, counterpart.inputs, strict=False)):
                if ours is None or theirs is None:
                    continue
                pair = a.root(ours), b.root(theirs)
                if pair[0] in a.constants and pair[1] in b.constants and self.same_constant(*pair):
                    pairs.setdefault(pair, []).append(f"{a.ref(node)}[{slot}]")
        found = []
        for (one, other), uses in pairs.items():
            change = constants.compare(
                (one.name or "", a.constants[one]),
                (other.name or "", b.constants[other]),
                tuple(uses),
                _moved_constant(one, other),
            )
            if change is not None:
                found.append(change)
        ours_paired, theirs_paired = {one for one, _ in pairs}, {other for _, other in pairs}
        for value in a.constants:
            if value not in ours_paired and not value.uses() and not value.is_graph_output():
                found.append(_lone(value, a.constants[value], before=True))
        for value in b.constants:
            if value not in theirs_paired and not value.uses() and not value.is_graph_output():
                found.append(_lone(value, b.constants[value], before=False))
        return sorted(found, key=lambda c: (c.before or c.after, c.after))

    def same_constant(self, one: ir.Value, other: ir.Value) -> bool:
        """Whether two constants at the same operand are one: paired, or one of them a further copy of the other's pair."""
        values, back = self.match.values, self.match.values_back
        return values.get(one) is other or other not in back or one not in values

    # Everything else

    def _renamed(self) -> list[Renamed]:
        a, b = self.a, self.b
        found = []
        for node, other in self.match.nodes.items():
            if (node.name or "") != (other.name or ""):
                found.append(Renamed("node", a.scope[node].path, node.name or "", other.name or ""))
        outputs = {v for one, _ in self.match.scopes for v in one.graph.outputs}
        theirs = {v for _, other in self.match.scopes for v in other.graph.outputs}
        for value, counterpart in self.match.values.items():
            before, after = value.name or "", counterpart.name or ""
            if before == after or after in a.labels(value) or before in b.labels(counterpart):
                continue
            path = a.path_of(value)
            if value in a.constants or counterpart in b.constants:
                kind = "constant"
            elif value.is_graph_input():
                kind = "input"
            elif value in outputs and counterpart in theirs:
                kind = "output"
            else:
                kind = "value"
            found.append(Renamed(kind, path, before, after))
        return sorted(found, key=lambda item: (item.scope, item.kind, item.before, item.after))

    def _moved(self) -> list[Moved]:
        a, b = self.a, self.b
        found = []
        for one, other in self.match.scopes:
            rows = []
            for node in one.nodes:
                counterpart = self.match.nodes.get(node)
                if (
                    counterpart is not None
                    and b.scope[counterpart] is other
                    and not _anonymous_cast(a, node, counterpart)
                ):
                    names = sorted((node_name(node), node_name(counterpart)))
                    rows.append((a.index[node], b.index[counterpart], names))
            dense = {new: k for k, new in enumerate(sorted(new for _, new, _ in rows))}
            for old, _, _ in order.moved([(k, dense[new], names) for k, (_, new, names) in enumerate(rows)]):
                node = one.nodes[rows[old][0]]
                found.append(Moved(a.ref(node), b.ref(self.match.nodes[node])))
        return found

    def _edited(self) -> list[Edited]:
        found: list[Edited] = []
        for node, other in self.match.nodes.items():
            refs = self.a.ref(node), self.b.ref(other)
            rows = [*self._operands(node, other), *attributes.edits(node, other), *attributes.notes(node, other)]
            if operator(node) != operator(other):
                rows.append(("operator", refs[0].op, refs[1].op))
            found += [Edited(*refs, what, before, after) for what, before, after in rows]
        for one, other_scope in self.match.scopes:
            found += self._results(one, other_scope)
        return sorted(found, key=lambda item: (item.node, item.what))

    def _operands(self, node: ir.Node, other: ir.Node) -> list[tuple[str, str, str]]:
        rows = []
        count = max(len(node.inputs), len(other.inputs))
        for slot in range(count):
            ours = node.inputs[slot] if slot < len(node.inputs) else None
            theirs = other.inputs[slot] if slot < len(other.inputs) else None
            if not self.same_value(ours, theirs):
                rows.append((f"input {slot}", _name(ours), _name(theirs)))
        return rows

    def _results(self, one: Scope, other: Scope) -> list[Edited]:
        """Outputs of bodies that another value leaves by; those of the main graph are `ModelChange`s."""
        if not one.path or len(one.graph.outputs) != len(other.graph.outputs):
            return []
        found = []
        parents = [n for n in self.match.nodes if any(body is one.graph for _, body in bodies(n))]
        for slot, (ours, theirs) in enumerate(zip(one.graph.outputs, other.graph.outputs, strict=True)):
            if parents and not self.same_value(ours, theirs):
                refs = self.a.ref(parents[0]), self.b.ref(self.match.nodes[parents[0]])
                found.append(Edited(*refs, f"output {slot} of {one.path}", _name(ours), _name(theirs)))
        return found

    def same_value(self, ours: ir.Value | None, theirs: ir.Value | None) -> bool:
        """Whether two operands are the same value, up to Casts and to nodes that only one of the models has."""
        if ours is None or theirs is None:
            return ours is theirs
        one, other = self.a.root(ours), self.b.root(theirs)
        if self._same(one, other):
            return True
        mine, others = self._upstream(self.a, one), self._upstream(self.b, other)
        return any(self._same(x, y) for x in mine for y in others)

    def _same(self, one: ir.Value, other: ir.Value) -> bool:
        if self.match.values.get(one) is other:
            return True
        if one in self.a.constants and other in self.b.constants:
            return self.same_constant(one, other)
        return False

    def _upstream(self, side: Side, value: ir.Value, limit: int = 16) -> list[ir.Value]:
        """The value, and what the unmatched nodes above it read: an insertion or deletion explains that readers moved on."""
        taken = self.match.nodes if side is self.a else self.match.nodes_back
        found, todo = [value], [value]
        while todo and len(found) < limit:
            producer = todo.pop().producer()
            if producer is None or producer in taken or producer not in side.index:
                continue
            for operand in producer.inputs:
                if operand is not None and side.root(operand) not in found:
                    found.append(side.root(operand))
                    todo.append(side.root(operand))
        return found


def _anonymous_cast(side: Side, node: ir.Node, counterpart: ir.Node) -> bool:
    """Whether two float Casts are a pair by their types alone: which of several equal ones is which says nothing of order."""
    return side.is_cast(node) and (node.name, node.outputs[0].name) != (counterpart.name, counterpart.outputs[0].name)


def decision(node: ir.Node) -> Decision | None:
    """The decision in a node's metadata.

    An `onnxamp.evidence` that is no JSON object is kept as text, as it may come from anyone.
    """
    code = node.metadata_props.get("onnxamp.code")
    if code is None:
        return None
    text = node.metadata_props.get("onnxamp.evidence", "{}")
    try:
        evidence = json.loads(text)
    except ValueError:
        evidence = text
    if not isinstance(evidence, dict):
        evidence = {"evidence": evidence}
    return Decision(node.metadata_props.get("onnxamp.precision", ""), code, evidence)


_Loaded = tuple[ir.Model, dict[ir.Node, int], dict[ir.Value, str]]


def _load(source: Source) -> _Loaded:
    """A model with its types; order and interface are noted before sorting and inference touch them.

    Types are inferred whatever the file declares: converters leave declarations that are no longer true.
    """
    model = io.load(source, sort=False)
    positions = {node: k for k, node in enumerate(_nodes(model))}
    declared = {value: signature_text(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    io.in_order(model)
    types.infer(model)
    return model, positions, declared


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return itertools.chain(model.graph.all_nodes(), *(f.all_nodes() for f in model.functions.values()))


def _label(source: Source) -> str:
    return Path(source).name if isinstance(source, str | os.PathLike) else ""


def _info(side: Side, label: str) -> ModelInfo:
    nodes = [n for n in side.index if not side.is_cast(n)]
    metadata = side.model.metadata_props
    return ModelInfo(
        label=label,
        nodes=len(nodes),
        precisions=counted([p for n in nodes if (p := side.precision(n))]),
        heavy=counted(
            [p for n in nodes if operators.operator(n).kind is operators.Kind.HEAVY and (p := side.precision(n))]
        ),
        casts=len(side.casts),
        constant_bytes=sum(tensor.nbytes for tensor in side.constants.values()),
        options=tuple(
            (k, metadata[f"onnxamp.{k}"]) for k in ("version", "level", "dtype", "target") if f"onnxamp.{k}" in metadata
        ),
    )


def _outermost(side: Side, nodes: list[ir.Node], functions: Iterable[ir.Function]) -> list[ir.Node]:
    """Without nodes in the bodies of others among them, and in functions that only one model has."""
    inner: set[ir.Node] = set()
    for function in functions:
        inner.update(function.all_nodes())
    for node in nodes:
        if node not in inner:
            for _, body in bodies(node):
                inner.update(body.all_nodes())
    return [node for node in nodes if node not in inner]


def _name(value: ir.Value | None) -> str:
    return "" if value is None else value.name or "?"


def _moved_constant(one: ir.Value, other: ir.Value) -> str:
    before, after = ("Constant" if v.producer() is not None else "initializer" for v in (one, other))
    return "" if before == after else f"{before} → {after}"


def _lone(value: ir.Value, tensor: ir.TensorProtocol, before: bool) -> ConstantChange:
    name, kind, shape = value.name or "", type_name(tensor.dtype), tuple(tensor.shape.numpy())
    if before:
        return ConstantChange(name, "", kind, "", shape, (), tensor.nbytes, 0)
    return ConstantChange("", name, "", kind, (), shape, 0, tensor.nbytes)
