"""Whether a serialized model computes in 16-bit floats, without its weights and without inference of types."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

_LOW = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
# As `model.signatures.TYPE_ATTRIBUTES`, which would bring onnx-ir into the worker.
_TYPES = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})


def has_low(source: str | bytes) -> bool:
    """Whether a 16-bit float value begins anywhere in a model: an input, a constant or the result of a Cast.

    Args:
        source: A path or the bytes of a model. What cannot be read has none: the runtime says what is wrong with it.
    """
    try:
        if isinstance(source, bytes):
            model = onnx.ModelProto.FromString(source)
        else:
            model = onnx.load(source, load_external_data=False)
    except Exception:  # protobuf's DecodeError, whose package has no types
        return False
    return _graph(model.graph) or any(_nodes(function.node) for function in model.functions)


def _graph(graph: onnx.GraphProto) -> bool:
    return (
        any(tensor.data_type in _LOW for tensor in graph.initializer)
        or any(
            _elements(value.type) in _LOW
            for values in (graph.input, graph.output, graph.value_info)
            for value in values
        )
        or _nodes(graph.node)
    )


def _nodes(nodes: Iterable[onnx.NodeProto]) -> bool:
    return any(_attribute(attribute) for node in nodes for attribute in node.attribute)


def _attribute(attribute: onnx.AttributeProto) -> bool:
    graphs = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
    return (
        (attribute.name in _TYPES and attribute.i in _LOW) or attribute.t.data_type in _LOW or any(map(_graph, graphs))
    )


def _elements(kind: onnx.TypeProto) -> int:
    """The element type of a tensor, also of one in a sequence or an optional."""
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        return _elements(getattr(kind, which).elem_type)
    return int(getattr(kind, which).elem_type) if which in ("tensor_type", "sparse_tensor_type") else 0
