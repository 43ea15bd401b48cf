"""What a comparison says: frozen records, each with its mirror image, and JSON from the same fields."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from onnxamp.comparison.numbers import Numbers

Change = Literal["added", "removed"]
_OPPOSITE: dict[Change, Change] = {"added": "removed", "removed": "added"}


@dataclasses.dataclass(frozen=True, order=True)
class NodeRef:
    """A node of one of the two models.

    Attributes:
        scope: Where it is: "" for the main graph, else the path of bodies and functions, such as ``If_3/then_branch``.
        index: Position in its graph.
        name: Its name, or its first output's if it has none.
        op: Operator, with the domain in front if that is not ai.onnx.
    """

    scope: str
    index: int
    name: str
    op: str

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}" if self.scope else self.name


@dataclasses.dataclass(frozen=True)
class Decision:
    """What onnxamp's metadata say about a node: its precision and the rule that made it."""

    precision: str
    code: str
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Retyped:
    """A node whose float operands or results have another type in the second model.

    Attributes:
        node, counterpart: The node in the first and in the second model.
        before, after: Its precision: the type of its float results, or of its float operands if it has no such results.
        slots: (slot, type before, type after), a slot being ``input 0``, ``output 0`` or ``attribute to``.
        decision_before, decision: The decisions recorded in the two models.
    """

    node: NodeRef
    counterpart: NodeRef
    before: str
    after: str
    slots: tuple[tuple[str, str, str], ...]
    decision_before: Decision | None = None
    decision: Decision | None = None

    def mirrored(self) -> Retyped:
        return Retyped(
            self.counterpart,
            self.node,
            self.after,
            self.before,
            tuple((slot, after, before) for slot, before, after in self.slots),
            self.decision,
            self.decision_before,
        )


@dataclasses.dataclass(frozen=True)
class CastChange:
    """A Cast between float types that only one of the models has.

    Attributes:
        change: ``added`` if the second model has it, ``removed`` if the first has it.
        tensor: The value that it casts, traced through other such Casts; by its name in the model without the Cast if it
            is there.
        source, target: Types that it reads and writes; "" if unknown.
        shape: Shape as text, dimensions by name or number.
        bytes: Bytes read and written in one run; None if the rank is unknown.
        assumed: Whether `bytes` rests on assumed sizes of unknown dimensions (1 for a name that first leads a shape, 64 for others).
        fan_out: Number of reads of its result, graph outputs included.
        constant: Whether it casts a constant.
        redundant: Why it is not needed; "" if it is.
    """

    change: Change
    node: NodeRef
    tensor: str
    source: str
    target: str
    shape: str
    bytes: int | None
    assumed: bool
    fan_out: int
    constant: bool
    redundant: str

    def mirrored(self) -> CastChange:
        return dataclasses.replace(self, change=_OPPOSITE[self.change])


@dataclasses.dataclass(frozen=True)
class Island:
    """A maximal connected region of fp32 nodes that Casts separate from 16-bit values.

    Attributes:
        change: ``added`` if only the second model has it, ``removed`` if only the first has it.
        head: The node that tells most of why it is there: one that a rule of its own holds, not one that follows or only moves data.
        nodes: Its nodes, in order.
        entering, leaving: Casts from 16 bits into the region and from it into 16 bits.
        bytes: Traffic of these Casts; None if a shape is unknown.
        codes: (code, number of nodes), most frequent first; the code is "" for nodes without a recorded decision.
        remedies: What would dissolve it, one sentence each.
    """

    change: Change
    head: NodeRef
    nodes: tuple[NodeRef, ...]
    entering: tuple[NodeRef, ...]
    leaving: tuple[NodeRef, ...]
    bytes: int | None
    codes: tuple[tuple[str, int], ...]
    remedies: tuple[str, ...]

    def mirrored(self) -> Island:
        return dataclasses.replace(self, change=_OPPOSITE[self.change])


@dataclasses.dataclass(frozen=True)
class ConstantChange:
    """An initializer or Constant whose type, shape or values differ, or a copy of it.

    The effect on the values is told from the wider type to the narrower one, and from the first model to the second if
    the types are equally wide.

    Attributes:
        before, after: Names in the two models; one is "" for a constant that nothing uses and only one model has.
        type_before, type_after, shape_before, shape_after: Element types and shapes.
        bytes_before, bytes_after: Sizes.
        elements: Number of elements compared.
        rounded: Elements that are the nearest value of the other type, not equal, and none of the following.
        clamped: Finite where the other side is infinite, or held at a limit because the value is out of range.
        overflowed: Infinite where the other side is finite.
        flushed: Zero where the other side is not.
        changed: Other values that rounding does not explain.
        max_error: Largest absolute difference between finite elements.
        uses: Operands of matched nodes that read it ("" for none).
        moved: ``initializer → Constant`` or the reverse, if it moved; "" else.
    """

    before: str
    after: str
    type_before: str
    type_after: str
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    elements: int = 0
    rounded: int = 0
    clamped: int = 0
    overflowed: int = 0
    flushed: int = 0
    changed: int = 0
    max_error: float = 0.0
    uses: tuple[str, ...] = ()
    moved: str = ""

    @property
    def altered(self) -> bool:
        """Whether more happened to it than a new type and the rounding that comes with it."""
        return bool(self.clamped or self.overflowed or self.flushed or self.changed or self.moved) or not (
            self.before and self.after and self.shape_before == self.shape_after
        )

    def mirrored(self) -> ConstantChange:
        same = self.type_before == self.type_after
        return dataclasses.replace(
            self,
            before=self.after,
            after=self.before,
            type_before=self.type_after,
            type_after=self.type_before,
            shape_before=self.shape_after,
            shape_after=self.shape_before,
            bytes_before=self.bytes_after,
            bytes_after=self.bytes_before,
            clamped=self.overflowed if same else self.clamped,
            overflowed=self.clamped if same else self.overflowed,
            moved=" → ".join(reversed(self.moved.split(" → "))),
        )


