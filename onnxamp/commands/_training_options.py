"""The options of `build` and `train` that say what is trained and how; in a file they have the same names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from onnxamp.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])

_LOSS = ("label_smoothing", "ignore_index", "class_weights", "probabilities", "class_axis", "pos_weight", "delta", "beta",
         "reduction", "log_target")  # fmt: skip
_OPTIMIZER = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha", "centered")
_SCHEDULE = ("total_steps", "start_factor", "end_factor", "eta_min", "power", "step_size", "gamma")
_SCALE = ("init_scale", "growth_interval")
# Options that the Python arguments call otherwise.
_RENAMED = {"class_weights": "weight", "class_axis": "axis"}

_OPTIONS = (
    click.option("--loss", metavar="NAME|FILE", help="cross_entropy, nll, binary_cross_entropy_with_logits, kl_div, mse, l1, "
                 "huber, smooth_l1, cosine, model_output if the model computes its loss, or an ONNX file that does."),
    click.option("--loss-part", multiple=True, metavar="OUTPUT:NAME[,KEY=V...]",
                 help="A loss of several that are added: its output, its name, its arguments, factor, labels; repeatable."),
    click.option("--output-name", metavar="NAME", help="The output that the loss reads, if the model has several."),
    click.option("--label-smoothing", type=float, help="Of cross_entropy."),
    click.option("--ignore-index", type=int, help="Label that counts nothing, of cross_entropy.  [default: -100]"),
    click.option("--class-weights", metavar="W,W,...", help="A weight per class, of cross_entropy."),
    click.option("--probabilities", is_flag=True, default=None, help="Labels of cross_entropy are probabilities."),
    click.option("--class-axis", type=int, help="Class dimension of the logits.  [default: 1; of 3 what the model shows]"),
    click.option("--pos-weight", metavar="W[,W...]", help="Weight of positive answers, of the binary loss."),
    click.option("--delta", type=float, help="Of huber.  [default: 1]"),
    click.option("--beta", type=float, help="Of smooth_l1.  [default: 1]"),
    click.option("--reduction", type=click.Choice(["mean", "batchmean"]), help="Of kl_div.  [default: mean]"),
    click.option("--log-target", is_flag=True, default=None, help="Labels of kl_div are logarithms."),
    click.option("--optimizer", default="adamw", show_default=True, metavar="NAME", help="sgd, adam, adamw or rmsprop."),
    click.option("--lr", type=float, help="Learning rate.  [default: PyTorch's]"),
    click.option("--weight-decay", type=float, help="Weight decay.  [default: PyTorch's]"),
    click.option("--momentum", type=float, help="Of sgd and rmsprop."),
    click.option("--dampening", type=float, help="Of sgd."),
    click.option("--nesterov", is_flag=True, default=None, help="Of sgd."),
    click.option("--betas", metavar="B,B", help="Of adam and adamw.  [default: 0.9,0.999]"),
    click.option("--eps", type=float, help="Of adam, adamw and rmsprop.  [default: 1e-8]"),
    click.option("--alpha", type=float, help="Of rmsprop.  [default: 0.99]"),
    click.option("--centered", is_flag=True, default=None, help="Of rmsprop."),
    click.option("--schedule", metavar="NAME", help="constant, linear, cosine, polynomial or step.  [default: constant]"),
    click.option("--warmup", type=int, default=0, show_default=True, metavar="N", help="Steps of linear warm-up."),
    click.option("--total-steps", type=int, metavar="N", help="Length of the schedule, warm-up included."),
    click.option("--start-factor", type=float, help="Of linear.  [default: 1]"),
    click.option("--end-factor", type=float, help="Of linear.  [default: 0]"),
    click.option("--eta-min", type=float, help="Lowest learning rate, of cosine.  [default: 0]"),
    click.option("--power", type=float, help="Of polynomial.  [default: 1]"),
    click.option("--step-size", type=int, help="Steps between two decays, of step.  [default: 30]"),
    click.option("--gamma", type=float, help="Factor of a decay, of step.  [default: 0.1]"),
    click.option("--loss-scale", default="auto", show_default=True, metavar="auto|none|dynamic|PRESET|N",
                 help="Presets: onnxamp, pytorch, paddle, mindspore, deepspeed."),
    click.option("--init-scale", type=float, help="First dynamic loss scale."),
    click.option("--growth-interval", type=int, help="Good windows before the loss scale grows."),
    click.option("--drop-overflow-update/--no-drop-overflow-update", default=None,
                 help="With a fixed loss scale: skip a window whose gradient is not finite, or apply it.  [default: skip]"),
    click.option("--clip-norm", type=float, help="Largest global norm of the gradient."),
    click.option("--clip-value", type=float, help="Largest absolute value in the gradient."),
    click.option("--ema", type=float, metavar="DECAY", help="Keep a moving average of the parameters."),
    click.option("--group", multiple=True, metavar="PATTERN:KEY=V,...",
                 help="Parameters with their own lr_factor and weight_decay."),
    click.option("--trainable", multiple=True, metavar="PATTERN", help="Train these parameters, whatever else is said."),
    click.option("--frozen", multiple=True, metavar="PATTERN", help="Keep these parameters as they are."),
    click.option("--lora", metavar="rank=N,alpha=X,target=PATTERN",
                 help="Train low-rank adapters of weights of MatMul, Gemm and Conv, and else only what --trainable names."),
    click.option("--memory-budget", type=click.IntRange(min=1), metavar="BYTES",
                 help="Memory of a micro-batch's activations; what does not fit is computed again in the backward half."),
    click.option("--dim", multiple=True, metavar="NAME=N", help="Size of a free dimension, for --memory-budget; repeatable."),
    click.option("--batch-norm", default="auto", show_default=True, type=click.Choice(["auto", "window", "freeze"]),
                 help="Batch statistics where the scale trains (running ones move by micro-batch or window), or nowhere."),
    click.option("--overflow", default="window", show_default=True, type=click.Choice(["window", "micro"]),
                 help="What a gradient that is not finite costs: the window, or only its micro-batch."),
    click.option("--level", default="O2", show_default=True, type=click.Choice(["O0", "OD", "O1", "O2", "O3"]),
                 help="How much becomes 16-bit."),
    click.option("--dtype", default="fp16", show_default=True, type=click.Choice(["fp16", "bf16"]), help="The 16-bit type."),
    click.option("--target", default="ort-cuda", show_default=True,
                 type=click.Choice(["ort-cuda", "ort-cpu", "tensorrt", "openvino", "cann", "any"]),
                 help="Whose kernels the graphs must have."),
    click.option("--keep-node", multiple=True, metavar="PATTERN", help="Nodes that stay fp32."),
    click.option("--keep-op", multiple=True, metavar="OP", help="Operators that stay fp32."),
    click.option("--lower-node", multiple=True, metavar="PATTERN", help="Nodes that become 16-bit where that is legal."),
    click.option("--lower-op", multiple=True, metavar="OP", help="Operators that become 16-bit where that is legal."),
    click.option("--engine", default="native", show_default=True, type=click.Choice(["native", "ort-training"]),
                 help="Who differentiates; ort-training needs onnxamp[ort-training]."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of Dropout."),
)  # fmt: skip


def training_options(function: _F) -> _F:
    """Add the options to a command; `build_arguments` makes arguments of them."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(_OPTIONS), function)


