"""The adapters of the opset table: each brings a node to the next version of its operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from onnxamp.model.opset.editing import Edit

# Attributes -----------------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Edit], None]:
    """Drop attributes that said nothing."""
    return lambda edit: edit.drop(*names)


def with_default(name: str, value: Any) -> Callable[[Edit], None]:
    """Write out what was the default."""

    def apply(edit: Edit) -> None:
        if not edit.has(name):
            edit.set(name, value)

    return apply


def must_be(name: str, value: int) -> Callable[[Edit], None]:
    """Drop an attribute whose only value left is the default."""

    def apply(edit: Edit) -> None:
        if (found := edit.get(name, value)) != value:
            raise edit.refuse(f"{name}={found} has no later form")
        edit.drop(name)

    return apply


def integral(name: str) -> Callable[[Edit], None]:
    """Make a float attribute an integer one."""

    def apply(edit: Edit) -> None:
        edit.drop("consumed_inputs")
        if edit.has(name):
            value = edit.get(name)
            if value != int(value):
                raise edit.refuse(f"{name}={value} is no integer")
            edit.set(name, int(value))

    return apply


def renamed(old: str, new: str) -> Callable[[Edit], None]:
    """Rename an attribute."""

    def apply(edit: Edit) -> None:
        if edit.has(old):
            edit.set(new, edit.get(old))
            edit.drop(old)

    return apply


def called(op_type: str) -> Callable[[Edit], None]:
    """Rename the operator."""

    def apply(edit: Edit) -> None:
        edit.node.op_type = op_type

    return apply


def selu(edit: Edit) -> None:
    """Selu 1 → 6."""
    edit.drop("consumed_inputs")
    for name, value in (("alpha", 1.6732), ("gamma", 1.0507)):
        with_default(name, value)(edit)


def direction(edit: Edit) -> None:
    """GRU 1 → 3."""
    if edit.get("direction", "foward") == "foward":
        edit.set("direction", "forward")


def cast(edit: Edit) -> None:
    """Cast 1 → 6."""
    edit.set("to", onnx.TensorProto.DataType.Value(edit.get("to").upper()))


def grid_sample(edit: Edit) -> None:
    """GridSample 16 → 20."""
    mode = edit.get("mode", "bilinear")
    edit.set("mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


# Attributes that become operands --------------------------------------------------------------------------------------


def _to_operand(edit: Edit, name: str, index: int) -> None:
    """Move a list of integers, if it is given."""
    if edit.has(name):
        edit.put(index, edit.ints(edit.get(name), name))
        edit.drop(name)


def axes_to_operand(edit: Edit) -> None:
    """Squeeze, Unsqueeze, ReduceSum 11 → 13, the other reductions 13 → 18."""
    _to_operand(edit, "axes", 1)


def reshape(edit: Edit) -> None:
    """Reshape 1 → 5."""
    edit.drop("consumed_inputs")
    if not edit.has("shape"):
        raise edit.refuse("it has no shape")
    _to_operand(edit, "shape", 1)


def slice_10(edit: Edit) -> None:
    """Slice 1 → 10."""
    for index, name in enumerate(("starts", "ends", "axes"), start=1):
        _to_operand(edit, name, index)


def split_2(edit: Edit) -> None:
    """Split 1 → 2."""
    if edit.operand(1) is not None:
        raise edit.refuse("its parts are an operand, which the next opsets do not have")
    with_default("axis", 0)(edit)


def split_13(edit: Edit) -> None:
    """Split 11 → 13."""
    _to_operand(edit, "split", 1)


def split_18(edit: Edit) -> None:
    """Split 13 → 18."""
    if edit.operand(1) is None:
        edit.set("num_outputs", len(edit.node.outputs))


def top_k(edit: Edit) -> None:
    """TopK 1 → 10."""
    edit.put(1, edit.ints([edit.get("k")], "k"))
    edit.drop("k")


def pad(edit: Edit) -> None:
    """Pad 2 → 11."""
    _to_operand(edit, "pads", 1)
    if edit.get("value", 0.0) != 0:
        edit.put(2, edit.constant(np.array(edit.get("value"), edit.dtype(0)), "value"))
    edit.drop("value")


def clip(edit: Edit) -> None:
    """Clip 6 → 11: the old default, fp32's largest number, becomes no bound at all, so ±inf stays."""
    for index, name in enumerate(("min", "max"), start=1):
        if edit.has(name):
            if abs(edit.get(name)) < np.finfo(np.float32).max:
                edit.put(index, edit.constant(np.array(edit.get(name), edit.dtype(0)), name))
            edit.drop(name)


