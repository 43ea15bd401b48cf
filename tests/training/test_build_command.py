"""`onnxamp build`: flags become arguments, and bad ones a sentence."""

from __future__ import annotations

import json

import click
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from onnxamp import training
from onnxamp.commands._training_options import OPTION_NAMES, build_arguments, training_options
from onnxamp.commands.build import command
from onnxamp.errors import AmpError, UsageError
from onnxamp.training import (
    SGD,
    Adam,
    AdamW,
    BinaryCrossEntropyWithLogits,
    Bundle,
    Constant,
    Cosine,
    CrossEntropy,
    DynamicLossScale,
    FixedLossScale,
    Huber,
    Linear,
    Polynomial,
    RMSprop,
    Step,
    Warmup,
)


def _arguments(text, steps=None):
    """What the flags in `text` become."""
    result = {}

    @click.command()
    @training_options
    def parse(**options):
        result.update(build_arguments(options, steps))

    parse.main(text.split(), standalone_mode=False)
    return result


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("--loss cross_entropy", "loss", CrossEntropy()),
        ("--loss cross_entropy --label-smoothing 0.1 --ignore-index 0 --class-weights 1,2,3 --class-axis -1", "loss",
         CrossEntropy(weight=(1.0, 2.0, 3.0), ignore_index=0, label_smoothing=0.1, axis=-1)),
        ("--loss cross_entropy --probabilities", "loss", CrossEntropy(target="probabilities")),
        ("--loss binary_cross_entropy_with_logits --pos-weight 2", "loss", BinaryCrossEntropyWithLogits(2.0)),
        ("--loss binary_cross_entropy_with_logits --pos-weight 2,3", "loss", BinaryCrossEntropyWithLogits((2.0, 3.0))),
        ("--loss huber --delta 0.5", "loss", Huber(0.5)),
        ("--loss mse", "optimizer", AdamW()),
        ("--loss mse --lr 1e-4 --weight-decay 0 --betas 0.8,0.9 --eps 1e-6", "optimizer",
         AdamW(1e-4, (0.8, 0.9), 1e-6, 0.0)),
        ("--loss mse --optimizer adam", "optimizer", Adam()),
        ("--loss mse --optimizer sgd --lr 0.1 --momentum 0.9 --nesterov", "optimizer",
         SGD(lr=0.1, momentum=0.9, nesterov=True)),
        ("--loss mse --optimizer rmsprop --alpha 0.9 --centered", "optimizer", RMSprop(alpha=0.9, centered=True)),
        ("--loss mse", "schedule", Constant()),
        ("--loss mse --warmup 5", "schedule", Warmup(5, Constant())),
        ("--loss mse --schedule cosine --total-steps 100 --warmup 10", "schedule", Warmup(10, Cosine(90))),
        ("--loss mse --schedule cosine --total-steps 100 --eta-min 0.01", "schedule", Cosine(100, 0.01)),
        ("--loss mse --schedule linear --total-steps 9 --end-factor 0.1", "schedule", Linear(1.0, 0.1, 9)),
        ("--loss mse --schedule polynomial --total-steps 9 --power 2", "schedule", Polynomial(9, 2.0)),
        ("--loss mse --schedule step --step-size 3 --gamma 0.5", "schedule", Step(3, 0.5)),
        ("--loss mse", "loss_scale", DynamicLossScale()),
        ("--loss mse --dtype bf16", "loss_scale", FixedLossScale(1.0)),
        ("--loss mse --loss-scale 128", "loss_scale", FixedLossScale(128.0)),
        ("--loss mse --loss-scale pytorch --init-scale 4 --growth-interval 10", "loss_scale",
         DynamicLossScale(4.0, growth_interval=10, floor=0.0, ceiling=None)),
        ("--loss mse --group *bias:weight_decay=0 --group a:b:lr_factor=0.5,weight_decay=1e-2", "groups",
         [{"match": "*bias", "weight_decay": 0.0}, {"match": "a:b", "lr_factor": 0.5, "weight_decay": 0.01}]),
        ("--loss mse --frozen a --frozen b", "frozen", ("a", "b")),
        ("--loss mse --keep-node a --lower-op Softmax", "keep", ("a",)),
        ("--loss mse --keep-node a --lower-op Softmax", "lower_op", ("Softmax",)),
        ("--loss mse --output-name logits", "output", "logits"),
    ],
)  # fmt: skip
def test_flags(text, key, expected):
    assert _arguments(text)[key] == expected


