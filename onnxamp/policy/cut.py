"""Minimum cut: the cheapest labelling of variables with two labels, fp32 and low.

The cost of a labelling is a sum of terms of one variable and of pairs::

    sum_v cost_low[v] * [v low]  +  sum_(u,v) cost[u, v] * [u fp32 and v low],   cost >= 0

Variables with at most two neighbours are eliminated first, exactly: the best cost of such a variable is a function of its neighbours'
labels and folds into their terms. Chains, trees and series-parallel graphs so vanish in linear time; what is left is a maximum flow.
Of all cheapest labellings the one with the most fp32 is taken.
"""

from __future__ import annotations

import collections
import math

import numpy as np
import numpy.typing as npt

from onnxamp.errors import InternalError

# Above every sum of costs that a graph can have (bytes), and far below what a float would round.
INFINITE = 1 << 100
# scipy's maximum flow counts in int32 and wraps without a word: the finite capacities together stay below this.
_FLOW_LIMIT = 1 << 29


class Network:
    """The terms of a labelling problem; `solve` empties it."""

    def __init__(self) -> None:
        self.cost_low: list[int] = []
        self.pairs: list[dict[int, int]] = []

    def variable(self) -> int:
        """A new variable."""
        self.cost_low.append(0)
        self.pairs.append({})
        return len(self.cost_low) - 1

    def add(self, variable: int, *, low: int = 0, fp32: int = 0) -> None:
        """`variable` costs `low` when it is low, `fp32` when it is fp32."""
        self.cost_low[variable] += low - fp32

    def add_pair(self, fp32: int, low: int, cost: int) -> None:
        """It costs `cost` that variable `fp32` is fp32 while variable `low` is low."""
        self.pairs[fp32][low] = min(self.pairs[fp32].get(low, 0) + cost, INFINITE)
        self.pairs[low].setdefault(fp32, 0)

    def solve(self) -> list[bool]:
        """Whether each variable is low."""
        count = len(self.cost_low)
        label: list[bool | None] = [None] * count
        eliminated = self._eliminate()
        core = [v for v in range(count) if v not in eliminated]
        if core:
            for v, low in zip(core, self._flow(core), strict=True):
                label[v] = low
        for v, (cost_low, terms) in reversed(eliminated.items()):
            cost_fp32 = 0
            for neighbour, if_neighbour_low, if_neighbour_fp32 in terms:
                if label[neighbour]:
                    cost_fp32 += if_neighbour_low
                else:
                    cost_low += if_neighbour_fp32
            label[v] = cost_low < cost_fp32
        return [bool(low) for low in label]

    def _eliminate(self) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
        """Remove variables of degree two or less; what each saw when it went, in order."""
        eliminated: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        pending = collections.deque(v for v in range(len(self.pairs)) if len(self.pairs[v]) <= 2)
        while pending:
            v = pending.popleft()
            if v in eliminated or len(self.pairs[v]) > 2:
                continue
            cost_low = self.cost_low[v]
            terms = [(n, cost, self.pairs[n].pop(v)) for n, cost in self.pairs[v].items()]
            self.pairs[v] = {}
            eliminated[v] = (cost_low, terms)
            if len(terms) == 1:
                ((a, fp32_low, low_fp32),) = terms
                self.cost_low[a] += min(fp32_low, cost_low) - min(0, cost_low + low_fp32)
            elif len(terms) == 2:
                self._fold(cost_low, *terms)
            pending.extend(n for n, _, _ in terms if len(self.pairs[n]) <= 2)
        return eliminated

    def _fold(self, cost_low: int, first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
        """Replace a variable between two by the pair of its neighbours, f(a, b) = min over its label."""
        a, va, av = first
        b, vb, bv = second
        f00 = min(0, cost_low + av + bv)
        f01 = min(vb, cost_low + av)
        f10 = min(va, cost_low + bv)
        f11 = min(va + vb, cost_low)
        rise, if_a, if_b = f11 - f00, f10 - f00, f01 - f00
        # rise = alpha + beta with alpha <= if_a and beta <= if_b; both finite, since f00 and f11 are
        alpha = if_a if if_a < INFINITE // 2 else (rise - if_b if if_b < INFINITE // 2 else rise)
        beta = rise - alpha
        self.cost_low[a] += alpha
        self.cost_low[b] += beta
        for fp32, low, cost in ((a, b, if_b - beta), (b, a, if_a - alpha)):
            self.add_pair(fp32, low, INFINITE if cost >= INFINITE // 2 else cost)

    def _flow(self, core: list[int]) -> list[bool]:
        """Label what is left by a maximum flow from fp32 (source) to low (sink)."""
        import scipy.sparse.csgraph  # a quarter of the time in which onnxamp starts, and most graphs leave nothing

        index = {v: i for i, v in enumerate(core)}
        source, sink = len(core), len(core) + 1
        edges: list[tuple[int, int, int]] = []
        for v, i in index.items():
            cost = self.cost_low[v]
            if cost > 0:
                edges.append((source, i, cost))
            elif cost < 0:
                edges.append((i, sink, -cost))
            edges.extend((i, index[n], cost) for n, cost in self.pairs[v].items() if cost > 0)
        if not edges:
            return [False] * len(core)
        capacity = capacities([cost for _, _, cost in edges])
        ends = np.array([(start, end) for start, end, _ in edges], np.int32).T
        graph = scipy.sparse.coo_array((capacity, (ends[0], ends[1])), shape=(len(core) + 2, len(core) + 2)).tocsr()
        if graph.nnz != len(edges) or graph.data.min() <= 0:
            raise InternalError(f"The minimum cut lost edges: {graph.nnz} of {len(edges)} arrived in the flow problem.")
        flow = scipy.sparse.csgraph.maximum_flow(graph, source, sink).flow
        residual = (graph - flow).tocsr()
        residual.data = np.where(residual.data > 0, residual.data, 0)
        residual.eliminate_zeros()
        # Low is only what can still reach the sink: the smallest low side, so ties are fp32.
        reaching = scipy.sparse.csgraph.breadth_first_order(
            residual.T.tocsr(), sink, directed=True, return_predecessors=False
        )
        low = np.zeros(len(core) + 2, bool)
        low[reaching] = True
        return [bool(x) for x in low[: len(core)]]


def capacities(costs: list[int]) -> npt.NDArray[np.int32]:
    """Costs as int32 capacities: one common factor for all, none lost, infinite ones above the sum of the others."""
    finite = [cost for cost in costs if cost < INFINITE // 2]
    divisor = math.gcd(*finite) or 1
    total = sum(finite) // divisor
    scale = max(1.0, total / (_FLOW_LIMIT - len(finite)))
    scaled = [max(1, round(cost // divisor / scale)) if cost < INFINITE // 2 else 0 for cost in costs]
    above = sum(scaled) + 1
    return np.array([cost or above for cost in scaled], np.int32)
