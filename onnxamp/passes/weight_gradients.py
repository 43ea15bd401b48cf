"""Weight gradients of convolutions as convolutions themselves, for runtimes whose kernels are best at those."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.signatures import operator_name
from onnxamp.model.units import producer

_BACKWARD = "onnxamp.backward"


class WeightGradientPass(ir.passes.InPlacePass):
    """Compute dW[m, c, tap] = Σ over batch and positions of g·x as one convolution instead of a matrix product for each tap.

    The axes of channels and batch change places: dW = Conv(xᵀ, gᵀ)ᵀ, where xᵀ is [C, N, ...], the kernel gᵀ is [M, N, ...] with the
    size of the output, and strides and dilations change places too.

    1. In the backward half (metadata `onnxamp.backward`) of an FP32 Conv with `group` 1, explicit pads and shapes that are known, the batch
       included (OpenVINO compiles a convolution for one size of its kernel), the `Reshape` that gives dW becomes
       `Transpose(Conv(Transpose(x), Transpose(g)))`, if it is made of one `Gemm` a tap.
    2. Where strides leave a rest, that convolution has more taps than the kernel: a `Slice` takes those of the kernel.
    3. What only the products read is removed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        forward = {name: node for node in graph if operator_name(node) == "Conv" for name in _names(node)}
        changed, names = 0, Names(model)
        for node in list(graph):
            conv = forward.get(node.metadata_props.get(_BACKWARD, ""))
            if conv is None or operator_name(node) != "Reshape" or not _suits(conv):
                continue
            g = _gradient(node, conv)
            if g is not None:
                _rewrite(graph, node, conv, g, names)
                changed += 1
        if changed:
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(changed))


def _names(node: ir.Node) -> Iterator[str]:
    """What the backward half calls a forward node."""
    yield from filter(None, (node.outputs[0].name, node.name))


def _suits(conv: ir.Node) -> bool:
    x, weight = conv.inputs[:2]
    values = (x, weight, conv.outputs[0])
    if x is None or any(v is None or v.shape is None or not v.shape.is_static() for v in values):
        return False
    explicit = conv.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return x.dtype == ir.DataType.FLOAT and explicit and conv.attributes.get_int("group", 1) == 1


def _gradient(node: ir.Node, conv: ir.Node) -> ir.Value | None:
    """The gradient g of the convolution's output if `node` gives dW from matrix products of it, else None."""
    weight = conv.inputs[1]
    assert weight is not None and weight.shape is not None  # noqa: PT018 (for mypy)
    kernel = weight.shape.numpy()[2:]
    if node.outputs[0].shape != weight.shape:
        return None
    products = [node.inputs[0]]
    if math.prod(kernel) > 1:
        moved = _producer(products[0], "Transpose")
        stacked = _producer(moved.inputs[0], "Reshape") if moved else None
        joined = _producer(stacked.inputs[0], "Concat") if stacked else None
        if moved is None or joined is None or tuple(moved.attributes.get_ints("perm", ())) != (1, 2, 0):
            return None
        products = list(joined.inputs)
    gemms = [_producer(value, "Gemm") for value in products]
    if len(gemms) != math.prod(kernel) or None in gemms:
        return None
    rows = {gemm.inputs[0] for gemm in gemms if gemm}
    flat = _producer(rows.pop(), "Reshape") if len(rows) == 1 else None
    maps = _producer(flat.inputs[0], "Transpose") if flat else None
    rank = len(kernel) + 2
    if maps is None or tuple(maps.attributes.get_ints("perm", ())) != (*range(1, rank), 0):
        return None
    return maps.inputs[0]


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = producer(value)
    return node if node is not None and operator_name(node) == operator else None


def _rewrite(graph: ir.Graph, node: ir.Node, conv: ir.Node, g: ir.Value, names: Names) -> None:
    x, weight = conv.inputs[:2]
    assert x is not None and weight is not None and weight.shape is not None  # noqa: PT018 (for mypy)
    kernel = [int(size) for size in weight.shape.numpy()[2:]]
    n = len(kernel)
    swap = [1, 0, *range(2, n + 2)]
    strides = conv.attributes.get_ints("strides", [1] * n)
    attributes = {
        "strides": conv.attributes.get_ints("dilations", [1] * n),
        "dilations": strides,
        "pads": conv.attributes.get_ints("pads", [0] * 2 * n),
    }
    name = str(node.outputs[0].name)

    def add(operator: str, *inputs: ir.Value, **given: object) -> ir.Value:
        made = ir.node(operator, inputs, given or None)  # type: ignore[arg-type]  # its type is too wide to name
        made.metadata_props.update(node.metadata_props)
        called = f"{name}/{operator}_of_{inputs[0].name}"
        made.name, made.outputs[0].name = names.node(called), names.value(called)
        made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(node, made)
        return made.outputs[0]

    def constant(what: str, numbers: list[int]) -> ir.Value:
        return add_initializer(graph, names.value(f"{name}/{what}"), np.asarray(numbers, np.int64))

    found = add("Conv", add("Transpose", x, perm=swap), add("Transpose", g, perm=swap), **attributes)
    if any(stride > 1 for stride in strides):
        found = add(
            "Slice",
            found,
            constant("starts", [0] * n),
            constant("ends", kernel),
            constant("axes", list(range(2, n + 2))),
        )
    node.op_type = "Transpose"
    node.attributes.clear()
    node.attributes.add(ir.AttrInt64s("perm", swap))
    node.resize_inputs(1)
    node.replace_input_with(0, found)
