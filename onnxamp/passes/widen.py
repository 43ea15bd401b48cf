"""Take 16-bit types back to fp32."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.dtypes import BY_IR, FP32, LOW
from onnxamp.errors import UnsupportedError
from onnxamp.model.constants import constant_tensor
from onnxamp.model.naming import Names
from onnxamp.model.signatures import TYPE_ATTRIBUTES, node_signature, operator_name
from onnxamp.model.tensors import ConvertedTensor, cast_attribute, cast_target
from onnxamp.model.units import all_nodes, all_values, bodies
from onnxamp.passes.append import new_cast

# What a conversion notes, which is no longer true; other notes (adapters, say) have nothing to do with precision.
_NOTES = "version level dtype target options ranges summary precision code evidence operands cast source change"
_NOTED = frozenset(f"onnxamp.{key}" for key in _NOTES.split())


class WidenPass(ir.passes.InPlacePass):
    """Compute in fp32 what was computed in 16 bits, with the constants as 16 bits hold them.

    1. Every 16-bit value becomes fp32: tensors, and those in sequences and optionals, in bodies and functions too. So do constants, whose
       values are exact in fp32, and attributes that name a type (``to``, ``dtype``, ``stash_type``, ...).
    2. A Cast (or CastLike) that now leads from fp32 to fp32 falls away, whoever made it. One that makes an output gives its name to the
       value before it; it stays where that is an input, a constant, an output already, or, in a body, an input or captured.
    3. An operator without a schema, or whose schema has no fp32, keeps its 16-bit operands and results, between Casts.
    4. With `keep_io` the inputs and outputs of the model keep their types, between Casts.
    5. The notes of a conversion are removed, as they are no longer true.

    Functions on floats are inlined before. Nothing depends on whether a 16-bit value was declared as such.
    """

    def __init__(self, keep_io: bool = False) -> None:
        super().__init__()
        self.keep_io = keep_io

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graphs = [model.graph, *(function.graph for function in model.functions.values())]
        values = [value for graph in graphs for value in all_values(graph)]
        for graph in graphs:
            for node in all_nodes(graph):
                target = cast_target(node) if operator_name(node) == "Cast" else None
                if target is not None and node.outputs[0].type is None:  # before opset 6 inference does not look at it
                    node.outputs[0].type = ir.TensorType(target)
        self._ends = _ends(model) if self.keep_io else {}
        kinds = {value.name or "": kind for value, kind in self._ends.items()}
        self._find_kept(model)
        self._stay.update(value for value in self._ends if _is_behind_cast(value))
        widened = {value for value in values if low_element(value.type) is not None and value not in self._stay}
        for value in widened:
            value.type = widened_type(value.type)
            if value.const_value is not None:
                value.const_value = widened_tensor(value.const_value)
        for graph in graphs:
            for node in all_nodes(graph):
                if node not in self._kept and not any(value in self._stay for value in node.outputs):
                    widen_attributes(node)
                    _widen_target(node)
        _drop_casts(model.graph, widened)
        self._names, self._model = Names(model), model
        self._serve_kept()
        self._restore_ends(model.graph, kinds)
        notes = [model.metadata_props, *(value.metadata_props for value in values)]
        notes += [node.metadata_props for graph in graphs for node in all_nodes(graph)]
        for props in notes:
            for key in _NOTED & props.keys():
                del props[key]
        return ir.passes.PassResult(model, modified=True)

    # -- operators that stay ----------------------------------------------------------------------------------------

    def _find_kept(self, model: ir.Model) -> None:
        """The nodes of rule 3 with the types of their operands, and the values that only they write or read."""
        self._kept: dict[ir.Node, list[ir.DataType | None]] = {}
        for node in all_nodes(model.graph):
            touched = [low_element(value.type) for value in (*node.inputs, *node.outputs) if value is not None]
            if not any(touched) or node.op_identifier() in model.functions or _has_fp32(node, model):
                continue
            plain = all(value.type is not None for value in node.outputs if value.name)
            plain &= all(v is None or isinstance(v.type, ir.TensorType | None) for v in (*node.inputs, *node.outputs))
            if not plain or any(True for _ in bodies(node)):
                raise UnsupportedError(
                    f"{operator_name(node)} node {node.name!r} has no fp32 form that is known, and 16-bit values in bodies, sequences or "
                    "results of undeclared type: declare its results as tensors (value_info) or replace it."
                )
            self._kept[node] = [low_element(value.type) if value is not None else None for value in node.inputs]
        self._stay = {value for node in self._kept for value in node.outputs if low_element(value.type) is not None}
        for node in self._kept:
            for value in node.inputs:
                if (
                    value is None
                    or low_element(value.type) is None
                    or value.is_graph_output()
                    or (value.is_graph_input() and value not in self._ends)
                ):
                    continue
                producer = value.producer()
                made = producer is None or operator_name(producer) in ("Cast", "Constant")
                if made and self._kept.keys() >= set(value.consumers()):
                    self._stay.add(value)

    def _serve_kept(self) -> None:
        """Casts around the nodes of rule 3."""
        for node, kinds in self._kept.items():
            for index, (value, kind) in enumerate(zip(node.inputs, kinds, strict=True)):
                if value is not None and kind is not None and value not in self._stay:
                    down = self._cast(value, self._names.typed(value.name or "", kind), kind)
                    node.prepend(down)
                    node.replace_input_with(index, down.outputs[0])
            for value in node.outputs:
                if value not in self._stay:
                    continue
                users = [
                    (user, index)
                    for user, index in value.uses()
                    if user not in self._kept and operator_name(user) != "Cast"
                ]
                if users or (value.is_graph_output() and value not in self._ends):
                    self._bring_back(node, value, users)

    def _bring_back(self, node: ir.Node, value: ir.Value, users: list[tuple[ir.Node, int]]) -> None:
        """A Cast behind `value`, whose result takes its name, unless that is the interface's."""
        name, kind, graph = value.name or "", value.dtype, value.graph
        assert kind is not None
        assert graph is not None
        if value in self._ends:
            up = self._cast(value, self._names.typed(name, FP32.ir), FP32.ir)
        else:
            value.name = self._names.typed(name, kind)
            up = self._cast(value, name, FP32.ir)
            for index, output in enumerate(graph.outputs):
                if output is value:
                    graph.outputs[index] = up.outputs[0]
        node.append(up)
        for user, index in users:
            user.replace_input_with(index, up.outputs[0])

    # -- interface --------------------------------------------------------------------------------------------------

    def _restore_ends(self, graph: ir.Graph, kinds: dict[str, ir.DataType]) -> None:
        """Casts behind inputs and before outputs that keep their types, by name."""
        for value in reversed(graph.inputs):
            name = value.name or ""
            if name not in kinds or value in self._stay:
                continue
            users = tuple(value.uses())
            up = self._cast(value, self._names.typed(name, FP32.ir), FP32.ir)
            _set_type(value, kinds[name])
            for user, index in users:
                user.replace_input_with(index, up.outputs[0])
            graph.insert_before(graph[0], up)
        for index, value in enumerate(graph.outputs):
            name = value.name or ""
            if name not in kinds or value.dtype == kinds[name]:  # an input handed through has its type already
                continue
            value.name = self._names.typed(name, FP32.ir)
            down = self._cast(value, name, kinds[name])
            graph.append(down)
            for other in range(index, len(graph.outputs)):
                if graph.outputs[other] is value:
                    graph.outputs[other] = down.outputs[0]

    def _cast(self, value: ir.Value, name: str, kind: ir.DataType) -> ir.Node:
        return new_cast(self._model, value, name, kind, self._names)


