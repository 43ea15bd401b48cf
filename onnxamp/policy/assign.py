"""Assignment of what is still open: follow the inputs (O1), or the minimum cut (O2); then dissolve low regions without purpose."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from onnxamp.model.traffic import Traffic
from onnxamp.model.units import TypeGraph, Unit
from onnxamp.policy.cut import INFINITE, Network
from onnxamp.policy.legality import CONTROL_FLOW

# In units of two bytes per element: a 16-bit operand saves 1 against fp32, a Cast reads and writes 3.
_CAST = 3


@dataclasses.dataclass(frozen=True)
class Groups:
    """Units that share one label.

    Attributes:
        of: The group of each unit.
        members: The units of each group.
        low: The label of groups that are decided: whether they are 16-bit; open groups are absent.
    """

    of: dict[Unit, int]
    members: list[list[Unit]]
    low: dict[int, bool]


def follow_inputs(graph: TypeGraph, groups: Groups) -> dict[int, bool]:
    """Labels as autocast gives them: low if some operand is computed and none of those is fp32; constants do not vote."""
    low = dict(groups.low)
    voters: dict[int, set[int]] = collections.defaultdict(set)
    followers: dict[int, set[int]] = collections.defaultdict(set)
    for unit in graph.units:
        group = groups.of[unit]
        if group in groups.low:
            continue
        for read in unit.reads:
            writer = graph.writer.get(read.value)
            if writer is not None and (source := groups.of[writer]) != group:
                voters[group].add(source)
                followers[source].add(group)
    undecided = [group for group in range(len(groups.members)) if group not in low]
    # fp32 spreads from what is fp32 to what is open; what it does not reach and hears a low voter is low.
    pending = collections.deque(
        [group for group, is_low in low.items() if not is_low] + [group for group in undecided if not voters[group]]
    )
    for group in pending:
        low.setdefault(group, False)
    while pending:
        for follower in followers[pending.popleft()]:
            if follower not in low:
                low[follower] = False
                pending.append(follower)
    # Only cycles of open groups could be left without a decided voter; loops start from an initial value, which decides.
    pending = collections.deque(group for group, is_low in low.items() if is_low)
    while pending:
        for follower in followers[pending.popleft()]:
            if follower not in low:
                low[follower] = True
                pending.append(follower)
    return {group: low.get(group, False) for group in range(len(groups.members))}


def minimum_cut(
    graph: TypeGraph, groups: Groups, model: Traffic, prices: Mapping[Unit, int] | None = None
) -> dict[int, bool]:
    """Labels of least modelled traffic, given those already decided; a unit with a price pays it in 16 bits. Ties are fp32."""
    problem = _Problem(groups)
    for unit in graph.units:
        variable = problem.variable.get(groups.of[unit])
        if variable is not None:
            problem.network.add(variable, fp32=model.of_unit[unit], low=(prices or {}).get(unit, 0))
    for value, readers in graph.readers.items():
        writer = graph.writer.get(value)
        if writer is not None:
            problem.value(
                groups.of[writer], dict.fromkeys(groups.of[r] for r in readers), _CAST * model.elements(value)
            )
    labels = problem.network.solve()
    return {
        group: groups.low[group] if group in groups.low else labels[problem.variable[group]]
        for group in range(len(groups.members))
    }


class _Problem:
    """Builds the network: decided groups are no variables, they only add to the costs of their neighbours."""

    def __init__(self, groups: Groups) -> None:
        self.low = groups.low
        self.network = Network()
        self.variable = {
            group: self.network.variable() for group in range(len(groups.members)) if group not in groups.low
        }

    def value(self, writer: int, readers: dict[int, None], cost: int) -> None:
        """A Cast of the value costs `cost`, once for all readers whose label differs from the writer's."""
        others = [reader for reader in readers if reader != writer]
        if not others or not cost:
            return
        free = [self.variable[reader] for reader in others if reader not in self.low]
        decided = {self.low[reader] for reader in others if reader in self.low}
        for low_readers in (True, False):
            self._direction(writer, free, cost, low_readers, low_readers in decided)

    def _direction(self, writer: int, free: list[int], cost: int, to_low: bool, certain: bool) -> None:
        """The cost of the Cast to low (`to_low`) or to fp32; `certain` if a decided reader wants it whatever the others do."""
        network = self.network
        if writer in self.low:
            if self.low[writer] == to_low or certain or not free:
                return  # never needed, or always
            wants = free[0] if len(free) == 1 else self._any(free, to_low)
            network.add(wants, **{"low" if to_low else "fp32": cost})
            return
        source = self.variable[writer]
        if certain:
            network.add(source, **{"fp32" if to_low else "low": cost})
        elif free:
            wants = free[0] if len(free) == 1 else self._any(free, to_low)
            network.add_pair(*((source, wants) if to_low else (wants, source)), cost)

    def _any(self, readers: list[int], low: bool) -> int:
        """A variable that is low (fp32 if not `low`) as soon as one of the readers is."""
        auxiliary = self.network.variable()
        for reader in readers:
            self.network.add_pair(*((auxiliary, reader) if low else (reader, auxiliary)), INFINITE)
        return auxiliary


def dissolve(graph: TypeGraph, groups: Groups, low: dict[int, bool], anchors: set[Unit]) -> set[int]:
    """The low groups of regions that contain no anchor: nothing in them gains from 16 bits.

    A region is what hangs together through values and through the units of a node. The units of control flow are independent outputs and
    states, so one does not justify another.
    """
    neighbours: dict[int, list[int]] = collections.defaultdict(list)

    def join(a: int, b: int) -> None:
        if a != b and low[a] and low[b]:
            neighbours[a].append(b)
            neighbours[b].append(a)

    for value, readers in graph.readers.items():
        writer = graph.writer.get(value)
        if writer is not None:
            for reader in readers:
                join(groups.of[writer], groups.of[reader])
    for node, units in graph.of.items():
        for unit in units[1:] if graph.operators[node] not in CONTROL_FLOW else ():
            join(groups.of[units[0]], groups.of[unit])
    reached = {groups.of[unit] for unit in anchors if low[groups.of[unit]]}
    pending = list(reached)
    while pending:
        for group in neighbours[pending.pop()]:
            if group not in reached:
                reached.add(group)
                pending.append(group)
    return {group for group, is_low in low.items() if is_low and group not in reached}
