"""Losses, as PyTorch names and defines them (torch.nn.functional, reduction="mean"), split into exact sums.

A loss gives Σ loss·w and Σ w with w the denominator of PyTorch's mean, both FP32, and its own gradient, so that the mean
is taken once per window whatever the window's pieces. `weights` holds one value per row (index of the first dimension):
mean = Σ w·loss / Σ w. What has weight 0 is selected away, not multiplied away.
"""

from onnxamp.training.losses.classes import NLL, CrossEntropy
from onnxamp.training.losses.model import LossModel, ModelOutput
from onnxamp.training.losses.several import Part, Sum
from onnxamp.training.losses.terms import Loss, Terms
from onnxamp.training.losses.values import (
    L1,
    MSE,
    BinaryCrossEntropyWithLogits,
    CosineEmbedding,
    Huber,
    KLDiv,
    SmoothL1,
)

COMPARING: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "nll": NLL,
    "binary_cross_entropy_with_logits": BinaryCrossEntropyWithLogits,
    "kl_div": KLDiv,
    "mse": MSE,
    "l1": L1,
    "huber": Huber,
    "smooth_l1": SmoothL1,
    "cosine": CosineEmbedding,
}
"""Losses that compare one output with labels."""

LOSSES: dict[str, type] = {**COMPARING, "model_output": ModelOutput, "loss_model": LossModel, "sum": Sum}
"""All losses by name."""

AnyLoss = Loss | ModelOutput | LossModel | Sum

__all__ = [
    "COMPARING",
    "L1",
    "LOSSES",
    "MSE",
    "NLL",
    "AnyLoss",
    "BinaryCrossEntropyWithLogits",
    "CosineEmbedding",
    "CrossEntropy",
    "Huber",
    "KLDiv",
    "Loss",
    "LossModel",
    "ModelOutput",
    "Part",
    "SmoothL1",
    "Sum",
    "Terms",
]
