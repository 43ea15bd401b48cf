"""From a forward model to a bundle: loss, AMP passes, autodiff, accumulation, optimizer."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp import conversion
from onnxamp.autodiff.parameters import BY_NUMBERS, LITERAL, Parameters, classify
from onnxamp.dtypes import low_type
from onnxamp.errors import UnsupportedError, UsageError, few
from onnxamp.model import io
from onnxamp.policy.options import Options, matches
from onnxamp.training import batch_norm, choices, ort_training, parameters
from onnxamp.training.arguments import Arguments, name_patterns, positive
from onnxamp.training.bundle import Bundle, content_digest
from onnxamp.training.forward import Forward, prepare
from onnxamp.training.gradients import GradGraph, Task, eval_graph, grad_graph
from onnxamp.training.groups import DEFAULT, Group, group_of, make_groups
from onnxamp.training.layout import Layout, Parameter, make_layout
from onnxamp.training.lora import PREFIX as ADAPTED
from onnxamp.training.lora import Lora, inject
from onnxamp.training.lora import lora as make_lora
from onnxamp.training.loss_model import PREFIX
from onnxamp.training.losses import LossModel
from onnxamp.training.manifest import Manifest
from onnxamp.training.recompute import Recomputed
from onnxamp.training.steps import Recipe, reduce_graph, update_graph

PATIENCE = 50
"""Windows skipped in a row at the lowest loss scale before a run should stop."""
ONCE = "Export the model with optimize=False (or do_constant_folding=False, with dynamo=False), and its file holds the weight once"
"""What to do about a tied weight that PyTorch's exporter has transposed for one of its uses."""
_UNSURE = "not surely a parameter"


def build(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    *,
    loss: object,
    optimizer: object,
    level: str = "O2",
    dtype: str = "fp16",
    loss_scale: object = "auto",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    schedule: object = None,
    groups: Sequence[Group | Mapping[str, object]] | None = None,
    trainable: str | Sequence[str] | None = None,
    frozen: str | Sequence[str] | None = None,
    batch_norm: str = "auto",
    overflow: str = "window",
    ema: float | None = None,
    seed: int = 0,
    output: str | None = None,
    lora: Lora | Mapping[str, Any] | str | None = None,
    memory_budget: int | None = None,
    dim: Mapping[str, int] | None = None,
    target: str = "ort-cuda",
    keep: str | Sequence[str] = (),
    keep_op: str | Sequence[str] = (),
    lower: str | Sequence[str] = (),
    lower_op: str | Sequence[str] = (),
    engine: str = "native",
) -> Bundle:
    """Make the training graphs of a model.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`; it is not changed.
        loss: A loss of `onnxamp.training`, or its name for the defaults; a list of `Part` for their sum.
        optimizer: An optimizer, or its name.
        level: ``O0`` (FP32), ``OD``, ``O1``, ``O2`` (low working copy, FP32 masters), ``O3`` (no masters).
        dtype: ``fp16`` or ``bf16``.
        loss_scale: A loss scale, ``auto``, ``none``, ``dynamic``, a preset's name or a number.
        clip_norm: Largest global norm of the gradient.
        clip_value: Largest absolute value of a gradient's element (after `clip_norm`).
        schedule: A schedule, or its name; None is constant.
        groups: Parameter groups; the first that matches counts.
        trainable: Patterns of parameters to train, whatever else is said of them.
        frozen: Patterns of parameters to keep as they are.
        batch_norm: ``auto``: batch statistics where the scale trains, and running statistics that move with every micro-batch, as
            PyTorch's; ``window``: they move once per window, by the mean of its micro-batches; ``freeze``: running statistics everywhere.
        overflow: What a gradient that is not finite costs: ``window``, the whole window; ``micro``, only its micro-batch, for
            the memory of one more set of gradients.
        ema: Decay of a moving average of the parameters, such as 0.999.
        seed: Seed of Dropout.
        output: The output that the loss reads, if there are several.
        lora: Train low-rank adapters of some weights, and of the model only what `trainable` names: ``rank=8,alpha=16,target=PATTERN``.
        memory_budget: Bytes that the activations of a micro-batch may take: what does not fit is computed again in the backward half, with
            the same bits.
        dim: Sizes of free dimensions, such as ``{"batch": 32}``, for `memory_budget` and for what is 16-bit at O2.
        target: Whose kernels the graphs must have; see `onnxamp.convert`.
        keep: Patterns of nodes that stay fp32.
        keep_op: Operators that stay fp32.
        lower: Patterns of nodes that become 16-bit where that is legal.
        lower_op: Operators that become 16-bit where that is legal.
        engine: ``native``: gradients in standard operators, for any ONNX Runtime; ``ort-training``: by the builder of
            onnxruntime-training 1.19.2, in its fused kernels, for that runtime alone.

    Raises:
        RuntimeMissingError: The engine is not installed.
        UsageError: The arguments contradict each other or the model.
        ModelError: The model is damaged.
        UnsupportedError: Something on the way to the loss has no gradient; all such nodes are named.
    """
    arguments = Arguments(
        loss=choices.loss(loss),
        optimizer=choices.optimizer(optimizer),
        scale=choices.loss_scale(loss_scale, level, dtype),
        schedule=choices.schedule(schedule),
        groups=make_groups(groups),
        trainable=name_patterns(trainable),
        frozen=name_patterns(frozen),
        amp=Options(
            level=level,
            dtype=dtype,
            target=target,
            keep=name_patterns(keep),
            keep_op=name_patterns(keep_op),
            lower=name_patterns(lower),
            lower_op=name_patterns(lower_op),
            weights="cast",
            dim=tuple((dim or {}).items()),
        ),
        batch_norm=batch_norm,
        overflow=overflow,
        clip_norm=positive("clip_norm", clip_norm),
        clip_value=positive("clip_value", clip_value),
        ema=ema,
        seed=seed,
        output=output,
        lora=make_lora(lora),
        memory_budget=None if memory_budget is None else int(positive("memory_budget", memory_budget) or 0),
        engine=engine,
    )
    return _build(io.load(model), arguments)