def dft(edit: Edit) -> None:
    """DFT 17 → 20."""
    edit.put(2, edit.constant(np.array(edit.get("axis", 1), np.int64), "axis"))
    edit.drop("axis")


# Broadcasting ---------------------------------------------------------------------------------------------------------


def broadcast(edit: Edit) -> None:
    """Binary operators 6 → 7: the second operand was aligned at `axis` of the first, or at its end."""
    second = edit.operand(1)
    if edit.get("broadcast", 0) and edit.has("axis"):
        rank, inner = edit.rank(0), edit.rank(1)
        axis = edit.get("axis") % rank if rank else 0
        behind = rank - axis - inner
        if behind < 0:
            raise edit.refuse(f"its second operand does not fit at axis {axis}")
        if behind and inner:
            axes = list(range(inner, inner + behind))
            edit.put(1, edit.add("Unsqueeze", [second], {"axes": axes}, "aligned"))
    edit.drop("broadcast", "axis")


def prelu(edit: Edit) -> None:
    """PRelu 6 → 7: a slope of one dimension went along the channels."""
    slope = edit.shape(1)
    if slope == (1,) or slope == ():
        return
    rank = edit.rank(0)
    if slope is None or None in slope:
        raise edit.refuse("the shape of its slope is unknown")
    if len(slope) == 1 and rank > 2:
        edit.put(1, edit.add("Unsqueeze", [edit.operand(1)], {"axes": list(range(1, rank - 1))}, "slope"))


# Modes of training ----------------------------------------------------------------------------------------------------


def batch_norm_7(edit: Edit) -> None:
    """BatchNormalization 6 → 7."""
    if not edit.get("is_test", 0):
        raise edit.refuse("is_test=0 asks for batch statistics")
    edit.drop("is_test")


def batch_norm_14(edit: Edit) -> None:
    """BatchNormalization 9 → 14."""
    if any(value.name for value in edit.node.outputs[1:]):
        raise edit.refuse("it computes batch statistics, of which the later version gives others")
    edit.node.resize_outputs(1)


def dropout_7(edit: Edit) -> None:
    """Dropout 6 → 7."""
    if not edit.get("is_test", 0):
        raise edit.refuse("is_test=0 asks for a random mask")
    edit.drop("is_test")


def dropout_10(edit: Edit) -> None:
    """Dropout 7 → 10."""
    if edit.is_read(1):
        raise edit.refuse("its mask is read as a float")
    edit.node.resize_outputs(1)


def dropout_12(edit: Edit) -> None:
    """Dropout 10 → 12."""
    if edit.has("ratio"):
        edit.put(1, edit.constant(np.array(edit.get("ratio"), np.float32), "ratio"))
        edit.drop("ratio")


# Normalizations -------------------------------------------------------------------------------------------------------


def softmax(edit: Edit) -> None:
    """Softmax, LogSoftmax, Hardmax 11 → 13: flattened into rows at `axis`, and back.

    Only the axis itself matters where the sizes behind it are all 1 or there are none.
    """
    axis, shape = edit.get("axis", 1), edit.shape(0)
    if axis == -1 or (shape is not None and all(size == 1 for size in shape[axis:][1:])):
        edit.set("axis", axis)
        return
    source = edit.operand(0)
    sizes = edit.add("Shape", [source], {}, "shape")
    flat = edit.add("Flatten", [source], {"axis": axis}, "rows")
    edit.become("Reshape", [edit.split("row_wise", [flat], {"axis": -1}), sizes], {})