def test_the_run_gives_a_schedule_its_length():
    assert _arguments("--loss mse --schedule cosine --warmup 10", steps=50)["schedule"] == Warmup(10, Cosine(40))
    assert _arguments("--loss mse --schedule cosine --total-steps 20", steps=50)["schedule"] == Cosine(20)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "No loss is given"),
        ("--loss mse --delta 1", "mse has no argument 'delta'"),
        ("--loss mse --momentum 0.9", "adamw has no argument 'momentum'"),
        ("--loss mse --schedule step --power 2", "step has no argument 'power'"),
        ("--loss mse --schedule cosine", "needs its length: give --total-steps"),
        ("--loss mse --warmup -1", "must not be negative"),
        ("--loss mse --betas 0.9", "betas"),
        ("--loss mse --class-weights a,b", "not numbers"),
        ("--loss mse --group bias", "not PATTERN:KEY=V"),
        ("--loss mse --group bias:lr=3", "not PATTERN:KEY=V"),
        ("--loss mse --loss-scale none --init-scale 3", "belong to a dynamic loss scale"),
    ],
)
def test_bad_flags(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        _arguments(text)


def test_option_names():
    assert {"loss", "optimizer", "lr", "schedule", "loss_scale", "group", "level", "seed"} <= set(OPTION_NAMES)
    assert len(set(OPTION_NAMES)) == len(OPTION_NAMES)


@pytest.fixture
def file(export, tmp_path):
    """A model file."""
    path = tmp_path / "model.onnx"
    onnx.save(export(nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1)), torch.randn(2, 5)), path)
    return str(path)


def test_build(file, tmp_path):
    target = str(tmp_path / "bundle")
    result = CliRunner().invoke(command, [file, "--loss", "cross_entropy", "-o", target], standalone_mode=False)
    assert result.exception is None
    assert "trained tensors" in result.output
    assert "Note: The output 'y' is a Softmax" in result.output
    manifest = Bundle.load(target).manifest
    assert (manifest.level, manifest.options["optimizer"]["name"]) == ("O2", "adamw")
    again = CliRunner().invoke(command, [file, "--loss", "mse", "-o", target], standalone_mode=False)
    assert isinstance(again.exception, UsageError)
    arguments = [file, "--loss", "mse", "-o", target, "--force", "--json", "--level", "O0"]
    forced = CliRunner().invoke(command, arguments, standalone_mode=False)
    summary = json.loads(forced.output)
    assert (summary["level"], summary["dtype"], summary["parameters"]) == ("O0", "", 18)
    assert Bundle.load(target).manifest.options["loss"]["name"] == "mse"


def test_build_refuses(file, tmp_path):
    for arguments in (["--loss", "cross"], ["--loss", "mse", "--frozen", "*"]):
        result = CliRunner().invoke(command, [file, *arguments, "-o", str(tmp_path / "b")], standalone_mode=False)
        assert isinstance(result.exception, AmpError)
        assert not (tmp_path / "b").exists()


def test_losses_as_flags():
    """Arguments of the losses, a file, and parts of a sum."""
    loss = build_arguments({"loss": "kl_div", "reduction": "batchmean", "log_target": True, "optimizer": "sgd"})["loss"]
    assert loss == training.KLDiv("batchmean", True)
    assert build_arguments({"loss": "judge.onnx", "optimizer": "sgd"})["loss"] == training.LossModel("judge.onnx")
    parts = ("a:b:smooth_l1,beta=0.5,factor=2", "kinds:cross_entropy,weight=1/2,ignore_index=0,labels=y")
    assert build_arguments({"loss_part": parts, "optimizer": "sgd"})["loss"] == training.Sum(
        (
            training.Part(training.SmoothL1(0.5), "a:b", 2),
            training.Part(training.CrossEntropy(weight=(1.0, 2.0), ignore_index=0), "kinds", labels="y"),
        )
    )
    for bad, sentence in (
        ({"loss": "mse", "loss_part": parts}, "not both"),
        ({"loss_part": ("mse",)}, "OUTPUT:NAME"),
        ({"loss_part": ("y:mse,factor",)}, "KEY=VALUE"),
        ({"loss": "judge.onnx", "delta": 2.0}, "A loss model takes no --delta"),
    ):
        with pytest.raises(UsageError, match=sentence):
            build_arguments({**bad, "optimizer": "sgd"})


def test_what_a_fixed_loss_scale_does_with_an_overflow():
    def scale(**options):
        return build_arguments({"loss": "mse", "optimizer": "sgd", **options})["loss_scale"]

    assert scale(loss_scale="128", drop_overflow_update=False) == training.FixedLossScale(
        128.0, drop_overflow_update=False
    )
    assert scale(loss_scale="dynamic", drop_overflow_update=True) == training.DynamicLossScale()
    with pytest.raises(UsageError, match="belongs to a fixed loss scale"):
        scale(loss_scale="dynamic", drop_overflow_update=False)
