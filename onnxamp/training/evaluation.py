"""Evaluation of a model with fixed parameters, at any level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxamp import conversion
from onnxamp.policy.options import Options
from onnxamp.training import choices
from onnxamp.training.forward import prepare
from onnxamp.training.gradients import Task, eval_graph
from onnxamp.training.loss_model import PREFIX
from onnxamp.training.losses import LossModel
from onnxamp.training.manifest import GraphPorts


def evaluation_graph(
    model: ir.Model, options: Mapping[str, Any], level: str, dtype: str, loss_model: ir.Model | None = None
) -> tuple[ir.Model, GraphPorts]:
    """The outputs of `model`, the sum of losses and the sum of weights; parameters are constants of the graph.

    Args:
        model: The user's model with the parameters to evaluate.
        options: The arguments that the bundle was built with (`Manifest.options`): its loss and what steers the precision.
        level: The level to convert `model` to.
        dtype: The 16-bit type.
        loss_model: The loss model, if the loss is one.
    """
    loss = choices.loss(options["loss"]) if loss_model is None else LossModel(loss_model)
    forward = prepare(model, loss, options["output"])
    mixed = forward.model
    if level != "O0":
        names = ("keep", "keep_op", "lower", "lower_op")
        chosen: dict[str, Any] = {name: tuple(options[name]) for name in names}
        if loss_model is not None:
            chosen["keep"] += (f"{PREFIX}*",)
        mixed = conversion.mixed(mixed, Options(level=level, dtype=dtype, target=options["target"], **chosen)).model
    task = Task(
        model=mixed,
        loss=forward.loss,
        predictions=forward.predictions,
        outputs=forward.outputs,
        rows=forward.rows,
        parameters=(),
        low=False,
        labels=forward.labels,
    )
    return eval_graph(task)
