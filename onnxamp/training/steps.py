"""reduce.onnx and update.onnx: from accumulated gradients to the next state.

The order is: gradient · c / (scale · Σw) → is it finite → global norm → clip → optimizer → schedule → loss scale. Each factor
has one owner; whatever is not applied is selected away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.training import fragment
from onnxamp.training.fragment import BOOL, FLOAT, INT64, Fragment
from onnxamp.training.layout import Layout
from onnxamp.training.manifest import BLOCK, REPORT, WINDOW, WINDOW_SIZE, GraphPorts, Port
from onnxamp.training.optimizers import Optimizer, Values
from onnxamp.training.scaler import LossScale, ScaleState
from onnxamp.training.schedules import Schedule, learning_rate

_NAMES = {
    FLOAT: "float32",
    INT64: "int64",
    BOOL: "bool",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that a step depends on.

    Attributes:
        optimizer: The optimizer.
        schedule: The schedule.
        scale: The loss scale.
        clip_norm: Largest global norm of the gradient, or None.
        clip_value: Largest absolute value of a gradient, or None.
        ema: Decay of the moving average, or None.
        low: Type of the low copies, or None.
        stored_low: At O3, segments with a low copy are rounded to it.
        decays: Whether any group has weight decay.
        drops_micro: Micro-batches with a gradient that is not finite are left out of the window.
    """

    optimizer: Optimizer
    schedule: Schedule
    scale: LossScale
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: float | None = None
    low: ir.DataType | None = None
    stored_low: bool = False
    decays: bool = True
    drops_micro: bool = False