def _build(source: ir.Model, arguments: Arguments) -> Bundle:
    forward = prepare(source, arguments.loss, arguments.output)
    if arguments.engine == "ort-training":
        ort_training.check(forward.model.graph)
    arguments = dataclasses.replace(arguments, loss=forward.loss)
    adapters, unadapted = inject(forward.model, arguments.lora, arguments.seed) if arguments.lora else ((), ())
    found = classify(forward.model)
    chosen, frozen = _choose(forward, found, arguments)
    norms = _trained_norms(forward.model.graph, chosen, frozen, arguments.batch_norm)
    model, held = _mixed(forward, arguments)
    task = Task(
        model=model,
        loss=arguments.loss,
        predictions=forward.predictions,
        outputs=forward.outputs,
        rows=forward.rows,
        parameters=chosen,
        low=arguments.amp.level in ("O2", "O3"),
        trained_norms=frozenset(norms),
        norms_by_window=arguments.batch_norm == "window",
        labels=forward.labels,
        memory_budget=arguments.memory_budget,
        dims=arguments.amp.dim,
        drops_micro=arguments.overflow == "micro",
        engine=arguments.engine,
    )
    grad = grad_graph(task)
    unreached = sorted(set(chosen) - {entry.name for entry in grad.entries})
    if not grad.entries:
        raise UsageError(
            f"No parameter that should train has a gradient: {', '.join(unreached[:5])} do not reach the loss."
        )
    trained = dataclasses.replace(task, parameters=tuple(entry.name for entry in grad.entries))
    layout, recipe = _steps(grad, arguments)
    evaluation, eval_ports = eval_graph(trained, [name for name, _ in grad.statistics])
    reduction, reduce_ports = reduce_graph(recipe, layout)
    update, update_ports = update_graph(recipe, reduce_ports)
    manifest = Manifest(
        level=arguments.amp.level,
        dtype=arguments.amp.dtype,
        graphs={
            "grad": grad.ports,
            "reduce": reduce_ports,
            "update": update_ports,
            "eval": eval_ports,
        },
        arenas=layout.arenas,
        tensors=layout.tensors,
        segments=layout.segments,
        labels=grad.labels,
        rows=forward.rows,
        frozen=frozen | dict.fromkeys(unreached, "does not reach the loss"),
        options=arguments.to_json(),
        limits={"floor": arguments.scale.lowest, "patience": PATIENCE},
        notes=(*forward.notes, *unadapted, *held, *_notes(found, grad, frozen, unreached, arguments.trainable)),
        adapters=tuple(adapter for adapter in adapters if adapter.a in trained.parameters),
    )
    graphs = {"grad": grad.model, "reduce": reduction, "update": update, "eval": evaluation}
    state = _state(forward.model.graph, layout, arguments)
    manifest = dataclasses.replace(manifest, content=content_digest(graphs, state, source))
    loss_model = io.load(forward.loss.model) if isinstance(forward.loss, LossModel) else None
    return Bundle(graphs, state, manifest, source, loss_model=loss_model)


