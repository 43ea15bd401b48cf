"""Reverse-mode differentiation of ONNX graphs: gradients are more nodes of the same graph."""

from onnxamp.autodiff import rules as _rules  # registers the rules
from onnxamp.autodiff.gradients import gradient_model
from onnxamp.autodiff.registry import gradient
from onnxamp.autodiff.reverse import backward

__all__ = ["backward", "gradient", "gradient_model"]

del _rules
