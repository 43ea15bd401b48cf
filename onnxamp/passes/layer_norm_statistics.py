"""LayerNormalization with one output, for runtimes that know no other form."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name


class LayerNormStatisticsPass(ir.passes.InPlacePass):
    """Compute mean and inverse standard deviation beside a LayerNormalization instead of taking them from it.

    1. The second output becomes `ReduceMean(x)` over the normalized axes, the third `1/√(ReduceMean((x − mean)²) + ε)`.
    2. Only in FP32, where x is as exact as the statistics inside, and where the rank of x is known.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed, names = 0, Names(model)
        for node in list(model.graph):
            x = node.inputs[0] if operator_name(node) == "LayerNormalization" else None
            if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT or len(node.outputs) < 2:
                continue
            _write_out(model.graph, node, x, len(x.shape), names)
            changed += 1
        return ir.passes.PassResult(model, modified=bool(changed))


def _write_out(graph: ir.Graph, node: ir.Node, x: ir.Value, rank: int, names: Names) -> None:
    first = node.attributes.get_int("axis", -1) % rank
    name = str(node.outputs[0].name)
    made: list[ir.Node] = []

    def add(operator: str, *inputs: ir.Value, result: ir.Value | None = None) -> ir.Value:
        new = ir.node(operator, inputs, name=names.node(f"{name}/{operator}_{len(made)}"))
        new.metadata_props.update(node.metadata_props)
        new.outputs[0].name = names.value(f"{name}/{operator}_{len(made)}")
        new.outputs[0].type = x.type
        new.outputs[0].shape = result.shape if result is not None else x.shape
        made.append(new)
        return new.outputs[0]

    def constant(what: str, array: np.ndarray) -> ir.Value:
        return add_initializer(graph, names.value(f"{name}/{what}"), array)

    axes = list(range(first, rank))
    listed = constant("axes", np.asarray(axes, np.int64)) if graph.opset_imports.get("", 0) >= 18 else None

    def mean_of(value: ir.Value, like: ir.Value) -> ir.Value:
        result = add("ReduceMean", value, *([listed] if listed is not None else ()), result=like)
        if listed is None:
            made[-1].attributes.add(ir.AttrInt64s("axes", axes))
        return result

    mean = mean_of(x, node.outputs[1])
    found = [mean]
    if len(node.outputs) > 2:
        apart = add("Sub", x, mean)
        variance = mean_of(add("Mul", apart, apart), node.outputs[2])
        epsilon = constant("epsilon", np.asarray(node.attributes.get_float("epsilon", 1e-5), np.float32))
        shifted = add("Add", variance, epsilon, result=node.outputs[2])
        found.append(add("Reciprocal", add("Sqrt", shifted, result=node.outputs[2]), result=node.outputs[2]))
    graph.insert_after(node, made)
    for old, new in zip(node.outputs[1:], found, strict=True):
        old_name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if old_name:  # an output that is left out in front of one that is not has none
            old.name, new.name = names.value(f"{name}/unused_{old.index()}"), old_name
    node.resize_outputs(1)
