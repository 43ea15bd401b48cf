"""Convert constants once for each precision in which they are really used."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator

import onnx_ir as ir

from onnxamp.dtypes import BY_IR, BY_NAME, FloatType
from onnxamp.model.constants import constant_tensor
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name
from onnxamp.model.tensors import ConvertedTensor
from onnxamp.model.units import Read, all_graphs, is_float
from onnxamp.passes.retype import retype
from onnxamp.policy.plan import Plan


class ConvertConstantsPass(ir.passes.InPlacePass):
    """Give the readers of initializers and Constant nodes what they read in their precision.

    1. A constant that is read in one precision only is converted in place and keeps its name, its form (initializer, Constant,
       external data) and its place; so tied weights stay tied.
    2. If it is also read in its own precision, that one keeps the name, and each other precision gets one copy, ``w__fp16``, in the
       same scope and form: readers share it.
    3. With weights that are cast, a constant of either form stays as it is and the readers are left to `InsertCastsPass`, except
       where shape inference looks at the value and where it is an output of the graph.
    4. Clamped constants are clamped in every precision, and the change is noted on them.
    5. Below IR 4 an initializer is listed as an input too: the entry is retyped with it, and a copy gets one of its own.
    6. Constant's ``value_float`` and ``value_floats`` become a ``value`` tensor when converted.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        reads = _reads(self.plan)
        names = Names(model)
        listed = set(model.graph.inputs) if model.ir_version < 4 else set()
        modified = False
        for value in self.plan.graph.constants:
            modified |= self._constant(model, value, reads.get(value, {}), names, value in listed)
        return ir.passes.PassResult(model, modified)

    def _constant(
        self,
        model: ir.Model,
        value: ir.Value,
        wanted: dict[ir.DataType, list[Read]],
        names: Names,
        listed: bool,
    ) -> bool:
        own = value.dtype
        assert own is not None
        clamp = self.plan.clamped.get(value)
        limit = clamp.limit if clamp is not None else None
        keeps_own = own in wanted
        others: dict[ir.DataType, list[Read]] = {}
        for kind, reads in wanted.items():
            converted = [read for read in reads if not self.plan.casts(read)]
            keeps_own |= len(converted) < len(reads)
            if kind != own and converted:
                others[kind] = converted
        if clamp is not None:
            note(
                value, value.name or "", {"clamped": clamp.limit, "elements": clamp.elements, "extreme": clamp.extreme}
            )
        if not keeps_own and len(others) == 1:
            convert_constant(value, BY_IR[next(iter(others))], limit)
            return True
        for kind, reads in others.items():
            name = names.typed(value.name or "", kind)
            copy = add_copy(value, ConvertedTensor(_data(value), BY_IR[kind], limit), name, names)
            if listed:
                model.graph.inputs.append(copy)
            for read in reads:
                read.redirect(copy)
            if any(read.site is model.graph for read in reads):
                _give_name(value, copy, names)
        if clamp is not None:
            convert_constant(value, BY_IR[own], limit)
        return bool(others) or clamp is not None


def _reads(plan: Plan) -> dict[ir.Value, dict[ir.DataType, list[Read]]]:
    """The reads of each constant, by the precision wanted, in order."""
    found: dict[ir.Value, dict[ir.DataType, list[Read]]] = collections.defaultdict(dict)
    constants = set(plan.graph.constants)
    for unit in plan.graph.units:
        kind = BY_NAME[plan.decisions[unit].precision].ir
        for read in unit.reads:
            if read.value in constants:
                found[read.value].setdefault(kind, []).append(read)
    return found


def note(value: ir.Value, source: str, change: dict[str, object]) -> None:
    """Write on a constant what it was made of and what changed in its values."""
    value.metadata_props["onnxamp.source"] = source
    value.metadata_props["onnxamp.change"] = json.dumps(change, sort_keys=True)


def float_constants(graph: ir.Graph) -> Iterator[ir.Value]:
    """The float constants of `graph` and its bodies."""
    for inner in all_graphs(graph):
        yield from filter(is_float, inner.initializers.values())
        yield from (
            node.outputs[0] for node in inner if operator_name(node) == "Constant" and is_float(node.outputs[0])
        )


def convert_constant(value: ir.Value, kind: FloatType, limit: float | None = None) -> None:
    """Convert a constant in place."""
    tensor = ConvertedTensor(_data(value), kind, limit)
    retype(value, kind.ir)
    if value.producer() is None:
        value.const_value = tensor
    else:
        _set_value(value.producer(), tensor)


def _data(value: ir.Value) -> ir.TensorProtocol:
    tensor = constant_tensor(value)
    assert tensor is not None, value.name
    return tensor


def _set_value(node: ir.Node | None, tensor: ir.TensorProtocol) -> None:
    assert node is not None
    for name in ("value_float", "value_floats"):
        node.attributes.pop(name, None)
    node.attributes["value"] = ir.AttrTensor("value", tensor)


def add_copy(value: ir.Value, tensor: ir.TensorProtocol, name: str, names: Names) -> ir.Value:
    """A constant called `name` beside another one, in its scope and form, with other data."""
    assert value.name is not None
    graph = value.graph
    assert graph is not None
    copy = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    node = value.producer()
    if node is None:
        tensor.name, copy.const_value = name, tensor
        graph.register_initializer(copy)
    else:
        attributes = [ir.AttrTensor("value", tensor)]
        twin = ir.Node("", "Constant", [], attributes, outputs=[copy], name=names.node(name))
        twin.metadata_props.update(node.metadata_props)
        graph.insert_after(node, twin)
    copy.metadata_props.update(value.metadata_props)
    copy.metadata_props.setdefault("onnxamp.source", value.name)
    return copy


def _give_name(value: ir.Value, copy: ir.Value, names: Names) -> None:
    """Let the copy that is an output of the graph have the constant's name."""
    assert value.name is not None
    assert value.dtype is not None
    name = value.name
    if value.const_value is not None:  # a renamed initializer renames its tensor, which belongs to the source
        value.const_value = ConvertedTensor(value.const_value, BY_IR[value.dtype])
    value.name = names.typed(name, value.dtype)
    copy.name = name
