"""Gradients of ONNX Runtime's fused operators (com.microsoft), written out in the operators that they were fused from."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import defined
from onnxamp.autodiff.rules.normalization import normalized, slopes
from onnxamp.autodiff.rules.shape import pad, trilu

MS = "com.microsoft"

gradient("Trilu", MS, inputs=(0,))(trilu)
gradient("Pad", MS)(pad)


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * count][:count]


def _sum(op: Builder, *values: ir.Value | None) -> ir.Value:
    total: ir.Value | None = None
    for value in values:
        if value is not None:
            total = value if total is None else op.Add(total, value)
    assert total is not None
    return total


def _activated(op: Builder, value: ir.Value, name: str, parameters: Sequence[float]) -> ir.Value:
    """`value` through an activation that ONNX Runtime fuses into products and convolutions."""
    names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}.get(name, ())
    if name == "Clip":
        return op.Clip(value, float(parameters[0]), float(parameters[1]))
    op.refuse(name not in ("", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"), f"activation {name}")
    return op.emit(name, [value], dict(zip(names, parameters, strict=False)))[0] if name else value


@defined("FusedMatMul", MS)
@defined("TransposeMatMul", MS)
def fused_matmul(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """alpha·A'·B', either operand transposed or not."""
    batches = any(node.attributes.get_int(f"transBatch{name}", 0) for name in "AB")
    op.refuse(batches, "transBatchA and transBatchB")
    a, b = (
        op.swap(value) if node.attributes.get_int(name, 0) and op.rank(value) > 1 else value
        for value, name in ((required(node), "transA"), (required(node, 1), "transB"))
    )
    alpha = node.attributes.get_float("alpha", 1.0)
    product = op.MatMul(a, b)
    return [product if alpha == 1.0 else op.Mul(product, alpha)]


@defined("FusedGemm", MS)
def fused_gemm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Gemm and an activation."""
    own = {name: attr for name, attr in node.attributes.items() if name in ("alpha", "beta", "transA", "transB")}
    given = [f"activation_{name}" for name in ("alpha", "beta") if f"activation_{name}" in node.attributes]
    product = op.emit("Gemm", list(node.inputs), own)[0]
    activation = node.attributes.get_string("activation", "")
    return [_activated(op, product, activation, [node.attributes[name].as_float() for name in given])]


