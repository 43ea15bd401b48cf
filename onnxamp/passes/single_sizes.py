"""Single sizes, without a node on the CPU and without a copy from there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name, standard_opset
from onnxamp.passes.integers import TAKEN


class SingleSizes(ir.passes.InPlacePass):
    """Replace the Cast of one size of a value to FP32 by a sum of ones, where data is computed with it, and what picks one by its Shape.

    `h / h.shape[0]` comes as `Div(h, Cast(Gather(Shape(h), 0)))`. Sizes are computed on the CPU, so that the Cast is copied to another
    device in every run, and once more for the backward half; `ReduceSum(Expand(1, Shape<start=0, end=1>(h)))` is computed there.

    1. The source of the Cast is one dimension, picked out of a Shape by operators that only move integers.
    2. Each reader of the Cast has another operand that is neither a constant nor made of sizes: arithmetic on sizes stays whole.
    3. The sum is exact up to 2²⁴. Opset 15 or later, whose Shape can give a single size.
    4. One size as a vector, to be joined to others, is this Shape too, instead of a Gather and an Unsqueeze on the CPU.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if standard_opset(model) < 15:
            return ir.passes.PassResult(model, modified=False)
        sizes = _Sizes(model)
        for graph in list(model.graphs()):
            for node in list(graph):
                if operator_name(node) == "Cast" and sizes.meets_data(node.outputs[0]):
                    sizes.count(node)
                elif operator_name(node) in ("Gather", "Slice", "Unsqueeze"):
                    sizes.pick(node)
        return ir.passes.PassResult(model, modified=sizes.modified)


class _Sizes:
    """What one run of the pass knows of a model."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.modified = False
        self.names = Names(model)
        self.made_of_sizes: set[ir.Value] = set()
        for graph in model.graphs():
            for node in graph:
                inputs = [value for value in node.inputs if value is not None]
                if operator_name(node) in ("Shape", "Size") or (inputs and all(self.is_setting(v) for v in inputs)):
                    self.made_of_sizes.update(node.outputs)

    def is_setting(self, value: ir.Value) -> bool:
        """Whether a value is a constant or made of sizes."""
        return value in self.made_of_sizes or fixed_tensor(value, self.model.ir_version) is not None

    def meets_data(self, value: ir.Value) -> bool:
        """Whether every node that reads an FP32 value reads data as well."""
        readers = [node for node, _ in value.uses()]
        if value.dtype != ir.DataType.FLOAT or value.is_graph_output() or not readers:
            return False
        return all(any(v is not None and not self.is_setting(v) for v in node.inputs) for node in readers)

    def pick(self, node: ir.Node) -> None:
        """Shape with `start` and `end` in place of `node`, if it gives one dimension as a vector."""
        result = node.outputs[0]
        picked = self.dimensions(result)
        if picked is None or picked[1].shape != (1,) or result.is_graph_output() or not result.uses():
            return
        if result.dtype != ir.DataType.INT64:
            return
        source, axis = picked[0], int(picked[1][0])
        name = self.names.node(f"{result.name}/size")
        size = ir.node("Shape", [source], {"start": axis, "end": axis + 1}, name=name)
        size.outputs[0].name = self.names.value(name)
        size.outputs[0].type, size.outputs[0].shape = result.type, ir.Shape([1])
        assert node.graph is not None
        node.graph.insert_before(node, size)
        result.replace_all_uses_with(size.outputs[0])
        node.graph.remove(node, safe=True)
        self.made_of_sizes.add(size.outputs[0])
        self.modified = True

    def count(self, cast: ir.Node) -> None:
        """Count ones in place of `cast`, if its source is one dimension."""
        picked = self.dimensions(cast.inputs[0])
        if picked is None or picked[1].size != 1:
            return
        source, places = picked
        axis, result = int(places.reshape(-1)[0]), cast.outputs[0]
        name = str(result.name)
        one, axes = (
            add_initializer(self.model.graph, self.names.value(f"{name}/{what}"), array)
            for what, array in (("one", np.ones((), np.float32)), ("axes", np.zeros(1, np.int64)))
        )
        size = ir.node("Shape", [source], {"start": axis, "end": axis + 1}, name=self.names.node(f"{name}/size"))
        ones = ir.node("Expand", [one, size.outputs[0]], name=self.names.node(f"{name}/ones"))
        total = ir.node(
            "ReduceSum", [ones.outputs[0], axes], {"keepdims": places.ndim}, name=self.names.node(f"{name}/count")
        )
        for node in (size, ones, total):
            node.outputs[0].name = self.names.value(str(node.name))
        total.outputs[0].type, total.outputs[0].shape = result.type, ir.Shape([1] * places.ndim)
        assert cast.graph is not None
        cast.graph.insert_before(cast, [size, ones, total])
        result.replace_all_uses_with(total.outputs[0])
        cast.graph.remove(cast, safe=True)
        self.modified = True

    def dimensions(self, value: ir.Value | None) -> tuple[ir.Value, np.ndarray] | None:
        """The value whose sizes `value` holds and nothing else, and which dimensions these are."""
        node = None if value is None else value.producer()
        source = node.inputs[0] if node is not None and node.domain == "" and node.inputs else None
        if node is None or source is None:
            return None
        if node.op_type == "Shape":
            if source.shape is None:
                return None
            places = np.arange(len(source.shape))
            return source, places[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(places))]
        if node.op_type == "Cast" and node.outputs[0].dtype not in (ir.DataType.INT32, ir.DataType.INT64):
            return None
        rank, take = TAKEN.get(node.op_type, (None, None))
        found = self.dimensions(source) if take is not None and node.op_type != "Concat" else None
        if take is None or found is None or rank not in (None, found[1].ndim):
            return None
        settings = [None if v is None else fixed_tensor(v, self.model.ir_version) for v in node.inputs[1:]]
        if any(setting is None for setting in settings):
            return None
        try:
            places = take(found[1], *(setting.numpy() for setting in settings if setting is not None))
        except (IndexError, TypeError, ValueError):  # not there
            return None
        return found[0], np.asarray(places, np.int64)
