"""Checks of a model as it was read, before anything is built from it: each failure is one sentence that names the place."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from onnxamp.errors import ModelError, UnsupportedError
from onnxamp.model.signatures import TYPE_ATTRIBUTES
from onnxamp.model.tensors import byte_count

_ATTRIBUTE = onnx.AttributeProto
# The field that holds the elements of a type when raw_data does not, and how many entries of it an element takes.
_FIELD = {
    onnx.TensorProto.FLOAT: ("float_data", 1.0),
    onnx.TensorProto.COMPLEX64: ("float_data", 2.0),
    onnx.TensorProto.DOUBLE: ("double_data", 1.0),
    onnx.TensorProto.COMPLEX128: ("double_data", 2.0),
    onnx.TensorProto.INT64: ("int64_data", 1.0),
    onnx.TensorProto.UINT64: ("uint64_data", 1.0),
    onnx.TensorProto.UINT32: ("uint64_data", 1.0),
    onnx.TensorProto.STRING: ("string_data", 1.0),
    **dict.fromkeys((21, 22, 23), ("int32_data", 0.5)),  # two 4-bit elements an entry
    **dict.fromkeys((25, 26), ("int32_data", 0.25)),  # four 2-bit elements an entry
}
_HELD = {
    _ATTRIBUTE.TENSOR: "t",
    _ATTRIBUTE.GRAPH: "g",
    _ATTRIBUTE.SPARSE_TENSOR: "sparse_tensor",
    _ATTRIBUTE.TYPE_PROTO: "tp",
}
_MANY = 1 << 20
# Attributes that must name an element type; in the others 0 says nothing.
_TYPES = TYPE_ATTRIBUTES - {"output_dtype", "stash_type", "softmax_precision"}
_DTYPES = frozenset(int(kind) for kind in ir.DataType if kind != ir.DataType.UNDEFINED)


def check(proto: onnx.ModelProto, folder: pathlib.Path | None) -> None:
    """Check everything that the later steps rely on.

    Args:
        proto: The model.
        folder: Where its external data lie; None if the model did not come from a file.

    Raises:
        ModelError: The model breaks a rule of ONNX that a conversion needs.
        UnsupportedError: The model is newer than the installed onnx, or carries a training graph.
    """
    if not proto.HasField("graph"):
        raise ModelError("The file holds no graph: it is not an ONNX model, or it was cut short.")
    if not proto.ir_version:
        raise ModelError("The model has no IR version: it is not a complete ONNX model.")
    if proto.ir_version > onnx.IR_VERSION:
        raise UnsupportedError(
            f"The model has IR version {proto.ir_version} and the installed onnx knows up to {onnx.IR_VERSION}; update onnx."
        )
    if proto.training_info:
        raise UnsupportedError(
            "The model carries a training graph (training_info), which a rewritten graph would no longer fit; remove it."
        )
    texts = (proto.producer_name, proto.producer_version, proto.domain, proto.doc_string, *_metadata(proto))
    _text("the model", *texts)
    _Checker(proto, folder).run()


def _imports(opsets: Iterable[onnx.OperatorSetIdProto], where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for opset in opsets:
        _text("a domain", opset.domain)
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        if opset.version < 1:
            raise ModelError(
                f"{where} imports domain {domain or 'ai.onnx'!r} in version {opset.version}; it begins at 1."
            )
        if found.setdefault(domain, opset.version) != opset.version:
            raise ModelError(f"{where} imports domain {domain or 'ai.onnx'!r} in two versions; keep one.")
    latest = onnx.defs.onnx_opset_version()
    if found.get("", 0) > latest:
        raise UnsupportedError(
            f"{where} uses opset {found['']} and the installed onnx knows up to {latest}; update onnx."
        )
    return found


class _Checker:
    def __init__(self, proto: onnx.ModelProto, folder: pathlib.Path | None) -> None:
        self.proto = proto
        self.folder = folder
        self.imports = _imports(proto.opset_import, "The model")
        self.files: dict[str, int] = {}
        self.local = {("" if f.domain == "ai.onnx" else f.domain, f.name) for f in proto.functions}

    def run(self) -> None:
        self.graph(self.proto.graph, ())
        if not self.proto.graph.node and not self.proto.graph.output:
            raise ModelError("The graph is empty: it has neither nodes nor outputs.")
        for function in self.proto.functions:
            self.function(function)

    def function(self, function: onnx.FunctionProto) -> None:
        model_imports = self.imports
        self.imports = {**model_imports, **_imports(function.opset_import, f"Function {function.name!r}")}
        where = f"function {function.name!r}"
        _text(where, function.name, function.domain, function.doc_string, *function.input, *function.output)
        _text(where, *function.attribute, *_metadata(function))
        defined = _define(where, [], [], function.input, function.node)
        self.nodes(function.node, (defined,), where)
        for name in function.output:
            if name not in defined:
                raise ModelError(f"Output {name!r} of {where} is produced by no node of it.")
        self.imports = model_imports

    def graph(self, graph: onnx.GraphProto, outer: tuple[set[str], ...]) -> None:
        where = f"graph {graph.name!r}"
        _text(where, graph.name, graph.doc_string, *_metadata(graph))
        for value in (*graph.input, *graph.output, *graph.value_info):
            _text(f"value {value.name!r}", value.name, value.doc_string, *_dimension_names(value))
        initializers = [tensor.name for tensor in graph.initializer]
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        defined = _define(where, initializers, sparse, [value.name for value in graph.input], graph.node)
        for tensor in graph.initializer:
            self.tensor(tensor)
        for entry in graph.sparse_initializer:
            self.sparse(entry)
        scopes = (*outer, defined)
        self.nodes(graph.node, scopes, where)
        for value in graph.output:
            if value.name in defined:
                continue
            if any(value.name in scope for scope in outer):
                raise ModelError(
                    f"Output {value.name!r} of {where} is a value of the graph around it, which ONNX does not allow; hand it on with an "
                    "Identity node."
                )
            raise ModelError(f"Output {value.name!r} of {where} is produced by no node of it.")

    def nodes(self, nodes: Iterable[onnx.NodeProto], scopes: tuple[set[str], ...], where: str) -> None:
        own = scopes[-1]
        for node in nodes:
            op_type, domain, operands = node.op_type, node.domain, list(node.input)
            _text(node, op_type, domain, node.name, node.doc_string, node.overload, *operands, *node.output)
            if node.metadata_props:
                _text(node, *_metadata(node))
            if not op_type:
                raise ModelError(f"Node {node.name!r} of {where} has no operator.")
            if domain not in self.imports and domain != "ai.onnx":
                domain = domain or "ai.onnx"
                raise ModelError(
                    f"{_called(node)} is of domain {domain!r}, which the model does not import; add it to opset_import."
                )
            for value in operands:
                if value and value not in own and not any(value in scope for scope in reversed(scopes)):
                    raise ModelError(f"{_called(node)} reads {value!r}, which nothing defines.")
            self.arity(node, op_type, "" if domain == "ai.onnx" else domain)
            for attribute in node.attribute:
                self.attribute(attribute, scopes, _called(node))

    def arity(self, node: onnx.NodeProto, op_type: str, domain: str) -> None:
        """Operands, results and attributes must be what the operator has."""
        if (domain, op_type) in self.local or domain not in self.imports:
            return
        formal = _arity(op_type, domain, self.imports[domain])
        if formal is None:
            return
        for what, count, (least, most) in (
            ("operands", len(node.input), formal.operands),
            ("results", len(node.output), formal.results),
        ):
            if not least <= count <= most:
                bounds = str(least) if least == most else f"{least} to {most}" if most < _MANY else f"at least {least}"
                raise ModelError(f"{_called(node)} has {count} {what}; the operator takes {bounds}.")
        have = {attribute.name: attribute for attribute in node.attribute}
        for required in formal.required - set(have):
            raise ModelError(f"{_called(node)} lacks its attribute {required!r}.")
        if op_type == "Constant" and not domain and len(have) != 1:
            raise ModelError(f"{_called(node)} has {len(have)} attributes; exactly one gives its value.")
        for key, attribute in have.items():
            want = formal.attributes.get(key, attribute.type)
            if attribute.type != want:
                kinds = [_ATTRIBUTE.AttributeType.Name(kind).lower() for kind in (attribute.type, want)]
                raise ModelError(
                    f"Attribute {key!r} of {_called(node)} is declared as {kinds[0]}; the operator takes {kinds[1]}."
                )
            open_type = bool(attribute.ref_attr_name)  # a function's attribute gives it
            if key in _TYPES and want == _ATTRIBUTE.INT and not open_type and attribute.i not in _DTYPES:
                raise ModelError(f"Attribute {key!r} of {_called(node)} is {attribute.i}, which is no element type.")

    def attribute(self, attribute: onnx.AttributeProto, scopes: tuple[set[str], ...], name: str) -> None:
        _text(f"an attribute of {name}", attribute.name, attribute.doc_string, attribute.ref_attr_name)
        if attribute.type == _ATTRIBUTE.UNDEFINED:
            raise ModelError(f"Attribute {attribute.name!r} of {name} has no type.")
        field = _HELD.get(attribute.type)
        if field and not attribute.ref_attr_name and not attribute.HasField(field):
            kind = _ATTRIBUTE.AttributeType.Name(attribute.type).lower()
            raise ModelError(f"Attribute {attribute.name!r} of {name} is declared as a {kind} and holds none.")
        if attribute.HasField("g"):
            self.graph(attribute.g, scopes)
        for graph in attribute.graphs:
            self.graph(graph, scopes)
        if attribute.HasField("t"):
            self.tensor(attribute.t, name)
        for tensor in attribute.tensors:
            self.tensor(tensor, name)
        if attribute.HasField("sparse_tensor"):
            self.sparse(attribute.sparse_tensor, name)

    def sparse(self, sparse: onnx.SparseTensorProto, where: str = "") -> None:
        self.tensor(sparse.values, where)
        self.tensor(sparse.indices, where)
        size = math.prod(sparse.dims)
        if any(dim < 0 for dim in sparse.dims) or size * 4 > 1 << 31:
            raise ModelError(
                f"Sparse tensor {sparse.values.name or where!r} has dimensions {list(sparse.dims)}, too large to be written densely."
            )

    def tensor(self, tensor: onnx.TensorProto, where: str = "") -> None:
        name = f"Tensor {tensor.name!r}" if tensor.name or not where else f"The tensor in {where}"
        try:
            dtype = ir.DataType(tensor.data_type)
        except ValueError:
            dtype = ir.DataType.UNDEFINED
        if dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"{name} has the unknown element type {tensor.data_type}.")
        _text(name, tensor.name, tensor.doc_string)
        if dtype == ir.DataType.STRING and (
            tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.HasField("raw_data")
        ):
            raise ModelError(f"{name} holds strings, which ONNX keeps in string_data only.")
        dims = tuple(tensor.dims)
        if any(dim < 0 for dim in dims):
            raise ModelError(f"{name} has a negative dimension: {list(dims)}.")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self.external(tensor, name, byte_count(dtype, dims))
            return
        count = math.prod(dims)
        if tensor.HasField("raw_data"):
            want, have, what = byte_count(dtype, dims), len(tensor.raw_data), "bytes"
        else:
            field, entries = _FIELD.get(tensor.data_type, ("int32_data", 1.0))
            want, have, what = math.ceil(count * entries), len(getattr(tensor, field)), "elements"
        if want != have:
            raise ModelError(
                f"{name} of dimensions {list(dims)} needs {want} {what} and has {have}: the model is damaged."
            )

    def external(self, tensor: onnx.TensorProto, name: str, nbytes: int) -> None:
        if self.folder is None:
            raise ModelError(
                f"{name} has its data in another file; pass the path of the model instead of the ModelProto."
            )
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
        except ValueError:
            raise ModelError(f"{name} has an offset or length of external data that is no number.") from None
        if location not in self.files:
            self.files[location] = _file_size(self.folder, location, name)
        if offset < 0:
            raise ModelError(f"{name} has its external data at the negative offset {offset}.")
        if length != nbytes:
            raise ModelError(
                f"{name} of dimensions {list(tensor.dims)} needs {nbytes} bytes of external data and declares {length}."
            )
        if offset + length > self.files[location]:
            raise ModelError(
                f"{name} needs bytes {offset} to {offset + length} of {location!r}, which has {self.files[location]}: "
                "the file is cut short; restore it."
            )


@dataclasses.dataclass(frozen=True)
class _Arity:
    """How many operands and results an operator may have, and the kinds of its attributes."""

    operands: tuple[int, int]
    results: tuple[int, int]
    required: frozenset[str]
    attributes: dict[str, int]


@functools.cache
def _arity(op_type: str, domain: str, opset: int) -> _Arity | None:
    """None for an operator that no schema describes."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    required = frozenset(name for name, attribute in schema.attributes.items() if attribute.required)
    kinds = _ATTRIBUTE.AttributeType
    typed = {name: attribute.type.name for name, attribute in schema.attributes.items()}  # type: ignore[attr-defined]  # an enum in the stubs
    attributes = {name: int(kinds.Value(kind)) for name, kind in typed.items()}
    return _Arity((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), required, attributes)


