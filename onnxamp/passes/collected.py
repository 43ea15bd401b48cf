"""Sequences that a Loop fills with one tensor a step, replaced by a result of the Loop that stacks them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names


class CollectSequences(ir.passes.InPlacePass):
    """Let a Loop of the main graph stack what it appends to a sequence.

    Scripted PyTorch writes a list that a `for` fills, and that `torch.stack` or `torch.cat` joins behind it, as a state: it begins with
    SequenceEmpty, a SequenceInsert at its end is all that reads it, and ConcatFromSequence all that reads the last one. Pieces that are
    joined along an axis of theirs need sizes that no step can change.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names, modified = Names(model), False
        for node in list(model.graph):
            while node.op_type == "Loop" and node.domain == "" and (found := _filled(node)) is not None:
                node = _collect(model.graph, node, *found, names)
                modified = True
        return ir.passes.PassResult(model, modified=modified)


def _filled(node: ir.Node) -> tuple[int, ir.Node] | None:
    """The first state of a Loop that is such a sequence, and the node that appends to it."""
    body = node.attributes["body"].as_graph()
    for index, start in enumerate(node.inputs[2:]):
        maker = None if start is None else start.producer()
        if maker is None or maker.op_type != "SequenceEmpty":
            continue
        uses, last, final = list(body.inputs[index + 2].uses()), body.outputs[index + 1], node.outputs[index]
        if len(uses) != 1 or body.inputs[index + 2].is_graph_output() or last.uses() or final.is_graph_output():
            continue
        insert = uses[0][0]
        if insert is not last.producer() or insert.op_type != "SequenceInsert" or len(insert.inputs) > 2:
            continue
        if insert.inputs[1] is None or insert.inputs[1].shape is None:
            continue
        if list(body.outputs).count(last) == 1 and all(_joins(reader, node, insert) for reader, _ in final.uses()):
            return index, insert
    return None


def _joins(reader: ir.Node, node: ir.Node, insert: ir.Node) -> bool:
    piece = insert.inputs[1]
    if reader.op_type != "ConcatFromSequence" or reader.graph is not node.graph or piece is None or piece.shape is None:
        return False
    return bool(reader.attributes.get_int("new_axis", 0)) or (len(piece.shape) > 0 and piece.shape.is_static())


def _collect(graph: ir.Graph, node: ir.Node, index: int, insert: ir.Node, names: Names) -> ir.Node:
    """Put a Loop without the state in the place of `node`."""
    body, piece, final = node.attributes["body"].as_graph(), insert.inputs[1], node.outputs[index]
    assert piece is not None
    assert piece.shape is not None
    copy = ir.node("Identity", [piece], name=names.node(f"{insert.name}/Identity"))
    copy.outputs[0].name = names.value(f"{final.name}/piece")
    copy.outputs[0].type, copy.outputs[0].shape = piece.type, piece.shape
    body.insert_before(insert, copy)
    body.outputs.pop(index + 1)
    body.remove(insert, safe=True)
    body.inputs.pop(index + 2)
    body.outputs.append(copy.outputs[0])
    inputs = [value for place, value in enumerate(node.inputs) if place != index + 2]
    kept = [value for value in node.outputs if value is not final]
    loop = ir.node("Loop", inputs, num_outputs=len(kept) + 1, name=node.name)
    loop.attributes.add(node.attributes.pop("body"))
    loop.metadata_props.update(node.metadata_props)
    graph.insert_before(node, loop)
    for old, new in zip(kept, loop.outputs, strict=False):
        own, old.name = old.name, None
        new.name, new.type, new.shape = own, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    stack = loop.outputs[-1]
    stack.name, stack.type = names.value(f"{final.name}/stack"), piece.type
    stack.shape = ir.Shape([None, *piece.shape])
    for reader, _ in list(final.uses()):
        _join(graph, reader, stack, names)
    graph.remove(node, safe=True)
    return loop


def _join(graph: ir.Graph, reader: ir.Node, stack: ir.Value, names: Names) -> None:
    """Write ConcatFromSequence as a Transpose of the stack, and a Reshape where no axis is new."""
    assert stack.shape is not None
    sizes = list(stack.shape)[1:]
    new = bool(reader.attributes.get_int("new_axis", 0))
    axis = reader.attributes["axis"].as_int() % (len(sizes) + new)
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(sizes) + 1)]
    result = reader.outputs[0]
    node = ir.node("Transpose", [stack], {"perm": order}, name=reader.name)
    graph.insert_before(reader, node)
    if not new:
        node.name = names.node(f"{reader.name}/Transpose")
        node.outputs[0].name, node.outputs[0].type = names.value(f"{result.name}/apart"), stack.type
        shape = np.asarray([*sizes[:axis], -1, *sizes[axis + 1 :]], np.int64)
        target = add_initializer(graph, names.value(f"{result.name}/shape"), shape)
        node = ir.node("Reshape", [node.outputs[0], target], name=reader.name)
        graph.insert_before(reader, node)
    own, result.name = result.name, None
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = own, result.type, result.shape
    result.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    graph.remove(reader, safe=True)
