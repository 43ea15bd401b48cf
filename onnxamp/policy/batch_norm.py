"""BatchNormalization in inference form: one product and one sum for each channel, no reduction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.model.signatures import operator_name

# How far a channel's line may move, in steps of the 16-bit type: the rounding of four parameters adds up to less than two.
_STEPS = 2
# A channel this much flatter than the steepest may lose all of it.
_FLAT = 1 / 64


def is_line(
    node: ir.Node, opset: int, tensor: Callable[[ir.Value | None], ir.TensorProtocol | None], low: FloatType
) -> bool:
    """Whether `node` is a BatchNormalization with constant statistics whose line a·x + b stays what it is in 16 bits.

    a = scale / √(variance + ε), b = bias − a·mean; a runtime computes them in fp32 from the four parameters as they are stored. So such a
    node rounds its result, as any product does, and its parameters, as any weight. It is none where rounding moves a line further: a
    variance beyond the type, or next to zero with an ε as small.

    Args:
        node: Any node.
        opset: The version of ai.onnx that defines it.
        tensor: Gives the data of constants.
        low: The 16-bit type.
    """
    if operator_name(node) != "BatchNormalization" or _trains(node, opset):
        return False
    parameters = [tensor(value) for value in node.inputs[1:5]]
    if len(parameters) < 4 or any(parameter is None for parameter in parameters):
        return False
    arrays = [parameter.numpy().astype(np.float64) for parameter in parameters if parameter is not None]
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    with np.errstate(all="ignore"):
        slope, reach, offset = _line(arrays, epsilon)
        rounded = _line([array.astype(low.numpy).astype(np.float64) for array in arrays], epsilon)
        moved = _STEPS * low.eps
        kept = np.abs(rounded[0] - slope) <= moved * (np.abs(slope) + _FLAT * np.abs(slope).max(initial=0))
        kept &= np.abs(rounded[2] - offset) <= moved * (reach + _FLAT * reach.max(initial=0))
    return bool(kept.all())


def _trains(node: ir.Node, opset: int) -> bool:
    """Whether the node takes the statistics of its batch: an attribute says so, between opsets 7 and 13 further results do."""
    if opset < 7:
        return node.attributes.get_int("is_test", 0) == 0
    return node.attributes.get_int("training_mode", 0) != 0 or any(value.name for value in node.outputs[1:])


def _line(parameters: list[np.ndarray], epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slope, size of the terms of the offset, offset."""
    scale, bias, mean, variance = parameters
    slope = scale / np.sqrt(variance + epsilon)
    return slope, np.abs(bias) + np.abs(slope * mean), bias - slope * mean