def _ends(model: ir.Model) -> dict[ir.Value, ir.DataType]:
    """The 16-bit inputs and outputs of the model."""
    given = [value for value in model.graph.inputs if model.ir_version >= 4 or not value.is_initializer()]
    ends = {}
    for value in (*given, *model.graph.outputs):
        kind = low_element(value.type)
        if kind is not None and not isinstance(value.type, ir.TensorType):
            raise UnsupportedError(
                f"{value.name!r} holds 16-bit tensors in a {value.type}, which has no Cast: let the interface become fp32."
            )
        if kind is not None:
            ends[value] = kind
    return ends


def _is_behind_cast(value: ir.Value) -> bool:
    """Whether nothing but Casts connects an input or output with the rest of the model."""
    producer = value.producer()
    if producer is None:
        return all(operator_name(user) == "Cast" for user in value.consumers())
    return operator_name(producer) == "Cast" and not value.uses()


def _has_fp32(node: ir.Node, model: ir.Model) -> bool:
    """Whether the schema of `node` allows fp32 wherever the node has a 16-bit tensor."""
    known = node_signature(node, model.opset_imports)
    if known is None:
        return False
    for values, formal_of in ((node.inputs, known.input), (node.outputs, known.output)):
        for index, value in enumerate(values):
            formal = formal_of(index)
            if value is None or not isinstance(value.type, ir.TensorType) or value.dtype not in LOW:
                continue
            if formal is not None and formal.homogeneous and not known.allows(formal.variable, FP32.ir):
                return False
    return True


