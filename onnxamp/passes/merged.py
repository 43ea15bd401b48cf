"""The tensors of a module, where an exporter merged some because their numbers were equal, or wrote one twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.modules import are_apart, are_siblings, around, module_of_node, owners, scopes
from onnxamp.model.naming import Names
from onnxamp.model.tensors import content_key
from onnxamp.model.units import producer

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
# What a tensor was in PyTorch, as its newer exporter notes.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
# What reads weights at its further inputs: masks and tables that many layers read are elsewhere, and may stay one.
_WEIGHTED = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"})
_PARAMETER = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_NUMBERED = re.compile(r"val_\d+")


class RestoreTensors(ir.passes.InPlacePass):
    """Give each module back its own tensor where an exporter kept one of several equal ones, and one where it wrote two of it.

    Running statistics are never shared by two modules, fresh scales and biases (one number everywhere) are equal by chance, and layers
    that were copied (`copy.deepcopy`, as those of `nn.TransformerEncoder`) are equal until they train: if they stayed one tensor, they
    would train as one. Tensors that are tied in PyTorch stay one.

    1. PyTorch's older exporter gives the others as `Identity` of the first one, under their names; what is tied has one name there.
    2. The newer one reads the first one everywhere, and notes the module of a node. Read in another module than its own, or elsewhere in
       it, statistics and fresh tensors are that module's `weight`, `bias`, `running_mean` or `running_var`, and so is any tensor in the
       layers of a list, if its own reads it first: what is tied has the name of the last. The parameters of a GroupNorm, which it writes
       out, have no name in the file, and get one.
    3. Weights that an exporter transposed have lost their names. They come apart if the modules that read them have other tensors of
       their own, or are in layers that have.
    4. Where nothing tells the modules, statistics do not share a tensor with anything but those of the same kind.
    5. What an exporter computed from a vector of the model by repeating it (the bias that a recurrent layer adds to a first state of
       zeros) is an `Expand` of the vector: as a constant it would not train with it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, names = model.graph, Names(model)
        changed = _restore_copies(graph, lambda node: _is_own(node, named=model.producer_name == "pytorch"))
        for value in _floats(graph):
            changed += _split(graph, value, names)
        owned = owners([str(value.name) for value in graph.initializers.values()])
        changed += _restore_copies(graph, lambda node: _weighs(node.outputs[0]) and are_apart(_readers(node), owned))
        for value in _floats(graph):
            if not _is_named(value) and _weighs(value):
                changed += _part_unnamed(graph, value, owned, names)
        changed += _share_repeated(graph, names)
        return ir.passes.PassResult(model, modified=changed > 0)


def _floats(graph: ir.Graph) -> list[ir.Value]:
    """Float initializers that are nothing else."""
    return [
        value
        for value in graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype.is_floating_point()
        and not (value.is_graph_input() or value.is_graph_output())
    ]


def _restore_copies(graph: ir.Graph, is_own: Callable[[ir.Node], bool]) -> int:
    """Make outputs of Identity initializers of the same name; how many."""
    count = 0
    for node in list(graph):
        source = node.inputs[0] if node.domain == "" and node.op_type == "Identity" else None
        tensor = None if source is None or not source.is_initializer() else source.const_value
        if (
            source is None
            or tensor is None
            or node.outputs[0].is_graph_output()
            or not tensor.dtype.is_floating_point()
        ):
            continue
        if is_own(node):
            copy = node.outputs[0]
            name, copy.name = str(copy.name), None
            copy.replace_all_uses_with(_initializer(graph, name, source))
            graph.remove(node, safe=True)
            count += 1
    return count


def _is_own(node: ir.Node, named: bool) -> bool:
    """Whether the copy that an Identity gives is a tensor of its own; `named`: if it has a name as parameters have."""
    copy, source = node.outputs[0], node.inputs[0]
    if named and _is_named(copy):
        return True
    if source is None or source.const_value is None or source.const_value.size < 2:
        return False
    uses = list(copy.uses())
    return (bool(uses) and all(_leaf(*use) in _STATISTICS for use in uses)) or _is_uniform(source.const_value)


def _weighs(value: ir.Value) -> bool:
    """Whether all that reads a tensor takes it for weights."""
    return all(
        (node.domain == "" and node.op_type in _WEIGHTED and position > 0) or _scales_groups(node, position)
        for node, position in value.uses()
    )


