"""The tensors of a module, where an exporter merged some because their numbers were equal, or wrote one twice."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.tensors import content_key

# What normalizations read at their inputs, as PyTorch calls it.
_NORM = {1: "weight", 2: "bias"}
_SLOTS = {
    "BatchNormalization": {**_NORM, 3: "running_mean", 4: "running_var"},
    "InstanceNormalization": _NORM,
    "LayerNormalization": _NORM,
    "GroupNormalization": _NORM,
    "RMSNormalization": {1: "weight"},
}
_STATISTICS = frozenset({"running_mean", "running_var"})
# PyTorch's exporter (`dynamo=True`) notes the modules around a node, the last but one being the node's own, and what a tensor was.
_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


class RestoreTensors(ir.passes.InPlacePass):
    """Give each module back its own tensor where an exporter kept one of several equal ones, and one where it wrote two of it.

    Running statistics are never shared by two modules, and fresh scales and biases (one number everywhere) are equal by chance: if they
    stayed one tensor, they would train as one.

    1. PyTorch's older exporter gives the others as `Identity` of the first one, under their names.
    2. The newer one reads the first one everywhere. It notes the module of a node: what is read in another module than its own, or
       elsewhere in it, is that module's `weight`, `bias`, `running_mean` or `running_var`.
    3. Without such notes, statistics do not share a tensor with anything but those of the same kind.

    4. What an exporter computed from a vector of the model by repeating it (the bias that a recurrent layer adds to a first state of
       zeros) is an `Expand` of the vector: as a constant it would not train with it.

    Other tensors may be tied: they stay one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        names = Names(model)
        modified = False
        for node in list(graph):
            if node.domain == "" and node.op_type == "Identity" and _is_copy(node):
                _restore(graph, node)
                modified = True
        for value in list(graph.initializers.values()):
            if value.const_value is not None and value.const_value.dtype.is_floating_point():
                modified |= _split(graph, value, names)
        modified |= _share_repeated(graph, names)
        return ir.passes.PassResult(model, modified=modified)


def _is_copy(node: ir.Node) -> bool:
    copy, source = node.outputs[0], node.inputs[0]
    tensor = None if source is None or not source.is_initializer() else source.const_value
    if tensor is None or copy.is_graph_output() or not tensor.dtype.is_floating_point() or tensor.size < 2:
        return False
    uses = list(copy.uses())
    return (bool(uses) and all(_leaf(*use) in _STATISTICS for use in uses)) or _is_uniform(tensor)


def _restore(graph: ir.Graph, node: ir.Node) -> None:
    """Make the output of an Identity an initializer of the same name."""
    copy, source = node.outputs[0], node.inputs[0]
    assert source is not None
    name = str(copy.name)
    copy.name = None
    copy.replace_all_uses_with(_initializer(graph, name, source))
    graph.remove(node, safe=True)


def _split(graph: ir.Graph, value: ir.Value, names: Names) -> bool:
    uses = list(value.uses())
    if len(uses) < 2 or value.is_graph_output() or value.is_graph_input():
        return False
    module, _, leaf = str(value.name).rpartition(".")
    places: dict[tuple[str, str], list[tuple[ir.Node, int]]] = {}
    for node, position in uses:
        places.setdefault((_module(node), _leaf(node, position) or leaf), []).append((node, position))
    own = (module, leaf)
    # Where its own module does not read it, or some node has none, nothing tells whose it is.
    if own not in places or not all(scope for scope, _ in places):
        own, places = _kinds(uses)
    elif not _is_uniform(value.const_value):
        places = {place: found for place, found in places.items() if place == own or place[1] in _STATISTICS}
    kind = value.metadata_props.get(_KIND)
    for (scope, part), found in places.items():
        if (scope, part) == own:
            continue
        tensor = _initializer(graph, names.value(f"{scope}.{part}"), value)
        if kind is not None and part in _STATISTICS:
            tensor.metadata_props[_KIND] = "BUFFER"
        elif kind == "PARAMETER":  # of a buffer's ones that a scale reads, nothing says that they are a parameter
            tensor.metadata_props[_KIND] = kind
        for node, position in found:
            node.replace_input_with(position, tensor)
    return len(places) > 1


def _kinds(
    uses: Sequence[tuple[ir.Node, int]],
) -> tuple[tuple[str, str], dict[tuple[str, str], list[tuple[ir.Node, int]]]]:
    """Uses by kind, where nothing tells the modules: statistics, by kind and by node, and everything else."""
    places: dict[tuple[str, str], list[tuple[ir.Node, int]]] = {}
    leaves = [leaf if (leaf := _leaf(*use)) in _STATISTICS else "" for use in uses]
    mixed = len(set(leaves)) > 1
    for (node, position), leaf in zip(uses, leaves, strict=True):
        scope = str(node.name or node.outputs[0].name) if mixed and leaf else ""
        places.setdefault((scope, leaf), []).append((node, position))
    own = ("", "") if ("", "") in places else next(iter(places))
    return own, places


def _share_repeated(graph: ir.Graph, names: Names) -> bool:
    """Make constants that repeat a vector of the graph computed from it."""
    repeated: list[tuple[ir.Value, np.ndarray]] = []
    vectors: dict[str, ir.Value] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or value.is_graph_input() or value.is_graph_output():
            continue
        row = _row(tensor.numpy()) if len(tensor.shape) else None
        if row is None or not _is_drawn(row):
            continue
        if len(tensor.shape) == 1:
            vectors.setdefault(content_key(row), value)
        elif value.metadata_props.get(_KIND) != "PARAMETER":
            repeated.append((value, row))
    modified = False
    for value, row in repeated:
        vector = vectors.get(content_key(row))
        if vector is None or vector.dtype != value.dtype or not value.uses():
            continue
        name, tensor = str(value.name), value.const_value
        assert tensor is not None
        shape = add_initializer(graph, names.value(f"{name}/shape"), np.asarray(tensor.shape.numpy(), np.int64))
        node = ir.node("Expand", [vector, shape], name=names.node(f"{name}/Expand"))
        del graph.initializers[name]
        value.name = names.value(f"{name}/constant")
        result = node.outputs[0]
        result.name, result.type, result.shape = name, value.type, value.shape
        value.replace_all_uses_with(result)
        graph.insert_before(graph[0], node)
        modified = True
    return modified


def _row(array: np.ndarray) -> np.ndarray | None:
    """A vector, or the last dimension of an array in which it is the same everywhere."""
    if array.size == 0:
        return None
    rows = array.reshape(-1, array.shape[-1])
    return rows[0] if (rows[-1] == rows[0]).all() and (rows == rows[0]).all() else None


def _is_drawn(row: np.ndarray) -> bool:
    """Whether another vector of these numbers must come from this one: most are different, and they are no whole numbers."""
    return 2 * len(np.unique(row)) > row.size > 1 and bool((row != np.round(row)).any())


def _initializer(graph: ir.Graph, name: str, source: ir.Value) -> ir.Value:
    tensor = source.const_value
    assert tensor is not None
    value = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=ir.Tensor(tensor.numpy(), tensor.dtype, name=name),
    )
    graph.register_initializer(value)
    return value


def _leaf(node: ir.Node, position: int) -> str:
    return _SLOTS.get(node.op_type, {}).get(position, "") if node.domain == "" else ""


def _module(node: ir.Node) -> str:
    """The module of a node, if its exporter notes it."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "()"))
    except (ValueError, SyntaxError):
        return ""
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""


def _is_uniform(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None:
        return False
    array = tensor.numpy().reshape(-1)
    return bool(array.size and (array == array[0]).all())
