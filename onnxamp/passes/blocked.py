"""Convolutions in ONNX Runtime's blocked layout, for weights that change."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name

DOMAIN = "com.microsoft.nchwc"


class BlockedConvPass(ir.passes.InPlacePass):
    """Compute Conv in the layout [N, C/B, H, W, B] that ONNX Runtime's CPU kernels are fastest in.

    ONNX Runtime does so itself where the weights are constants, which it reorders once. A graph that trains has them as inputs:

    1. `Conv(x, w, b)` becomes `ReorderInput(x)` → blocked `Conv` with w as [M/B, C/B, kH, kW, B of C, B of M] → `ReorderOutput`,
       where all is FP32, x has two spatial dimensions, `group` is 1, the channels M and C are multiples of B, and the kernel has more than
       one element (a product of matrices is as fast).
    2. The same with w as [M/B, kH, kW, B] where each channel has a filter of its own (`group` = C = M).
    3. Convolutions of one x share its `ReorderInput`.

    Args:
        block: B, what the runtime's kernels use on this machine (`ort.layouts.channel_block`).
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, names = model.graph, Names(model)
        reordered: dict[ir.Value, ir.Value] = {}
        suitable = [node for node in graph if operator_name(node) == "Conv" and self._suits(node)]
        for node in suitable:
            x, weight = node.inputs[:2]
            assert x is not None and weight is not None  # noqa: PT018 (for mypy)
            if x not in reordered:
                name = names.node(f"{x.name}/ReorderInput")
                reorder = ir.node("ReorderInput", [x], {"channels_last": 0}, domain=DOMAIN, name=name)
                graph.insert_before(node, reorder)
                reordered[x] = _typed(reorder, x)
            self._rewrite(graph, node, reordered[x], weight, names)
        if suitable:
            graph.opset_imports.setdefault(DOMAIN, 1)
        return ir.passes.PassResult(model, modified=bool(suitable))

    def _suits(self, node: ir.Node) -> bool:
        x, weight = node.inputs[:2]
        if x is None or weight is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) != 4:
            return False
        if weight.shape is None or ir.convenience.get_const_tensor(weight) is not None:
            return False
        sizes = weight.shape.numpy() if weight.shape.is_static() else ()
        if len(sizes) != 4 or math.prod(sizes[2:]) < 2 or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return False
        group = node.attributes.get_int("group", 1)
        blocked = sizes[:1] if sizes[1] == 1 and group == sizes[0] else sizes[:2] if group == 1 else (1,)
        return all(size and size % self.block == 0 for size in blocked)

    def _rewrite(self, graph: ir.Graph, node: ir.Node, x: ir.Value, weight: ir.Value, names: Names) -> None:
        assert weight.shape is not None
        outputs, inputs, height, width = sizes = weight.shape.numpy()
        block, y = self.block, node.outputs[0]
        name = y.name
        rows, columns = [outputs // block, block], [inputs // block, block]
        if node.attributes.get_int("group", 1) > 1:
            parts, order = [*rows, height, width], [0, 2, 3, 1]
        else:
            parts, order = [*rows, *columns, height, width], [0, 2, 4, 5, 3, 1]
        split = add_initializer(graph, names.value(f"{name}/split"), np.asarray(parts, np.int64))
        joined = add_initializer(graph, names.value(f"{name}/joined"), np.asarray(sizes, np.int64))
        apart = ir.node("Reshape", [weight, split], name=names.node(f"{name}/Reshape"))
        moved = ir.node("Transpose", apart.outputs, {"perm": order}, name=names.node(f"{name}/Transpose"))
        blocked = ir.node("Reshape", [moved.outputs[0], joined], name=names.node(f"{name}/Reshape"))
        conv = ir.node(
            "Conv",
            [x, blocked.outputs[0], *node.inputs[2:]],
            dict(node.attributes),
            domain=DOMAIN,
            name=names.node(f"{name}/Conv"),
        )
        conv.outputs[0].name = names.value(f"{name}/blocked")
        for fresh, like in ((apart, weight), (moved, weight), (blocked, weight), (conv, y)):
            _typed(fresh, like, shaped=fresh in (blocked, conv))
        graph.insert_before(node, [apart, moved, blocked, conv])
        node.op_type, node.domain = "ReorderOutput", DOMAIN
        node.attributes.clear()
        node.attributes.add(ir.AttrInt64("channels", outputs))
        node.attributes.add(ir.AttrInt64("channels_last", 0))
        node.resize_inputs(1)
        node.replace_input_with(0, conv.outputs[0])


def _typed(node: ir.Node, like: ir.Value, *, shaped: bool = True) -> ir.Value:
    value = node.outputs[0]
    value.type, value.shape = like.type, like.shape if shaped else None
    return value
