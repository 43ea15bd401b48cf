"""What a provider does faster in another form. A bundle's graphs stay plain ONNX: this happens when they are loaded.

The times behind each are in benchmarks/results/train.md and openvino.md.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.ort.layouts import channel_block
from onnxamp.ort.session import SessionConfig, loads
from onnxamp.passes.blocked import BlockedConvPass
from onnxamp.passes.dropout_masks import DropoutMaskPass
from onnxamp.passes.layer_norm_statistics import LayerNormStatisticsPass
from onnxamp.passes.masks import MaskPass
from onnxamp.passes.scaled_add import ScaledAddPass
from onnxamp.passes.scatters import ScatterRowsPass
from onnxamp.passes.weight_gradients import WeightGradientPass


def lower_gradient(model: ir.Model, config: SessionConfig) -> ir.Model:
    """grad.onnx for the provider of `config`; the model itself if there is nothing to gain."""
    passes: list[ir.passes.InPlacePass] = []
    if config.provider == "cpu":
        passes = [MaskPass(), DropoutMaskPass(), *([BlockedConvPass(block)] if (block := channel_block()) else ())]
    elif config.provider == "openvino":
        passes = [MaskPass(), WeightGradientPass(), LayerNormStatisticsPass(), ScatterRowsPass()]
    if not passes:
        return model
    lowered = model.clone()
    modified = [each(lowered).modified for each in passes]
    return lowered if any(modified) else model


def lower_update(model: ir.Model, config: SessionConfig) -> ir.Model:
    """update.onnx for the CPU, with the runtime's own operators if it has them (ONNX Runtime before 1.32 lacks GatedAdd)."""
    lowered = model.clone()
    modified = ScaledAddPass()(lowered).modified
    return lowered if modified and loads(lowered, dataclasses.replace(config, provider="cpu")) else model
