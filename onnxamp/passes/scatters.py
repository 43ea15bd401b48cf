"""Sums of rows in the form that compilers of inference graphs know."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name


class ScatterRowsPass(ir.passes.InPlacePass):
    """Add rows by ScatterElements instead of ScatterND, whose reductions some runtimes do not know.

    `ScatterND<reduction="add">(data, indices, updates)`, the gradient of a Gather of rows, with data [V, ...] of known size and indices
    [..., 1] becomes, over data as a matrix [V, D], `ScatterElements<axis=0, reduction="add">` with each index repeated D times.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if operator_name(node) == "ScatterND" and _suits(node)]
        names = Names(model)
        for node in nodes:
            _rewrite(model.graph, node, names)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _suits(node: ir.Node) -> bool:
    data, indices = node.inputs[:2]
    if data is None or indices is None or data.shape is None or indices.shape is None or not len(indices.shape):
        return False
    add = node.attributes.get_string("reduction", "none") == "add"
    return add and data.shape.is_static() and indices.shape[-1] == 1


def _rewrite(graph: ir.Graph, node: ir.Node, names: Names) -> None:
    data, indices, updates = node.inputs
    result, name = node.outputs[0], str(node.outputs[0].name)
    assert data is not None and data.shape is not None and indices is not None and updates is not None  # noqa: PT018 (for mypy)
    rows, *rest = map(int, data.shape.numpy())
    width = math.prod(rest)

    def shape(what: str, sizes: list[int]) -> ir.Value:
        return add_initializer(graph, names.value(f"{name}/{what}"), np.asarray(sizes, np.int64))

    def add(operator: str, what: str, *inputs: ir.Value, **attributes: int | str) -> ir.Value:
        made = ir.node(operator, inputs, attributes or None, name=names.node(f"{name}/{what}"))
        made.metadata_props.update(node.metadata_props)
        made.outputs[0].name, made.outputs[0].type = names.value(f"{name}/{what}"), inputs[0].type
        graph.insert_before(node, made)
        return made.outputs[0]

    table = add("Reshape", "table", data, shape("table_shape", [rows, width]))
    added = add("Reshape", "added", updates, shape("added_shape", [-1, width]))
    column = add("Reshape", "column", indices, shape("column_shape", [-1, 1]))
    repeated = add("Expand", "repeated", column, shape("width", [1, width]))
    summed = add("ScatterElements", "summed", table, repeated, added, axis=0, reduction="add")
    node.op_type = "Reshape"
    node.attributes.clear()
    node.resize_inputs(2)
    node.replace_input_with(0, summed)
    node.replace_input_with(1, shape("shape", [rows, *rest]))
    result.shape = data.shape
