"""What the user asks of single nodes: keep and lower, by node, module scope or operator, and decisions from a policy file."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.model import dimensions
from onnxamp.model.modules import scopes
from onnxamp.model.signatures import operator_name
from onnxamp.model.units import TypeGraph, all_values, named_bodies
from onnxamp.policy import codes
from onnxamp.policy.operators import OPERATORS
from onnxamp.policy.options import Options, matches

# A pattern of higher rank decides; of one rank, the command line before the policy file.
_EXACT, _PATTERN, _OPERATOR, _ALL = 4, 3, 2, 1


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user wants of one node.

    Attributes:
        low: Whether it should be 16-bit.
        code: The code of the decision.
        pattern: The pattern that matched.
        exact: Whether the command line names this very node.
    """

    low: bool
    code: str
    pattern: str
    exact: bool


@dataclasses.dataclass
class _Entry:
    low: bool
    pattern: str
    rank: int
    code: str
    used: bool = False

    @property
    def from_file(self) -> bool:
        return self.code == codes.POLICY_FILE

    @property
    def weight(self) -> tuple[int, bool]:
        return self.rank, not self.from_file

    def matches(self, node: ir.Node, place: str) -> bool:
        if self.rank == _OPERATOR:
            return self.pattern in (node.op_type, operator_name(node))
        return self.rank == _ALL or any(matches(self.pattern, name) for name in (label(node), place, *scopes(node)))


def label(node: ir.Node) -> str:
    """What a node is called: its name, or that of its first output."""
    return node.name or next((value.name for value in node.outputs if value.name), "") or ""


def places(graph: ir.Graph, around: str = "") -> Iterator[tuple[ir.Node, str]]:
    """Each node with its label behind those of the nodes and branches around it: ``if/then_branch/matmul``.

    Names in sibling bodies may repeat; places tell them apart.
    """
    for node in graph:
        yield node, f"{around}{label(node)}"
        for name, body in named_bodies(node):
            yield from places(body, f"{around}{label(node)}/{name}/")


def check_dims(graph: ir.Graph, dims: Collection[str]) -> None:
    """See that each is the name of a dimension of some value.

    Raises:
        UsageError: One is not.
    """
    found = dimensions.known(all_values(graph)) if dims else set()
    for name in dims:
        if name not in found:
            raise UsageError(f"The model has no dimension {name!r}{nearest(name, found)}")


def nearest(name: str, known: Collection[str]) -> str:
    """What to say of a name that is not known: the one that it may be."""
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


def wishes(graph: TypeGraph, options: Options) -> dict[ir.Node, Wish]:
    """What the user asked for, for every node that some pattern matches; the most specific pattern decides.

    Raises:
        UsageError: A pattern matches no node, no such operator is known, or keep and lower match one node equally specifically.
    """
    if not any((options.keep, options.lower, options.keep_op, options.lower_op, options.policy)):
        return {}
    place = dict(places(graph.model.graph))
    found = {name for node in graph.of for name in (label(node), place[node])}
    _check_operators(graph, options)
    entries = [
        *(_entry(pattern, False, found) for pattern in options.keep),
        *(_entry(pattern, True, found) for pattern in options.lower),
        *(_Entry(False, op, _OPERATOR, codes.KEEP) for op in options.keep_op),
        *(_Entry(True, op, _OPERATOR, codes.LOWER) for op in options.lower_op),
        *_file_entries(options, found),
    ]
    result = {}
    for node in graph.of:
        best: _Entry | None = None
        for entry in entries:
            if not entry.matches(node, place[node]):
                continue
            entry.used = True
            if best is None or entry.weight > best.weight:
                best = entry
            elif entry.weight == best.weight and entry.low != best.low:
                keep, lower = sorted((entry, best), key=lambda e: e.low)
                raise UsageError(
                    f"Node {label(node)!r} is asked to stay fp32 by {keep.pattern!r} and to become {options.dtype} by "
                    f"{lower.pattern!r}, which is just as specific: make one of them more specific."
                )
        if best is not None:
            result[node] = Wish(best.low, best.code, best.pattern, best.weight == (_EXACT, True))
    for entry in entries:
        if not entry.used and entry.rank not in (_OPERATOR, _ALL):
            kind = "policy file's" if entry.from_file else "lower" if entry.low else "keep"
            raise UsageError(
                f"The {kind} pattern {entry.pattern!r} matches no node that computes with floats"
                f"{nearest(entry.pattern, found)} See the names with `onnxamp inspect`."
            )
    return result


def _check_operators(graph: TypeGraph, options: Options) -> None:
    """An operator that the model lacks is no mistake, one that does not exist is.

    Raises:
        UsageError: No such operator is known.
    """
    asked = (*options.keep_op, *options.lower_op)
    if not asked:
        return
    here = {name for node in graph.signatures for name in (node.op_type, operator_name(node))}
    known = {*here, *OPERATORS, *(name.rpartition(".")[2] for name in OPERATORS)}
    for op in asked:
        if op not in known:
            raise UsageError(
                f"There is no operator {op!r} in the model or in the table of operators{nearest(op, known)}"
            )


def _entry(pattern: str, low: bool, found: set[str]) -> _Entry:
    code = codes.LOWER if low else codes.KEEP
    if pattern == "*":
        return _Entry(low, pattern, _ALL, code)
    if pattern in found:  # an exact name may hold characters that a glob would interpret
        return _Entry(low, f"re:{re.escape(pattern)}", _EXACT, code)
    return _Entry(low, pattern, _EXACT if _is_plain(pattern) else _PATTERN, code)


def _is_plain(pattern: str) -> bool:
    return not pattern.startswith("re:") and not any(character in pattern for character in "*?[")


def _file_entries(options: Options, found: set[str]) -> Iterator[_Entry]:
    for pattern, precision in options.policy:
        entry = _entry(pattern, precision != "fp32", found)
        entry.code = codes.POLICY_FILE
        yield entry