@dataclasses.dataclass(frozen=True)
class NodeChange:
    """A node that only one model has. Nodes of its bodies are not listed; float Casts are in `GraphDiff.casts`."""

    change: Change
    node: NodeRef

    def mirrored(self) -> NodeChange:
        return NodeChange(_OPPOSITE[self.change], self.node)


@dataclasses.dataclass(frozen=True)
class Renamed:
    """Something that is the same under another name.

    `kind` is ``node``, ``value``, ``input``, ``output``, ``constant`` or ``function``.
    """

    kind: str
    scope: str
    before: str
    after: str

    def mirrored(self) -> Renamed:
        return Renamed(self.kind, self.scope, self.after, self.before)


@dataclasses.dataclass(frozen=True)
class Moved:
    """A node that runs at another place of the order: one of the fewest whose move explains the new order."""

    node: NodeRef
    counterpart: NodeRef

    def mirrored(self) -> Moved:
        return Moved(self.counterpart, self.node)


@dataclasses.dataclass(frozen=True)
class Edited:
    """A property of a matched node that differs.

    `what` is ``attribute NAME``, ``input N`` (it reads another value), ``operator``, ``doc_string``, ``metadata KEY`` or
    ``bodies`` (their number); a value is "" where the model has none.
    """

    node: NodeRef
    counterpart: NodeRef
    what: str
    before: str
    after: str

    def mirrored(self) -> Edited:
        return Edited(self.counterpart, self.node, self.what, self.after, self.before)


@dataclasses.dataclass(frozen=True)
class ModelChange:
    """A property of the model: its interface, opset, functions, producer or metadata."""

    what: str
    before: str
    after: str

    def mirrored(self) -> ModelChange:
        return ModelChange(self.what, self.after, self.before)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Counts of one model.

    Attributes:
        label: File name, or "" for a model in memory.
        nodes: Nodes of all graphs and functions, without Constant nodes and float Casts.
        precisions: (precision, nodes), for nodes that handle floats.
        heavy: The same for MatMul, Conv and other nodes that carry the arithmetic.
        casts: Float Casts.
        constant_bytes: Bytes of initializers and Constants.
        options: onnxamp's model metadata: version, level, dtype, target.
    """

    label: str
    nodes: int
    precisions: tuple[tuple[str, int], ...]
    heavy: tuple[tuple[str, int], ...]
    casts: int
    constant_bytes: int
    options: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class GraphDiff:
    """All that differs between two models. `mirrored` exchanges them.

    Attributes:
        before, after: Counts of the two models.
        matched: Pairs of nodes, without Constants.
        retyped, casts, islands, constants: What precision is about.
        raised: The opset, where a conversion by onnxamp raised it for types that only a later one has; what the later opset
            writes otherwise is then no difference.
        nodes, renamed, moved, edited, model: Everything else; `others` counts it.
        numbers: Errors of values, if data were given. They are no part of `empty`.
    """

    before: ModelInfo
    after: ModelInfo
    matched: int
    retyped: tuple[Retyped, ...] = ()
    casts: tuple[CastChange, ...] = ()
    islands: tuple[Island, ...] = ()
    constants: tuple[ConstantChange, ...] = ()
    raised: tuple[ModelChange, ...] = ()
    nodes: tuple[NodeChange, ...] = ()
    renamed: tuple[Renamed, ...] = ()
    moved: tuple[Moved, ...] = ()
    edited: tuple[Edited, ...] = ()
    model: tuple[ModelChange, ...] = ()
    numbers: Numbers | None = None

    @property
    def others(self) -> int:
        """Number of differences that are not about precision."""
        return sum(map(len, (self.nodes, self.renamed, self.moved, self.edited, self.model)))

    @property
    def empty(self) -> bool:
        """Whether the models are the same, up to the order of initializers and onnxamp's own metadata."""
        return not (self.retyped or self.casts or self.islands or self.constants or self.raised or self.others)

    def mirrored(self) -> GraphDiff:
        """`diff(b, a)`."""
        lists: dict[str, Any] = {name: tuple(item.mirrored() for item in getattr(self, name)) for name in LISTS}
        lists["casts"], lists["nodes"] = casts_in_order(lists["casts"]), nodes_in_order(lists["nodes"])
        return dataclasses.replace(self, before=self.after, after=self.before, **lists)

    def to_json(self) -> dict[str, Any]:
        """The diff as JSON data, after the schema `onnxamp/comparison/schema.json`."""
        data = dataclasses.asdict(self)
        return {"format": "onnxamp-diff/1", "empty": self.empty, "others": self.others, **data}


def casts_in_order(casts: Iterable[CastChange]) -> tuple[CastChange, ...]:
    """Casts as a diff lists them: added ones first, each kind by its node."""
    return tuple(sorted(casts, key=lambda cast: (cast.change, cast.node)))


def nodes_in_order(nodes: Iterable[NodeChange]) -> tuple[NodeChange, ...]:
    """Nodes as a diff lists them: removed ones first, each kind in the order of its graph."""
    return tuple(sorted(nodes, key=lambda node: node.change != "removed"))


LISTS = ("retyped", "casts", "islands", "constants", "raised", "nodes", "renamed", "moved", "edited", "model")


def counted(names: list[str]) -> tuple[tuple[str, int], ...]:
    """(name, count), most frequent first, then by name."""
    return tuple(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