def _called(node: onnx.NodeProto) -> str:
    return f"{node.op_type} node {node.name or next(iter(node.output), '')!r}"


def _text(where: str | onnx.NodeProto, *texts: str) -> None:
    """Protobuf hands out bytes where a text is not UTF-8."""
    if bytes in map(type, texts):
        where = where if isinstance(where, str) else _called(where)
        raise ModelError(f"The name or text of {where} is not UTF-8: the file is damaged.")


def _metadata(
    holder: onnx.ModelProto | onnx.GraphProto | onnx.FunctionProto | onnx.NodeProto,
) -> Iterator[str]:
    for entry in holder.metadata_props:
        yield entry.key
        yield entry.value


def _dimension_names(value: onnx.ValueInfoProto) -> Iterator[str]:
    for dim in value.type.tensor_type.shape.dim:
        yield dim.dim_param
        yield dim.denotation


def _file_size(folder: pathlib.Path, location: str, name: str) -> int:
    """Size of a file with external data, which has to lie inside the model's folder."""
    inside = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(inside, location))
    if not location or os.path.isabs(location) or os.path.commonpath([inside, path]) != inside:
        raise ModelError(
            f"{name} has external data at {location!r}, outside the model's folder; copy the file into the folder."
        )
    try:
        status = os.stat(path)
    except OSError:
        raise ModelError(f"{name} has its data in {location!r}, which is missing; put it beside the model.") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{name} has external data at {location!r}, which is no file.")
    if status.st_nlink > 1:
        raise ModelError(
            f"{name} has external data at {location!r}, which is a hard link; copy the file instead of linking it."
        )
    return status.st_size


def _define(
    where: str,
    initializers: Iterable[str],
    sparse: Iterable[str],
    inputs: Iterable[str],
    nodes: Iterable[onnx.NodeProto],
) -> set[str]:
    """The names that a graph or function defines, each once (an input may have an initializer)."""
    where = where[0].upper() + where[1:]
    constants: set[str] = set()
    for name in (*initializers, *sparse):
        if not name:
            raise ModelError(f"{where} has an initializer without a name.")
        if name in constants:
            raise ModelError(f"{where} has two initializers called {name!r}; rename one.")
        constants.add(name)
    defined: set[str] = set()
    for name in inputs:
        if name in defined:
            raise ModelError(f"{where} has two inputs called {name!r}; rename one.")
        defined.add(name)
    defined |= constants
    for node in nodes:
        for name in node.output:
            if name and name in defined:
                raise ModelError(
                    f"{where} defines {name!r} twice, the second time in {node.op_type} node {node.name!r}; rename it."
                )
            defined.add(name)
    return defined


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Every graph and function of a model, bodies included."""
    yield from _nested(proto.graph)
    for function in proto.functions:
        yield from _nested(function)


def _nested(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nested(attribute.g)
            for inner in attribute.graphs:
                yield from _nested(inner)
