"""Training graphs from a forward model: losses, optimizers, schedules, loss scales, and `build`, which makes a bundle.

Graphs only: nothing here runs them.
"""

from onnxamp.training.assembly import build
from onnxamp.training.bundle import Bundle
from onnxamp.training.groups import Group
from onnxamp.training.lora import Lora
from onnxamp.training.losses import (
    L1,
    MSE,
    NLL,
    BinaryCrossEntropyWithLogits,
    CosineEmbedding,
    CrossEntropy,
    Huber,
    KLDiv,
    LossModel,
    ModelOutput,
    Part,
    SmoothL1,
    Sum,
)
from onnxamp.training.optimizers import SGD, Adam, AdamW, RMSprop
from onnxamp.training.scaler import DynamicLossScale, FixedLossScale
from onnxamp.training.schedules import Constant, Cosine, Linear, Polynomial, Step, Warmup

__all__ = [
    "L1",
    "MSE",
    "NLL",
    "SGD",
    "Adam",
    "AdamW",
    "BinaryCrossEntropyWithLogits",
    "Bundle",
    "Constant",
    "Cosine",
    "CosineEmbedding",
    "CrossEntropy",
    "DynamicLossScale",
    "FixedLossScale",
    "Group",
    "Huber",
    "KLDiv",
    "Linear",
    "Lora",
    "LossModel",
    "ModelOutput",
    "Part",
    "Polynomial",
    "RMSprop",
    "SmoothL1",
    "Step",
    "Sum",
    "Warmup",
    "build",
]
