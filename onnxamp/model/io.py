"""Reading and writing models: a private copy in, an atomic and deterministic file out.

What onnx-ir 1.1 would drop or refuse is handled here: sparse tensors are made dense, map types are carried through as they are, and a
training graph is refused (`validation`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxamp import files
from onnxamp.errors import ModelError, RuntimeMissingError, UsageError, cause
from onnxamp.model import validation
from onnxamp.model.tensors import byte_blocks, is_external, nbytes, stored
from onnxamp.model.units import all_graphs, all_nodes, all_values, bodies

# Key of Value.meta: the TypeProto of a value whose type onnx-ir cannot hold (maps).
_TYPE_PROTO = "onnxamp.type_proto"
# Above this many bytes of weights the rest does not surely fit into a protobuf message of 2 GiB.
INLINE_BYTES = 3 << 29
# Smaller tensors are never moved to a data file.
_EXTERNAL_BYTES = 1024

_log = logging.getLogger("onnx_ir")


def load(source: str | os.PathLike[str] | onnx.ModelProto | ir.Model, *, sort: bool = True) -> ir.Model:
    """A private copy of a model: mutating it never touches the source. Tensor data are shared, not copied.

    Args:
        source: A path, a `ModelProto` or an `ir.Model`. External data stay where they are and are checked now.
        sort: Whether to put nodes that stand before what they read behind it (see `in_order`).

    Raises:
        UsageError: There is no such file, or the source is something else.
        ModelError: The model is damaged, incomplete or not a valid graph.
        UnsupportedError: It is newer than the installed onnx, or carries a training graph.
    """
    if isinstance(source, ir.Model):
        try:
            model = source.clone()
        except RuntimeError as problem:
            raise ModelError(f"The model cannot be copied, its graph is inconsistent: {cause(problem)}.") from None
        return in_order(model) if sort else model
    folder = None
    if isinstance(source, onnx.ModelProto):
        proto = source
    else:
        if not isinstance(source, (str, os.PathLike)):
            raise UsageError(f"A model is a path, a ModelProto or an ir.Model, not a {type(source).__name__}.")
        path = pathlib.Path(source)
        folder = path.absolute().parent
        proto = _parse(path)
    validation.check(proto, folder)
    model = _deserialize(proto, own=folder is not None)
    if folder is not None:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            ir.external_data.set_base_dir(graph, os.fspath(folder))
    return in_order(model) if sort else model


def _parse(path: pathlib.Path) -> onnx.ModelProto:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"There is no file {os.fspath(path)!r}.") from None
    except OSError as problem:
        raise UsageError(f"{os.fspath(path)!r} cannot be read: {problem.strerror}.") from None
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception:  # protobuf's DecodeError, whose package has no types
        raise ModelError(f"{os.fspath(path)!r} is not an ONNX model, or it was cut short.") from None
    return proto


def _deserialize(proto: onnx.ModelProto, *, own: bool) -> ir.Model:
    """The model of a proto; `own` means that the proto may be changed."""
    special = [graph for graph in validation.graphs(proto) if _is_special(graph)]
    if special and not own:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        return _deserialize(copy, own=True)
    held: dict[str, onnx.TypeProto] = {}
    for graph in special:
        _densify(graph)
        for declared in _declared(graph):
            if _has_map(declared.type):
                held[declared.name] = onnx.TypeProto.FromString(declared.type.SerializeToString())
                declared.ClearField("type")
    level = _log.level
    _log.setLevel(logging.ERROR)
    try:
        model = ir.from_proto(proto)
    except Exception as problem:  # a damaged proto takes onnx_ir anywhere: KeyError, ValueError, TypeError, ...
        raise ModelError(f"The model cannot be read: {cause(problem)}.") from None
    finally:
        _log.setLevel(level)
    if "ai.onnx" in model.opset_imports:
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    if held:
        for value in _values(model):
            if value.name in held:
                value.meta[_TYPE_PROTO] = held[value.name]
    return model


def _declared(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.ValueInfoProto]:
    if isinstance(graph, onnx.GraphProto):
        yield from graph.input
        yield from graph.output
    yield from graph.value_info


def _has_map(kind: onnx.TypeProto) -> bool:
    case = kind.WhichOneof("value")
    if case in ("sequence_type", "optional_type"):
        return _has_map(getattr(kind, case).elem_type)
    return bool(case == "map_type")


def _is_special(graph: onnx.GraphProto | onnx.FunctionProto) -> bool:
    return (
        (isinstance(graph, onnx.GraphProto) and len(graph.sparse_initializer) > 0)
        or any(_sparse(node) is not None for node in graph.node)
        or any(_has_map(value.type) for value in _declared(graph))
    )


def _sparse(node: onnx.NodeProto) -> onnx.AttributeProto | None:
    """The sparse tensor of a Constant node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next((attribute for attribute in node.attribute if attribute.HasField("sparse_tensor")), None)