def _mixed(forward: Forward, arguments: Arguments) -> tuple[ir.Model, tuple[str, ...]]:
    """The model at its level, and what a user should know about that."""
    amp = arguments.amp
    if amp.level == "O0":
        return forward.model, ()
    if isinstance(forward.loss, LossModel):  # the loss is FP32 at every level
        amp = dataclasses.replace(amp, keep=(*amp.keep, f"{PREFIX}*"))
    converted = conversion.mixed(forward.model, amp)
    if arguments.engine == "ort-training":  # its 16-bit kernels are those of the CPU: each result is rounded instead
        return ort_training.rounded(converted.model), converted.held_by_opset
    return converted.model, converted.held_by_opset


def _choose(forward: Forward, found: Parameters, arguments: Arguments) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the parameters that train, and why the others do not."""
    possible = [parameter for parameter in (*found.trainable, *found.unsure, *found.frozen) if parameter.uses]
    names = [parameter.name for parameter in possible]
    for kind, patterns in (("trainable", arguments.trainable), ("frozen", arguments.frozen)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                hint = f"did you mean {', '.join(close)}" if close else "`onnxamp check MODEL` lists their names"
                raise UsageError(f"No parameter matches {kind} {pattern!r}: {hint}.")
    for group in arguments.groups:
        if group is not DEFAULT and not any(group.holds(name) for name in names):
            raise UsageError(f"No parameter is in the group {group.title!r}: `onnxamp check MODEL` lists their names.")
    default = {parameter.name for parameter in found.trainable}
    wanted, frozen = set(), {}
    for parameter in possible:
        group = group_of(parameter.name, arguments.groups)
        if parameter.size == 0:
            frozen[parameter.name] = "no elements"
        elif any(matches(pattern, parameter.name) for pattern in arguments.trainable):
            wanted.add(parameter.name)
        elif any(matches(pattern, parameter.name) for pattern in arguments.frozen):
            frozen[parameter.name] = "frozen by name"
        elif group.frozen:
            frozen[parameter.name] = f"frozen by group {group.title}"
        elif isinstance(arguments.loss, LossModel) and parameter.name.startswith(PREFIX):
            frozen[parameter.name] = "belongs to the loss"
        elif arguments.lora is not None and not parameter.name.startswith(ADAPTED):
            frozen[parameter.name] = "only adapters train"
        elif parameter.name in default:
            wanted.add(parameter.name)
        else:
            frozen[parameter.name] = f"{_UNSURE}: {parameter.reason}"
    chosen = [name for name in forward.model.graph.initializers if name in wanted]
    if all(parameter.size == 0 for parameter in possible):
        raise UsageError("The model has no float weights that a node reads, so there is nothing to train.")
    if not chosen:
        raise UsageError("No parameter trains: name some with trainable, or freeze fewer.")
    return tuple(chosen), frozen


def _trained_norms(graph: ir.Graph, chosen: Sequence[str], frozen: Mapping[str, str], mode: str) -> list[str]:
    """Names of the nodes of BatchNormalization that use batch statistics: those whose scale trains, or is none in PyTorch."""
    if mode == "freeze":
        return []
    return [
        str(node.name)
        for node in graph
        if node.op_type == "BatchNormalization"
        and node.domain == ""
        and (scale := node.inputs[1]) is not None
        and (scale.name in chosen or frozen.get(str(scale.name), "").endswith(LITERAL) or _is_spread(scale, chosen))
        and batch_norm.statistics(node) is not None
    ]


def _is_spread(value: ir.Value, chosen: Sequence[str]) -> bool:
    """Whether a value is a constant, expanded: how PyTorch's newer exporter writes the scale that a norm does not have."""
    node = value.producer()
    if node is None or node.op_type != "Expand" or node.domain != "":
        return False
    source = node.inputs[0]
    while source is not None and (node := source.producer()) is not None and node.op_type in ("Cast", "CastLike"):
        source = node.inputs[0]
    return source is not None and source.is_initializer() and source.name not in chosen


