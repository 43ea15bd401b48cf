"""Operators that ONNX defines by a function of simpler ones: the function is written out again and differentiated.

The forward node stays as it is; its intermediate results are computed anew, as memory-saving attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxamp.autodiff.bodies import rebuild
from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import through


@gradient("RotaryEmbedding")
@gradient("CenterCropPad", inputs=(0,))
@gradient("CausalConvWithState")
@gradient("LinearAttention")
@gradient("SwiGLU")
def by_function(op: Builder, node: ir.Node, *gradients: ir.Value | None) -> Gradients:
    """The gradient of the operator's function body."""
    body = ir.from_proto(_given_attributes(op, node, _body(op, node)))
    assert isinstance(body, ir.Function)
    given = {own: value for own, value in zip(body.inputs, node.inputs, strict=False) if value is not None}
    outputs = rebuild(op, body.graph, given, absent=set(body.inputs) - set(given))
    for value, original in zip(outputs, node.outputs, strict=False):
        if original.shape is not None:
            value.shape = original.shape
    return through(op, outputs, gradients, node.inputs)


def _given_attributes(op: Builder, node: ir.Node, body: onnx.FunctionProto) -> onnx.FunctionProto:
    """`body` with the node's attributes, or their defaults, where it refers to them."""
    defaults = onnx.defs.get_schema(node.op_type, op.opset, node.domain).attributes

    def settle(steps: Sequence[onnx.NodeProto]) -> None:
        for step in steps:
            kept = []
            for attribute in step.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    settle(attribute.g.node)
                if not attribute.ref_attr_name:
                    kept.append(attribute)
                    continue
                own = node.attributes.get(attribute.ref_attr_name)
                value = ir.to_proto(own) if own is not None else defaults[attribute.ref_attr_name].default_value
                if value.type != onnx.AttributeProto.UNDEFINED:
                    kept.append(onnx.AttributeProto.FromString(value.SerializeToString()))
                    kept[-1].name = attribute.name
            copies = [attribute.SerializeToString() for attribute in kept]
            del step.attribute[:]
            step.attribute.extend(onnx.AttributeProto.FromString(data) for data in copies)

    settle(body.node)
    return body


def _body(op: Builder, node: ir.Node) -> onnx.FunctionProto:
    schema: Any = onnx.defs.get_schema(node.op_type, op.opset, node.domain)  # its stubs lack the functions
    if schema.has_context_dependent_function:
        types = []
        for value in node.inputs:
            info = onnx.TypeProto()
            if value is not None and value.type is not None:
                ir.serde.serialize_type_into(info, value.type)
                if value.shape is not None:
                    ir.serde.serialize_shape_into(info, value.shape)
            types.append(info.SerializeToString())
        versions = schema.context_dependent_function_opset_versions
        version = max((v for v in versions if v <= op.opset), default=min(versions))
        data = schema.get_context_dependent_function_with_opset_version(
            version, ir.to_proto(node).SerializeToString(), types
        )
    else:
        versions = schema.function_opset_versions
        version = max((v for v in versions if v <= op.opset), default=min(versions))
        data = schema.get_function_with_opset_version(version)
    result: onnx.FunctionProto = onnx.FunctionProto.FromString(data)
    return result