def _densify(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Replace sparse initializers and Constants by dense ones."""
    if isinstance(graph, onnx.GraphProto):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse))
        del graph.sparse_initializer[:]
    for node in graph.node:
        attribute = _sparse(node)
        if attribute is not None:
            dense = onnx.AttributeProto(
                name="value", type=onnx.AttributeProto.TENSOR, t=_dense(attribute.sparse_tensor)
            )
            attribute.CopyFrom(dense)


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """A dense tensor of the same name; `indices` are positions in row-major order, or one row of coordinates an element."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    size = math.prod(sparse.dims)
    try:
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        flat = np.zeros(size, values.dtype)
        flat[indices] = values
    except (IndexError, ValueError):
        raise ModelError(f"Sparse tensor {sparse.values.name!r} has an index outside {list(sparse.dims)}.") from None
    return numpy_helper.from_array(flat.reshape(tuple(sparse.dims)), sparse.values.name)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from all_values(graph)


def in_order(model: ir.Model) -> ir.Model:
    """The model with its nodes in topological order, as ONNX demands; nothing moves if they are."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if _is_in_order(graph):
            continue
        try:
            graph.sort()
        except ValueError:
            raise ModelError(f"The nodes of graph {graph.name!r} depend on each other in a cycle; break it.") from None
    return model


def _is_in_order(graph: ir.Graph) -> bool:
    seen: set[ir.Node] = set()
    own = set(all_graphs(graph))
    for node in all_nodes(graph):
        # A node comes before its bodies here, so that what a body reads from outside must have been seen too.
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph in own and producer not in seen:
                return False
        seen.add(node)
    return True


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, what onnx-ir cannot hold put back."""
    proto = ir.to_proto(model)
    held = {value.name: value.meta[_TYPE_PROTO] for value in _values(model) if _TYPE_PROTO in value.meta}
    for graph in validation.graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            _drop_redundant(graph)
        if held:
            for value in _declared(graph):
                if value.name in held and not value.type.WhichOneof("value"):
                    value.type.CopyFrom(held[value.name])
    return proto


def _drop_redundant(graph: onnx.GraphProto) -> None:
    """Remove what onnx-ir writes twice: value_info of an initializer that says no more than the tensor, metadata of a tensor."""
    names = {tensor.name for tensor in graph.initializer}
    kept = [
        value
        for value in graph.value_info
        if value.name not in names or value.doc_string or value.metadata_props or value.type.denotation
    ]
    if len(kept) < len(graph.value_info):
        copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
        del graph.value_info[:]
        graph.value_info.extend(copies)
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.metadata_props}
        if len(entries) < len(tensor.metadata_props):
            del tensor.metadata_props[:]
            for key, value in entries.items():
                tensor.metadata_props.add(key=key, value=value)


