"""The reverse walk: from gradients of some values to gradients of others, as nodes appended to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import onnx
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.registry import Gradients, gradient, rule_of, stops
from onnxamp.errors import InternalError, UnsupportedError, few

_Definition = TypeVar("_Definition", bound=Callable[[Builder, ir.Node], Sequence[ir.Value | None]])


def backward(
    graph: ir.Graph,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    *,
    opset_imports: dict[str, int] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Append to `graph` the nodes that compute the gradients of `wrt`.

    With y the keys of `seeds` and s their values, the result holds Σ_y (∂y/∂x)ᵀ s for each x of `wrt` that reaches a y.

    1. Only nodes between `wrt` and the keys of `seeds` are differentiated; the others may be any operators.
    2. A gradient has the type and shape of its value. Its nodes run in the type of their forward node; an operator
       without a 16-bit kernel or schema is computed in FP32 between Casts; the gradient of a Cast is a Cast.
    3. Backward nodes carry the metadata `onnxamp.backward` (name of the forward node) and inherit `onnxamp.precision`
       and `onnxamp.code`. The gradient of value ``v`` is called ``grad/v`` where the name is free.
    4. Forward values are reused and no node is emitted twice, so two values may share one gradient value.

    Args:
        graph: Typed graph in topological order, functions inlined, opset 13 or later.
        seeds: Gradient of some scalar with respect to values of `graph`, each of its value's type and shape.
        wrt: Values of `graph`: inputs, initializers or intermediate ones.
        opset_imports: Opsets, when `graph` does not carry them.

    Returns:
        The gradient of each of `wrt`; values that receive none are absent.

    Raises:
        UnsupportedError: Operators, or operands of operators, on the way without a rule (all of them, with node names), or
            an unknown shape that a gradient needs.
    """
    nodes = list(graph)
    order = _supported_path(nodes, seeds, wrt)
    op = Builder(graph, opset_imports)
    result = _walk(op, order, active(nodes, wrt), seeds, wrt)
    op.prune(result.values())
    return result


def through(
    op: Builder,
    outputs: Sequence[ir.Value | None],
    gradients: Sequence[ir.Value | None],
    inputs: Sequence[ir.Value | None],
) -> list[ir.Value | None]:
    """Gradients of an operator that a rule has written out in simpler ones.

    Args:
        op: The builder of the rule.
        outputs: The results of the simpler operators, one for each output of the node; None, or fewer, where they do not give it.
        gradients: The gradient of each, or None.
        inputs: What the simpler operators read; None and values that are not wanted get None.
    """
    given = [position for position, value in enumerate(outputs) if value is not None]
    op.refuse(
        any(g is not None and position not in given for position, g in enumerate(gradients)),
        "a gradient of its further outputs",
    )
    seeds: dict[ir.Value, ir.Value] = {}
    for value, g in zip(outputs, gradients, strict=False):
        if g is not None and value is not None:
            seeds[value] = op.Add(seeds[value], g) if value in seeds else g
    wrt = list(dict.fromkeys(v for position, v in enumerate(inputs) if v is not None and position in op.wanted))
    nodes = _between(op.graph, seeds, set(wrt))
    order = _supported_path(nodes, seeds, wrt)
    with op.nested():
        result = _walk(op, order, active(nodes, wrt), seeds, wrt)
    # A value that is read twice has one gradient, which already is the sum of both.
    found: list[ir.Value | None] = []
    for position, entry in enumerate(inputs):
        found.append(result.pop(entry, None) if entry is not None and position in op.wanted else None)
    return found