def group_norm(edit: Edit) -> None:
    """GroupNormalization 18 → 21: scale and bias of a group are those of each of its channels."""
    shape, groups = edit.shape(0), edit.get("num_groups")
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if channels is None or channels % groups:
        raise edit.refuse("the number of channels is unknown")
    for index, role in ((1, "scale"), (2, "bias")):
        column = edit.add("Unsqueeze", [edit.operand(index), edit.ints([1], f"{role}_axes")], {}, f"{role}_column")
        sizes = edit.ints([groups, channels // groups], f"{role}_sizes")
        table = edit.add("Expand", [column, sizes], {}, f"{role}_table")
        edit.put(index, edit.add("Reshape", [table, edit.ints([-1], f"{role}_all")], {}, f"{role}_by_channel"))


# Windows --------------------------------------------------------------------------------------------------------------


def conv_transpose(edit: Edit) -> None:
    """ConvTranspose 1 → 11: which side got the odd pixel changed where padding is implied."""
    if edit.has("output_shape") or str(edit.get("auto_pad", "NOTSET")).startswith("SAME"):
        raise edit.refuse("its padding is implied by output_shape or auto_pad, and opset 11 shares it out otherwise")


def pool(edit: Edit) -> None:
    """AveragePool, MaxPool → 22: no window starts in the padding at the end if stride + pad ≤ kernel, dilated."""
    if not edit.get("ceil_mode", 0) or edit.get("auto_pad", "NOTSET") != "NOTSET":
        return
    kernel = edit.get("kernel_shape")
    strides, dilations = (edit.get(name, [1] * len(kernel)) for name in ("strides", "dilations"))
    ends = edit.get("pads", [0] * 2 * len(kernel))[len(kernel) :]
    begins = edit.get("pads", [0] * 2 * len(kernel))[: len(kernel)]
    sizes = (edit.shape(0) or (None,) * (2 + len(kernel)))[2:]
    for k, s, d, begin, end, size in zip(kernel, strides, dilations, begins, ends, sizes, strict=True):
        extent = d * (k - 1) + 1
        if s + end <= extent:
            continue
        if size is None or s * -(-(size + begin + end - extent) // s) - begin >= size:
            raise edit.refuse("ceil_mode may start a window in the padding at the end, which opset 22 leaves out")


# Resizing -------------------------------------------------------------------------------------------------------------


def upsample_7(edit: Edit) -> None:
    """Upsample 1 → 7."""
    edit.set("scales", [1.0, 1.0, edit.get("height_scale"), edit.get("width_scale")])
    if edit.get("mode", "nearest") == "bilinear":
        edit.set("mode", "linear")
    edit.drop("height_scale", "width_scale")


def upsample_9(edit: Edit) -> None:
    """Upsample 7 → 9."""
    edit.put(1, edit.constant(np.array(edit.get("scales"), np.float32), "scales"))
    edit.drop("scales")


def resize_11(edit: Edit) -> None:
    """Resize 10 → 11. ONNX Runtime rounds up where a size shrinks, which opset 10 leaves open."""
    scales, content = edit.operand(1), edit.content(1)
    if edit.get("mode", "nearest") == "nearest":
        if content is None:
            raise edit.refuse("its scales are not constant, and ONNX Runtime rounds up where a size shrinks, else down")
        shrinks = bool((content < 1).any())
        if shrinks and (content > 1).any():
            raise edit.refuse("it shrinks one size and grows another, each rounded its own way")
        edit.set("nearest_mode", "ceil" if shrinks else "floor")
    edit.set("coordinate_transformation_mode", "asymmetric")
    edit.put(2, scales)
    edit.put(1, edit.constant(np.array([], np.float32), "roi"))


def resize_13(edit: Edit) -> None:
    """Resize 11 → 13."""
    if edit.get("coordinate_transformation_mode", "half_pixel") == "tf_half_pixel_for_nn":
        raise edit.refuse("coordinate_transformation_mode=tf_half_pixel_for_nn has no later form")
    roi = edit.operand(1)
    if roi is not None and roi.shape == (0,):
        edit.put(1, None)
        edit.discard(roi)
