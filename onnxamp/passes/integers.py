"""Integer arithmetic on constants, folded, so that shapes that depend on it become known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxamp.model.constants import add_initializer, fixed_tensor
from onnxamp.model.signatures import standard_opset
from onnxamp.model.types import infer
from onnxamp.passes.collected import CollectSequences
from onnxamp.passes.sequences import FoldSequences

# fmt: off
_FOLDED = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
    "Neg", "Not", "Or", "Pow", "Range", "ReduceProd", "ReduceSum", "Reshape", "Round", "ScatterND", "Shape", "Size", "Slice",
    "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where", "Xor",
})
# fmt: on
_ELEMENTS = 1024


# How sizes are taken out of a shape, by operator, and the rank that they must have.
TAKEN: dict[str, tuple[int | None, Callable[..., np.ndarray]]] = {
    "Cast": (None, lambda sizes: sizes),
    "Concat": (1, lambda *parts: np.concatenate([part.astype(object) for part in parts])),
    "Gather": (1, lambda sizes, where: np.asarray(sizes[where], object)),
    "Identity": (None, lambda sizes: sizes),
    "Slice": (1, lambda sizes, start, end, axes=None, *step: sizes[slice(*(x.item() for x in (start, end, *step)))]),
    "Squeeze": (1, lambda sizes, axes=None: sizes.reshape(())),
    "Unsqueeze": (0, lambda sizes, axes=None: sizes.reshape(1)),
}
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


class FoldIntegers(ir.passes.InPlacePass):
    """Replace small integer and boolean results that depend on constants and static shapes only.

    1. A node of the main graph with constant inputs, or a Shape or Size of a static shape, becomes an initializer of the
       same name; floats are folded only on the way between integers, or to the scales of a Resize.
    2. So does what is taken out of a shape, if the sizes taken are static, whatever the others are.
    3. Graph outputs and results of more than 1,024 elements stay.
    4. Exporters write shape arithmetic (TorchScript's unflatten: 2 mod 3) that inference cannot follow otherwise.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        known: dict[ir.Value, np.ndarray] = {}
        partly: dict[ir.Value, np.ndarray] = {}
        folded = []
        for node in model.graph:
            if node.domain != "" or len(node.outputs) != 1 or node.op_type not in _FOLDED:
                continue
            content = _evaluate(node, known, model)
            if content is None:
                sizes = _sizes(node, known, partly, model.ir_version)
                kind = node.outputs[0].dtype
                if sizes is not None and kind is not None and all(size is not None for size in sizes.reshape(-1)):
                    content = sizes.astype(kind.numpy())
                elif sizes is not None:
                    partly[node.outputs[0]] = sizes
            if content is not None and content.size <= _ELEMENTS:
                known[node.outputs[0]] = content
                folded.append(node)
        modified = False
        for node in reversed(folded):
            value = node.outputs[0]
            content = known[value]
            if value.is_graph_output() or (content.dtype.kind not in "iub" and not _is_setting(value)):
                if not value.uses() and not value.is_graph_output():
                    model.graph.remove(node, safe=True)
                continue
            modified = True
            name = value.name
            value.name = None
            if value.uses():
                value.replace_all_uses_with(add_initializer(model.graph, name or "", content))
            model.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=modified)


def _is_setting(value: ir.Value) -> bool:
    """Whether only Resize reads a value, as its region or scales."""
    uses = list(value.uses())
    return bool(uses) and all(node.op_type == "Resize" and position in (1, 2) for node, position in uses)


def settle(model: ir.Model, rounds: int = 64) -> None:
    """Fold integers and sequences and infer types, until no more follows: a folded size makes shapes static, these more sizes."""
    for _ in range(rounds):
        folded = FoldIntegers()(model).modified
        collected = CollectSequences()(model).modified
        if not FoldSequences()(model).modified and not folded and not collected:
            return
        infer(model)


def _evaluate(node: ir.Node, known: dict[ir.Value, np.ndarray], model: ir.Model) -> np.ndarray | None:
    source = node.inputs[0] if node.inputs else None
    if node.op_type in ("Shape", "Size") and source is not None:
        if source.shape is None or not source.shape.is_static():
            return None
        dims = np.asarray(source.shape.numpy(), np.int64)
        if node.op_type == "Size":
            return np.asarray(dims.prod(), np.int64)
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
        return dims[start:end]
    feeds = {}
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        content = known.get(value)
        if content is None:
            content = _constant(value, model.ir_version)
        if content is None:
            return None
        feeds[f"x{index}"] = content
    names = ["" if value is None else f"x{index}" for index, value in enumerate(node.inputs)]
    proto = onnx.helper.make_node(node.op_type, names, ["y"])
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    graph = onnx.helper.make_graph([proto], "fold", inputs, [onnx.ValueInfoProto(name="y")])
    opsets = [onnx.helper.make_opsetid("", standard_opset(model))]
    try:
        if _elements(node, list(feeds.values())) > _ELEMENTS:
            return None
        (result,) = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    except Exception:  # what cannot be evaluated stays as it is
        return None
    return np.asarray(result)


def _elements(node: ir.Node, operands: list[np.ndarray]) -> float:
    """How many elements the result has, before any is computed; 0 where few operands cannot make many, or make nothing."""
    shape = node.outputs[0].shape
    if shape is not None and shape.is_static():
        return math.prod(shape.numpy())
    numbers: list[list[float]] = [operand.reshape(-1).tolist() for operand in operands]
    if node.op_type == "ConstantOfShape":
        return math.prod(numbers[0])
    if node.op_type == "Expand":
        return math.prod(numbers[1]) * operands[0].size
    if node.op_type == "Range":
        (start,), (end,), (step,) = numbers
        return (end - start) / step if step else 0
    return 0


def _constant(value: ir.Value, ir_version: int) -> np.ndarray | None:
    tensor = fixed_tensor(value, ir_version)
    if tensor is None or tensor.size > _ELEMENTS or tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return None
    return tensor.numpy()


def _sizes(
    node: ir.Node, known: dict[ir.Value, np.ndarray], partly: dict[ir.Value, np.ndarray], ir_version: int
) -> np.ndarray | None:
    """Sizes as objects, None where one is not static: a Shape, or what is taken out of one."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type == "Shape":
        if source.shape is None:
            return None
        dims = np.asarray([size if isinstance(size, int) else None for size in source.shape] or [], object)
        return dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(dims))]
    rank, take = TAKEN.get(node.op_type, (None, None))
    if take is None or not any(value in partly for value in node.inputs) or node.outputs[0].dtype not in _INTEGERS:
        return None
    operands = []
    for value in node.inputs:
        content = None if value is None else partly.get(value, known.get(value))
        content = _constant(value, ir_version) if content is None and value is not None else content
        if content is None:
            return None
        operands.append(content)
    # Only what sizes are taken from may be partly known: a bound that is not would be read as the end of the table.
    fixed = [] if node.op_type == "Concat" else operands[1:]
    if rank not in (None, operands[0].ndim) or any(None in operand.reshape(-1).tolist() for operand in fixed):
        return None
    try:
        return take(*operands)
    except (IndexError, TypeError, ValueError):  # not there, or computed from what is not static
        return None
