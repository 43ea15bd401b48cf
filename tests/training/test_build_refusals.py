"""What build refuses, in one sentence."""

from __future__ import annotations

import onnx.helper as h
import pytest
import torch
from torch import nn

from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.training import (
    Group,
    build,
)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Dropout(0.1), nn.Linear(7, 3))


@pytest.fixture
def model(export):
    """An MLP with BatchNorm and Dropout."""
    return export(_net(), torch.randn(2, 5), train=True)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"loss": "cros_entropy"}, UsageError, "did you mean cross_entropy"),
        ({"loss": {"name": "mse", "delta": 1}}, UsageError, "mse has no argument 'delta'"),
        ({"loss": 3}, UsageError, "3 is no loss"),
        ({"optimizer": "lamb"}, UsageError, "Unknown optimizer 'lamb'"),
        ({"optimizer": {"name": "adamw", "momentum": 1}}, UsageError, "no argument 'momentum'"),
        ({"schedule": "cosine"}, UsageError, "T_max"),
        ({"schedule": {"name": "warmup"}}, UsageError, "needs total_iters"),
        ({"level": "O4"}, UsageError, "Unknown level"),
        ({"dtype": "fp8"}, UsageError, "Unknown dtype"),
        (
            {"overflow": "micro", "loss_scale": {"name": "fixed", "drop_overflow_update": False}},
            UsageError,
            "choose one",
        ),
        ({"overflow": "never"}, UsageError, "Unknown overflow"),
        ({"batch_norm": "sync"}, UsageError, "Unknown batch_norm"),
        ({"ema": 1.0}, UsageError, "below 1"),
        ({"clip_norm": 0}, UsageError, "clip_norm is 0"),
        ({"frozen": "5.*"}, UsageError, "No parameter matches frozen '5"),
        ({"trainable": "0.weigth"}, UsageError, "did you mean 0.weight"),
        ({"frozen": "*"}, UsageError, "No parameter trains"),
        ({"output": "z"}, UsageError, "no output 'z'"),
        ({"loss": "model_output"}, UsageError, "not a scalar"),
        ({"groups": [{"match": "*", "lr": 1}]}, UsageError, "no entry 'lr'"),
        ({"groups": [{"match": "*", "lr_factor": "fast"}]}, UsageError, "lr_factor must be a number"),
        ({"groups": [{"lr_factor": 1}]}, UsageError, "needs match"),
        ({"groups": [{"match": "*", "lr_factor": float("nan")}]}, UsageError, "lr_factor is nan"),
        ({"groups": [{"match": "*", "weight_decay": float("inf")}]}, UsageError, "weight_decay is inf"),
        ({"schedule": {"name": "constant", "factor": float("nan")}}, UsageError, "factor of Constant is nan"),
        ({"clip_norm": float("inf")}, UsageError, "clip_norm is inf"),
        ({"groups": [Group("a"), Group("a")]}, UsageError, "taken twice"),
        ({"groups": [Group("nothing*", weight_decay=0.0)]}, UsageError, "No parameter is in the group .nothing"),
        ({"seed": 2**64}, UsageError, "64 bits"),
    ],
)
def test_bad_arguments(model, options, error, sentence):
    with pytest.raises(error, match=sentence):
        build(model, **{"loss": "cross_entropy", "optimizer": "adamw", **options})


def test_an_old_opset_is_refused(export):
    with pytest.raises(UnsupportedError, match="opset 13"):
        build(export(nn.Linear(5, 3), torch.randn(2, 5), opset=11), loss="mse", optimizer="sgd")


def test_operators_without_gradient_are_named(export):
    model = export(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), torch.randn(2, 5))
    model.graph.node[-1].CopyFrom(h.make_node("Det", [model.graph.node[-1].input[0]], ["y"], name="my_det"))
    model.graph.node[-1].CopyFrom(
        h.make_node("Inverse", [model.graph.node[-1].input[0]], ["y"], "my_inverse", domain="x.y")
    )
    model.opset_import.append(h.make_opsetid("x.y", 1))
    with pytest.raises((UnsupportedError, UsageError), match=r"my_inverse|type of"):
        build(model, loss="mse", optimizer="sgd", level="O0")
