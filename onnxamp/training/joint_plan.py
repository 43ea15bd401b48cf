"""The plan of forward and backward half together: what the target cannot compute in 16 bits goes up, and Casts are placed anew.

The forward half keeps its decisions. Rules give a backward node the type of its forward node, or FP32 where ONNX Runtime's CUDA provider
lacks a kernel; this pass asks the table of the target that the graph is built for, whatever rule, source or user made the node.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.model.naming import Names
from onnxamp.model.signatures import TENSOR, Signature, node_signature
from onnxamp.passes.append import new_cast
from onnxamp.policy.targets import TargetTable, table

FLOAT = ir.DataType.FLOAT
BACKWARD = "onnxamp.backward"


class JointPlan(ir.passes.InPlacePass):
    """Fit the backward half to a target.

    1. A backward node with 16-bit operands or results for which the target has no kernel, but one in FP32, is computed in FP32 between
       Casts.
    2. A backward result that is rounded to 16 bits and widened again at once is read before it was rounded; Casts that nothing reads
       go.
    3. Bodies of If, Loop and Scan are treated like the main graph. Forward nodes stay as they are.

    Args:
        target: Name of the target, as of `onnxamp.convert`.
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        kernels = table(self.target)
        modified = False
        names: Names | None = None
        for graph in model.graphs():
            for node in list(graph):
                if BACKWARD in node.metadata_props and _lacks(node, kernels, model.opset_imports):
                    names = names or Names(model)
                    _raise(model, graph, node, names)
                    modified = True
            modified = _without_detours(graph) or modified
        return ir.passes.PassResult(model, modified=modified)


def _lacks(node: ir.Node, kernels: TargetTable, opsets: dict[str, int]) -> bool:
    """Whether the target computes a node in FP32 only."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if node.op_type == "Cast" or not any(value.dtype in LOW for value in values):
        return False
    signed = node_signature(node, opsets)
    if signed is None or kernels.supports(node, signed, {}):
        return False
    wide = dict.fromkeys(_low_variables(node, signed), FLOAT)
    allowed = all(TENSOR[FLOAT] in signed.types.get(variable, ()) for variable in wide)
    return bool(wide) and allowed and kernels.supports(node, signed, wide)


def _low_variables(node: ir.Node, signed: Signature) -> set[str]:
    found = set()
    for values, formal in ((node.inputs, signed.input), (node.outputs, signed.output)):
        for index, value in enumerate(values):
            described = formal(index)
            if value is not None and described is not None and value.dtype in LOW:
                found.add(described.variable)
    return found


def _raise(model: ir.Model, graph: ir.Graph, node: ir.Node, names: Names) -> None:
    """Compute a node in FP32: Casts of its 16-bit operands before it, of its results behind it."""
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype in LOW:
            up = new_cast(model, value, names.value(f"{value.name}/fp32/{node.name}/{position}"), FLOAT, names)
            up.metadata_props.update(node.metadata_props)
            graph.insert_before(node, up)
            node.replace_input_with(position, up.outputs[0])
    for value in node.outputs:
        low = value.dtype
        if low is None or low not in LOW:
            continue
        down = new_cast(model, value, names.value(f"{value.name}/{low.name.lower()}"), low, names)
        down.metadata_props.update(node.metadata_props)
        value.replace_all_uses_with(down.outputs[0], replace_graph_outputs=True)
        down.replace_input_with(0, value)
        value.type = ir.TensorType(FLOAT)
        graph.insert_after(node, down)


def _without_detours(graph: ir.Graph) -> bool:
    """Read what was rounded only to be widened again before it was rounded."""
    modified = False
    for node in list(graph):
        if node.op_type != "Cast" or node.domain != "" or node.outputs[0].dtype != FLOAT or node.inputs[0] is None:
            continue
        down = node.inputs[0].producer()
        if down is None or down.op_type != "Cast" or down.domain != "" or BACKWARD not in down.metadata_props:
            continue
        exact = down.inputs[0]
        if exact is None or exact.dtype != FLOAT or down.graph is not graph or node.outputs[0].is_graph_output():
            continue
        node.outputs[0].replace_all_uses_with(exact)
        graph.remove(node, safe=True)
        modified = True
        if not down.outputs[0].uses() and not down.outputs[0].is_graph_output():
            graph.remove(down, safe=True)
    return modified
