"""Specialize a graph for a boolean input whose value is known."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.model.signatures import operator_name


class AssumePass(ir.passes.InPlacePass):
    """Take one branch of every selection by a boolean scalar input, and drop the input.

    1. `Where(name, a, b)` becomes `a` if `value` is true, else `b`, if both have the shape of the result.
    2. Where that branch is a zero scalar, which cannot take the place of a tensor, a sum with the selection becomes the other
       summand.
    3. A graph output keeps its name; if what takes its place is an input, an initializer or another output, it is copied.
    4. What only fed the other branch is removed. An input that is still read stays.

    Args:
        name: The input.
        value: What it is.
    """

    def __init__(self, name: str, value: bool) -> None:
        super().__init__()
        self.name = name
        self.value = value

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        condition = next(value for value in graph.inputs if value.name == self.name)
        for node in [node for node in graph if operator_name(node) == "Where" and node.inputs[0] is condition]:
            branch, other = node.inputs[1:] if self.value else node.inputs[:0:-1]
            if branch is None or other is None:
                continue
            result = node.outputs[0]
            if branch.shape == other.shape == result.shape:
                _substitute(node, branch)
            elif _is_zero(branch) and not result.is_graph_output():
                for user in [user for user, _ in result.uses() if operator_name(user) == "Add"]:
                    summand = user.inputs[1] if user.inputs[0] is result else user.inputs[0]
                    if summand is not None and summand is not result and summand.shape == user.outputs[0].shape:
                        _substitute(user, summand)
        RemoveUnusedNodesPass()(model)
        if not condition.uses():
            graph.inputs.remove(condition)
        return ir.passes.PassResult(model, modified=True)


def _substitute(node: ir.Node, value: ir.Value) -> None:
    """Let `value` take the place of the only result of `node`."""
    result = node.outputs[0]
    assert node.graph is not None
    if not result.is_graph_output():
        result.replace_all_uses_with(value)
        node.graph.remove(node, safe=True)
    elif value.producer() is None or value.is_graph_output():
        node.op_type = "Identity"
        node.resize_inputs(1)
        node.replace_input_with(0, value)
    else:
        name = result.name
        result.replace_all_uses_with(value, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        value.name = name


def _is_zero(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()
