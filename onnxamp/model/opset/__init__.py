"""Raising the opset: the table of what changed in ai.onnx, its adapters, and the walk over a model."""

from onnxamp.model.opset.editing import OpsetError
from onnxamp.model.opset.raising import HIGHEST, raise_opset
from onnxamp.model.opset.table import ROWS

__all__ = ["HIGHEST", "ROWS", "OpsetError", "raise_opset"]