def _readers(node: ir.Node) -> list[str]:
    """The modules that read the copy that an Identity gives, and those that read what it copies."""
    source = node.inputs[0]
    assert source is not None
    others = [user for user, _ in source.uses() if user.op_type != "Identity"]
    return [module_of_node(user) for user in (*others, *(user for user, _ in node.outputs[0].uses()))]


def _part_unnamed(graph: ir.Graph, value: ir.Value, owned: frozenset[str], names: Names) -> int:
    """Give each module that reads a tensor without a name its own one, if they are apart; how many there are more."""
    places: dict[str, list[tuple[ir.Node, int]]] = {}
    for node, position in value.uses():
        places.setdefault(module_of_node(node), []).append((node, position))
    if not are_apart(places, owned) or _is_uniform(value.const_value):
        return 0
    for found in list(places.values())[1:]:
        tensor = _initializer(graph, names.value(str(value.name)), value)
        for node, position in found:
            node.replace_input_with(position, tensor)
    return len(places) - 1


def _split(graph: ir.Graph, value: ir.Value, names: Names) -> int:
    """Give each place that reads a tensor, and has a name for it, its own one; how many there are more."""
    uses = list(value.uses())
    if len(uses) < 2:
        return 0
    read = {node: noted[-1] if (noted := scopes(node)) else "" for node, _ in uses}
    # The code of a module may read the parameters of one in it, as attention does those of its `out_proj`.
    module = next((outer for outer in around(str(value.name).rpartition(".")[0]) if outer in read.values()), "")
    leaf = str(value.name).removeprefix(f"{module}.")
    places: dict[tuple[str, str], list[tuple[ir.Node, int]]] = {}
    for node, position in uses:
        part = _leaf(node, position) or _scales_groups(node, position) or leaf
        places.setdefault((read[node], part), []).append((node, position))
    own, kind = (module, leaf), value.metadata_props.get(_KIND)
    if all(scope and _scales_groups(*use) for (scope, _), found in places.items() for use in found):
        own = next(iter(places))
        value.name = names.value(".".join(own))
    # Where its own module does not read it, or some node has none, nothing tells whose it is.
    if own not in places or not all(scope for scope, _ in places):
        own, places = _kinds(uses)
    else:
        same = [place for place in places if place == own or (place[1] == own[1] and are_siblings((place[0], own[0])))]
        is_copied, is_fresh = same[0] == own and kind != "BUFFER", _is_uniform(value.const_value)
        for place in [place for place in places if place != own and place[1] not in _STATISTICS]:
            if not (is_copied if place in same else is_fresh):
                del places[place]
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
    return len(places) - 1


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


def _share_repeated(graph: ir.Graph, names: Names) -> int:
    """Compute constants that repeat a vector of the graph from it; how many."""
    repeated: list[tuple[ir.Value, np.ndarray]] = []
    vectors: dict[str, ir.Value] = {}
    for value in _floats(graph):
        tensor = value.const_value
        assert tensor is not None
        row = _row(tensor.numpy()) if len(tensor.shape) else None
        if row is None or not _is_drawn(row):
            continue
        if len(tensor.shape) == 1:
            vectors.setdefault(content_key(row), value)
        elif value.metadata_props.get(_KIND) != "PARAMETER":
            repeated.append((value, row))
    count = 0
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
        count += 1
    return count


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


def _scales_groups(node: ir.Node, position: int) -> str:
    """What of a GroupNorm an operand is that exporters write as InstanceNormalization, Reshape, Mul and Add; empty if it is none of it."""
    part = {"Mul": "weight", "Add": "bias"}.get(node.op_type, "") if node.domain == "" else ""
    before = producer(node.inputs[1 - position]) if part else None
    if part == "bias" and before is not None and before.op_type == "Mul":
        before = next((made for value in before.inputs if (made := producer(value)) is not None), None)
    norm = producer(before.inputs[0]) if before is not None and before.op_type == "Reshape" else None
    return part if norm is not None and norm.op_type == "InstanceNormalization" else ""


def _is_named(value: ir.Value) -> bool:
    """Whether a tensor is called like a parameter of a module: those of exporters have numbers (`onnx::MatMul_13`, `val_7`)."""
    name = str(value.name)
    return _PARAMETER.fullmatch(name) is not None and _NUMBERED.fullmatch(name) is None


def _is_uniform(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None:
        return False
    array = tensor.numpy().reshape(-1)
    return bool(array.size and (array == array[0]).all())