OPTION_NAMES: tuple[str, ...] = tuple(
    str(option.name)
    for option in training_options(lambda: None).__click_params__[::-1]  # type: ignore[attr-defined]  # set by click
)
"""Names of the options as parameters of the command."""


def build_arguments(options: Mapping[str, Any], steps: int | None = None) -> dict[str, Any]:
    """The arguments of `onnxamp.training.build` that the options mean.

    Args:
        options: Values by parameter name; others than `OPTION_NAMES` are ignored.
        steps: The planned length of the run, for a schedule whose length is not given.

    Raises:
        UsageError: A value is malformed, or an option does not belong to the loss, optimizer or schedule chosen.
    """
    from onnxamp.commands._options import sizes
    from onnxamp.training import choices

    optimizer = _given("optimizer", options, _OPTIMIZER)
    if "betas" in optimizer:
        optimizer["betas"] = _numbers(optimizer["betas"], "--betas")
    return {
        "loss": _loss(options),
        "optimizer": choices.optimizer(optimizer),
        "schedule": _schedule(options, steps),
        "loss_scale": _scale(options),
        "groups": [_group(text) for text in options.get("group") or ()],
        "output": options.get("output_name"),
        "dim": sizes(options.get("dim") or ()),
        "keep": options.get("keep_node") or (),
        "lower": options.get("lower_node") or (),
        **{
            name: options.get(name)
            for name in ("clip_norm", "clip_value", "ema", "trainable", "frozen", "lora", "memory_budget", "batch_norm", "overflow",
                         "level", "dtype", "target", "keep_op", "lower_op", "engine", "seed")
        },
    }  # fmt: skip


