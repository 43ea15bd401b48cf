"""What a page is made of: plain data, no markup. Every text here is shown as text, whatever it contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

Cell = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Link:
    """A cell that leads to an element of the same page (`target` is a node's id in a graph view)."""

    text: str
    target: str


@dataclasses.dataclass(frozen=True)
class Figures:
    """Key figures in a row of cards.

    Attributes:
        items: (label, value, note) each; an empty note is left out.
        title: Heading; empty for none.
    """

    items: Sequence[tuple[str, str, str]]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Note:
    """Paragraphs of prose. `tone` is ``plain``, ``good``, ``warn`` or ``bad``."""

    paragraphs: Sequence[str]
    title: str = ""
    tone: str = "plain"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that sorts by a click on a column's head.

    Attributes:
        columns: The heads.
        rows: One sequence of cells a row, as long as `columns`; numbers are aligned right.
        note: A sentence under the heading.
        open: Whether the section starts unfolded.
        limit: Rows shown before "show all".
        bad: Positions of the rows that are marked as failed.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | Link]]
    note: str = ""
    open: bool = True
    limit: int = 200
    bad: Collection[int] = ()


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a plot; a y that is NaN or infinite leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclasses.dataclass(frozen=True)
class LinePlot:
    """Lines over a common x axis.

    Attributes:
        points: Draw each series as points without a line: x has no order that means anything.
        log_y: Logarithmic y axis; values that are not positive leave a gap.
        marks: (x, text): vertical lines, such as skipped windows; a text that all share stands in the legend.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    y_label: str = ""
    log_y: bool = False
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    points: bool = False


@dataclasses.dataclass(frozen=True)
class Box:
    """One node of a graph view.

    Attributes:
        id: Unique in the view; it is also the URL fragment of the node.
        op: Operator, the first line of the box.
        name: Node name, the second line.
        precision: ``fp32``, ``fp16``, ``bf16`` or another type's name; empty if it handles no floats.
        before: The precision in the other model, if it differs.
        status: ``same``, ``retyped``, ``changed``, ``added`` or ``removed``.
        kind: ``node``, ``cast`` (a Cast between float types, drawn as a small capsule) or ``port`` (an input or output of
            its graph).
        island: Number of the fp32 island that it belongs to, counted from 1; 0 for none.
        facts: (heading, rows) for the side panel; a row is (label, value before, value after), where a row with equal
            values shows one.
        rule: Code of the decision, explained by `GraphView.rules`.
        heat: Error of the node's values from 0 (none) to 1 (worst); None if it was not measured.
        bodies: Graphs that open in place: (name, graph).
    """

    id: str
    op: str
    name: str
    precision: str = ""
    before: str = ""
    status: str = "same"
    kind: Literal["node", "cast", "port"] = "node"
    island: int = 0
    facts: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
    rule: str = ""
    heat: float | None = None
    bodies: Sequence[tuple[str, Graph]] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """Boxes in topological order and edges between them.

    Attributes:
        edges: (from, to, label, precision): positions in `boxes`; an edge that does not go forward is drawn, and
            does not shape the layout.
    """

    boxes: Sequence[Box]
    edges: Sequence[tuple[int, int, str, str]]


@dataclasses.dataclass(frozen=True)
class GraphView:
    """A graph to look at: zoom, fold, search, side panel.

    Attributes:
        rules: code → (title, paragraphs) of the rules that `Box.rule` names.
    """

    title: str
    graph: Graph
    rules: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    note: str = ""


Section = Figures | Note | Table | LinePlot | GraphView