@defined("FusedConv", MS)
def fused_conv(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Conv, an addend and an activation."""
    own = {name: attr for name, attr in node.attributes.items() if not name.startswith("activation")}
    result = op.emit("Conv", list(node.inputs[:3]), own)[0]
    result = _sum(op, result, _inputs(node, 4)[3])
    parameters = node.attributes.get_floats("activation_params", ())
    return [_activated(op, result, node.attributes.get_string("activation", ""), parameters)]


@defined("NhwcConv", MS)
def nhwc_conv(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Conv on data whose channels are last; the weights are [M, kH, kW, C]."""
    x, weight = required(node), required(node, 1)
    rank = op.rank(x)
    order, back = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    operands = [op.transpose(x, order), op.transpose(weight, order), *node.inputs[2:3]]
    return [op.transpose(op.emit("Conv", operands, dict(node.attributes))[0], back)]


@defined("GemmFastGelu", MS)
def gemm_fast_gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """FastGelu of a product."""
    product = op.MatMul(node.inputs[0], node.inputs[1])
    return op.emit("FastGelu", [product, *node.inputs[2:3]], domain=MS)


@defined("BiasAdd", MS)
def bias_add(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Data, bias and residual."""
    return [_sum(op, *node.inputs)]


@defined("BiasDropout", MS, inputs=(0, 1, 2))
def bias_dropout(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Data, bias and residual; in inference nothing is dropped."""
    mode = _inputs(node, 5)[4]
    content = op.known(mode)
    op.refuse(mode is not None and (content is None or bool(content.reshape(()))), "training mode")
    return [_sum(op, *node.inputs[:3])]


@defined("BiasSoftmax", MS)
def bias_softmax(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Softmax of a sum over the last dimension."""
    total = op.Add(*node.inputs)
    axis = node.attributes.get_int("axis", 1) % op.rank(total)
    op.refuse(axis != op.rank(total) - 1, "a Softmax over several dimensions")
    op.refuse(not node.attributes.get_int("is_inner_broadcast", 0) and op.rank(required(node, 1)) != op.rank(total),
              "a bias without leading dimensions")  # fmt: skip
    return [op.Softmax(total, axis=-1)]


@defined("BiasSplitGelu", MS)
def bias_split_gelu(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """left·Gelu(right), the halves of x + b."""
    total = op.Add(*node.inputs)
    width = op.dims(total)[-1]
    op.refuse(not isinstance(width, int), "the width is not static")
    assert isinstance(width, int)
    axis = op.rank(total) - 1
    left, right = op.Slice(total, [0], [width // 2], [axis]), op.Slice(total, [width // 2], [width], [axis])
    return [op.Mul(left, op.emit("Gelu", [right], domain=MS)[0])]


@gradient("SimplifiedLayerNormalization", inputs=(0, 1))
def simplified_layer_normalization(op: Builder, node: ir.Node, g: ir.Value, *rest: ir.Value | None) -> Gradients:
    """RMSNormalization, as ONNX Runtime called it before ONNX had it."""
    op.refuse(any(value is not None for value in rest), "a gradient of its deviation")
    return _parts(op, node, required(node), g, required(node, 1), None, centered=False)[:2]


@gradient("SkipLayerNormalization", MS)
def skip_layer_normalization(op: Builder, node: ir.Node, g: ir.Value | None, *rest: ir.Value | None) -> Gradients:
    """LayerNormalization of input + skip + bias; the sum may be an output of its own."""
    x, skip, gamma, beta, bias = _inputs(node, 5)
    total = _sum(op, x, skip, bias)
    op.refuse(any(value is not None for value in rest[:2]), "a gradient of its mean or deviation")
    d, dgamma, dbeta = _parts(op, node, total, g, gamma, beta, centered=True)
    d = _sum(op, d, [*rest, None, None, None][2])
    return [*_spread(op, d, total, x, skip), dgamma, dbeta, *_spread(op, d, total, bias)][: len(node.inputs)]


@gradient("SkipSimplifiedLayerNormalization", MS)
def skip_simplified_layer_normalization(
    op: Builder, node: ir.Node, g: ir.Value | None, *rest: ir.Value | None
) -> Gradients:
    """RMSNormalization of input + skip + bias; the sum may be an output of its own."""
    x, skip, gamma, bias = _inputs(node, 4)
    total = _sum(op, x, skip, bias)
    op.refuse(any(value is not None for value in rest[:2]), "a gradient of its mean or deviation")
    d, dgamma, _ = _parts(op, node, total, g, gamma, None, centered=False)
    d = _sum(op, d, [*rest, None, None, None][2])
    return [*_spread(op, d, total, x, skip), dgamma, *_spread(op, d, total, bias)][: len(node.inputs)]


def _parts(
    op: Builder,
    node: ir.Node,
    x: ir.Value,
    g: ir.Value | None,
    scale: ir.Value | None,
    bias: ir.Value | None,
    centered: bool,
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    if g is None:
        return None, None, None
    assert scale is not None
    axes = list(range(node.attributes.get_int("axis", -1) % op.rank(x), op.rank(x)))
    default = 1e-12 if node.op_type.startswith("Skip") else 1e-5
    normal, inverse = normalized(op, op.wide(x), axes, node.attributes.get_float("epsilon", default), centered)
    return slopes(op, op.wide(g), normal, inverse, scale, bias, axes, op.dims(x), centered)


def _spread(op: Builder, d: ir.Value, total: ir.Value, *operands: ir.Value | None) -> list[ir.Value | None]:
    """The gradient of a sum, for each of its operands."""
    return [None if value is None else op.unbroadcast_dims(d, value, [op.dims(total)]) for value in operands]


@defined("EmbedLayerNormalization", MS, inputs=(2, 3, 4, 5, 6))
def embed_layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """LayerNormalization of the sum of word, position and segment vectors."""
    ids, segments, words, positions, kinds, gamma, beta, _mask, places = _inputs(node, 9)
    assert ids is not None
    assert gamma is not None
    assert beta is not None
    if places is None:
        row = op.Range(op.index(0), op.Squeeze(op.dim(ids, 1), [0]), op.index(1))
        vectors = op.Gather(positions, row, axis=0)
    else:
        vectors = op.Gather(positions, places, axis=0)
    kind = None if kinds is None else op.Gather(kinds, segments, axis=0)
    total = _sum(op, op.Gather(words, ids, axis=0), vectors, kind)
    normal, _ = normalized(op, op.wide(total), [2], node.attributes.get_float("epsilon", 1e-12), centered=True)
    assert total.dtype is not None
    result = op.cast(op.Add(op.Mul(normal, op.wide(gamma)), op.wide(beta)), total.dtype)
    return [result, None, total]


@defined("GroupNorm", MS)
def group_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """GroupNormalization, of data whose channels are last or not, with SiLU or not."""
    return [_group_norm(op, node, required(node))]


@defined("SkipGroupNorm", MS)
def skip_group_norm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """GroupNorm of x + skip + bias; the sum is an output of its own."""
    x, _gamma, _beta, skip, bias = _inputs(node, 5)
    assert skip is not None
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = _sum(op, x, skip, bias)
    return [_group_norm(op, node, total), total]


def _group_norm(op: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    gamma, beta = required(node, 1), required(node, 2)
    last = bool(node.attributes.get_int("channels_last", 1))
    groups = node.attributes["groups"].as_int()
    channels = op.dims(x)[3 if last else 1]
    op.refuse(not isinstance(channels, int), "the number of channels is not static")
    assert isinstance(channels, int)
    share = channels // groups
    extent: list[int | ir.Value] = [op.dim(x, 0), -1, groups, share] if last else [op.dim(x, 0), groups, share, -1]
    axes = [1, 3] if last else [2, 3]
    parts = op.Reshape(op.wide(x), op.join(extent))
    normal, _ = normalized(op, parts, axes, node.attributes.get_float("epsilon", 1e-5), centered=True)
    places = [1, 1, groups, share] if last else [1, groups, share, 1]
    y = op.Add(op.Mul(normal, op.Reshape(op.wide(gamma), places)), op.Reshape(op.wide(beta), places))
    y = op.reshape(y, x)
    if node.attributes.get_int("activation", 0):
        y = op.Mul(y, op.Sigmoid(y))
    assert x.dtype is not None
    return op.cast(y, x.dtype)


@defined("ComplexMul", MS)
def complex_mul(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Products of pairs (real, imaginary) in the last dimension."""
    return [_complex_product(op, node, 1.0)]


@defined("ComplexMulConj", MS)
def complex_mul_conj(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Products with the conjugate of the second operand."""
    return [_complex_product(op, node, -1.0)]


def _complex_product(op: Builder, node: ir.Node, sign: float) -> ir.Value:
    (a, b), (c, d) = (
        [op.Slice(value, [i], [i + 1], [op.rank(value) - 1]) for i in range(2)]
        for value in (required(node), required(node, 1))
    )
    d = op.Mul(d, sign)
    return op.Concat(op.Sub(op.Mul(a, c), op.Mul(b, d)), op.Add(op.Mul(a, d), op.Mul(b, c)), axis=-1)


@defined("CDist", MS)
def cdist(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Distances of all pairs of rows, or their squares."""
    difference = op.Sub(op.Unsqueeze(node.inputs[0], [1]), op.Unsqueeze(node.inputs[1], [0]))
    squares = op.sum(op.Mul(difference, difference), [2], keepdims=False)
    kind = node.attributes.get_string("metric", "sqeuclidean")
    op.refuse(kind not in ("euclidean", "sqeuclidean"), f"metric {kind}")
    return [squares if kind == "sqeuclidean" else op.Sqrt(squares)]


@gradient("Inverse", MS)
def inverse(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """d(X⁻¹) = −X⁻¹·dX·X⁻¹."""
    turned = op.swap(node.outputs[0])
    return [op.Neg(op.MatMul(op.MatMul(turned, g), turned))]


@gradient("ExpandDims", MS, inputs=(0,))
def expand_dims(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """The gradient in the shape of the input."""
    return [op.reshape(g, required(node))]
