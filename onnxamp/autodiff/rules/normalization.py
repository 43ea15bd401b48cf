"""Gradients of normalizations. Statistics are FP32 (FP64 for FP64) whatever the type of the data."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxamp.autodiff.builder import Builder, Dim, required
from onnxamp.autodiff.registry import Gradients, gradient
from onnxamp.autodiff.reverse import through


def _standardize(op: Builder, x: ir.Value, axes: Sequence[int], epsilon: float) -> tuple[ir.Value, ir.Value]:
    """x̂ = (x − mean)/√(var + ε) over `axes`, and 1/√(var + ε)."""
    centered = op.Sub(x, op.reduce("ReduceMean", x, axes))
    variance = op.reduce("ReduceMean", op.Mul(centered, centered), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    return op.Mul(centered, inverse), inverse


def _through(op: Builder, g: ir.Value, normal: ir.Value, inverse: ir.Value, axes: Sequence[int]) -> ir.Value:
    """dx = (g − mean g − x̂·mean(g·x̂))·inverse, the gradient through `_standardize`."""
    mean = op.reduce("ReduceMean", g, axes)
    slope = op.reduce("ReduceMean", op.Mul(g, normal), axes)
    return op.Mul(op.Sub(op.Sub(g, mean), op.Mul(normal, slope)), inverse)


def normalized(
    op: Builder, x: ir.Value, axes: Sequence[int], epsilon: float, centered: bool
) -> tuple[ir.Value, ir.Value]:
    """x̂ and the factor that makes it: (x − mean)/√(var + ε), or x/√(mean x² + ε) if not `centered`."""
    if centered:
        return _standardize(op, x, axes, epsilon)
    square = op.reduce("ReduceMean", op.Mul(x, x), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(square, epsilon)))
    return op.Mul(x, inverse), inverse


def slopes(
    op: Builder,
    g: ir.Value,
    normal: ir.Value,
    inverse: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None,
    axes: Sequence[int],
    dims: list[Dim],
    centered: bool,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Gradients of x, scale and bias of x̂·scale + bias, x̂ by `normalized`, for data of dimensions `dims`."""
    scaled = op.Mul(g, op.wide(scale))
    if centered:
        dx = _through(op, scaled, normal, inverse, axes)
    else:
        slope = op.reduce("ReduceMean", op.Mul(scaled, normal), axes)
        dx = op.Mul(op.Sub(scaled, op.Mul(normal, slope)), inverse)
    dbias = None if bias is None else op.unbroadcast_dims(g, bias, [dims])
    return dx, op.unbroadcast_dims(op.Mul(g, normal), scale, [dims]), dbias


@gradient("LayerNormalization", inputs=(0, 1, 2))
def layer_normalization(op: Builder, node: ir.Node, g: ir.Value | None, *statistics: ir.Value | None) -> Gradients:
    """y = x̂·scale + b: dx through x̂, dscale = Σ g·x̂, db = Σ g. Mean and 1/σ are outputs of the forward node."""
    if any(value is not None for value in statistics):
        return through(op, _with_statistics(op, node), [g, *statistics], node.inputs)
    x, scale, bias = [*node.inputs, None][:3]
    assert g is not None
    assert x is not None
    assert scale is not None
    axes = list(range(node.attributes.get_int("axis", -1) % op.rank(x), op.rank(x)))
    wide, g32, scale32 = op.wide(x), op.wide(g), op.wide(scale)
    if x.dtype == ir.DataType.DOUBLE:  # the schema gives FP32 statistics even for FP64 data
        normal, inverse = _standardize(op, wide, axes, node.attributes.get_float("epsilon", 1e-5))
    else:
        mean, inverse = _statistics(op, node, x, axes)
        normal = op.Mul(op.Sub(wide, mean), inverse)
    dx = _through(op, op.Mul(g32, scale32), normal, inverse, axes) if 0 in op.wanted else None
    dims = op.dims(x)
    dscale = op.unbroadcast_dims(op.Mul(g32, normal), scale, [dims]) if 1 in op.wanted else None
    db = op.unbroadcast_dims(g32, bias, [dims]) if bias is not None and 2 in op.wanted else None
    return [dx, dscale, db]


