"""Losses that are graphs: an output of the model itself, or a model of its own that is joined to it by names."""

from __future__ import annotations

import dataclasses
import os

import onnx
import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """A scalar output of the model is the mean loss of its rows; `labels` and `weights` are then the model's own affair.

    Attributes:
        output: The output; None for the only one.
    """

    output: str | None = None


@dataclasses.dataclass(frozen=True)
class LossModel:
    """An ONNX model that computes the loss.

    Its inputs are outputs of the model, joined by name, and what it compares them with, which becomes part of a batch under its
    name. Its outputs are one scalar, the mean loss of the rows, or the scalars ``loss_sum`` and ``weight_sum``, whose
    quotient is the mean: with these micro-batches are exact whatever the denominator. Its own parameters stay as they are
    unless `trainable` names them (``loss/NAME``). It is computed in FP32 at every level.

    Attributes:
        model: A path, a `ModelProto` or an `ir.Model`.
    """

    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model
