"""Types and shapes of all values of a model.

Three sources, each used for what it does best: ONNX's own inference gives every type of the standard operators; onnx-shape-inference
keeps the names of dimensions and knows ONNX Runtime's operators; the type variables of the signatures give the types that both miss.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator

import onnx
import onnx.shape_inference
import onnx_ir as ir
import onnx_shape_inference

from onnxamp.errors import cause
from onnxamp.model import contrib_shapes
from onnxamp.model.signatures import node_signature, operator_name
from onnxamp.model.tensors import nbytes
from onnxamp.model.units import TYPE_ATTRIBUTE, all_nodes, all_values, bodies

# Tensors above this size do not take part in inference by value (shapes, axes and repeats are far smaller).
_SMALL_BYTES = 1024
# How ONNX's inference calls a dimension that it does not know.
_ANONYMOUS = "unk__"
# What ONNX's inference raises.
_REFUSALS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, TypeError)
_ELEMENT = {
    "bool": ir.DataType.BOOL,
    "complex64": ir.DataType.COMPLEX64,
    "complex128": ir.DataType.COMPLEX128,
    "double": ir.DataType.DOUBLE,
    "float": ir.DataType.FLOAT,
    "string": ir.DataType.STRING,
} | {
    name.lower(): kind
    for name, kind in ir.DataType.__members__.items()
    if name.startswith(("INT", "UINT", "FLOAT1", "BFLOAT", "FLOAT8", "FLOAT4", "FLOAT6"))
}


def infer(model: ir.Model) -> None:
    """Set type and shape on every value of `model` for which they follow from the graph, in place.

    What the source declares of intermediate values counts only where nothing can be inferred (custom operators) and for the names of
    dimensions, as such declarations are often stale; declared types of inputs and outputs are kept. Weights are not copied. A value
    behind an unknown operator stays without type.
    """
    declared = {value: value.type for value in (*model.graph.inputs, *model.graph.outputs)}
    _infer_standard(model)
    if not _complete(model):
        _infer_symbolic(model)
    _propagate(model.graph, model.opset_imports)
    for value, kind in declared.items():
        if kind is not None:
            value.type = kind


# ONNX's inference


def _infer_standard(model: ir.Model) -> None:
    proto, nodes = _skeleton(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except _REFUSALS:
        return  # the other two sources do what they can; what stays untyped is named where it matters
    _absorb(nodes, inferred.graph)


def contradiction(model: ir.Model) -> str | None:
    """What ONNX's own strict inference, which onnx.checker runs, refuses in a model with inferred types; None if nothing."""
    try:
        onnx.shape_inference.infer_shapes(_skeleton(model)[0], check_type=True, strict_mode=True)
    except _REFUSALS as problem:
        return cause(problem)
    return None


def _skeleton(model: ir.Model) -> tuple[onnx.ModelProto, list[ir.Node]]:
    """The model without large tensors and stale declarations, and the nodes that its main graph has."""
    graph = model.graph
    nodes = []
    large: dict[ir.Value, ir.TensorProtocol] = {}
    for node in graph:
        if _is_large_constant(node):
            large[node.outputs[0]] = node.attributes["value"].as_tensor()
        else:
            nodes.append(node)
    small = []
    for value in graph.initializers.values():
        if value.const_value is not None and nbytes(value.const_value) > _SMALL_BYTES:
            large[value] = value.const_value
        else:
            small.append(value)
    view = ir.GraphView(graph.inputs, graph.outputs, nodes=nodes, initializers=small, name=graph.name or "graph")
    proto = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    ir.serde.serialize_graph_into(proto.graph, view)  # type: ignore[arg-type]  # its own class does not fit its protocol
    for function in model.functions.values():
        ir.serde.serialize_function_into(proto.functions.add(), function)
    _drop_declarations(nodes, proto.graph, model.opset_imports)
    inputs = {value.name for value in graph.inputs}
    for value, tensor in large.items():
        if value.name not in inputs:
            assert isinstance(tensor.shape, ir.Shape)
            value.type, value.shape = ir.TensorType(tensor.dtype), tensor.shape
            typed = ir.Value(name=value.name, type=value.type, shape=value.shape)
            ir.serde.serialize_value_into(proto.graph.value_info.add(), typed)
    return proto, nodes


def _is_large_constant(node: ir.Node) -> bool:
    if operator_name(node) != "Constant" or "value" not in node.attributes or node.attributes["value"].is_ref():
        return False
    return nbytes(node.attributes["value"].as_tensor()) > _SMALL_BYTES


