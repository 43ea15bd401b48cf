"""The tensors of a module, where an exporter kept one of several equal ones, or wrote one twice."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.model.modules import (
    KIND,
    SCOPES,
    apart_from,
    are_siblings,
    around,
    is_second_call,
    module_of_node,
    numbers,
    scopes,
)
from onnxamp.model.naming import Names
from onnxamp.model.units import producer
from onnxamp.passes.repeated import share_repeated

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
# What reads weights at its further inputs: masks and tables that many layers read are elsewhere, and may stay one.
_WEIGHTED = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"})
_PARAMETER = re.compile(r"[A-Za-z_]\w*(\.\w+)*|\d+(\.\w+)+")
_NUMBERED = re.compile(r"val_\d+")
# How the older exporter calls the nodes that stand for copies.
_COPY = re.compile(r"Identity_\d+")
# Up to this size the newer exporter keeps one of equal tensors.
_MERGED_ELEMENTS = 1024

_UNKNOWN = "?"

Use = tuple[ir.Node, int]
Place = tuple[str, str]
"""A module, and what a tensor is in it: ``("layers.0.norm", "weight")``."""


class RestoreTensors(ir.passes.InPlacePass):
    """Give each module back its own tensor where an exporter kept one of several equal ones, and one where it wrote two of it.

    Running statistics are never shared by two modules, fresh scales and biases (one number everywhere) are equal by chance, and layers
    that were copied (`copy.deepcopy`, as those of `nn.TransformerEncoder`) are equal until they train: if they stayed one tensor, they
    would train as one. Tensors that are tied in PyTorch stay one, as far as the file tells them from those.

    1. PyTorch's older exporter gives the others as `Identity` of the first one, under their names; what is tied has one name there.
    2. The newer one reads one of them everywhere: the one that was registered first if they were equal, the last if they are tied. It
       notes the module of a node, and so what else reads it. Statistics and fresh tensors may be any module's; others come apart in the
       layers of a list. The parameters of a GroupNorm, which it writes out, have no name in the file, and get one.
    3. Weights that an exporter transposed have lost their names. They come apart if what else the modules have is equal, too.
    4. Where nothing tells the modules, statistics do not share a tensor with anything but those of the same kind.
    5. See `share_repeated`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, names = model.graph, Names(model)
        noted = any(SCOPES in node.metadata_props for node in graph)
        older = model.producer_name == "pytorch" and not noted
        changed = _restore_copies(graph, lambda node: _is_own(node, older))
        if not noted or _merges_equal(graph):
            registry = _Registry(graph)
            for value in _floats(graph):
                changed += _split(graph, value, names, registry)
            changed += _restore_copies(
                graph, lambda node: older and _weighs(node.outputs[0]) and _are_copies(graph, _readers(node))
            )
            for value in _floats(graph):
                if not _is_named(value) and not _is_uniform(value.const_value) and _weighs(value):
                    changed += _part_unnamed(graph, value, names)
        changed += share_repeated(graph, names)
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


def _merges_equal(graph: ir.Graph) -> bool:
    """Whether the exporter has kept one of equal tensors: no two are equal. It has not with `optimize=False`."""
    seen = set()
    for value in _floats(graph):
        assert value.const_value is not None
        if 1 < value.const_value.size <= _MERGED_ELEMENTS:
            array = value.const_value.numpy()
            key = (value.dtype, array.shape, array.tobytes())
            if key in seen:
                return False
            seen.add(key)
    return True


# The older exporter


def _restore_copies(graph: ir.Graph, is_own: Callable[[ir.Node], bool]) -> int:
    """Make outputs of Identity initializers of the same name; how many."""
    count = 0
    for node in list(graph):
        source = node.inputs[0] if node.domain == "" and node.op_type == "Identity" else None
        tensor = None if source is None or not source.is_initializer() else source.const_value
        if source is None or tensor is None or not tensor.dtype.is_floating_point():
            continue
        copy = node.outputs[0]
        if not copy.is_graph_output() and is_own(node):
            name, copy.name = str(copy.name), None
            copy.replace_all_uses_with(_initializer(graph, name, source))
            graph.remove(node, safe=True)
            count += 1
    return count