def defined(
    op_type: str, domain: str = "", *, inputs: Sequence[int] | None = None, zero: Sequence[int] = ()
) -> Callable[[_Definition], _Definition]:
    """Register the gradient rule of an operator by what the operator is in simpler ones.

    The decorated function is called as ``definition(op, node)`` and appends nodes that compute the outputs of `node` from its inputs;
    these are differentiated. Like a rule it may refuse; the arguments are those of `gradient`.
    """

    def register(definition: _Definition) -> _Definition:
        @gradient(op_type, domain, inputs=inputs, zero=zero)
        def rule(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
            outputs = list(definition(op, node))
            for value, original in zip(outputs, node.outputs, strict=False):
                if value is not None and original.shape is not None:
                    value.shape = original.shape
            return through(op, outputs, gradients, node.inputs)

        return definition

    return register


def _walk(
    op: Builder,
    order: Sequence[ir.Node],
    reached: set[ir.Value],
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Visit the nodes of `order` from the last to the first and give the gradients of `wrt`."""
    pending: dict[ir.Value, list[ir.Value]] = {value: [seed] for value, seed in seeds.items()}
    done: dict[ir.Value, ir.Value] = {}
    for node in reversed(order):
        gradients = [_total(op, value, pending, done) for value in node.outputs]
        if all(g is None for g in gradients):
            continue
        op.enter(node)
        for value, g in _differentiate(op, node, gradients, reached):
            pending.setdefault(value, []).append(g)
    result = {}
    for value in wrt:
        op.enter(value.producer())
        total = _total(op, value, pending, done)
        if total is not None:
            result[value] = total
    return result


def _between(graph: ir.Graph, targets: Iterable[ir.Value], sources: set[ir.Value]) -> list[ir.Node]:
    """The nodes of `graph` that `targets` are computed with, in topological order, not going past `sources`."""
    order: dict[ir.Node, None] = {}
    made = {value: node for value in targets if (node := value.producer()) is not None and node.graph is graph}
    stack = [(node, False) for value, node in made.items() if value not in sources]
    while stack:
        node, visited = stack.pop()
        if visited:
            order[node] = None
        elif node not in order:
            stack.append((node, True))
            for value in [*node.inputs, *captured(node)]:
                if value is None or value in sources:
                    continue
                before = value.producer()
                if before is not None and before.graph is graph:
                    stack.append((before, False))
    return list(order)


def differentiable_path(
    nodes: Sequence[ir.Node], targets: Iterable[ir.Value], wrt: Iterable[ir.Value]
) -> list[ir.Node]:
    """The nodes, in order, through which a change of `wrt` reaches `targets` with a derivative that is not zero."""
    reached = active(nodes, wrt)
    useful = set(targets)
    path = []
    for node in reversed(nodes):
        if not any(value in useful and value in reached for value in node.outputs):
            continue
        entries = [value for value in _entries(node) if value in reached]
        if entries:
            path.append(node)
            useful.update(entries)
    return path[::-1]


def without_gradient(path: Sequence[ir.Node], wrt: Iterable[ir.Value]) -> dict[str, list[str]]:
    """Operators, and ``operand scales of Resize`` and the like, on a path of `differentiable_path` that have no rule → names of nodes."""
    reached = active(path, wrt)
    found: dict[str, list[str]] = {}
    for node in path:
        rule = rule_of(node)
        operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        labels = [operator]
        if rule is not None:
            lacking = [
                position
                for position, value in enumerate(node.inputs)
                if value in reached and value is not None and value.dtype in FLOATS and rule.lacks(position)
            ]
            labels = [f"operand {operand(node, position)} of {operator}" for position in lacking]
        for label in labels:
            found.setdefault(label, []).append(node.name or str(node.outputs[0].name))
    return dict(sorted(found.items()))


def operand(node: ir.Node, position: int) -> str:
    """The schema's name of an input of `node`."""
    try:
        names = [parameter.name for parameter in onnx.defs.get_schema(node.op_type, domain=node.domain).inputs]
    except onnx.defs.SchemaError:
        names = []
    return names[position] if position < len(names) else f"input {position}"


def _supported_path(nodes: Sequence[ir.Node], targets: Iterable[ir.Value], wrt: Sequence[ir.Value]) -> list[ir.Node]:
    """`differentiable_path`, or UnsupportedError with one sentence that lists all that has no gradient rule."""
    path = differentiable_path(nodes, targets, wrt)
    missing = without_gradient(path, wrt)
    if not missing:
        return path
    parts = [f"{label} ({few(names)})" for label, names in missing.items()]
    raise UnsupportedError(
        f"No gradient rule for {'; '.join(parts)}: freeze what lies before these nodes, or register a rule with "
        "onnxamp.autodiff.gradient."
    )


def _entries(node: ir.Node) -> list[ir.Value]:
    """The float values that `node` depends on with a derivative that is not zero, those that its bodies capture included."""
    if stops(node):
        return []
    rule = rule_of(node)
    values = [
        value
        for position, value in enumerate(node.inputs)
        if value is not None and value.dtype in FLOATS and not (rule is not None and position in rule.zero)
    ]
    return values + [value for value in captured(node) if value.dtype in FLOATS]


def captured(node: ir.Node) -> list[ir.Value]:
    """Values of outer graphs that the bodies of `node` read, in order of first use."""
    found: dict[ir.Value, None] = {}
    for attr in node.attributes.values():
        if attr.type != ir.AttributeType.GRAPH:
            continue
        body = attr.as_graph()
        own = set(body.inputs) | set(body.initializers.values())
        for inner in body.all_nodes():
            own.update(inner.outputs)
            for deep in inner.attributes.values():
                if deep.type == ir.AttributeType.GRAPH:
                    own.update(deep.as_graph().inputs)
                    own.update(deep.as_graph().initializers.values())
        for inner in body.all_nodes():
            found.update(dict.fromkeys(value for value in inner.inputs if value is not None and value not in own))
        found.update(dict.fromkeys(value for value in body.outputs if value not in own))
    return list(found)


def active(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that change with `wrt`, with a derivative that is not zero, `wrt` among them."""
    reached = set(wrt)
    for node in nodes:
        if any(value in reached for value in _entries(node)):
            reached.update(value for value in node.outputs if value.dtype in FLOATS or value.dtype is None)
    return reached


def _differentiate(
    op: Builder, node: ir.Node, gradients: list[ir.Value | None], reached: set[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """Each active value that one node reads with the gradient that it gets there, in its type and shape."""
    rule = rule_of(node)
    assert rule is not None
    values = [*node.inputs, *captured(node)]
    entries = set(_entries(node))
    op.wanted = frozenset(
        position
        for position, value in enumerate(values)
        if value is not None
        and value in reached
        and value in entries
        and (rule.inputs is None or position in rule.inputs)
    )
    results = rule.function(op, node, *gradients)
    if any(g is not None for g in results[len(values) :]):
        raise InternalError(f"The gradient rule of {node.op_type} gave {len(results)} gradients for {node.name!r}.")
    wanted = op.wanted
    found = []
    for position, g in enumerate(results):
        if g is None or position not in wanted:
            continue
        value = values[position]
        assert value is not None
        if rule.broadcast:
            g = op.unbroadcast(g, value, node.inputs)
        assert value.dtype is not None
        found.append((value, op.cast(g, value.dtype)))
    return found


def _total(
    op: Builder, value: ir.Value, pending: dict[ir.Value, list[ir.Value]], done: dict[ir.Value, ir.Value]
) -> ir.Value | None:
    """The sum of all contributions to the gradient of `value`, named after it."""
    if value in done:
        return done[value]
    parts = pending.pop(value, None)
    if not parts:
        return None
    op.enter(value.producer())
    total = parts[0] if len(parts) == 1 else op.Sum(*parts) if len(parts) > 2 else op.Add(*parts)
    producer = total.producer()
    if producer is not None and producer in op.emitted:
        if value.shape is not None:
            total.shape = value.shape
        op.claim(total, f"grad/{value.name}")
    done[value] = total
    return total
