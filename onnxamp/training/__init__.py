"""Training graphs from a forward model: losses, optimizers, schedules, loss scales, and `build`, which makes a bundle.

Graphs only: nothing here runs them.
"""

from onnxamp.training.assembly import build
from onnxamp.training.bundle import Bundle
from onnxamp.training.groups import Group
from onnxamp.training.losses import L1, MSE, BinaryCrossEntropyWithLogits, CrossEntropy, Huber, ModelOutput
from onnxamp.training.optimizers import SGD, Adam, AdamW, RMSprop
from onnxamp.training.scaler import DynamicLossScale, FixedLossScale
from onnxamp.training.schedules import Constant, Cosine, Linear, Polynomial, Step, Warmup

__all__ = [
    "L1",
    "MSE",
    "SGD",
    "Adam",
    "AdamW",
    "BinaryCrossEntropyWithLogits",
    "Bundle",
    "Constant",
    "Cosine",
    "CrossEntropy",
    "DynamicLossScale",
    "FixedLossScale",
    "Group",
    "Huber",
    "Linear",
    "ModelOutput",
    "Polynomial",
    "RMSprop",
    "Step",
    "Warmup",
    "build",
]