def _is_own(node: ir.Node, older: bool) -> bool:
    """Whether the copy that an Identity gives is a tensor of its own."""
    copy, source = node.outputs[0], node.inputs[0]
    assert source is not None
    uses = list(copy.uses())
    if uses and all(_leaf(*use) in _STATISTICS for use in uses):
        return True
    if not older or not _COPY.fullmatch(str(node.name)):
        return False
    if _is_named(copy):
        return True
    readers = _readers(node)
    again = any(is_second_call(one, other) for one in readers for other in readers)
    return _is_uniform(source.const_value) and _weighs(copy) and not again


def _readers(node: ir.Node) -> list[str]:
    """The modules that read what an Identity copies, and those that read its copy."""
    source = node.inputs[0]
    assert source is not None
    others = [user for user, _ in source.uses() if user.op_type != "Identity"]
    return [module_of_node(user) for user in (*others, *(user for user, _ in node.outputs[0].uses()))]


# Weights without names


def _weighs(value: ir.Value) -> bool:
    """Whether all that reads a tensor takes it for weights."""
    return all(
        (node.domain == "" and node.op_type in _WEIGHTED and position > 0) or _written_out(node, position)
        for node, position in value.uses()
    )


def _part_unnamed(graph: ir.Graph, value: ir.Value, names: Names) -> int:
    """Give each module that reads a tensor without a name its own one, if they are copies; how many there are more."""
    places: dict[str, list[Use]] = {}
    for node, position in value.uses():
        places.setdefault(module_of_node(node), []).append((node, position))
    if not _are_copies(graph, list(places)):
        return 0
    for found in list(places.values())[1:]:
        _replace(found, _initializer(graph, names.value(str(value.name)), value))
    return len(places) - 1


def _are_copies(graph: ir.Graph, paths: Sequence[str]) -> bool:
    """Whether modules that read the same weight are copies, and the weight is not tied: see `_is_copy`."""
    different = list(dict.fromkeys(paths))
    return len(different) > 1 and all(different) and all(_is_copy(graph, path, different[0]) for path in different[1:])


def _is_copy(graph: ir.Graph, path: str, other: str) -> bool:
    """Whether all that two modules have under equal names is equal; of layers in a list, what the layers have.

    Where there is nothing but fresh tensors, layers of a list are copies, as it is these that are copied.
    """
    listed = are_siblings((path, other))
    if not listed and is_second_call(path, other) and not any(_under(graph, path)):
        return False
    first, second = (apart_from(path, other), apart_from(other, path)) if listed else (path, other)
    own, against = dict(_under(graph, first)), dict(_under(graph, second))
    drawn = [
        name for name in own.keys() & against.keys() if not (_is_uniform(own[name]) and _is_uniform(against[name]))
    ]
    if drawn:
        return all(np.array_equal(own[name].numpy(), against[name].numpy()) for name in drawn)
    return listed and bool(own) and bool(against)


def _under(graph: ir.Graph, path: str) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """The float tensors of a module, by their names in it."""
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if name.startswith(f"{path}.") and tensor is not None and tensor.dtype.is_floating_point():
            yield name[len(path) + 1 :], tensor


# Tensors that the newer exporter reads in several modules


