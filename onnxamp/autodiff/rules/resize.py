"""Gradient of Resize: along each axis it is a matrix, and its gradient the transposed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxamp.autodiff.builder import Builder, Dim
from onnxamp.autodiff.registry import Gradients, gradient


@gradient("Resize", inputs=(0,))
def resize(op: Builder, node: ir.Node, g: ir.Value) -> Gradients:
    """dX = Mᵀ·g along every resized axis, M what the reference evaluator makes of the unit matrix.

    Whole factors of nearest neighbours with the usual coordinates are sums over blocks and need no static sizes.
    """
    x = node.inputs[0]
    assert x is not None
    blocks = _whole_factors(op, node, x)
    if blocks is not None:
        return [_block_sums(op, g, x, blocks)]
    sizes, results = op.dims(x), op.dims(node.outputs[0])
    scales = op.known(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    axes = list(node.attributes.get_ints("axes", tuple(range(len(sizes)))))
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    crops = node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    boxes = op.known(node.inputs[1]) if crops else None
    op.refuse(crops and boxes is None, "the region of Resize is computed at run time")
    for axis, (size, result) in enumerate(zip(sizes, results, strict=True)):
        if (size == result and size is not None and not crops) or axis not in axes:
            continue
        place = axes.index(axis)
        scale = None if scales is None or not scales.size else float(scales.reshape(-1)[place])
        if scale == 1.0 and not crops and not (isinstance(size, int) and isinstance(result, int)):
            continue  # a free dimension, the batch
        op.refuse(not isinstance(size, int) or not isinstance(result, int), "this Resize needs static sizes")
        assert isinstance(size, int)
        assert isinstance(result, int)
        if policy != "stretch" and scale is None:
            scale = _common_scale(op, node, sizes, axes, policy)
        box = None if boxes is None else boxes.reshape(2, -1)[:, place]
        matrix = _matrix(node, size, result, scale, box, op.opset)
        order = [other for other in range(len(sizes)) if other != axis] + [axis]
        assert g.dtype is not None
        product = op.MatMul(op.transpose(g, order), op.cast(op.constant(matrix), g.dtype))
        g = op.transpose(product, np.argsort(order).tolist())
    g.shape = x.shape
    return [g]


def _common_scale(op: Builder, node: ir.Node, sizes: Sequence[Dim], axes: Sequence[int], policy: str) -> float:
    """The factor of all axes where the sizes keep their ratio."""
    wanted = op.known(node.inputs[3])
    op.refuse(wanted is None, "the sizes of Resize are computed at run time")
    assert wanted is not None
    static = [size for axis in axes if isinstance(size := sizes[axis], int)]
    op.refuse(len(static) < len(axes), "this Resize keeps the ratio of sizes that are not static")
    factors = [float(w) / size for w, size in zip(wanted.reshape(-1), static, strict=True)]
    return min(factors) if policy == "not_larger" else max(factors)


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
    node: ir.Node, size: int, result: int, scale: float | None, box: np.ndarray | None, opset: int
) -> np.ndarray:
    """[result, size]: what the forward node makes of each unit vector along one axis."""
    unit = np.eye(size, dtype=np.float64)[:, None, None, :]
    kept = {"axes", "keep_aspect_ratio_policy", "extrapolation_value"}
    attributes = [ir.to_proto(attr) for name, attr in node.attributes.items() if name not in kept]
    roi = "" if box is None else "roi"
    names = ["x", roi, "scales", ""] if scale is not None else ["x", roi, "", "sizes"]
    proto = onnx.helper.make_node("Resize", names, ["y"])
    proto.attribute.extend(attributes)
    feeds: dict[str, np.ndarray] = {"x": unit}
    if box is not None:
        feeds["roi"] = np.asarray([0.0, 0.0, 0.0, box[0], 1.0, 1.0, 1.0, box[1]], np.float32)
    if scale is not None:
        feeds["scales"] = np.asarray([1.0, 1.0, 1.0, scale], np.float32)
    else:
        feeds["sizes"] = np.asarray([size, 1, 1, result], np.int64)
    graph = onnx.helper.make_graph(
        [proto], "resize", [onnx.ValueInfoProto(name=name) for name in feeds], [onnx.ValueInfoProto(name="y")]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    (rows,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(rows, np.float64).reshape(size, result).T
