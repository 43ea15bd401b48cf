"""A model in the form in which decisions are made on it: typed, every call on floats replaced by what it calls."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxamp.model import io, types
from onnxamp.model.inlining import inline_float_functions


def prepare(model: ir.Model) -> None:
    """Infer types and inline float functions, in place.

    Raises:
        UnsupportedError: A function cannot be inlined.
    """
    types.infer(model)
    if inline_float_functions(model):
        types.infer(model)


def prepared(source: str | os.PathLike[str] | onnx.ModelProto | ir.Model) -> ir.Model:
    """A private copy of a model, prepared.

    Raises:
        ModelError: The model is damaged.
        UnsupportedError: A function cannot be inlined.
    """
    model = io.load(source)
    prepare(model)
    return model
