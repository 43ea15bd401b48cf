"""Specialize a graph for a boolean input whose value is known."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class AssumePass(ir.passes.InPlacePass):
    """Take one branch of every selection by a boolean scalar input, and drop the input.

    1. `Where(name, a, b)` becomes `a` if `value` is true, else `b`, if both have the shape of the result.
    2. A graph output keeps its name; if the branch is an input, an initializer or another output, it is copied.
    3. What only fed the other branch is removed. An input that is still read stays.

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
        for node in [node for node in graph if node.op_type == "Where" and node.inputs[0] is condition]:
            result = node.outputs[0]
            branch, other = node.inputs[1:] if self.value else node.inputs[:0:-1]
            if branch is None or other is None or not branch.shape == other.shape == result.shape:
                continue
            if not result.is_graph_output():
                result.replace_all_uses_with(branch)
                graph.remove(node, safe=True)
            elif branch.producer() is None or branch.is_graph_output():
                node.op_type = "Identity"
                node.resize_inputs(1)
                node.replace_input_with(0, branch)
            else:
                name = result.name
                result.replace_all_uses_with(branch, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                branch.name = name
        RemoveUnusedNodesPass()(model)
        if not condition.uses():
            graph.inputs.remove(condition)
        return ir.passes.PassResult(model, modified=True)