def _drop_declarations(nodes: list[ir.Node], proto: onnx.GraphProto, opsets: dict[str, int]) -> None:
    """Leave only the declarations of values that ONNX cannot infer: results of operators that it does not know."""
    if proto.value_info:
        needed = {value.name for node in nodes if not _is_standard(node, opsets) for value in node.outputs}
        kept = [info.SerializeToString() for info in proto.value_info if info.name in needed]
        del proto.value_info[:]
        proto.value_info.extend(onnx.ValueInfoProto.FromString(info) for info in kept)
    for body, inner in _bodies(nodes, proto):
        _drop_declarations(list(body), inner, opsets)


def _is_standard(node: ir.Node, opsets: dict[str, int]) -> bool:
    return onnx.defs.has(node.op_type, domain=node.domain) and node.domain in opsets


def _bodies(nodes: list[ir.Node], proto: onnx.GraphProto) -> Iterator[tuple[ir.Graph, onnx.GraphProto]]:
    """The bodies of `nodes`, each with its serialized twin."""
    for index, node in enumerate(nodes):
        found = list(bodies(node))
        if found:
            yield from zip(found, _proto_bodies(proto.node[index]), strict=True)


def _proto_bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _absorb(nodes: list[ir.Node], proto: onnx.GraphProto) -> None:
    """Take types and shapes over from an inferred graph with the same nodes."""
    found = {info.name: info.type for info in (*proto.value_info, *proto.output)}
    for node in nodes:
        for value in node.outputs:
            if value.name in found:
                _set(value, found[value.name])
    for body, inner in _bodies(nodes, proto):
        for value, info in zip(body.inputs, inner.input, strict=True):
            _set(value, info.type)
        _absorb(list(body), inner)


def _set(value: ir.Value, proto: onnx.TypeProto) -> None:
    """Give a value an inferred type; its declared shape contributes the names of dimensions."""
    case = proto.WhichOneof("value")
    if case == "tensor_type":  # most values: without the detours of the general case
        tensor = proto.tensor_type
        if not tensor.elem_type:
            return
        value.type = ir.TensorType(ir.DataType(tensor.elem_type), denotation=proto.denotation or None)
        if tensor.HasField("shape"):
            dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
            value.shape = _merge(dims, value.shape)
    elif case in ("sequence_type", "optional_type"):
        with contextlib.suppress(ir.serde.SerdeError, ValueError, NotImplementedError):  # maps
            value.type = ir.serde.deserialize_type_proto_for_type(proto)


def _merge(inferred: list[int | str], declared: ir.Shape | None) -> ir.Shape:
    """The inferred shape with the declared names of dimensions; inferred sizes win, anonymous ones stay anonymous."""
    names = [None] * len(inferred) if declared is None or len(declared) != len(inferred) else declared.dims
    dims: list[int | ir.SymbolicDim] = []
    for dim, name in zip(inferred, names, strict=True):
        if isinstance(dim, int) and dim >= 0:
            dims.append(dim)
        elif (isinstance(name, int) and name >= 0) or (
            isinstance(name, ir.SymbolicDim) and not _is_anonymous(name.value)
        ):
            dims.append(name)
        else:
            dims.append(ir.SymbolicDim(None if isinstance(dim, int) or _is_anonymous(dim) else dim))
    return ir.Shape(dims)


def _is_anonymous(name: str | None) -> bool:
    return not name or name.startswith(_ANONYMOUS)


# onnx-shape-inference


def _complete(model: ir.Model) -> bool:
    """Whether every result has a type and a shape without anonymous dimensions."""
    for node in all_nodes(model.graph):
        for value in node.outputs:
            if not value.name:
                continue
            if value.type is None or (isinstance(value.type, ir.TensorType) and value.shape is None):
                return False
            if any(isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in value.shape or ()):
                return False
    return True


def _infer_symbolic(model: ir.Model) -> None:
    contrib_shapes.register()
    values = list(all_values(model.graph))
    inside = [value for function in model.functions.values() for value in all_values(function.graph)]
    open_values = [(value, value.type, value.shape) for value in inside]  # a function may be called with several types
    before = [(value, value.type, value.shape, value.const_value) for value in values]
    with (
        _quiet("onnx_shape_inference"),
        _keep_names(model),
        contextlib.suppress(Exception),
    ):  # one operator it gets wrong ends the walk
        onnx_shape_inference.infer_symbolic_shapes(model, policy="override", warn_on_missing=False)
    names = {dim.value for _, _, shape, _ in before for dim in shape or () if not isinstance(dim, int)}
    for value, kind, shape, tensor in before:
        if kind is not None:
            value.type = kind
        elif not _is_whole(value.type) or not _is_result(value, model.opset_imports):
            value.type = None
        if shape is not None and (shape.is_static() or value.shape is None or len(value.shape) != len(shape)):
            value.shape = shape
        elif value.shape is not None:
            value.shape = _sized(value.shape, names)
        value.const_value = tensor
    for value, kind, shape in open_values:
        value.type, value.shape = kind, shape
    for value in (*values, *inside):
        for key in [key for key in value.metadata_props if key.startswith("pkg.onnx_shape_inference.")]:
            del value.metadata_props[key]


