"""A graph view as data for the page's script: folded, laid out, strings stored once.

Runs of boxes that are alike (same status, precision and island, no Casts) fold into one box with their count. If more than
`LEVEL` boxes remain, stretches of the order fold again, so that no level is large, however large the graph is. A stretch
of a topological order never makes a cycle when it becomes one box. In an open fold, edges that come from outside start at
one point at its upper border, those that leave end at one at its lower border.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from onnxamp.report.layout import BEND, layout
from onnxamp.report.sections import Box, Graph, GraphView

RUN = 4  # the shortest run that folds
LEVEL = 160  # boxes on a level
WIDTH = (92.0, 230.0)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Consecutive items that are shown as one box until it is opened."""

    items: list[int | Fold]

    def boxes(self) -> list[int]:
        """Positions of all boxes in it."""
        found: list[int] = []
        todo: list[int | Fold] = [self]
        while todo:
            item = todo.pop()
            if isinstance(item, Fold):
                todo.extend(reversed(item.items))
            else:
                found.append(item)
        return found


def view_data(view: GraphView) -> dict[str, Any]:
    """What `graph.js` draws."""
    strings: dict[str, int] = {}
    graph = _level_of(view.graph, strings)
    return {"strings": list(strings), "graph": graph, "rules": view.rules}


def folded(boxes: Sequence[Box]) -> list[int | Fold]:
    """Positions and folds, in order."""
    items: list[int | Fold] = []
    start = 0
    while start < len(boxes):
        end = start + 1
        kind = _kind(boxes[start])
        while end < len(boxes) and kind is not None and _kind(boxes[end]) == kind:
            end += 1
        run: list[int | Fold] = list(range(start, end))
        items += [Fold(_limited(run))] if len(run) >= RUN and len(run) < len(boxes) else run
        start = end
    return _limited(items)


def _limited(items: list[int | Fold]) -> list[int | Fold]:
    """At most `LEVEL` items: stretches of equal size become folds."""
    while len(items) > LEVEL:
        size = max(8, math.ceil(len(items) / LEVEL))
        items = [Fold(items[k : k + size]) for k in range(0, len(items), size)]
    return items


def _kind(box: Box) -> tuple[object, ...] | None:
    """What boxes of a run have in common; None for a box that stays visible."""
    if box.kind != "node" or box.bodies or box.status not in ("same", "retyped"):
        return None
    return box.status, box.precision, box.before, box.island


def _level_of(graph: Graph, strings: dict[str, int]) -> dict[str, Any]:
    return _level(graph, folded(graph.boxes), graph.edges, strings)


def _level(
    graph: Graph, items: list[int | Fold], edges: Sequence[tuple[int, int, str, str]], strings: dict[str, int]
) -> dict[str, Any]:
    """One level; `edges` are those with an end in it.

    Items are numbered in order; then come the points where edges enter and leave, and the bend points.
    """
    count = len(items)
    enter, leave = count, count + 1
    owner: dict[int, int] = {}
    for k, item in enumerate(items):
        for box in item.boxes() if isinstance(item, Fold) else (item,):
            owner[box] = k
    outer: dict[tuple[int, int], tuple[str, str, int]] = {}
    inner: dict[int, list[tuple[int, int, str, str]]] = {}
    for edge in edges:
        source, target = owner.get(edge[0], enter), owner.get(edge[1], leave)
        for end in {source, target}:
            inner.setdefault(end, []).append(edge)
        if source != target:
            label, precision, joined = outer.get((source, target), (edge[2], edge[3], 0))
            outer[source, target] = label, precision if precision == edge[3] else "", joined + 1
    rows = [
        _fold_row(graph, item, inner.get(k, []), strings)
        if isinstance(item, Fold)
        else _box_row(graph.boxes[item], strings)
        for k, item in enumerate(items)
    ]
    widths = [WIDTH[1] if isinstance(item, Fold) else width(graph.boxes[item]) for item in items]
    order = [*([enter] if enter in inner else []), *range(count), *([leave] if leave in inner else [])]
    place = {number: k for k, number in enumerate(order)}
    made = layout([(*widths, BEND, BEND)[number] for number in order], [(place[a], place[b]) for a, b in outer])
    order += range(count + 2, count + 2 + len(made.centers) - len(order))
    centers = dict(zip(order, made.centers, strict=True))
    left = min((x - (widths[k] if k < count else 0) / 2 for k, x in centers.items()), default=0)
    return {
        "items": rows,
        "widths": [round(w) for w in widths],
        "rows": [[order[k] for k in row] for row in made.rows],
        "x": [round(centers[k] - left) if k in centers else 0 for k in range(max(centers, default=-1) + 1)],
        "edges": [
            [
                *pair,
                _intern(label if joined == 1 else f"{joined} values", strings),
                precision,
                [order[k] for k in route],
            ]
            for (pair, (label, precision, joined)), route in zip(outer.items(), made.routes, strict=True)
        ],
    }


