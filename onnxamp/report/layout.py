"""A layered layout: boxes in rows below what they read, edges routed through the gaps.

Rows are longest paths; the order in a row comes from barycentres of the neighbours, the positions from least squares under
the condition that boxes do not overlap (isotonic regression). Edges over several rows get a bend point in each.
After Sugiyama, Tagawa and Toda (1981). Time is linear in boxes and bend points, which are limited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

GAP = 24.0  # between neighbours in a row
BEND = 14.0  # room for an edge that passes a row
SWEEPS = 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are.

    Attributes:
        rows: Item numbers of each row from left to right; an item is a box, or a bend point from `len(boxes)` on.
        centers: Horizontal centre of each item.
        routes: For each edge the bend points that it passes, from its source to its target.
    """

    rows: list[list[int]]
    centers: list[float]
    routes: list[list[int]]


def layout(widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes 0..n-1 in topological order.

    Args:
        widths: Width of each box.
        edges: (source, target); edges that do not go forward do not count.
    """
    count = len(widths)
    row = [0] * count
    for source, target in sorted((e for e in edges if e[0] < e[1]), key=lambda edge: edge[1]):
        row[target] = max(row[target], row[source] + 1)
    _sink(row, edges)
    # Long edges first lose their bends if there are too many.
    budget = 4 * count + 2000
    order = sorted(range(len(edges)), key=lambda k: row[edges[k][1]] - row[edges[k][0]])
    routes: list[list[int]] = [[] for _ in edges]
    rows: list[list[int]] = [[] for _ in range(max(row, default=-1) + 1)]
    for item, r in enumerate(row):
        rows[r].append(item)
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    sizes = list(widths)
    for k in order:
        source, target = edges[k]
        span = row[target] - row[source] - 1
        if source >= target or span < 0:
            continue
        if span > budget:
            span = 0
        budget -= span
        last = source
        for r in range(row[source] + 1, row[source] + 1 + span):
            item = len(sizes)
            sizes.append(BEND)
            up.append([])
            down.append([])
            rows[r].append(item)
            routes[k].append(item)
            _join(up, down, last, item)
            last = item
        _join(up, down, last, target)
    centers = [0.0] * len(sizes)
    for items in rows:
        _place(items, [0.0] * len(items), sizes, centers)
    for sweep in range(SWEEPS):
        for items in rows if sweep % 2 == 0 else reversed(rows):
            near = up if sweep % 2 == 0 else down
            wish = {i: _mean([centers[j] for j in near[i]], centers[i]) for i in items}
            items.sort(key=wish.__getitem__)
            _place(items, [wish[i] for i in items], sizes, centers)
    for items in rows:
        both = [_mean([centers[j] for j in (*up[i], *down[i])], centers[i]) for i in items]
        _place(items, both, sizes, centers)
    return Layout(rows, centers, routes)


def _sink(row: list[int], edges: Sequence[tuple[int, int]]) -> None:
    """Move boxes without predecessors down to just above their first reader."""
    first: dict[int, int] = {}
    fed = {target for source, target in edges if source < target}
    for source, target in edges:
        if source < target:
            first[source] = min(first.get(source, row[target]), row[target])
    for item, below in first.items():
        if item not in fed:
            row[item] = max(row[item], below - 1)


def _join(up: list[list[int]], down: list[list[int]], above: int, below: int) -> None:
    down[above].append(below)
    up[below].append(above)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _place(items: list[int], wish: list[float], sizes: Sequence[float], centers: list[float]) -> None:
    """Centres nearest to `wish` (least squares) that keep the order and leave `GAP` between neighbours."""
    offset, at = [], 0.0
    for k, item in enumerate(items):
        if k:
            at += (sizes[items[k - 1]] + sizes[item]) / 2 + GAP
        offset.append(at)
    blocks: list[tuple[float, int]] = []  # (mean, members): pool adjacent violators
    for k in range(len(items)):
        mean, members = wish[k] - offset[k], 1
        while blocks and blocks[-1][0] >= mean:
            other, n = blocks.pop()
            mean, members = (mean * members + other * n) / (members + n), members + n
        blocks.append((mean, members))
    k = 0
    for mean, members in blocks:
        for _ in range(members):
            centers[items[k]] = mean + offset[k]
            k += 1
