"""One pass over memory for a sum with a scaled tensor, where the runtime has a kernel for it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name

DOMAIN = "com.microsoft"


class ScaledAddPass(ir.passes.InPlacePass):
    """Fuse ``x + y·s`` and ``x − y·s`` for a scalar s into ONNX Runtime's GatedAdd.

    GatedAdd rounds the product before it adds, as Mul and Add do: results are equal bit for bit.

    1. `Add(x, Mul(y, s))` becomes `GatedAdd(x, y, s)`, and `Sub(x, Mul(y, s))` becomes `GatedAdd(x, y, −s)`, where all are FP32, `x`
       and `y` have the shape of the result, which has dimensions, `s` has none and nothing else reads the product.
    2. If both summands are products, the second is fused.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(model)
        fused = [node for node in model.graph if operator_name(node) in ("Add", "Sub") and _fuse(node, names)]
        if fused:
            model.graph.opset_imports.setdefault(DOMAIN, 1)
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(fused))


def _fuse(node: ir.Node, names: Names) -> bool:
    """Rewrite `node` if one of its summands, the second first, is a product with a scalar."""
    result = node.outputs[0]
    if result.dtype != ir.DataType.FLOAT or result.shape is None or not len(result.shape):
        return False
    for other, product in (node.inputs,) if node.op_type == "Sub" else (node.inputs, node.inputs[::-1]):
        if other is None or product is None or other.shape != result.shape:
            continue
        producer = product.producer()
        if producer is None or operator_name(producer) != "Mul" or len(product.uses()) > 1 or product.is_graph_output():
            continue
        for y, scale in (producer.inputs, producer.inputs[::-1]):
            if y is None or scale is None or y.shape != result.shape or scale.shape is None or len(scale.shape):
                continue
            gate = _gate(node, scale, names, negative=node.op_type == "Sub")
            node.op_type, node.domain = "GatedAdd", DOMAIN
            node.resize_inputs(3)
            for position, value in enumerate((other, y, gate)):
                node.replace_input_with(position, value)
            return True
    return False


def _gate(node: ir.Node, scale: ir.Value, names: Names, *, negative: bool) -> ir.Value:
    """`scale` or −`scale` with one dimension, made before `node`."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    name = node.outputs[0].name
    constant = ir.convenience.get_const_tensor(scale)
    if constant is not None:
        number = constant.numpy().reshape(1)
        return add_initializer(graph, names.value(f"{name}/gate"), -number if negative else number)
    added = [ir.node("Neg", [scale], name=names.node(f"{name}/Neg"))] if negative else []
    axes = add_initializer(graph, names.value(f"{name}/axes"), np.zeros(1, np.int64))
    factor = added[0].outputs[0] if negative else scale
    added.append(ir.node("Unsqueeze", [factor, axes], name=names.node(f"{name}/Unsqueeze")))
    graph.insert_before(node, added)
    return added[-1].outputs[0]