class _Registry:
    """What a file shows of the modules before anything is taken apart.

    Attributes:
        reads: The float initializers that the code of each module reads.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._order = {str(value.name): index for index, value in enumerate(graph.initializers.values())}
        self.reads: dict[str, set[ir.Value]] = collections.defaultdict(set)
        for value in _floats(graph):
            for node, _ in value.uses():
                self.reads[_scope(node)].add(value)

    def came_before(self, name: str, module: str) -> bool | None:
        """Whether a tensor was registered before all tensors of a module; None if the file has none of it."""
        others = [index for other, index in self._order.items() if other.startswith(f"{module}.")]
        return self._order[name] < min(others) if others and name in self._order else None


def _scope(node: ir.Node) -> str:
    noted = scopes(node)
    return noted[-1] if noted else "" if SCOPES in node.metadata_props else _UNKNOWN


def _split(graph: ir.Graph, value: ir.Value, names: Names, registry: _Registry) -> int:
    """Give each place that reads a tensor, and has a name for it, its own one; how many there are more."""
    uses = list(value.uses())
    if len(uses) < 2:
        return 0
    own, places = _places(value, uses)
    known = all(scope != _UNKNOWN for scope, _ in places)
    if own is None and known and _is_uniform(value.const_value) and all(_written_out(*use) for use in uses):
        if len(places) == 1:
            return 0
        del graph.initializers[str(value.name)]  # what the exporter writes out has lost its name, and each gets one
    elif own is None or own not in places or not known:
        own, places = _kinds(uses)
    else:
        kept = [place for place in places if place == own or _is_apart(value, own, place, places, registry)]
        places = {place: places[place] for place in kept}
    kind = value.metadata_props.get(KIND)
    for (scope, part), found in places.items():
        if (scope, part) == own:
            continue
        tensor = _initializer(graph, names.value(f"{scope}.{part}" if scope else part), value)
        if kind is not None and part in _STATISTICS:
            tensor.metadata_props[KIND] = "BUFFER"
        elif kind == "PARAMETER":  # of a buffer's ones that a scale reads, nothing says that they are a parameter
            tensor.metadata_props[KIND] = kind
        _replace(found, tensor)
    return len(places) - 1


def _places(value: ir.Value, uses: Sequence[Use]) -> tuple[Place | None, dict[Place, list[Use]]]:
    """The place of a tensor by its name, none if it has no name, and its uses by place, in the order of the graph."""
    read = {node: _scope(node) for node, _ in uses}
    name = str(value.name)
    # The code of a module may read the parameters of one in it, as attention does those of its `out_proj`.
    module = next((outer for outer in around(name.rpartition(".")[0]) if outer in read.values()), "")
    leaf = name.removeprefix(f"{module}.") if module else name
    places: dict[Place, list[Use]] = {}
    for node, position in uses:
        part = _leaf(node, position) or _written_out(node, position) or leaf
        places.setdefault((read[node], part), []).append((node, position))
    return ((module, leaf) if _is_named(value) else None), places


def _is_apart(value: ir.Value, own: Place, place: Place, places: dict[Place, list[Use]], registry: _Registry) -> bool:
    """Whether what is read in `place` was a tensor of its own there, and is not tied to that of `own`.

    1. Statistics are never shared.
    2. In the layers of a list it was if the one that is kept has the lower number; tied ones have the name of the last.
    3. Elsewhere only fresh tensors are equal by chance. They were if the module has other tensors, which `own` does not read. Else the
       order of registration tells, if tensors around it show that, or the order in which they are read.
    """
    (module, part), (scope, other) = own, place
    if other in _STATISTICS:
        return True
    if part == other and are_siblings((module, scope)):
        return numbers(module) < numbers(scope) and value.metadata_props.get(KIND) != "BUFFER"
    if not _is_uniform(value.const_value):
        return False
    if module == scope or registry.reads[scope] - registry.reads[module]:
        return True
    came_first = registry.came_before(str(value.name), apart_from(scope, module))
    if came_first is not None:
        return came_first
    order = list(places)
    return order.index(own) < order.index(place)


def _kinds(uses: Sequence[Use]) -> tuple[Place, dict[Place, list[Use]]]:
    """Uses by kind, where nothing tells the modules: statistics, by kind and by node, and everything else."""
    places: dict[Place, list[Use]] = {}
    leaves = [leaf if (leaf := _leaf(*use)) in _STATISTICS else "" for use in uses]
    mixed = len(set(leaves)) > 1
    for (node, position), leaf in zip(uses, leaves, strict=True):
        scope = str(node.name or node.outputs[0].name) if mixed and leaf else ""
        places.setdefault((scope, leaf), []).append((node, position))
    own = ("", "") if ("", "") in places else next(iter(places))
    return own, places


def _replace(uses: Sequence[Use], tensor: ir.Value) -> None:
    for node, position in uses:
        node.replace_input_with(position, tensor)


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


def _written_out(node: ir.Node, position: int) -> str:
    """What of a module an operand is whose tensors exporters reshape, so that they lose their names; empty if it is none of it.

    Slopes of PRelu, and of a GroupNorm, which is written as InstanceNormalization, Reshape, Mul and Add, its scale and bias.
    """
    if node.domain == "" and node.op_type == "PRelu" and position == 1:
        return "weight"
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
