"""Policy files: the decision for every node as TOML, to read, edit and give back.

    [nodes]
    "/encoder/attention/Softmax" = "fp32"  # AMP101 sensitive operator
    "/encoder/attention/MatMul" = "low"    # AMP002 heavy operator

A key is a node's name or a pattern, as for --keep; a value is ``fp32`` or ``low``. A node in a body whose name others have too goes by its
place, ``if/then_branch/name``.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable

from onnxamp import config
from onnxamp.errors import UsageError
from onnxamp.policy.pages import title
from onnxamp.policy.plan import Plan
from onnxamp.policy.user import label, places


def read_policy(path: str | os.PathLike[str]) -> tuple[tuple[str, str], ...]:
    """The (pattern, ``fp32`` or ``low``) pairs of a policy file.

    Raises:
        UsageError: The file cannot be read, is not TOML, or holds something else.
    """
    content = config.read(path)
    where = os.fspath(path)
    config.check_names(content, ["nodes"], where)
    nodes = content.get("nodes", {})
    if not isinstance(nodes, dict):
        raise UsageError(f"'nodes' in {where} is no table: write [nodes] and one line a node.")
    pairs = []
    for pattern, precision in nodes.items():
        if precision not in ("fp32", "low"):
            raise UsageError(f"{pattern!r} in {where} is {precision!r}: use fp32 or low.")
        pairs.append((pattern, precision))
    return tuple(pairs)


def plan_text(plan: Plan) -> str:
    """A policy file of the decision for every node of `plan`, with its reason as a comment.

    Raises:
        UsageError: Two nodes with one name have different decisions.
    """
    options = plan.options
    lines = [f"# level {options.level}, {options.dtype}, target {options.target}", "", "[nodes]"]
    place = dict(places(plan.graph.model.graph))
    shared = collections.Counter(label(node) for node in plan.nodes)
    seen: dict[str, str] = {}
    for node, decision in plan.nodes.items():
        name = label(node) if shared[label(node)] == 1 else place[node]
        value = "fp32" if decision.precision == "fp32" else "low"
        if name in seen:
            if seen[name] != value:
                raise UsageError(
                    f"Two nodes are called {name!r} and have different decisions, which a policy file cannot say: "
                    "give the nodes of the model names of their own."
                )
            continue
        seen[name] = value
        lines.append(
            f'{config.toml_string(name)} = "{value}"  # {node.op_type}: {decision.code} {title(decision.code)}'
        )
    return "\n".join(lines) + "\n"


def policy_text(pairs: Iterable[tuple[str, str]], comments: Iterable[str]) -> str:
    """A policy file of single (node or pattern, ``fp32`` or ``low``) pairs, in their order."""
    lines = [*(f"# {comment}" for comment in comments), "", "[nodes]"]
    lines += [f'{config.toml_string(name)} = "{precision}"' for name, precision in pairs]
    return "\n".join(lines) + "\n"
