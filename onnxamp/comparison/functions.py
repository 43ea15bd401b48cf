"""Functions that one of the models has inlined: the other's calls are inlined too, so that their nodes can be paired."""

from __future__ import annotations

import collections

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxamp.comparison.records import ModelChange
from onnxamp.model.units import all_nodes

Key = tuple[str, str, str]


def align(a: ir.Model, b: ir.Model) -> list[ModelChange]:
    """Inline, in place, what only one model has as a function and the other has inlined; says which these are.

    A function counts as inlined in a model that has neither the function nor a call of it, and at least as many more nodes
    of each operator as the calls of the other model hold. Else it was deleted, and nothing is done.
    """
    found = []
    for model, other, before in ((a, b, True), (b, a, False)):
        wanted = {key for key in model.functions if key not in other.functions and _inlined(key, model, other)}
        if not wanted:
            continue
        counts = {key: len(model.functions[key]) for key in sorted(wanted)}
        try:
            InlinePass(lambda function, wanted=wanted: function.identifier() in wanted)(model)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        except (ir.passes.PassError, RuntimeError, ValueError):
            continue  # what cannot be inlined is compared as it is
        for key, count in counts.items():
            texts = f"{count} nodes", "inlined"
            found.append(ModelChange(f"function {'::'.join(filter(None, key))}", *(texts if before else texts[::-1])))
    return found


def _inlined(key: Key, model: ir.Model, other: ir.Model) -> bool:
    calls = sum(node.op_identifier() == key for node in all_nodes(model.graph))
    if not calls or any(node.op_identifier() == key for node in all_nodes(other.graph)):
        return False
    ours, theirs = _operators(model), _operators(other)
    inside: collections.Counter[Key] = collections.Counter(n.op_identifier() for n in model.functions[key])
    return all(
        theirs[operator] >= ours[operator] + calls * count
        for operator, count in inside.items()
        if operator[1] not in ("Cast", "Constant") and operator not in model.functions
    )


def _operators(model: ir.Model) -> collections.Counter[Key]:
    return collections.Counter(node.op_identifier() for node in all_nodes(model.graph))