def _sized(shape: ir.Shape, names: Collection[str | None]) -> ir.Shape:
    """`shape` with sizes where onnx-shape-inference gives the result of its arithmetic as a name: a dimension called 16.

    The source's own `names` stay: a dimension that it calls 16 is free.
    """
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape(
        [int(dim) if isinstance(dim, str) and dim.isdecimal() and dim not in names else dim for dim in dims]
    )


@contextlib.contextmanager
def _keep_names(model: ir.Model) -> Iterator[None]:
    """Undo that onnx-shape-inference names the tensors of Constant nodes, which may belong to the caller's ModelProto."""
    tensors = [
        node.attributes["value"].value
        for node in all_nodes(model.graph)
        if operator_name(node) == "Constant" and "value" in node.attributes
    ]
    names = [tensor.name for tensor in tensors]
    yield
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.name != name:
            tensor.name = name or None


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# Signatures


def _propagate(graph: ir.Graph, opsets: dict[str, int]) -> None:
    """Types that follow from type variables, in graph order; bodies take and give types where control flow ties them."""
    for node in graph:
        control = operator_name(node) in ("If", "Loop", "Scan")
        inner = list(bodies(node))
        if control and operator_name(node) in ("Loop", "Scan"):
            for value, formal in zip(node.inputs, inner[0].inputs, strict=False):
                _copy_type(value, formal)
        for body in inner:
            _propagate(body, opsets)
        if control:
            results = inner[0].outputs[1 if operator_name(node) == "Loop" else 0 :]
            for value, output in zip(results, node.outputs, strict=False):
                _copy_type(value, output)
        elif any(value.type is None and value.name for value in node.outputs):
            _by_signature(node, opsets)


def _copy_type(source: ir.Value | None, target: ir.Value) -> None:
    if source is not None and source.type is not None and target.type is None:
        target.type = source.type


def _by_signature(node: ir.Node, opsets: dict[str, int]) -> None:
    signed = node_signature(node, opsets)
    if signed is None:
        return
    bound: dict[str, ir.TypeProtocol] = {}
    for index, value in enumerate(node.inputs):
        formal = signed.input(index)
        if value is not None and value.type is not None and formal is not None and formal.homogeneous:
            bound.setdefault(formal.variable, value.type)
    for index, value in enumerate(node.outputs):
        formal = signed.output(index)
        if value.type is not None or formal is None or not formal.homogeneous:
            continue
        attribute = node.attributes.get(TYPE_ATTRIBUTE.get((operator_name(node), formal.variable), ""))
        allowed = signed.types.get(formal.variable, frozenset({formal.variable}))
        if attribute is not None and attribute.type == ir.AttributeType.INT:
            value.type = ir.TensorType(ir.DataType(attribute.as_int()))
        elif formal.variable in bound:
            kind = bound[formal.variable]
            value.type = kind if _is_allowed(kind, allowed) else None
        elif len(allowed) == 1:
            value.type = _parse(next(iter(allowed)))


def _is_result(value: ir.Value, opsets: dict[str, int]) -> bool:
    """Whether the operator that makes the value can give its type; True where no schema tells."""
    node, index = value.producer(), value.index()
    if node is None or index is None or value.type is None:
        return True
    signed = node_signature(node, opsets)
    formal = signed.output(index) if signed is not None else None
    if signed is None or formal is None or not formal.homogeneous:
        return True
    return _is_allowed(value.type, signed.types.get(formal.variable, frozenset({formal.variable})))


def _is_allowed(kind: ir.TypeProtocol, allowed: frozenset[str]) -> bool:
    """Whether a schema that allows these types allows this one; of sequences and maps it is not asked."""
    return not isinstance(kind, ir.TensorType) or f"tensor({kind.dtype.name.lower()})" in allowed


def _is_whole(kind: ir.TypeProtocol | None) -> bool:
    """Whether a type says what its elements are: a sequence of unknown things is no type that can be written."""
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        kind = kind.elem_type
    return kind is not None and kind.dtype not in (None, ir.DataType.UNDEFINED)


def _parse(text: str) -> ir.TypeProtocol | None:
    """The type that ONNX writes as ``tensor(float)`` or ``seq(tensor(int64))``; None for maps."""
    outer, _, rest = text.removesuffix(")").partition("(")
    if outer == "tensor" and rest in _ELEMENT:
        return ir.TensorType(_ELEMENT[rest])
    if outer in ("seq", "optional") and (inner := _parse(rest)) is not None:
        return ir.SequenceType(inner) if outer == "seq" else ir.OptionalType(inner)
    return None