def _with_statistics(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Y, the mean and 1/σ in plain operators, where the last two have gradients too."""
    x, scale, bias = [*node.inputs, None][:3]
    assert x is not None
    assert scale is not None
    axes = list(range(node.attributes.get_int("axis", -1) % op.rank(x), op.rank(x)))
    wide = op.wide(x)
    normal, inverse = _standardize(op, wide, axes, node.attributes.get_float("epsilon", 1e-5))
    y = op.Mul(normal, op.wide(scale))
    y = y if bias is None else op.Add(y, op.wide(bias))
    kinds = [value.dtype or wide.dtype for value in node.outputs]
    results = [y, op.reduce("ReduceMean", wide, axes), inverse]
    return [op.cast(value, kind) for value, kind in zip(results, kinds, strict=False) if kind is not None]


def _statistics(op: Builder, node: ir.Node, x: ir.Value, axes: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """The outputs Mean and InvStdDev of the forward node, added when it has none."""
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for value, name in zip(node.outputs[1:], ("mean", "inv_std"), strict=True):
        if not value.name:
            value.name = op.unique(f"{node.outputs[0].name}/{name}")
        if value.dtype is None:
            value.type = ir.TensorType(ir.DataType(node.attributes.get_int("stash_type", 1)))
        if x.shape is not None:
            value.shape = ir.Shape([1 if axis in axes else dim for axis, dim in enumerate(x.shape)])
    return op.wide(node.outputs[1]), op.wide(node.outputs[2])


@gradient("RMSNormalization", inputs=(0, 1))
def rms_normalization(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x·r·scale, r = 1/√(mean x² + ε): dx = r·(gs − x̂·mean(gs·x̂)) with gs = g·scale, x̂ = x·r."""
    x, scale = node.inputs
    assert x is not None
    assert scale is not None
    axes = list(range(node.attributes.get_int("axis", -1) % op.rank(x), op.rank(x)))
    normal, inverse = normalized(op, op.wide(x), axes, node.attributes.get_float("epsilon", 1e-5), centered=False)
    return slopes(op, op.wide(g), normal, inverse, scale, None, axes, op.dims(x), centered=False)[:2]


@gradient("BatchNormalization")
def batch_normalization(op: Builder, node: ir.Node, g: ir.Value, *_: ir.Value | None) -> Gradients:
    """Inference form, y = (x − μ)·r·scale + b with r = 1/√(σ² + ε): dx = g·scale·r, dscale = r·Σ g·(x − μ), db = Σ g,
    dμ = −scale·r·db, dσ² = −½·scale·r²·dscale. The training form is decomposed before (`passes.norms`)."""
    op.refuse(
        bool(node.attributes.get_int("training_mode", 0)),
        "a BatchNormalization in training mode has to be decomposed first",
    )
    x, scale, _bias, mean, variance = node.inputs
    assert x is not None
    assert scale is not None
    assert mean is not None
    assert variance is not None
    rank = op.rank(x)
    others = [0, *range(2, rank)]
    inverse = op.Reciprocal(op.Sqrt(op.Add(op.wide(variance), node.attributes.get_float("epsilon", 1e-5))))
    dx = dscale = db = dmean = dvariance = None
    factor = op.Mul(op.wide(scale), inverse)
    if 0 in op.wanted:
        assert x.dtype is not None
        dx = op.Mul(g, op.cast(op.per_channel(factor, rank), x.dtype))
    if not op.wanted.isdisjoint((1, 4)):
        centered = op.Sub(op.wide(x), op.per_channel(op.wide(mean), rank))
        dscale = op.Mul(op.sum(op.Mul(op.wide(g), centered), others, keepdims=False), inverse)
        dvariance = op.Mul(op.Mul(op.Mul(factor, inverse), dscale), -0.5) if 4 in op.wanted else None
    if not op.wanted.isdisjoint((2, 3)):
        db = op.sum(op.wide(g), others, keepdims=False)
        dmean = op.Neg(op.Mul(factor, db)) if 3 in op.wanted else None
    return [dx, dscale, db, dmean, dvariance]


@gradient("InstanceNormalization")
def instance_normalization(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Statistics over the spatial dimensions of each channel of each sample."""
    x, scale, _ = node.inputs
    assert x is not None
    assert scale is not None
    rank = op.rank(x)
    axes, others = list(range(2, rank)), [0, *range(2, rank)]
    normal, inverse = _standardize(op, op.wide(x), axes, node.attributes.get_float("epsilon", 1e-5))
    g32 = op.wide(g)
    dx = _through(op, op.Mul(g32, op.per_channel(op.wide(scale), rank)), normal, inverse, axes)
    return [dx, op.sum(op.Mul(g32, normal), others, keepdims=False), op.sum(g32, others, keepdims=False)]


@gradient("GroupNormalization")
def group_normalization(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """Statistics over the channels of a group and the spatial dimensions; scale and bias per channel."""
    x, scale, bias = node.inputs
    assert x is not None
    assert scale is not None
    assert bias is not None
    groups = node.attributes["num_groups"].as_int()
    channels = op.dims(x)[1]
    op.refuse(not isinstance(channels, int), "the number of channels is not static")
    assert isinstance(channels, int)
    op.refuse(op.opset < 21, "GroupNormalization is deprecated before opset 21")
    grouped = op.join([op.dim(x, 0), groups, channels // groups, -1])
    wide, g32 = op.Reshape(op.wide(x), grouped), op.Reshape(op.wide(g), grouped)
    normal, inverse = _standardize(op, wide, [2, 3], node.attributes.get_float("epsilon", 1e-5))
    spread = op.Reshape(op.wide(scale), [1, groups, channels // groups, 1])
    dx = op.reshape(_through(op, op.Mul(g32, spread), normal, inverse, [2, 3]), x)
    others = [0, 3]
    dscale = op.Reshape(op.sum(op.Mul(g32, normal), others, keepdims=False), [-1])
    return [dx, dscale, op.Reshape(op.sum(g32, others, keepdims=False), [-1])]


@gradient("LpNormalization")
def lp_normalization(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x/n with n = Σ|x| or √Σx²: dx = (g − n'·Σ g·y)/n with n' = sign x, or y; 0 where n = 0."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    axis = node.attributes.get_int("axis", -1) % op.rank(x)
    p = node.attributes.get_int("p", 2)
    g, wide = op.wide(g), op.wide(x)
    size = op.Abs(wide) if p == 1 else op.Mul(wide, wide)
    norm = op.sum(size, [axis])
    norm = norm if p == 1 else op.Sqrt(norm)
    slope = op.Sign(wide) if p == 1 else op.wide(y)
    inner = op.sum(op.Mul(g, op.wide(y)), [axis])
    zero = op.Equal(norm, 0.0)
    safe = op.Where(zero, op.scalar(1.0, norm.dtype), norm)
    dx = op.Div(op.Sub(g, op.Mul(slope, inner)), safe)
    return [op.Where(zero, op.scalar(0.0, g.dtype), dx)]


@gradient("MeanVarianceNormalization")
def mean_variance_normalization(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = (x − mean)/(σ + 1e-9): the gradient through x̂ with that 1/(σ + 1e-9)."""
    x = required(node)
    axes = list(node.attributes.get_ints("axes", (0, 2, 3)))
    wide, g32 = op.wide(x), op.wide(g)
    centered = op.Sub(wide, op.reduce("ReduceMean", wide, axes))
    deviation = op.Sqrt(op.reduce("ReduceMean", op.Mul(centered, centered), axes))
    inverse = op.Reciprocal(op.Add(deviation, 1e-9))
    return [_through(op, g32, op.Mul(centered, inverse), inverse, axes)]


@gradient("LRN")
def lrn(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """y = x·s⁻ᵝ, s = k + α/size·Σ x² over a window of channels:
    dx = g·s⁻ᵝ − 2αβ/size·x·Σ' g·x·s⁻ᵝ⁻¹ over the mirrored window."""
    assert node.inputs[0] is not None
    x, y, g = op.wide(node.inputs[0]), op.wide(node.outputs[0]), op.wide(g)
    size = node.attributes["size"].as_int()
    alpha, beta, bias = (
        node.attributes.get_float(name, value) for name, value in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    scale = op.Add(op.Mul(_window_sum(op, op.Mul(x, x), before, after), alpha / size), bias)
    inner = op.Div(op.Mul(g, y), scale)
    spread = op.Mul(op.Mul(x, _window_sum(op, inner, after, before)), 2.0 * alpha * beta / size)
    return [op.Sub(op.Mul(g, op.Pow(scale, -beta)), spread)]


def _window_sum(op: Builder, value: ir.Value, before: int, after: int) -> ir.Value:
    """Sums over channels [c − before, c + after]."""
    rank = op.rank(value)
    pads = [0] * (2 * rank)
    pads[1], pads[rank + 1] = before, after
    padded = op.Pad(value, pads)
    total: ir.Value | None = None
    for shift in range(before + after + 1):
        last = shift - before - after
        part = op.Slice(padded, [shift], [last if last else 2**63 - 1], [1])
        total = part if total is None else op.Add(total, part)
    assert total is not None
    total.shape = value.shape
    return total