def save(model: ir.Model, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write `model` to `path` in one step: the file is there whole or not at all, and the same model gives the same bytes.

    Tensors that were external stay external; if all the others would not fit into one message, they move out too. The data file
    lies beside the model and is called after its content, `STEM-HASH.data`, so that it never replaces another model's data.

    Raises:
        UsageError: The file exists and `overwrite` is false, or is none (a folder, a device), or holds data that the model reads; or its
            folder does not exist.
        RuntimeMissingError: The disk is full or the folder may not be written.
    """
    path = pathlib.Path(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{os.fspath(path)!r} exists already; choose another name or allow overwriting.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{os.fspath(path)!r} is no ordinary file; choose another name.")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {os.fspath(path.parent)!r}.")
    for place in _places(model) if path.exists() else ():
        source = stored(place.tensor)
        if isinstance(source, ir.ExternalTensor) and os.path.realpath(source.path) == os.path.realpath(path):
            raise UsageError(f"{os.fspath(path)!r} holds the data of tensor {source.name!r}; choose another name.")
    try:
        _save(model, path)
    except OSError as problem:
        raise RuntimeMissingError(f"{os.fspath(path)!r} cannot be written: {problem.strerror}.") from None


def _save(model: ir.Model, path: pathlib.Path) -> None:
    places = _external_places(model)
    if not places:
        files.write(path, to_proto(model).SerializeToString(deterministic=True))
        return
    tensors = {id(place.tensor): place.tensor for place in places}
    location, spans = _write_data(path, tensors)
    files.write(path, _referring(model, places, location, spans, path.absolute().parent))


def _referring(
    model: ir.Model, places: list[_Place], location: str, spans: dict[int, tuple[int, int]], folder: pathlib.Path
) -> bytes:
    """The bytes of `model` with the tensors at `places` as references into a data file."""
    try:
        for place in places:
            offset, length = spans[id(place.tensor)]
            assert isinstance(place.tensor.shape, ir.Shape)
            place.put(
                ir.ExternalTensor(
                    location,
                    offset,
                    length,
                    place.tensor.dtype,
                    shape=place.tensor.shape,
                    name=place.tensor.name or "",
                    doc_string=place.tensor.doc_string,
                    metadata_props=dict(place.tensor.metadata_props),
                    base_dir=os.fspath(folder),
                )
            )
        data: bytes = to_proto(model).SerializeToString(deterministic=True)
        return data
    finally:
        for place in places:
            place.put(place.tensor)


def digest(model: ir.Model) -> str:
    """SHA-256 of everything that `model` holds, weights of any size included, wherever these are stored.

    Raises:
        ModelError: External data cannot be read.
    """
    places = [place for place in _places(model) if place.tensor.dtype != ir.DataType.STRING]
    spans = {id(place.tensor): (0, nbytes(place.tensor)) for place in places}
    whole = hashlib.sha256(_referring(model, places, "data", spans, pathlib.Path()))
    for place in places:
        for block in byte_blocks(place.tensor):
            whole.update(block)
    return whole.hexdigest()


class _Place:
    """Where a tensor sits in a model: an initializer's value, or an attribute of a node."""

    def __init__(
        self, tensor: ir.TensorProtocol, value: ir.Value | None = None, node: ir.Node | None = None, key: str = ""
    ) -> None:
        self.tensor = tensor
        self._value = value
        self._node = node
        self._key = key

    def put(self, tensor: ir.TensorProtocol) -> None:
        if self._value is not None:
            self._value.const_value = tensor
        elif self._node is not None:
            old = self._node.attributes[self._key]
            self._node.attributes[self._key] = ir.AttrTensor(self._key, tensor, doc_string=old.doc_string)


def _external_places(model: ir.Model) -> list[_Place]:
    """The tensors to be written to a data file, in graph order."""
    places = [place for place in _places(model) if place.tensor.dtype != ir.DataType.STRING]
    inline = sum({id(p.tensor): p.tensor.nbytes for p in places if not is_external(p.tensor)}.values())
    everything = inline > INLINE_BYTES
    return [
        place
        for place in places
        if isinstance(place.tensor, ir.ExternalTensor)
        or ((everything or is_external(place.tensor)) and place.tensor.nbytes >= _EXTERNAL_BYTES)
    ]


def _places(model: ir.Model) -> Iterator[_Place]:
    pending = [model.graph, *(function.graph for function in model.functions.values())]
    while pending:
        graph = pending.pop(0)
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield _Place(value.const_value, value=value)
        for node in graph:
            for key, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield _Place(attribute.as_tensor(), node=node, key=key)
            pending.extend(bodies(node))


def _write_data(path: pathlib.Path, tensors: dict[int, ir.TensorProtocol]) -> tuple[str, dict[int, tuple[int, int]]]:
    """Write tensors to a data file beside `path`; its name, and offset and length of each tensor by identity."""
    spans: dict[int, tuple[int, int]] = {}
    digest = hashlib.sha256()
    position = 0
    with files.Unfinished(path) as unfinished:
        for key, tensor in tensors.items():
            # Whole pages for large tensors, so that a runtime can map them.
            alignment = 4096 if tensor.nbytes >= 1 << 16 else 64
            padding = bytes(-position % alignment)
            unfinished.write(padding)
            digest.update(padding)
            start = position = position + len(padding)
            for block in byte_blocks(tensor):
                unfinished.write(block)
                digest.update(block)
                position += len(block)
            spans[key] = (start, position - start)
        location = f"{path.stem}-{digest.hexdigest()[:12]}.data"
        unfinished.publish(path.parent / location)
    return location, spans
