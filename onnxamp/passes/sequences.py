"""Sequences that only carry tensors from where they are split or put together to where they are read, replaced by these tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.naming import Names

_Constants = Callable[[ir.Value | None], np.ndarray | None]


class FoldSequences(ir.passes.InPlacePass):
    """Read the pieces themselves instead of a sequence of them, in the main graph.

    1. SequenceAt of a SplitToSequence becomes an output of a Split; of a SequenceConstruct, the tensor. The position is constant, and so
       are the sizes of the pieces (or the size of the split dimension).
    2. ConcatFromSequence of a SequenceConstruct becomes a Concat.
    3. Sequences that nothing reads any more go. PyTorch's exporters write them for chunk, split and stack.
    4. A graph output keeps its name, through an Identity where its value has another one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        pieces: dict[ir.Value, list[ir.Value]] = {}
        folded = []
        constant, names = functools.partial(_constant, ir_version=model.ir_version), Names(model)
        for node in list(model.graph):
            if node.domain != "" or not node.inputs or node.inputs[0] is None:
                continue
            sequence = node.inputs[0]
            if node.op_type == "SequenceConstruct":
                pieces[node.outputs[0]] = [value for value in node.inputs if value is not None]
            elif node.op_type == "SplitToSequence":
                found = _split(model.graph, node, constant, names) if _folds(node.outputs[0], constant) else []
                if found:
                    pieces[node.outputs[0]] = found
            elif node.op_type == "SequenceAt" and sequence in pieces:
                position, count = constant(node.inputs[1]), len(pieces[sequence])
                if position is not None and -count <= position.reshape(()) < count:
                    _stand_in(model.graph, node, pieces[sequence][int(position.reshape(()))])
                    folded.append(node)
            elif node.op_type == "ConcatFromSequence" and sequence in pieces:
                _concat(model.graph, node, pieces[sequence], names)
                folded.append(node)
        for node in folded:
            model.graph.remove(node, safe=True)
        for value in pieces:
            maker = value.producer()
            if maker is not None and not value.uses() and not value.is_graph_output():
                model.graph.remove(maker, safe=True)
        return ir.passes.PassResult(model, modified=bool(folded))


def _constant(value: ir.Value | None, ir_version: int) -> np.ndarray | None:
    tensor = fixed_tensor(value, ir_version)
    return None if tensor is None else tensor.numpy()


def _folds(sequence: ir.Value, constant: _Constants) -> bool:
    """Whether a node of the same graph reads a known piece of a sequence, or joins it."""
    maker = sequence.producer()
    return any(
        node.domain == ""
        and maker is not None
        and node.graph is maker.graph
        and (
            node.op_type == "ConcatFromSequence"
            or (node.op_type == "SequenceAt" and constant(node.inputs[1]) is not None)
        )
        for node, _ in sequence.uses()
    )


def _stand_in(graph: ir.Graph, node: ir.Node, piece: ir.Value) -> None:
    """Read `piece` in the place of what `node` yields, whose name it gets if that is an output of the graph."""
    result = node.outputs[0]
    if result.is_graph_output():
        copy = ir.node("Identity", [piece], name=node.name)
        graph.insert_before(node, copy)
        piece = copy.outputs[0]
        own, result.name = result.name, None
        piece.name, piece.type, piece.shape = own, result.type, result.shape
    result.replace_all_uses_with(piece, replace_graph_outputs=True)


def _split(graph: ir.Graph, node: ir.Node, constant: _Constants, names: Names) -> list[ir.Value]:
    """The outputs of a Split in the place of a SplitToSequence; empty where their number is unknown."""
    source = node.inputs[0]
    assert source is not None
    axis = node.attributes.get_int("axis", 0)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    content = constant(given)
    squeezed = given is None and not node.attributes.get_int("keepdims", 1)
    size = None if source.shape is None else source.shape[axis]
    if squeezed or (given is not None and content is None):
        return []
    if content is not None and content.ndim:
        sizes = [int(part) for part in content]
    else:
        step = 1 if content is None else int(content.reshape(()))
        sizes = (
            [min(step, size - start) for start in range(0, size, step)] if isinstance(size, int) and step > 0 else []
        )
    if not sizes:
        return []
    name = node.outputs[0].name
    lengths = add_initializer(graph, names.value(f"{name}/sizes"), np.asarray(sizes, np.int64))
    split = ir.node("Split", [source, lengths], {"axis": axis}, num_outputs=len(sizes), name=node.name)
    for index, value in enumerate(split.outputs):
        value.name, value.type = names.value(f"{name}/{index}"), source.type
    graph.insert_before(node, split)
    return list(split.outputs)


def _concat(graph: ir.Graph, node: ir.Node, values: list[ir.Value], names: Names) -> None:
    axis = node.attributes["axis"].as_int()
    result = node.outputs[0]
    if node.attributes.get_int("new_axis", 0):
        axes = add_initializer(graph, names.value(f"{result.name}/axis"), np.asarray([axis], np.int64))
        wide = []
        for index, value in enumerate(values):
            unsqueeze = ir.node("Unsqueeze", [value, axes], name=names.node(f"{node.name}/{index}"))
            wide.append(unsqueeze.outputs[0])
            wide[-1].name, wide[-1].type = names.value(f"{result.name}/{index}"), value.type
            graph.insert_before(node, unsqueeze)
        values = wide
    joined = ir.node("Concat", values, {"axis": axis}, name=node.name)
    graph.insert_before(node, joined)
    own, result.name = result.name, None
    joined.outputs[0].name, joined.outputs[0].type, joined.outputs[0].shape = own, result.type, result.shape
    result.replace_all_uses_with(joined.outputs[0], replace_graph_outputs=True)
