"""The plans of least traffic for their noise: among them a search of `convert --auto` looks for one that just meets the tolerance.

For every weight of noise against traffic there is one best plan (`Space.cheapest`); the larger the weight, the less noise is left in it.
The noise of a plan is the sum of the scores of its 16-bit nodes among those that may be turned. Its error goes with that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from onnxamp.evidence.space import Space

_STEPS = 12  # halvings between two weights
_DECADES = 8  # how far from one element per mean noise a weight may be


@dataclasses.dataclass(frozen=True)
class Point:
    """One plan of the frontier.

    Attributes:
        weight: Elements of traffic that a unit of noise is worth there.
        raised: What is fp32 and was not at O2.
        lowered: What is 16-bit and was not at O2.
        noise: The finite scores of the 16-bit nodes, added.
    """

    weight: float
    raised: tuple[str, ...]
    lowered: tuple[str, ...]
    noise: float

    def same(self, other: Point) -> bool:
        """Whether it is the same plan."""
        return (self.raised, self.lowered) == (other.raised, other.lowered)


class Frontier:
    """The plans by weight.

    Args:
        space: All plans.
        noise: Score of each node that may be turned.
    """

    def __init__(self, space: Space, noise: Mapping[str, float]) -> None:
        self.space = space
        self.noise = noise
        total = sum(score for score in noise.values() if math.isfinite(score))
        self._unit = space.elements / total if total else 1.0
        self._known: dict[float, Point] = {}

    def at(self, weight: float) -> Point:
        """The plan for a weight; infinite: the one with the least noise that raising can give."""
        if weight not in self._known:
            raised, lowered, low = self.space.cheapest(self.noise, weight)
            left = math.fsum(score for name, score in self.noise.items() if name in low and math.isfinite(score))
            self._known[weight] = Point(weight, raised, lowered, left)
        return self._known[weight]

    def between(self, noisy: Point, quiet: Point, aim: float) -> Point | None:
        """The plan between two with the most noise up to `aim`, else the one with the least beyond; None if there is no other."""
        low = math.log10(noisy.weight / self._unit) if noisy.weight else -_DECADES
        high = math.log10(quiet.weight / self._unit) if math.isfinite(quiet.weight) else _DECADES
        above, below = noisy, quiet
        for _ in range(_STEPS):
            middle = (low + high) / 2
            point = self.at(self._unit * 10**middle)
            if point.noise > aim:
                above, low = point, middle
            else:
                below, high = point, middle
        return next((point for point in (below, above) if not (point.same(noisy) or point.same(quiet))), None)
