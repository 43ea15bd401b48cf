"""A conversion that raised the opset: the source is raised likewise before the two are compared."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.comparison.records import ModelChange
from onnxamp.errors import UnsupportedError
from onnxamp.model import types
from onnxamp.model.opset import HIGHEST, raise_opset
from onnxamp.model.signatures import standard_opset


def is_raised(one: ir.Model, other: ir.Model) -> bool:
    """Whether `other` is a conversion by onnxamp at a later opset than `one`.

    Only then is what the later opset writes otherwise (axes as an input instead of an attribute) no change of its own. Of other
    tools' files nothing is known of how they came to their opset.
    """
    return "onnxamp.version" in other.metadata_props and standard_opset(one) < standard_opset(other) <= HIGHEST


def change(one: ir.Model, other: ir.Model) -> ModelChange:
    """What is said of the raising."""
    return ModelChange("opset ai.onnx", str(standard_opset(one)), str(standard_opset(other)))


def bring(model: ir.Model, version: int) -> bool:
    """Raise `model` in place; False if it cannot be raised, and then it is of no use any more."""
    try:
        raise_opset(model, version)
    except UnsupportedError:
        return False
    types.infer(model)
    return True