def _loss(options: Mapping[str, Any]) -> object:
    """The loss, the loss model, or the sum of losses."""
    from onnxamp.training import LossModel, choices

    parts = options.get("loss_part") or ()
    if bool(parts) == bool(options.get("loss")):
        raise UsageError(
            "Give --loss or --loss-part, not both."
            if parts
            else "No loss is given: use --loss cross_entropy, mse, ... (see --help)."
        )
    loss = _given("loss", options, _LOSS)
    if parts or str(loss["name"]).endswith(".onnx"):
        if len(loss) > 1:
            raise UsageError(
                f"{'--loss-part' if parts else 'A loss model'} takes no --{list(loss)[1].replace('_', '-')}."
            )
        return choices.loss([_part(text) for text in parts]) if parts else LossModel(loss["name"])
    if "weight" in loss:
        loss["weight"] = _numbers(loss["weight"], "--class-weights")
    if "pos_weight" in loss:
        weights = _numbers(loss["pos_weight"], "--pos-weight")
        loss["pos_weight"] = weights if len(weights) > 1 else weights[0]
    if loss.pop("probabilities", None):
        loss["target"] = "probabilities"
    return choices.loss(loss)


def _part(text: str) -> dict[str, object]:
    """``OUTPUT:NAME,KEY=V,...`` as the mapping that `build` takes."""
    output, colon, rest = text.rpartition(":")
    name, *entries = rest.split(",")
    if not colon or not output or not name:
        raise UsageError(
            f"--loss-part {text!r} is not OUTPUT:NAME[,KEY=V...]: write for example --loss-part boxes:smooth_l1,beta=0.5,factor=2."
        )
    part: dict[str, object] = {"output": output}
    loss: dict[str, object] = {"name": name}
    for entry in entries:
        key, sign, value = entry.partition("=")
        if not sign:
            raise UsageError(f"--loss-part {text!r}: {entry!r} is not KEY=VALUE.")
        target = part if key in ("factor", "labels") else loss
        target[key] = _value(value) if key != "labels" else value
    return {**part, "loss": loss}


def _value(text: str) -> object:
    """An argument of a loss: a whole number, a number, a truth value, numbers with ``/`` between them, or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text in ("true", "false"):
        return text == "true"
    return _numbers(text.replace("/", ","), "--loss-part") if "/" in text else text


def _given(kind: str, options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The choice and those of its arguments that were given, by their Python names."""
    found = {_RENAMED.get(name, name): options[name] for name in names if _is_given(options.get(name))}
    return {"name": options.get(kind), **found}


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is a value


def _schedule(options: Mapping[str, Any], steps: int | None) -> object:
    from onnxamp.training import Warmup, choices

    name = options.get("schedule") or "constant"
    spec = _given("schedule", {**options, "schedule": name}, _SCHEDULE)
    total = spec.pop("total_steps", None) or steps
    schedule = choices.schedule(spec)
    warmup = options.get("warmup") or 0
    if warmup < 0:
        raise UsageError(f"--warmup is {warmup}: it must not be negative.")
    if warmup:
        schedule = Warmup(warmup, schedule)
    if total is not None:
        return schedule.resolved(int(total))
    if name in ("linear", "cosine", "polynomial"):
        raise UsageError(f"The schedule {name} needs its length: give --total-steps.")
    return schedule


def _scale(options: Mapping[str, Any]) -> object:
    import dataclasses

    from onnxamp.training import DynamicLossScale, choices

    level, dtype = options.get("level") or "O2", options.get("dtype") or "fp16"
    scale = choices.loss_scale(options.get("loss_scale") or "auto", level, dtype)
    given = {name: options[name] for name in _SCALE if options.get(name) is not None}
    drops = options.get("drop_overflow_update")
    if given and not isinstance(scale, DynamicLossScale):
        raise UsageError("--init-scale and --growth-interval belong to a dynamic loss scale: add --loss-scale dynamic.")
    if drops is not None and isinstance(scale, DynamicLossScale):
        if not drops:
            raise UsageError(
                "--no-drop-overflow-update belongs to a fixed loss scale: add --loss-scale N (or none); a dynamic one always drops."
            )
    elif drops is not None:
        given["drop_overflow_update"] = drops
    return dataclasses.replace(scale, **given)  # type: ignore[type-var]  # both kinds of scale are dataclasses


def _group(text: str) -> dict[str, object]:
    """``PATTERN:lr_factor=0.1,weight_decay=0`` as the mapping that `build` takes."""
    pattern, colon, rest = text.rpartition(":")
    spec: dict[str, object] = {"match": pattern}
    for entry in rest.split(","):
        key, sign, value = entry.partition("=")
        if not colon or not pattern or not sign or key.strip() not in ("lr_factor", "weight_decay"):
            raise UsageError(
                f"--group {text!r} is not PATTERN:KEY=V,...: write for example --group '*bias:weight_decay=0,lr_factor=2'."
            )
        spec[key.strip()] = _numbers(value, "--group")[0]
    return spec


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r} is not numbers with commas between them.") from None
