"""Gradient of Resize: along each axis it is a matrix, and its gradient the transposed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxamp.autodiff.builder import Builder, Dim, required
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Resize", inputs=(0,))
def resize(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dX = Mᵀ·g along every resized axis, M what the reference evaluator makes of the unit matrix.

    Whole factors of nearest neighbours with the usual coordinates are sums over blocks and need no static sizes. Where no size changes,
    ONNX Runtime and PyTorch copy x whatever the factors; where only some change, the others are interpolated by their factor too, but
    not with `antialias`, which leaves an axis whose size stays as it is.
    """
    x = required(node)
    blocks = _whole_factors(op, node, x)
    if blocks is not None:
        return [_block_sums(op, g, x, blocks)]
    sizes, results = op.dims(x), op.dims(node.outputs[0])
    scales = op.known(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    axes = [axis % len(sizes) for axis in node.attributes.get_ints("axes", tuple(range(len(sizes))))]
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    crops = node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    boxes = op.known(node.inputs[1]) if crops else None
    op.refuse(crops and boxes is None, "the region of Resize is computed at run time")
    if not crops and op.same_shape(x, node.outputs[0]):
        return [g]
    smooth = bool(node.attributes.get_int("antialias", 0))
    scaled = scales is not None and bool(scales.size)
    ratio = None if scaled or policy == "stretch" else _common_ratio(op, node, sizes, axes, policy)
    for place, axis in enumerate(axes):
        size, result = sizes[axis], results[axis]
        scale = float(scales.reshape(-1)[place]) if scaled and scales is not None else None
        same = size is not None and size == result
        if not crops and (scale == 1.0 or (same and (smooth or (scale is None and ratio is None)))):
            continue
        op.refuse(not isinstance(size, int) or not isinstance(result, int), "this Resize needs static sizes")
        assert isinstance(size, int)
        assert isinstance(result, int)
        lone = (
            node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "pytorch_half_pixel"
            and result == 1
        )
        op.refuse(lone and smooth, "this Resize smooths an axis to one element")
        box = None if boxes is None else boxes.reshape(2, -1)[:, place]
        matrix = _matrix(op, node, size, result, scale if ratio is None else ratio, box)
        order = [other for other in range(len(sizes)) if other != axis] + [axis]
        assert g.dtype is not None
        product = op.MatMul(op.transpose(g, order), op.cast(op.constant(matrix), g.dtype))
        g = op.transpose(product, np.argsort(order).tolist())
    g.shape = x.shape
    return [g]


def _common_ratio(
    op: Builder, node: ir.Node, sizes: Sequence[Dim], axes: Sequence[int], policy: str
) -> tuple[int, int]:
    """The wanted and the present size of the axis whose factor is that of all, where sizes keep their ratio."""
    wanted = op.known(node.inputs[3])
    op.refuse(wanted is None, "the sizes of Resize are computed at run time")
    assert wanted is not None
    static = [size for axis in axes if isinstance(size := sizes[axis], int)]
    op.refuse(len(static) < len(axes), "this Resize keeps the ratio of sizes that are not static")
    choose = min if policy == "not_larger" else max
    return choose(zip(wanted.reshape(-1).tolist(), static, strict=True), key=lambda pair: pair[0] / pair[1])


def _whole_factors(op: Builder, node: ir.Node, x: ir.Value) -> list[int] | None:
    """The factor of each axis where every output element is one input element, repeated in blocks."""
    scales = op.known(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if scales is None or not scales.size or node.attributes.get_string("mode", "nearest") != "nearest":
        return None
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    rounding = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    if (mode, rounding) not in {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")}:
        return None
    factors = [1] * op.rank(x)
    for axis, scale in zip(node.attributes.get_ints("axes", range(op.rank(x))), scales.reshape(-1), strict=True):
        if scale != int(scale) or scale < 1:
            return None
        factors[axis] = int(scale)
    return factors


def _block_sums(op: Builder, g: ir.Value, x: ir.Value, factors: list[int]) -> ir.Value:
    extent: list[int | ir.Value] = []
    summed = []
    for axis, factor in enumerate(factors):
        extent.append(op.dim(x, axis))
        if factor > 1:
            summed.append(len(extent))
            extent.append(factor)
    if not summed:
        return g
    result = op.sum(op.Reshape(g, op.join(extent)), summed, keepdims=False)
    result.shape = x.shape
    return result


def _matrix(
    op: Builder,
    node: ir.Node,
    size: int,
    result: int,
    scale: float | tuple[int, int] | None,
    box: np.ndarray | None,
) -> np.ndarray:
    """[result, size]: what the forward node makes of each unit vector along one axis.

    A factor (w, s) is w/s, and the result is rounded to the nearest size: a further axis, of s equal elements that become w, sets it.
    """
    coordinates = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    # The evaluator takes the length before it is rounded down, ONNX Runtime and PyTorch the whole one.
    if coordinates == "pytorch_half_pixel" and result == 1:
        return np.eye(1, size)
    if coordinates == "align_corners" and scale is not None:
        length = size * (scale[0] / scale[1] if isinstance(scale, tuple) else scale)
        shrinks = bool(node.attributes.get_int("antialias", 0)) and length < size
        op.refuse(
            shrinks and abs(length - result) > 1e-4, "this Resize smooths by another factor than that of its sizes"
        )
        scale = None
    kept = {"axes", "keep_aspect_ratio_policy", "extrapolation_value"}
    attributes = [ir.to_proto(attr) for name, attr in node.attributes.items() if name not in kept]
    feeds = {"x": np.eye(size, dtype=np.float64)[:, None, None, :]}
    if isinstance(scale, tuple):
        wanted, present = scale
        feeds["x"] = np.repeat(feeds["x"], present, 2)
        feeds["sizes"] = np.asarray([wanted, 0], np.int64)  # not_smaller: the larger factor, which is that of `scale`
        attributes.append(onnx.helper.make_attribute("axes", [2, 3]))
        attributes.append(onnx.helper.make_attribute("keep_aspect_ratio_policy", "not_smaller"))
    elif scale is not None:
        factor = np.float32(scale)
        if int(size * np.float64(factor)) < result:  # runtimes multiply in FP32, which may round up to a whole number
            factor = np.nextafter(factor, np.float32(np.inf))
        feeds["scales"] = np.asarray([1.0, 1.0, 1.0, factor], np.float32)
    else:
        feeds["sizes"] = np.asarray([size, 1, 1, result], np.int64)
    if box is not None:
        whole = 1 if isinstance(scale, tuple) else 3
        feeds["roi"] = np.asarray([*[0.0] * whole, box[0], *[1.0] * whole, box[1]], np.float32)
    names = [name if name in feeds else "" for name in ("x", "roi", "scales", "sizes")]
    proto = onnx.helper.make_node("Resize", names, ["y"])
    proto.attribute.extend(attributes)
    graph = onnx.helper.make_graph(
        [proto], "resize", [onnx.ValueInfoProto(name=name) for name in feeds], [onnx.ValueInfoProto(name="y")]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", op.opset)])
    (rows,) = ReferenceEvaluator(model).run(None, feeds)
    matrix = np.asarray(rows, np.float64)[:, 0, 0].T
    op.refuse(
        matrix.shape != (result, size), f"a dimension of {size} becomes {matrix.shape[0]} by its factor, not {result}"
    )
    return matrix
