"""Give the results of 16-bit units their type."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import BY_IR, BY_NAME
from onnxamp.errors import UnsupportedError
from onnxamp.model.signatures import operator_name
from onnxamp.model.units import TYPE_ATTRIBUTE, Unit
from onnxamp.policy.plan import Plan


class RetypePass(ir.passes.InPlacePass):
    """Set the types of written values, and the attributes that name them.

    1. Every value that a unit writes gets the unit's precision: results, graph inputs, inputs of bodies.
    2. An attribute that names the type of a result (Cast's ``to``, ``dtype``, ``output_datatype``) names the new one.
    3. If such an attribute is absent and means "as the input", it is set as soon as input and result differ.
    4. ConstantOfShape's ``value`` becomes a tensor of the new type, its default of fp32 zero too.

    Readers are brought into line by the passes that follow, so the graph is inconsistent in between.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for unit in self.plan.graph.units:
            kind = BY_NAME[self.plan.decisions[unit].precision].ir
            if kind == unit.dtype:
                continue
            modified = True
            for value in unit.writes:
                retype(value, kind)
        # An attribute may have to be spelled out because another unit of its node changed: look at all of them, afterwards.
        for unit in self.plan.graph.units:
            if unit.node is not None and unit.writes and (operator_name(unit.node), unit.variable) in TYPE_ATTRIBUTE:
                _set_attribute(unit, unit.node, BY_NAME[self.plan.decisions[unit].precision].ir, self.plan)
        return ir.passes.PassResult(model, modified)


def retype(value: ir.Value, kind: ir.DataType) -> None:
    """Give a tensor value another element type; type objects may be shared between models, so it is a new one."""
    assert isinstance(value.type, ir.TensorType)
    value.type = ir.TensorType(kind, denotation=value.type.denotation)


def _set_attribute(unit: Unit, node: ir.Node, kind: ir.DataType, plan: Plan) -> None:
    name = TYPE_ATTRIBUTE[operator_name(node), unit.variable]
    attribute = node.attributes.get(name)
    if attribute is not None and attribute.is_ref():
        raise UnsupportedError(
            f"{node.op_type} node {node.name!r} takes its type from a function's attribute; inline the function."
        )
    if operator_name(node) == "ConstantOfShape":
        if kind != unit.dtype:
            old = np.zeros(1, np.float32) if attribute is None else attribute.as_tensor().numpy()
            tensor = ir.Tensor(old.astype(BY_IR[kind].numpy), dtype=kind)
            node.attributes[name] = ir.AttrTensor(name, tensor)
        return
    if attribute is None:
        follows = [other for other in plan.graph.of[node] if other.reads]
        default = ir.DataType.FLOAT
        if operator_name(node) in ("EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli") and follows:
            default = BY_NAME[plan.decisions[follows[0]].precision].ir
        if kind != default:
            node.attributes[name] = ir.AttrInt64(name, kind.value)
    elif attribute.type == ir.AttributeType.STRING:  # Cast before opset 6
        node.attributes[name] = ir.AttrString(name, kind.name)
    elif attribute.as_int() != kind.value:
        node.attributes[name] = ir.AttrInt64(name, kind.value)
