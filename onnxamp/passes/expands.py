"""Expand without the guard that PyTorch's exporter puts around its target."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.naming import Names

# What only moves or picks sizes on the way from a Shape.
_CARRIERS = frozenset({"Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


class PlainExpands(ir.passes.InPlacePass):
    """Resolve the −1 of `expand` when the graph is read, not when it runs.

    `x.expand(n, -1, -1)` comes as `Expand(x, Where(Equal(t, −1), 1, t))` with `t = Concat(n, −1, −1)`. Where the other parts of `t` are
    sizes of values, which are never −1, the target is `Concat(n, 1, 1)`: inference follows it, and three nodes on the CPU go.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(model)
        modified = False
        for node in list(model.graph):
            if node.domain != "" or node.op_type != "Expand":
                continue
            guard = node.inputs[1]
            target = _guarded(guard, model.ir_version)
            if guard is None or target is None:
                continue
            parts: list[ir.Value] = []
            for part in target.inputs:
                assert part is not None
                tensor = fixed_tensor(part, model.ir_version)
                if tensor is not None:
                    sizes = tensor.numpy()
                    part = add_initializer(
                        model.graph, names.value(f"{guard.name}/sizes"), np.where(sizes == -1, 1, sizes)
                    )
                parts.append(part)
            name = names.value(f"{guard.name}/plain")
            plain = ir.node("Concat", parts, {"axis": 0}, name=names.node(name))
            plain.outputs[0].name = name
            plain.outputs[0].type, plain.outputs[0].shape = guard.type, guard.shape
            model.graph.insert_before(node, plain)
            node.replace_input_with(1, plain.outputs[0])
            _forget(node)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _forget(node: ir.Node) -> None:
    """Drop the shapes of what `node` leads to: names were made up for sizes that inference finds now, and it keeps names."""
    stack, seen = [node], {node}
    while stack:
        each = stack.pop()
        for value in each.outputs:
            if each.domain == "" and not value.is_graph_output():
                value.shape = None
            for user, _ in value.uses():
                if user not in seen:
                    seen.add(user)
                    stack.append(user)


def _guarded(value: ir.Value | None, ir_version: int) -> ir.Node | None:
    """The Concat `t` of `Where(Equal(t, −1), 1, t)`, if all its parts are constants or sizes."""
    where = _made_by(value, "Where")
    if where is None:
        return None
    condition, ones, target = where.inputs
    equal = _made_by(condition, "Equal")
    if equal is None or not _is_all(ones, 1, ir_version):
        return None
    sides = list(equal.inputs)
    if target not in sides or not _is_all(sides[1 - sides.index(target)], -1, ir_version):
        return None
    while (flat := _made_by(target, "Reshape")) is not None:
        target = flat.inputs[0]
        if target is None or target.shape is None or len(target.shape) != 1:
            return None
    concat = _made_by(target, "Concat")
    if concat is None:
        return None
    plain = all(part is not None and (fixed_tensor(part, ir_version) or _is_size(part)) for part in concat.inputs)
    return concat if plain else None


def _made_by(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator and node.domain == "" else None


def _is_all(value: ir.Value | None, number: int, ir_version: int) -> bool:
    tensor = fixed_tensor(value, ir_version)
    return tensor is not None and bool((tensor.numpy() == number).all())


def _is_size(value: ir.Value) -> bool:
    """Whether a value holds nothing but sizes of another."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _CARRIERS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.domain == "" and node.op_type == "Shape"
