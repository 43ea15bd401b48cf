"""BatchNormalization in training mode, as plain operators.

ONNX Runtime's own training form does not exist on CUDA from opset 14, and on the CPU it gives wrong results in a known case
(microsoft/onnxruntime#29790).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name, standard_opset


class DecomposeBatchNorm(ir.passes.InPlacePass):
    """Replace every BatchNormalization with training_mode=1.

    1. μ and σ² are the mean and the biased variance over batch and space, in FP32 (FP64 for FP64) whatever the type of x.
    2. y = (x − μ)·(scale/√(σ² + ε)) + bias, cast back to the type of x.
    3. running = running·momentum + statistic·(1 − momentum), as ONNX defines it; only where the source has these outputs.
    4. New nodes keep the name of the node as a prefix, and its metadata.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node
            for node in model.graph.all_nodes()
            if operator_name(node) == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1
        ]
        names = Names(model)
        for node in nodes:
            _replace(node, standard_opset(model), names)
        return ir.passes.PassResult(model, modified=bool(nodes))


class _Writer:
    """Inserts typed nodes in front of the one that they replace."""

    def __init__(self, node: ir.Node, names: Names) -> None:
        assert node.graph is not None
        self.names = names
        self.node, self.graph = node, node.graph
        self.prefix = node.name or str(node.outputs[0].name)
        self.count = 0

    def __call__(
        self, op_type: str, *inputs: ir.Value, shape: ir.Shape | None = None, **attributes: object
    ) -> ir.Value:
        self.count += 1
        name = self.names.value(f"{self.prefix}/{op_type}_{self.count}")
        new = ir.node(op_type, list(inputs), attributes or None, name=self.names.node(name))  # type: ignore[arg-type]  # its attributes' own type is too wide to name
        new.metadata_props.update(self.node.metadata_props)
        value = new.outputs[0]
        value.name = name
        target = attributes.get("to")
        dtype = target if isinstance(target, ir.DataType) else inputs[0].dtype
        assert dtype is not None
        value.type = ir.TensorType(dtype)
        value.shape = inputs[0].shape if shape is None else shape
        self.graph.insert_before(self.node, new)
        return value

    def constant(self, array: np.ndarray) -> ir.Value:
        self.count += 1
        name = self.names.value(f"{self.prefix}/const_{self.count}")
        new = ir.node("Constant", [], {"value": ir.tensor(array, name=name)}, name=self.names.node(name))
        new.outputs[0].name = name
        new.outputs[0].type, new.outputs[0].shape = (
            ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            ir.Shape(array.shape),
        )
        self.graph.insert_before(self.node, new)
        return new.outputs[0]

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        return value if value.dtype == dtype else self("Cast", value, to=dtype)


def _replace(node: ir.Node, opset: int, names: Names) -> None:
    emit = _Writer(node, names)
    x, scale, bias, *running = node.inputs
    assert x is not None
    assert scale is not None
    assert bias is not None
    assert x.shape is not None
    rank = len(x.shape)
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    axes = [0, *range(2, rank)]
    flat = scale.shape if scale.shape is not None else ir.Shape([x.shape[1]])
    kept = ir.Shape([1 if axis in axes else size for axis, size in enumerate(x.shape)])

    def mean(value: ir.Value) -> ir.Value:
        if opset >= 18:
            return emit("ReduceMean", value, emit.constant(np.asarray(axes, np.int64)), keepdims=1, shape=kept)
        return emit("ReduceMean", value, axes=axes, keepdims=1, shape=kept)

    def spread(value: ir.Value) -> ir.Value:
        if rank == 2:
            return value
        return emit(
            "Unsqueeze", value, emit.constant(np.arange(1, rank - 1)), shape=ir.Shape([flat[0]] + [1] * (rank - 2))
        )

    def scalar(number: float) -> ir.Value:
        return emit.constant(np.asarray(number, wide.numpy()))

    data = emit.cast(x, wide)
    average = mean(data)
    centered = emit("Sub", data, average)
    variance = mean(emit("Mul", centered, centered))
    deviation = emit("Sqrt", emit("Add", variance, scalar(node.attributes.get_float("epsilon", 1e-5))))
    factor = emit("Div", spread(emit.cast(scale, wide)), deviation, shape=kept)
    result = emit("Add", emit("Mul", centered, factor), spread(emit.cast(bias, wide)))
    results = [emit.cast(result, x.dtype)]
    momentum = node.attributes.get_float("momentum", 0.9)
    for old, statistic, output in zip(running, (average, variance), node.outputs[1:], strict=False):
        assert old is not None
        if not output.name:
            continue
        now = emit("Reshape", statistic, emit.constant(np.asarray([-1], np.int64)), shape=flat)
        fresh = emit("Mul", now, scalar(1.0 - momentum))
        aged = emit("Mul", emit.cast(old, wide), scalar(momentum))
        results.append(emit.cast(emit("Add", aged, fresh), old.dtype))
    for output, value in zip([out for out in node.outputs if out.name], results, strict=False):
        name = output.name
        output.replace_all_uses_with(value, replace_graph_outputs=True)
        output.name = None
        value.name = name
    emit.graph.remove(node, safe=True)