def reduce_graph(recipe: Recipe, layout: Layout) -> tuple[ir.Model, GraphPorts]:
    """The graph that ends a window: flags, norm, and every scalar of the step."""
    op = fragment.graph("onnxamp_reduce")
    length = next(arena.elements for arena in layout.arenas if arena.name == "gradient")
    inputs = [
        _Input(op, "gradient", FLOAT, (length,), "arena"),
        _Input(op, "window", FLOAT, (WINDOW_SIZE,), "tensor", "window/window"),
    ]
    gradient, window = (port.value for port in inputs)
    state: dict[str, ir.Value] = {}
    for arena, dtype in (("scalars", FLOAT), ("counters", INT64)):
        for tensor in layout.tensors:
            if tensor.arena == arena and tensor.name != "seed":
                inputs.append(_Input(op, tensor.name, dtype, (), "tensor", tensor.key))
                state[tensor.name] = inputs[-1].value
    sums = {name: op.Gather(window, np.asarray(index), axis=0) for index, name in enumerate(WINDOW)}

    verdict = _judge(op, recipe, gradient, sums, state)
    op.section("step")
    this_step = op.Add(state["step"], 1)
    results = {
        "ok": verdict.ok,
        "empty": verdict.empty,
        "found_inf": verdict.found_inf,
        "gradient_factor": verdict.factor,
        "learning_rate": learning_rate(op, recipe.schedule, recipe.optimizer.lr, state["step"]),
        **recipe.optimizer.results(op, this_step),
    }
    new = _next(op, recipe, verdict, state, this_step)
    report = _report(op, verdict, sums | results, state, new)

    outputs = [_Output(op, value, name, "result", name) for name, value in results.items()]
    for name, value in new.items():
        if value is not state[name]:
            key = f"{'scalars' if name == 'loss_scale' else 'counters'}/{name}"
            outputs.append(_Output(op, value, f"{name}_out", "tensor", key))
    outputs.append(_Output(op, report, "report", "result", "report"))
    statistics = next((arena.elements for arena in layout.arenas if arena.name == "statistics"), None)
    if statistics is not None:
        committed, work = (
            _Input(op, name, FLOAT, (statistics,), "arena") for name in ("statistics", "statistics_work")
        )
        inputs += [committed, work]
        op.section("statistics")
        kept = op.select(verdict.ok, work.value, committed.value)
        outputs.append(_Output(op, kept, "statistics_out", "arena", "statistics", alias="statistics"))
    return fragment.model(op), _ports("reduce.onnx", inputs, outputs)


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What is made of a window's gradient.

    Attributes:
        factor: What the gradient is multiplied by: 1/scale, 1/Σw and the clip coefficient.
        norm: The global norm, before it is clipped.
        clip: The clip coefficient.
        loss: The mean loss of the window.
        empty: No row had weight.
        found_inf: The gradient is not finite, or nothing is left of the window.
        bad: That, or micro-batches were left out: what the loss scale hears.
        ok: The step is applied.
        skipped: It is not, because of the gradient.
    """

    factor: ir.Value
    norm: ir.Value
    clip: ir.Value
    loss: ir.Value
    empty: ir.Value
    found_inf: ir.Value
    bad: ir.Value
    ok: ir.Value
    skipped: ir.Value


def _judge(op: Fragment, recipe: Recipe, gradient: ir.Value, sums: Values, state: Values) -> _Verdict:
    """Norm, flags and factor of the gradient."""
    op.section("gradient")
    empty = op.is_zero(sums["weight_sum"])
    denominator = op.select(empty, 1.0, sums["weight_sum"])
    factor = op.Div(op.Div(state["seed_divisor"], denominator), state["loss_scale"])
    # Block by block: a plain sum over millions of FP32 squares loses four digits.
    squares = op.reduce("ReduceSumSquare", op.Reshape(gradient, [-1, BLOCK]), [1], keepdims=False)
    norm = op.Mul(op.Sqrt(op.sum_all(squares)), factor)
    found_inf = bad = op.And(op.Not(op.finite(norm)), op.Not(empty))
    loss = op.Div(sums["loss_sum"], denominator)
    if recipe.drops_micro:
        dropped = op.Greater(sums["dropped"], 0.0)
        lost = op.And(empty, dropped)  # nothing is left of the window
        empty = op.And(empty, op.Not(dropped))
        found_inf = op.Or(found_inf, lost)
        bad = op.Or(found_inf, dropped)
        loss = op.select(lost, math.nan, loss)
    skip = op.Or(empty, found_inf) if recipe.scale.drops else empty
    clip = op.number(1.0)
    if recipe.clip_norm is not None:
        clip = op.Min(op.Div(op.number(recipe.clip_norm), op.Add(norm, 1e-6)), op.number(1.0))
        factor = op.Mul(factor, clip)
    return _Verdict(
        factor, norm, clip, op.select(empty, 0.0, loss), empty, found_inf, bad, op.Not(skip), op.And(found_inf, skip)
    )


def _next(op: Fragment, recipe: Recipe, verdict: _Verdict, state: Values, this_step: ir.Value) -> Values:
    """The loss scale and the counters after the window."""
    op.section("loss_scale")
    before = ScaleState(state["loss_scale"], state["growth_tracker"], state["hysteresis"])
    after = recipe.scale.next(op, before, verdict.bad, verdict.empty)
    at_floor = op.And(verdict.skipped, op.LessOrEqual(state["loss_scale"], recipe.scale.lowest))
    stuck = op.select(at_floor, op.Add(state["stuck"], 1), 0)
    return {
        "loss_scale": after.scale,
        "step": op.select(verdict.ok, this_step, state["step"]),
        "growth_tracker": after.growth_tracker,
        "hysteresis": after.hysteresis,
        "skipped": op.select(verdict.skipped, op.Add(state["skipped"], 1), state["skipped"]),
        "stuck": op.select(verdict.empty, state["stuck"], stuck),
    }


def _report(op: Fragment, verdict: _Verdict, values: Values, state: Values, new: Values) -> ir.Value:
    """The fields of `manifest.REPORT` in one tensor."""
    op.section("report")
    values = {
        **values,
        "loss": verdict.loss,
        "gradient_norm": verdict.norm,
        "clip_coefficient": verdict.clip,
        "loss_scale": state["loss_scale"],
        "next_loss_scale": new["loss_scale"],
        **{name: new[name] for name in ("step", "skipped", "stuck")},
    }
    return op.Concat(*(op.Reshape(op.cast(values[name], FLOAT), [1]) for name in REPORT), axis=0)


def update_graph(recipe: Recipe, results: GraphPorts) -> tuple[ir.Model, GraphPorts]:
    """The optimizer on one segment of free length ``N``, elementwise.

    Args:
        recipe: What to compute.
        results: The ports of the reduce graph, whose results it takes.
    """
    op = fragment.graph("onnxamp_update")
    optimizer = recipe.optimizer
    inputs = [_Input(op, "parameter", FLOAT, ("N",), "slice", "master"), _Input(op, "gradient", FLOAT, ("N",), "slice")]
    inputs += [_Input(op, name, FLOAT, ("N",), "slice") for name in optimizer.moments]
    parameter, gradient, *rest = (port.value for port in inputs)
    moments = dict(zip(optimizer.moments, rest, strict=True))
    if recipe.ema is not None:
        inputs.append(_Input(op, "ema", FLOAT, ("N",), "slice"))
        average = inputs[-1].value
    scalars: dict[str, ir.Value] = {}
    for port in results.outputs:
        if port.kind == "result" and port.name not in ("empty", "found_inf", "report"):
            inputs.append(_Input(op, port.name, BOOL if port.dtype == "bool" else FLOAT, (), "result"))
            scalars[port.name] = inputs[-1].value
    segment = [
        "lr_factor",
        *(["weight_decay"] if recipe.decays else []),
        *(["stored_low"] if recipe.stored_low else []),
    ]
    for name in segment:
        inputs.append(_Input(op, name, FLOAT, (), "segment"))
        scalars[name] = inputs[-1].value

    op.section("gradient")
    g = op.Mul(gradient, scalars["gradient_factor"])
    if recipe.clip_value is not None:
        g = op.Clip(g, -recipe.clip_value, recipe.clip_value)
    op.section("optimizer")
    rate = op.Mul(scalars["learning_rate"], scalars["lr_factor"])
    moved, new = optimizer.update(op, parameter, g, moments, rate, scalars.get("weight_decay"), scalars)
    if recipe.stored_low and recipe.low is not None:
        rounded = op.Cast(op.Cast(moved, to=recipe.low), to=FLOAT)
        moved = op.select(op.Greater(scalars["stored_low"], 0.0), rounded, moved)
    op.section("apply")
    ok = scalars["ok"]
    kept = op.select(ok, moved, parameter)
    outputs = [_Output(op, kept, "parameter_out", "slice", "master", alias="parameter")]
    if recipe.low is not None:
        outputs.append(_Output(op, op.Cast(kept, to=recipe.low), "low_out", "slice", "low"))
    for name, value in new.items():
        outputs.append(_Output(op, op.select(ok, value, moments[name]), f"{name}_out", "slice", name, alias=name))
    if recipe.ema is not None:
        drift = op.Mul(op.Sub(moved, average), 1 - recipe.ema)
        outputs.append(
            _Output(op, op.select(ok, op.Add(average, drift), average), "ema_out", "slice", "ema", alias="ema")
        )
    return fragment.model(op), _ports("update.onnx", inputs, outputs)


class _Input:
    """A graph input and its port."""

    def __init__(
        self, op: Fragment, name: str, dtype: ir.DataType, shape: Sequence[int | str], kind: str, ref: str | None = None
    ) -> None:
        self.value = op.input(name, dtype, shape)
        self.port = Port(name, _NAMES[dtype], tuple(shape), kind, name if ref is None else ref)


class _Output:
    """A graph output and its port."""

    def __init__(self, op: Fragment, value: ir.Value, name: str, kind: str, ref: str, alias: str | None = None) -> None:
        self.value = op.output(value, name)
        assert value.dtype is not None
        assert self.value.shape is not None
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in self.value.shape)
        self.port = Port(name, _NAMES[value.dtype], shape, kind, ref, alias)


def _ports(file: str, inputs: Sequence[_Input], outputs: Sequence[_Output]) -> GraphPorts:
    return GraphPorts(file, tuple(item.port for item in inputs), tuple(item.port for item in outputs))