def _notes(
    found: Parameters,
    grad: GradGraph,
    frozen: Mapping[str, str],
    unreached: Sequence[str],
    asked: Sequence[str],
) -> list[str]:
    """What a user should know about what trains, and what is computed twice."""
    notes = []
    # A single number is hardly ever a parameter: no word about those that nothing speaks for.
    doubtful = [p.name for p in found.unsure if p.size > 1 or p.name in found.numbers]
    unsure = [name for name in doubtful if frozen.get(name, "").startswith(_UNSURE)]
    if unsure:
        tensors = "float tensor is" if len(unsure) == 1 else "float tensors are"
        called = [f"{name}, computed from {source}" if (source := found.numbers.get(name)) else name for name in unsure]
        notes.append(
            f"{len(unsure)} {tensors} not trained: {few(called)} (--trainable {unsure[0]} trains it; `onnxamp check` "
            "lists all)."
        )
    trained = {entry.name for entry in grad.entries if not any(matches(pattern, entry.name) for pattern in asked)}
    if placed := [p.name for p in found.trainable if p.reason.endswith(BY_NUMBERS) and p.name in trained]:
        one = len(placed) == 1
        tensors = (
            "float tensor is in a parameter's place, looks" if one else "float tensors are in a parameter's place, look"
        )
        notes.append(
            f"{len(placed)} {tensors} learned, and {'trains' if one else 'train'}: {few(placed)} (--frozen {placed[0]} "
            "keeps it as it is)."
        )
    if unreached:
        notes.append(f"{len(unreached)} parameters do not reach the loss and stay as they are: {few(unreached)}.")
    tied = [entry.name for entry in grad.entries if entry.name in found.tied]
    if tied:
        notes.append(f"{len(tied)} parameters are read by several nodes and train as one each: {few(tied)}.")
    entries = {entry.name for entry in grad.entries}
    notes += [
        f"{' and '.join(group)} hold the same numbers, and train apart: if they are one tensor in PyTorch (tied weights), it cannot "
        f"take both back. {ONCE}."
        for group in found.copies
        if entries.issuperset(group)
    ]
    if layers := [group for group in found.layers if entries.issuperset(group)]:
        examples = few([" = ".join(group) for group in layers], 1)
        notes.append(f"Layers that were copied begin with the same numbers, and train apart: {examples}.")
    if grad.recomputed is not None:
        notes.append(_recompute_note(grad.recomputed))
    return notes


def _steps(grad: GradGraph, arguments: Arguments) -> tuple[Layout, Recipe]:
    """Where the state lies, and what a step computes."""
    lows = {entry.low.dtype for entry in grad.entries if entry.low is not None}
    if len(lows) > 1:
        raise UnsupportedError("The model has both fp16 and bf16 parameters: convert it to one of them first.")
    low = next(iter(lows), None)
    stored_low = arguments.amp.level == "O3" and low is not None
    optimizer = arguments.optimizer
    layout = make_layout(
        [Parameter(e.name, e.shape, group_of(e.name, arguments.groups), e.low is not None) for e in grad.entries],
        grad.statistics,
        groups=arguments.groups,
        moments=optimizer.moments,
        weight_decay=optimizer.weight_decay,
        low=None if low is None else str(low.numpy().name),
        ema=arguments.ema is not None,
        stored_low=stored_low,
    )
    recipe = Recipe(
        optimizer=optimizer,
        schedule=arguments.schedule,
        scale=arguments.scale,
        clip_norm=arguments.clip_norm,
        clip_value=arguments.clip_value,
        ema=arguments.ema,
        low=low,
        stored_low=stored_low,
        decays=any(segment.scalars["weight_decay"] for segment in layout.segments),
        drops_micro=arguments.overflow == "micro",
    )
    return layout, recipe


def _state(graph: ir.Graph, layout: Layout, arguments: Arguments) -> dict[str, np.ndarray]:
    """Initial values by key; what is absent starts as zeros."""
    scale, tracker, hysteresis = arguments.scale.initial
    state: dict[str, np.ndarray] = {
        "scalars/loss_scale": np.asarray(scale, np.float32),
        "counters/growth_tracker": np.asarray(tracker, np.int64),
        "counters/hysteresis": np.asarray(hysteresis, np.int64),
        "counters/seed": np.asarray(arguments.seed, np.int64),
    }
    lows = {tensor.name for tensor in layout.tensors if tensor.arena == "low"}
    rounds = low_type(arguments.amp.dtype).numpy if arguments.amp.level == "O3" else None
    for tensor in layout.tensors:
        if tensor.arena in ("master", "ema", "statistics"):
            value = parameters.content(graph.initializers[tensor.name])
            if rounds is not None and tensor.name in lows:
                value = value.astype(rounds).astype(np.float32)
            state[tensor.key] = value
    return state


def _recompute_note(done: Recomputed) -> str:
    known = ", ".join(f"{name}={size}" for name, size in done.sizes.items())
    assumed = f" (modelled for {known})" if known else " (modelled)"
    if not done.segments:
        return f"Activations take {done.before:,} bytes{assumed}, which fits: nothing is computed twice."
    return (
        f"Activations take {done.after:,} bytes instead of {done.before:,}{assumed}: {done.segments} segments are computed twice, about "
        f"{done.work:.0%} more work in a step."
    )