def width(box: Box) -> float:
    """Width of a box by its text."""
    if box.kind == "cast":
        return 104.0
    if box.kind == "port":
        return min(max(6.4 * (len(box.op) + 1 + len(box.name)) + 20, WIDTH[0]), WIDTH[1])
    badge = 7.0 * (len(box.precision) + len(box.before))
    text = max(8.0 * len(box.op) + badge + 24 + (14 if box.bodies else 0), 6.4 * min(len(box.name), 30)) + 20
    return min(max(text, WIDTH[0]), WIDTH[1])


def _intern(text: str, strings: dict[str, int]) -> int:
    return strings.setdefault(text, len(strings))


def _box_row(box: Box, strings: dict[str, int]) -> dict[str, Any]:
    row: dict[str, Any] = {"op": _intern(box.op, strings), "name": box.name}
    if box.id != box.name:
        row["id"] = box.id
    for key, value, default in (
        ("p", box.precision, ""),
        ("b", box.before, ""),
        ("s", box.status, "same"),
        ("cast", int(box.kind == "cast"), 0),
        ("io", int(box.kind == "port"), 0),
        ("island", box.island, 0),
        ("rule", box.rule, ""),
        ("heat", None if box.heat is None else round(box.heat, 3), None),
    ):
        if value != default:
            row[key] = value
    if box.facts:
        row["facts"] = [
            [
                _intern(heading, strings),
                [
                    [_intern(label, strings), *(_intern(v, strings) for v in dict.fromkeys(values))]
                    for label, *values in rows
                ],
            ]
            for heading, rows in box.facts
        ]
    if box.bodies:
        row["bodies"] = [[_intern(name, strings), _level_of(graph, strings)] for name, graph in box.bodies]
    return row


def _fold_row(
    graph: Graph, fold: Fold, edges: list[tuple[int, int, str, str]], strings: dict[str, int]
) -> dict[str, Any]:
    boxes = [graph.boxes[k] for k in fold.boxes()]
    precisions = Counter(box.precision for box in boxes if box.kind == "node" and box.precision)
    casts = sum(box.kind == "cast" for box in boxes)
    statuses = Counter(box.status for box in boxes)
    first = boxes[0]
    alike = all(_kind(box) == _kind(first) and _kind(box) is not None for box in boxes)
    facts = [f"{n} {kind}" for kind, n in precisions.most_common()] + ([f"{casts} Casts"] if casts else [])
    facts += [f"{n} {kind}" for kind, n in statuses.most_common() if kind not in ("same", "retyped") and n - casts > 0]
    operators = Counter(box.op for box in boxes if box.kind == "node").most_common()
    kinds = ", ".join(op if n == 1 else f"{n} {op}" for op, n in operators[:4]) + (" …" if len(operators) > 4 else "")
    return {
        "fold": len(boxes),
        "title": common_prefix([box.name for box in boxes]) or kinds,
        "note": "; ".join(filter(None, (", ".join(facts), kinds))),
        "p": first.precision if alike else "",
        "b": first.before if alike else "",
        "s": first.status if alike else "mixed",
        "island": first.island if alike else 0,
        "mix": [] if alike else sorted(precisions.items()),
        "heat": max((box.heat for box in boxes if box.heat is not None), default=None),
        "level": _level(graph, fold.items, edges, strings),
    }


def common_prefix(names: Sequence[str]) -> str:
    """The longest common beginning of names that ends at a separator."""
    low, high = min(names), max(names)
    length = next((k for k, (x, y) in enumerate(zip(low, high, strict=False)) if x != y), min(len(low), len(high)))
    cut = max(low.rfind(mark, 0, length) for mark in "/.")
    return low[:cut].strip("/.") if cut > 0 else ""
