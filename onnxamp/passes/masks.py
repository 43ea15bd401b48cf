"""Masks of gradients in the form that ONNX Runtime's CPU kernels are fastest in."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name
from onnxamp.passes.append import new_cast

_FLOAT = int(ir.DataType.FLOAT)
_BACKWARD = "onnxamp.backward"


class MaskPass(ir.passes.InPlacePass):
    """Multiply by masks that are Casts of bools: ONNX Runtime's CPU kernels of Sign and Where are several times slower.

    Only in nodes of the backward half (metadata `onnxamp.backward`); what the model itself computes keeps its nodes:

    1. `Sign(y)`, in the gradient of an FP32 `y = Relu(x)`, becomes `Cast(Cast(y, bool), float)`. They differ where y is NaN (NaN and 1),
       which a product with the gradient of a loss that is NaN does not show.
    2. `Where(inside, g, 0)`, the gradient of `Clip(x, low, high)`, becomes `Mul(g, Cast(inside))` in FP32. They differ where g is
       infinite or NaN outside (0 and NaN): then the window is skipped, as it is for a Relu. A g that was rounded to 16 bits, where that
       does happen, keeps its `Where`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changed, names = 0, Names(model)
        for node in list(model.graph):
            if _BACKWARD not in node.metadata_props:
                continue
            if operator_name(node) == "Sign" and _of_relu(node):
                (y,) = node.inputs
                assert y is not None
                node.replace_input_with(0, _mask(model, node, y, ir.DataType.BOOL, names))
                node.op_type = "Cast"
                node.attributes.add(ir.AttrInt64("to", _FLOAT))
                changed += 1
            elif operator_name(node) == "Where" and _of_clip(node):
                inside, g, _ = node.inputs
                assert inside is not None
                node.op_type = "Mul"
                node.resize_inputs(2)
                node.replace_input_with(0, g)
                node.replace_input_with(1, _mask(model, node, inside, ir.DataType.FLOAT, names))
                changed += 1
        return ir.passes.PassResult(model, modified=bool(changed))


def _mask(model: ir.Model, before: ir.Node, value: ir.Value, dtype: ir.DataType, names: Names) -> ir.Value:
    cast = new_cast(model, value, names.value(f"{before.outputs[0].name}/mask"), dtype, names)
    cast.metadata_props[_BACKWARD] = before.metadata_props[_BACKWARD]
    before.prepend(cast)
    return cast.outputs[0]


def _of_relu(node: ir.Node) -> bool:
    (y,) = node.inputs
    return y is not None and y.dtype == ir.DataType.FLOAT and _made_by(y, "Relu")


def _of_clip(node: ir.Node) -> bool:
    """The gradient of a Clip: a Where that keeps g where that Clip lets its operand through."""
    inside, g, zero = node.inputs
    if inside is None or g is None or zero is None or g.dtype != ir.DataType.FLOAT or _made_by(g, "Cast"):
        return False
    constant = ir.convenience.get_const_tensor(zero)
    if constant is None or constant.size != 1 or constant.numpy().any():
        return False
    if not (g.shape == inside.shape == node.outputs[0].shape):
        return False
    conjunction = inside.producer()
    if conjunction is None:
        return False
    comparisons = (
        [value.producer() for value in conjunction.inputs if value] if _made_by(inside, "And") else [conjunction]
    )
    forward = node.metadata_props[_BACKWARD]
    return all(each is not None and _of_bound(each, forward) for each in comparisons)


def _of_bound(comparison: ir.Node, forward: str) -> bool:
    """Whether x is compared with a bound of the Clip of x that has the name `forward`."""
    if operator_name(comparison) not in ("GreaterOrEqual", "LessOrEqual"):
        return False
    x, bound = comparison.inputs
    assert x is not None
    return any(
        operator_name(user) == "Clip"
        and forward in (user.name, user.outputs[0].name)
        and position == 0
        and bound in user.inputs
        for user, position in x.uses()
    )


def _made_by(value: ir.Value, operator: str) -> bool:
    producer = value.producer()
    return producer is not None and operator_name(producer) == operator
