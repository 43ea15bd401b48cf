"""Pairs the nodes and values of two models.

1. Interfaces pair by name, then by position; constants by recorded origin and by name; functions by identifier.
2. Nodes with the same operator are candidates that share a node name or a result's name, or a unique hash of all that
   is above or below them (`structure`). They are paired, what most speaks for first, if a hash is equal or at least half
   of the operands and results go by common names.
3. Structure spreads from what is paired: a value's readers (looked at through float Casts) pair if operator and operand
   make them unique, or their other operands do; so do the producers of paired nodes' operands.
4. Candidates that agree less pair if they are still free, then what only order tells apart (equal branches of unnamed
   nodes), then nodes of one name with different operators. Structure spreads again after each.
5. Float Casts pair at the end (`cast_pairs`).

Bodies of paired nodes are scopes that go through the same steps. Every step looks at an operand a bounded number of
times, so the whole is near-linear. No step prefers one of the two models: exchanging them gives the inverse pairs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxamp.comparison import structure
from onnxamp.comparison.cast_pairs import cast_pairs
from onnxamp.comparison.side import Scope, Side, attributes_key, bodies, operator

Reader = tuple[ir.Node, int]


class Match:
    """The pairs: `nodes`, `values` (of roots), each with its inverse, and `scopes`."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.nodes: dict[ir.Node, ir.Node] = {}
        self.nodes_back: dict[ir.Node, ir.Node] = {}
        self.values: dict[ir.Value, ir.Value] = {}
        self.values_back: dict[ir.Value, ir.Value] = {}
        self.scopes: list[tuple[Scope, Scope]] = []
        self._fresh: collections.deque[tuple[ir.Value, ir.Value]] = collections.deque()
        self._upward: collections.deque[tuple[ir.Node, ir.Node]] = collections.deque()
        self._ambiguous: dict[tuple[ir.Value, ir.Value], None] = {}
        self._weak: list[tuple[ir.Node, ir.Node]] = []
        self._ends: collections.deque[tuple[Scope, Scope]] = collections.deque()
        self._new_scopes: collections.deque[tuple[Scope, Scope]] = collections.deque()

        labels = [{label for value in side.constants for label in side.labels(value)} for side in (a, b)]
        self._constants = labels[0] & labels[1]
        for key in dict.fromkeys([*a.model.functions, *b.model.functions]):
            one, other = a.model.functions.get(key), b.model.functions.get(key)
            if one is not None and other is not None:
                self._pair_scopes(a.at(one), b.at(other))
        self._pair_scopes(a.at(a.model.graph), b.at(b.model.graph))
        self._settle()
        for node, candidate in self._weak:
            self._pair(node, candidate)
        self._settle()
        while self._ambiguous:
            pending, self._ambiguous = self._ambiguous, {}
            for value, counterpart in pending:
                self._spread(value, counterpart, last=True)
            self._settle()
        self._replaced()
        self._settle()
        casts = cast_pairs(a, b, self.values)
        self.nodes |= casts
        self.nodes_back |= {other: node for node, other in casts.items()}

    # Scopes

    def _pair_scopes(self, one: Scope, other: Scope) -> None:
        self.scopes.append((one, other))
        self._new_scopes.append((one, other))
        self._pair_interface(_real_inputs(one), _real_inputs(other))
        self._pair_constants(one, other)

    def _pair_interface(self, ours: list[ir.Value], theirs: list[ir.Value]) -> None:
        named = {v.name: v for v in theirs}
        left = []
        for value in ours:
            if value.name in named:
                self._pair_values(value, named.pop(value.name))
            else:
                left.append(value)
        for value, counterpart in zip(left, named.values(), strict=False):
            if _rank(value) == _rank(counterpart) and len(ours) == len(theirs):
                self._pair_values(value, counterpart)

    def _pair_constants(self, one: Scope, other: Scope) -> None:
        ours = {v.name: v for v in one.constants}
        theirs = {v.name: v for v in other.constants}
        for name, value in ours.items():
            if name in theirs:
                self._pair_values(value, theirs[name])
        for value in ours.values():
            origin = value.metadata_props.get("onnxamp.source")
            if origin in theirs:
                self._pair_values(value, theirs[origin])
        for value in theirs.values():
            origin = value.metadata_props.get("onnxamp.source")
            if origin in ours:
                self._pair_values(ours[origin], value)

    # Names

    def _candidates(self, one: Scope, other: Scope) -> None:
        """Pair by names and by equal structure, what most speaks for first."""
        common = self._common(one, other)
        ours, theirs = structure.hashes(self.a, one, common), structure.hashes(self.b, other, common)
        found: dict[tuple[ir.Node, ir.Node], float] = {}
        for mine, counterpart in zip(ours, theirs, strict=True):
            for node, candidate in structure.equal(mine, counterpart).items():
                found[node, candidate] = found.get((node, candidate), 0.0) + 1.0
        equal = set(found)
        for node, candidate, weight in self._namesakes(one, other):
            found[node, candidate] = found.get((node, candidate), 0.0) + weight
        scored = [
            (-evidence, -self._agreement(*pair), abs(self.a.index[pair[0]] - self.b.index[pair[1]]), pair)
            for pair, evidence in found.items()
        ]
        scored.sort(key=lambda item: item[:3])
        for _, agreement, _, pair in scored:
            if pair in equal or agreement <= -0.5:
                self._pair(*pair)
            else:
                self._weak.append(pair)

    def _common(self, one: Scope, other: Scope) -> set[str]:
        """Names of constants, inputs and outputs that both scopes know."""
        names = []
        for side, scope in ((self.a, one), (self.b, other)):
            values = [*scope.graph.inputs, *scope.graph.outputs]
            names.append({label for value in values for label in side.labels(value)})
        shared = names[0] & names[1]
        return self._constants | shared if shared else self._constants

    def _namesakes(self, one: Scope, other: Scope) -> Iterator[tuple[ir.Node, ir.Node, float]]:
        """Nodes of one operator with a common name or a result of a common name, and how much that says.

        A name that ends in a digit says less than structure does: exporters number names, and one more node shifts them.
        """
        names = [
            _unique(((operator(n), n.name), n) for n in scope.nodes if n.name and not side.is_cast(n))
            for side, scope in ((self.a, one), (self.b, other))
        ]
        for key, node in names[0].items():
            if key in names[1]:
                yield node, names[1][key], _weight(node.name or "")
        results: dict[Hashable, ir.Node] = {}
        for node in other.nodes:
            if not self.b.is_cast(node):
                for value in node.outputs:
                    for label in self.b.labels(value):
                        results.setdefault((operator(node), label), node)
        for node in one.nodes:
            if not self.a.is_cast(node):
                labels = {
                    label: results.get((operator(node), label)) for v in node.outputs for label in self.a.labels(v)
                }
                best: dict[ir.Node, float] = {}
                for label, candidate in labels.items():
                    if candidate is not None:
                        best[candidate] = max(best.get(candidate, 0.0), _weight(label))
                for candidate, weight in best.items():
                    yield node, candidate, weight

    def _agreement(self, node: ir.Node, candidate: ir.Node) -> float:
        """Share of operands, results and the node's name that agree by name or by a pair already made."""
        same = int(bool(node.name) and node.name == candidate.name)
        total = int(bool(node.name or candidate.name))
        for ours, theirs in _slots(node, candidate):
            total += 1
            same += self._alike(ours, theirs)
        for mine, other in zip(node.outputs, candidate.outputs, strict=False):
            if mine.name or other.name:
                total += 1
                same += not self.a.labels(mine).isdisjoint(self.b.labels(other))
        return same / total if total else 1.0

    def _alike(self, ours: ir.Value | None, theirs: ir.Value | None) -> bool:
        if ours is None or theirs is None:
            return ours is theirs
        mine, other = self.a.root(ours), self.b.root(theirs)
        if mine in self.values or other in self.values_back:
            return self.values.get(mine) is other
        return not self.a.labels(mine).isdisjoint(self.b.labels(other))

    # Structure

    def _pair_values(self, one: ir.Value, other: ir.Value) -> bool:
        if one in self.values or other in self.values_back:
            return self.values.get(one) is other
        self.values[one], self.values_back[other] = other, one
        self._fresh.append((one, other))
        return True

    def _pair(self, node: ir.Node, counterpart: ir.Node) -> None:
        if node in self.nodes or counterpart in self.nodes_back:
            return
        self.nodes[node], self.nodes_back[counterpart] = counterpart, node
        for mine, other in zip(node.outputs, counterpart.outputs, strict=False):
            self._pair_values(mine, other)
        theirs = dict(bodies(counterpart))
        for name, body in bodies(node):
            if name in theirs:
                self._pair_scopes(self.a.at(body), self.b.at(theirs[name]))
        self._upward.append((node, counterpart))

    def _settle(self) -> None:
        """Names of new scopes, then structure, until nothing follows."""
        while self._new_scopes or self._fresh or self._upward or self._ends:
            if self._new_scopes:
                scopes = self._new_scopes.popleft()
                self._candidates(*scopes)
                self._ends.append(scopes)
            elif self._fresh:
                self._spread(*self._fresh.popleft(), last=False)
            elif self._upward:
                self._climb(*self._upward.popleft())
            else:
                self._pair_results(*self._ends.popleft())

    def _free(self, side: Side, value: ir.Value) -> list[Reader]:
        taken: dict[ir.Node, ir.Node] = self.nodes if side is self.a else self.nodes_back
        return [reader for reader in side.readers.get(value, ()) if reader[0] not in taken]

    def _spread(self, value: ir.Value, counterpart: ir.Value, last: bool) -> None:
        """Pair the readers of two paired values."""
        ours, theirs = self._free(self.a, value), self._free(self.b, counterpart)
        if not ours or not theirs:
            return
        groups = _group(theirs, _place)
        rest = False
        for place, mine in _group(ours, _place).items():
            others = groups.get(place, [])
            if len(mine) == 1 and len(others) == 1:
                if self._plausible(mine[0][0], others[0][0]):
                    self._pair(mine[0][0], others[0][0])
            elif others:
                rest |= not self._tell_apart(mine, others, last)
        if rest and not last:
            self._ambiguous[value, counterpart] = None

    def _tell_apart(self, ours: list[Reader], theirs: list[Reader], last: bool) -> bool:
        """Pair readers with the same operator and operand number by their other operands; at the end, by their order."""
        numbered = {v: k for k, v in enumerate(dict.fromkeys(self._paired_operands(ours)))}
        mine = _group(ours, lambda reader: self._key(self.a, reader[0], numbered, self.values))
        other = _group(theirs, lambda reader: self._key(self.b, reader[0], numbered, None))
        done = True
        for key, group in mine.items():
            match = other.get(key, [])
            if len(group) == 1 == len(match) or (last and len(group) == len(match)):
                for (node, _), (candidate, _) in zip(group, match, strict=True):
                    self._pair(node, candidate)
            else:
                done = False
        return done

    def _paired_operands(self, readers: Iterable[Reader]) -> Iterable[ir.Value]:
        for node, _ in readers:
            for value in node.inputs:
                if value is not None and (found := self.values.get(self.a.root(value))) is not None:
                    yield found

    def _key(
        self, side: Side, node: ir.Node, numbered: dict[ir.Value, int], forward: dict[ir.Value, ir.Value] | None
    ) -> Hashable:
        operands: list[Hashable] = []
        for value in node.inputs:
            if value is None:
                operands.append(None)
                continue
            root = side.root(value)
            paired = forward.get(root) if forward is not None else root
            if paired is not None and paired in numbered:
                operands.append(numbered[paired])
            elif root in side.constants:
                operands.append(_fingerprint(side.constants[root]))
            else:
                producer = root.producer()
                operands.append(operator(producer) if producer is not None else "")
        return (tuple(operands), len(node.outputs), attributes_key(node))

    def _plausible(self, node: ir.Node, candidate: ir.Node) -> bool:
        """Whether at most half of the operands are known to be others.

        An operand that is paired while its counterpart is not counts half: a node may have been inserted above it.
        """
        total = wrong = 0.0
        for ours, theirs in _slots(node, candidate):
            total += 1
            if ours is None or theirs is None:
                wrong += ours is not theirs
                continue
            mine, other = self.a.root(ours), self.b.root(theirs)
            known = (mine in self.values) + (other in self.values_back)
            if known and self.values.get(mine) is not other:
                wrong += known / 2
        return 2 * wrong <= total

    def _climb(self, node: ir.Node, counterpart: ir.Node) -> None:
        """Pair the operands of two paired nodes, and what produces them."""
        for ours, theirs in _slots(node, counterpart):
            if ours is not None and theirs is not None:
                self._pair_producers(ours, theirs)

    def _pair_producers(self, ours: ir.Value, theirs: ir.Value) -> None:
        mine, other = self.a.root(ours), self.b.root(theirs)
        if mine in self.values or other in self.values_back:
            return
        one, two = mine.producer(), other.producer()
        if mine in self.a.constants and other in self.b.constants:
            self._pair_values(mine, other)
        elif (
            one is not None
            and two is not None
            and mine not in self.a.constants
            and other not in self.b.constants
            and operator(one) == operator(two)
            and mine.index() == other.index()
            and self._plausible(one, two)
        ):
            self._pair(one, two)

    def _pair_results(self, one: Scope, other: Scope) -> None:
        """Pair what produces the outputs of two scopes: by name in the main graph, by position in bodies."""
        named = {v.name: v for v in other.graph.outputs} if not one.path else {}
        if any(v.name in named for v in one.graph.outputs):
            pairs = [(v, named[v.name]) for v in one.graph.outputs if v.name in named]
        else:
            pairs = list(zip(one.graph.outputs, other.graph.outputs, strict=False))
        for ours, theirs in pairs:
            self._pair_producers(ours, theirs)

    def _replaced(self) -> None:
        """Nodes of one name whose operator changed."""
        for one, other in self.scopes:
            ours = _unique((n.name, n) for n in one.nodes if n.name and n not in self.nodes and not self.a.is_cast(n))
            theirs = _unique(
                (n.name, n) for n in other.nodes if n.name and n not in self.nodes_back and not self.b.is_cast(n)
            )
            for name, node in ours.items():
                if name in theirs and self._agreement(node, theirs[name]) > 0.5:
                    self._pair(node, theirs[name])


