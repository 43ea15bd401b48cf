"""Tensors that an exporter merged because their numbers were equal, each by itself again."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


class SplitMerged(ir.passes.InPlacePass):
    """Make initializers of what is `Identity` of one and was a tensor of its own in the framework.

    PyTorch's exporter keeps one of several equal tensors in a model for inference and gives the others as `Identity` of it, under
    their names. Running statistics are never shared by two modules, and fresh scales and biases (one number everywhere) are equal by
    chance. Other tensors may be tied: they stay one.

    Args:
        names: Only outputs of these names; None for all.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        modified = False
        for node in list(graph):
            if node.domain != "" or node.op_type != "Identity" or node.outputs[0].is_graph_output():
                continue
            copy, source = node.outputs[0], node.inputs[0]
            tensor = None if source is None or not source.is_initializer() else source.const_value
            if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2:
                continue
            if self._names is not None and copy.name not in self._names:
                continue
            if not _is_statistic(copy) and not _is_uniform(tensor):
                continue
            name = str(copy.name)
            copy.name = None
            own = ir.Value(
                name=name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape),
                const_value=ir.Tensor(tensor.numpy(), tensor.dtype, name=name),
                metadata_props=copy.metadata_props,
            )
            graph.register_initializer(own)
            copy.replace_all_uses_with(own)
            graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _is_statistic(value: ir.Value) -> bool:
    uses = list(value.uses())
    return bool(uses) and all(node.op_type == "BatchNormalization" and position in (3, 4) for node, position in uses)


def _is_uniform(tensor: ir.TensorProtocol) -> bool:
    array = tensor.numpy()
    return bool((array == array.reshape(-1)[0]).all())
