"""Operators that ONNX defines by a function of simpler ones: the function is written out again and differentiated.

The forward node stays as it is; its intermediate results are computed anew, as memory-saving attention does.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

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
    body = _body(op, node)
    actual: dict[str, ir.Value | None] = dict(zip(body.input, node.inputs, strict=False))
    for step in body.node:
        bodies = any(attribute.type == onnx.AttributeProto.GRAPH for attribute in step.attribute)
        op.refuse(bodies, f"the function of {node.op_type} has branches")
        inputs = [actual.get(name) if name else None for name in step.input]
        attributes = {}
        for attribute in step.attribute:
            own = _attribute(node, attribute, op)
            if own is not None:
                attributes[attribute.name] = own
        if step.op_type == "Constant":
            tensor = ir.convenience.get_const_tensor(ir.node("Constant", [], attributes).outputs[0])
            assert tensor is not None
            actual[step.output[0]] = op.constant(tensor.numpy())
            continue
        results = op.emit(step.op_type, inputs, attributes, outputs=len(step.output), domain=step.domain)
        actual.update(zip(step.output, results, strict=True))
    outputs = [actual.get(name) for name in body.output]
    produced = [(value, g) for value, g in zip(outputs, gradients, strict=False) if value is not None]
    for value, original in zip(outputs, node.outputs, strict=False):
        if value is not None and original.shape is not None:
            value.shape = original.shape
    return through(op, [value for value, _ in produced], [g for _, g in produced], node.inputs)


def _attribute(node: ir.Node, attribute: onnx.AttributeProto, op: Builder) -> ir.Attr | None:
    """An attribute of a body's node; one that refers to the node's takes its value or default."""
    if not attribute.ref_attr_name:
        return ir.serde.deserialize_attribute(attribute)
    own = node.attributes.get(attribute.ref_attr_name)
    if own is None:
        default = onnx.defs.get_schema(node.op_type, op.opset, node.domain).attributes[attribute.ref_attr_name]
        if default.default_value.type == onnx.AttributeProto.UNDEFINED:
            return None
        own = ir.serde.deserialize_attribute(default.default_value)
    return ir.Attr(attribute.name, own.type, own.value)


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