def _weight(name: str) -> float:
    return 0.4 if name[-1:].isdigit() else 0.9


def _real_inputs(scope: Scope) -> list[ir.Value]:
    """Inputs that are no initializers."""
    return [v for v in scope.graph.inputs if not v.is_initializer()]


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else value.shape.rank()


def _slots(node: ir.Node, counterpart: ir.Node) -> Sequence[tuple[ir.Value | None, ir.Value | None]]:
    """Operands side by side; a missing one is None, and pairs of missing ones are left out."""
    count = max(len(node.inputs), len(counterpart.inputs))
    ours = [*node.inputs, *[None] * (count - len(node.inputs))]
    theirs = [*counterpart.inputs, *[None] * (count - len(counterpart.inputs))]
    return [pair for pair in zip(ours, theirs, strict=True) if pair != (None, None)]


def _place(reader: Reader) -> Hashable:
    return (operator(reader[0]), reader[1])


def _group(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _unique(items: Iterable[tuple[Hashable, ir.Node]]) -> dict[Hashable, ir.Node]:
    """Keys that occur once."""
    found: dict[Hashable, ir.Node] = {}
    twice = set()
    for key, node in items:
        if key in found:
            twice.add(key)
        found[key] = node
    for key in twice:
        del found[key]
    return found


def _fingerprint(tensor: ir.TensorProtocol) -> Hashable:
    """Tells constants apart whatever float type holds them: shape, and up to 64 leading values to two digits."""
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype == ir.DataType.STRING or tensor.size > 64:
        return shape
    values = tensor.numpy().astype("float64").ravel()
    return (shape, tuple(float(f"{v:.2g}") for v in values))
