"""Dropout by products, in the form that ONNX Runtime's CPU kernels are fastest in."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name


class DropoutMaskPass(ir.passes.InPlacePass):
    """Multiply by one mask of 0 and 1/(1 − p), forward and backward, where training selects: Where takes seven times as long as Mul.

    Of a mask `dropped`, which is made by comparing hashes (`Less` of uint32):

    1. `Where(dropped, 0, x·s)` becomes `x·m` and `Where(dropped, 0, g)·s` becomes `g·m`, with `m = Cast(Not(dropped))·s` for both.
    2. Results differ only where x or g is infinite or NaN and dropped: NaN, as in PyTorch, instead of 0. An operand that was rounded to
       16 bits, where that does happen, keeps its `Where`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(model)
        masks: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
        for node in list(model.graph):
            found = _selection(node)
            if found is None:
                continue
            dropped, operand, scale, product = found
            if (dropped, scale) not in masks:
                masks[dropped, scale] = _mask(dropped, scale, names)
            new = ir.node(
                "Mul", [operand, masks[dropped, scale]], name=names.node(f"{product.name}/masked"),
                metadata_props=dict(product.metadata_props),
            )  # fmt: skip
            old, result = product.outputs[0], new.outputs[0]
            result.name, result.type, result.shape = names.value(f"{old.name}/masked"), old.type, old.shape
            product.append(new)
            unread = [product, *(value.producer() for value in product.inputs if value is not None)]
            old.replace_all_uses_with(result, replace_graph_outputs=True)
            for each in unread:
                if each is not None and operator_name(each) in ("Mul", "Where") and not each.outputs[0].uses():
                    model.graph.remove(each, safe=True)
        return ir.passes.PassResult(model, modified=bool(masks))


def _selection(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, ir.Node] | None:
    """The mask, the operand, the factor and the last node of Dropout's selection and product, if `node` selects for one."""
    if operator_name(node) != "Where":
        return None
    dropped, zero, kept = node.inputs
    if dropped is None or kept is None or kept.dtype != ir.DataType.FLOAT or not _is_number(zero, 0.0):
        return None
    less = dropped.producer()
    if (
        less is None
        or operator_name(less) != "Less"
        or less.inputs[0] is None
        or less.inputs[0].dtype != ir.DataType.UINT32
    ):
        return None
    before, after = kept.producer(), [user for user, _ in node.outputs[0].uses()]
    if before is not None and _factor(before) is not None and len(kept.uses()) == 1:
        product, operand, last = before, before.inputs[0], node
    elif len(after) == 1 and _factor(after[0]) is not None and not node.outputs[0].is_graph_output():
        product, operand, last = after[0], kept, after[0]
    else:
        return None
    scale = _factor(product)
    maker = None if operand is None else operand.producer()
    if operand is None or scale is None or (maker is not None and operator_name(maker) == "Cast"):
        return None
    return dropped, operand, scale, last


def _factor(node: ir.Node) -> ir.Value | None:
    """The constant number that a Mul multiplies its first operand by."""
    scale = node.inputs[1] if operator_name(node) == "Mul" else None
    return scale if _is_number(scale) else None


def _is_number(value: ir.Value | None, number: float | None = None) -> bool:
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and (number is None or tensor.numpy().item() == number)


def _mask(dropped: ir.Value, scale: ir.Value, names: Names) -> ir.Value:
    """0 where `dropped`, else `scale`, in FP32."""
    made = dropped.producer()
    assert made is not None
    base = str(dropped.name)
    kept = ir.node("Not", [dropped], name=names.node(f"{base}/kept"))
    ones = ir.node("Cast", [kept.outputs[0]], {"to": ir.DataType.FLOAT}, name=names.node(f"{base}/ones"))
    mask = ir.node("Mul", [ones.outputs[0], scale], name=names.node(f"{base}/mask"))
    for node, dtype in ((kept, ir.DataType.BOOL), (ones, ir.DataType.FLOAT), (mask, ir.DataType.FLOAT)):
        value = node.outputs[0]
        value.name, value.type, value.shape = names.value(str(node.name)), ir.TensorType(dtype), dropped.shape
        node.metadata_props.update(made.metadata_props)
    made.append([kept, ones, mask])
    return mask.outputs[0]