def _drop_casts(graph: ir.Graph, widened: set[ir.Value]) -> None:
    """Remove the Casts that widening left without effect."""
    idle = [
        node
        for node in all_nodes(graph)
        if operator_name(node) in ("Cast", "CastLike")
        and all(value is not None and _is_fp32(value) for value in (node.inputs[0], node.outputs[0]))
        and not widened.isdisjoint((node.inputs[0], node.outputs[0]))
    ]
    for node in idle:
        value, result, inside = node.inputs[0], node.outputs[0], node.graph
        assert value is not None
        assert inside is not None
        named = result.is_graph_output()
        if named and (value.producer() is None or value.graph is not inside or value.is_graph_output()):
            continue
        for user, index in tuple(result.uses()):
            user.replace_input_with(index, value)
        for index, output in enumerate(inside.outputs):
            if output is result:
                inside.outputs[index] = value
        inside.remove(node, safe=True)
        if named:
            value.name, value.type = result.name, result.type
            value.shape = result.shape if result.shape is not None else value.shape


def _widen_target(node: ir.Node) -> None:
    """Let a Cast to 16 bits lead to fp32."""
    if operator_name(node) == "Cast" and cast_target(node) in LOW:
        by_name = node.attributes["to"].type == ir.AttributeType.STRING
        node.attributes["to"] = cast_attribute(FP32.ir, 1 if by_name else 6)


def widen_attributes(node: ir.Node) -> None:
    """Widen the constants and element types that `node` carries in attributes; not the target of a Cast."""
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in LOW:
            node.attributes[name] = ir.AttrTensor(name, widened_tensor(attribute.value))
        elif (
            name in TYPE_ATTRIBUTES
            and name != "to"
            and attribute.type == ir.AttributeType.INT
            and attribute.value in LOW
        ):
            node.attributes[name] = ir.AttrInt64(name, FP32.ir.value)
        elif attribute.type == ir.AttributeType.TYPE_PROTO:
            kind = ir.TypeAndShape(widened_type(attribute.value.type), attribute.value.shape)
            node.attributes[name] = ir.Attr(name, attribute.type, kind)


def low_element(kind: ir.TypeProtocol | None) -> ir.DataType | None:
    """The 16-bit element type inside a tensor, sequence or optional type."""
    while isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        kind = kind.elem_type
    return kind.dtype if isinstance(kind, ir.TensorType) and kind.dtype in LOW else None


def widened_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """The type with fp32 in place of 16-bit elements."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        inner = widened_type(kind.elem_type)
        assert inner is not None
        return type(kind)(inner, denotation=kind.denotation)
    if isinstance(kind, ir.TensorType) and kind.dtype in LOW:
        return ir.TensorType(FP32.ir, denotation=kind.denotation)
    return kind


def widened_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor in fp32 if it is 16-bit; exact."""
    return ConvertedTensor(tensor, FP32) if tensor.dtype in LOW else tensor


def _is_fp32(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) and value.dtype == FP32.ir


def _set_type(value: ir.Value, kind: ir.DataType) -> None:
    """Give an input its 16-bit type back, and its default, which came from 16 bits, too."""
    value.type = ir.TensorType(kind, denotation=value.type.denotation if value.type is not None else None)
    tensor = constant_tensor(value)
    if tensor is not None:
        value.const_value = ConvertedTensor(tensor, BY_IR[kind])
