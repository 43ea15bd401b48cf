"""Scale and bias behind a layer normalization that is written out: in which precision runtimes can fuse them with it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxamp.model.signatures import operator_name
from onnxamp.model.units import Read, Unit, producer
from onnxamp.policy import codes
from onnxamp.policy.decision import Decision
from onnxamp.policy.facts import Facts

# What the level decided, and nobody forbids the other way.
_FREE = frozenset(
    {codes.CUT_LOW, codes.CUT_FP32, codes.FOLLOWS_LOW, codes.FOLLOWS_FP32, codes.DISSOLVED, codes.LEVEL_O3}
)


def join_affine(facts: Facts, decisions: dict[Unit, Decision]) -> tuple[Read, ...]:
    """Give scale and bias the precision of the value that is normalized, where both have the other one.

    ONNX Runtime makes one LayerNormalization of ``Cast → (x − μ) / √(σ² + ε) → Cast → · scale → + bias``. It leaves the Casts out, so
    that x as it was before them and both constants must be of one type; if they are not, the model does not load. (It does not fuse
    scale and bias of two types.) Where the user, a rule or a missing kernel forbids that, the reads of the biases are returned, for
    `passes.unfuse` to keep the fusion off.
    """
    graph = facts.graph
    apart: list[Read] = []
    for data, affine in _affines(facts):
        writer = graph.writer.get(data)
        units = [unit for node in affine for unit in graph.of[node]]
        if writer is None or len(units) != len(affine):
            continue
        kind = decisions[writer].precision
        if any(decisions[unit].precision == kind for unit in units):
            continue
        if all(decisions[unit].code in _FREE for unit in units):
            decisions.update(dict.fromkeys(units, Decision(kind, codes.AFFINE, {"normalizes": data.name})))
        elif _is_alone(facts, data, kind, decisions):
            apart.extend(read for read in units[-1].reads if read.value in facts.constants)
    return tuple(apart)


def _is_alone(facts: Facts, data: ir.Value, kind: str, decisions: dict[Unit, Decision]) -> bool:
    """Whether only the normalization reads the Cast of `data`: else ONNX Runtime leaves the Cast where it is, and all types agree."""
    cast = [unit for unit in facts.graph.readers[data] if decisions[unit].precision != kind]
    return all(unit.node is not None and operator_name(unit.node) in ("ReduceMean", "Sub") for unit in cast)


def _affines(facts: Facts) -> Iterator[tuple[ir.Value, tuple[ir.Node, ir.Node]]]:
    """What each written-out layer normalization normalizes, and its product with a scale and its sum with a bias."""
    for node in facts.graph.nodes(("Div",)):
        deviation, root = producer(node.inputs[0]), producer(node.inputs[1])
        if deviation is None or root is None or (operator_name(deviation), operator_name(root)) != ("Sub", "Sqrt"):
            continue
        data, mean = deviation.inputs[0], producer(deviation.inputs[1])
        if data is None or mean is None or operator_name(mean) != "ReduceMean" or mean.inputs[0] is not data:
            continue
        product = _only_reader(facts, node, "Mul")
        total = _only_reader(facts, product, "Add") if product is not None else None
        if product is not None and total is not None:
            yield data, (product, total)


def _keeps_type(node: ir.Node) -> bool:
    """Whether this is a Cast to the type that its operand has."""
    source = node.inputs[0] if operator_name(node) == "Cast" else None
    return source is not None and source.dtype is not None and source.dtype == node.outputs[0].dtype


def _only_reader(facts: Facts, node: ir.Node, name: str) -> ir.Node | None:
    """The only node that reads the result of `node`, Casts of no effect aside, if it is that operator with a constant."""
    readers = list(node.outputs[0].consumers())
    while len(readers) == 1 and _keeps_type(readers[0]) and not node.outputs[0].is_graph_output():
        (node,) = readers  # ONNX Runtime takes it out before it fuses
        readers = list(node.outputs[0].consumers())
    if len(readers) != 1 or operator_name(readers[0]) != name or node.outputs[0].is_graph_output():
        return None
    others = [value for value in readers[0].inputs if value is not node.outputs[0]]
    return readers[0] if len(others) == 1 and facts.tensor(others[0]) is not None else None
