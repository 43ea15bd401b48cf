"""The fewest nodes whose move explains a new order."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from typing import Any


def moved(pairs: Sequence[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Pairs (old position, new position, key) outside a longest increasing subsequence.

    Among the longest, the choice rests on what exchanging old and new leaves alone: small displacements stay, then small
    keys. So the inverse order gives the same pairs. Time n log n.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0])
    tails: list[int] = []
    level: list[int] = []
    for _, new, _ in ordered:
        k = bisect.bisect_left(tails, new)
        tails[k : k + 1] = [new]
        level.append(k)
    groups: list[list[tuple[int, int, Hashable]]] = [[] for _ in tails]
    for pair, k in zip(ordered, level, strict=True):
        groups[k].append(pair)
    kept: set[tuple[int, int]] = set()
    after = (float("inf"), float("inf"))
    for group in reversed(groups):
        fits = [pair for pair in group if pair[0] < after[0] and pair[1] < after[1]]
        best = min(fits, key=lambda pair: (abs(pair[0] - pair[1]), pair[2]))
        kept.add(best[:2])
        after = best[:2]
    return [pair for pair in ordered if pair[:2] not in kept]
