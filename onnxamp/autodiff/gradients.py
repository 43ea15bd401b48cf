"""Gradient models: a model with the gradients of one scalar output among its outputs."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.registry import rule_of
from onnxamp.autodiff.reverse import backward
from onnxamp.errors import UsageError
from onnxamp.model.preparation import prepared
from onnxamp.model.units import all_values
from onnxamp.passes.integers import settle
from onnxamp.passes.norms import DecomposeBatchNorm
from onnxamp.passes.resizes import PlainResizes


def gradient_model(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    of: str | None = None,
    wrt: Sequence[str] = ("*",),
) -> ir.Model:
    """A copy of `model` that also gives the gradients of one scalar output.

    The outputs stay; for every float input and initializer that matches `wrt` and reaches the output, ``grad/<name>`` is
    added, of its type and shape. Those initializers become graph inputs too and keep their values as defaults. A pattern
    leaves out what is only read by operands without a gradient rule, such as the scales of Resize; a name does not.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`; never changed.
        of: Name of the scalar output; may be left out when there is only one.
        wrt: Glob patterns of names, or regular expressions after ``re:``.

    Raises:
        UsageError: No such output, an output that is not a float scalar, a name that matches nothing or does not reach it, or
            an input, initializer or output that is called as a gradient would be.
        UnsupportedError: Operators on the way have no gradient rule (all of them are listed).
    """
    result = prepare(model)
    graph = result.graph
    target = _scalar_output(graph, of)
    values = matching(graph, wrt)
    dtype, shape = target.dtype, target.shape
    assert dtype is not None
    assert shape is not None
    names = {value.name for value in [*graph.inputs, *graph.initializers.values(), *graph.outputs]}
    seed = ir.Value(
        name=_free(f"grad/{target.name}/seed", names),
        type=ir.TensorType(dtype),
        shape=shape,
        const_value=ir.tensor(np.ones(tuple(shape.numpy()), dtype.numpy())),
    )
    graph.register_initializer(seed)
    exact = [name for name in wrt if not name.startswith("re:") and not any(sign in name for sign in "*?[")]
    values = [value for value in values if value.name in exact or not _only_lacking(value)]
    taken = next((value for value in values if f"grad/{value.name}" in names), None)
    if taken is not None:
        raise UsageError(
            f"The gradient of {taken.name!r} would be called 'grad/{taken.name}', as an input, initializer or output of the "
            f"model is already: rename that one, or leave {taken.name!r} out of wrt (is the model itself made by grad?)."
        )
    gradients = backward(graph, {target: seed}, values, opset_imports=dict(result.opset_imports))
    for value in values:
        if value in gradients:
            _add_output(graph, value, gradients[value])
        elif value.name in exact:
            raise UsageError(f"{value.name!r} has no gradient: it does not reach the output {target.name!r}.")
    if not seed.uses():
        del graph.initializers[str(seed.name)]
    return result


def prepare(model: str | os.PathLike[str] | onnx.ModelProto | ir.Model) -> ir.Model:
    """A private copy that can be differentiated: functions inlined, typed, integer constants and sequences folded, training
    BatchNormalization decomposed."""
    result = prepared(model)
    if result.ir_version < 4:  # where every initializer, also one that is added, must be an input
        result.graph.inputs[:] = [value for value in result.graph.inputs if not value.is_initializer()]
        result.ir_version = 4
    settle(result)
    PlainResizes()(result)
    DecomposeBatchNorm()(result)
    return result


def matching(graph: ir.Graph, patterns: Sequence[str]) -> list[ir.Value]:
    """The float inputs and initializers of `graph` that match one of the patterns, inputs first.

    Raises:
        UsageError: A pattern matches nothing.
    """
    candidates = list(dict.fromkeys([*graph.inputs, *graph.initializers.values()]))
    candidates = [value for value in candidates if value.dtype in FLOATS]
    found: dict[ir.Value, None] = {}
    for pattern in patterns:
        try:
            test = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
        except re.error as problem:
            raise UsageError(f"The pattern {pattern!r} is not a regular expression: {problem}.") from None
        hits = [
            value
            for value in candidates
            if value.name == pattern or (test.search if pattern.startswith("re:") else test.match)(str(value.name))
        ]
        if not hits:
            known = ", ".join(str(value.name) for value in candidates[:8])
            raise UsageError(f"No float input or initializer matches {pattern!r}; there are {known or 'none'}...")
        found.update(dict.fromkeys(hits))
    return [value for value in candidates if value in found]


def _only_lacking(value: ir.Value) -> bool:
    """Whether every use of `value` is an operand for which its operator's rule has no gradient."""
    rules = [(rule_of(node), position) for node, position in value.uses()]
    return bool(rules) and all(rule is not None and rule.lacks(position) for rule, position in rules)


def _scalar_output(graph: ir.Graph, of: str | None) -> ir.Value:
    names = [str(value.name) for value in graph.outputs]
    if of is None and len(names) != 1:
        raise UsageError(f"The model has {len(names)} outputs ({', '.join(names[:8])}): name the scalar one.")
    target = next((value for value in graph.outputs if of is None or value.name == of), None)
    if target is None:
        raise UsageError(f"The model has no output {of!r}; it has {', '.join(names[:8])}.")
    if target.dtype not in FLOATS:
        raise UsageError(f"The output {target.name!r} is not a float and has no gradient.")
    if target.shape is None or not target.shape.is_static() or target.shape.numpy().count(1) != len(target.shape):
        shape = "unknown" if target.shape is None else str(target.shape)
        raise UsageError(f"The output {target.name!r} has shape {shape} and is not a scalar: reduce it first.")
    return target


def _add_output(graph: ir.Graph, value: ir.Value, g: ir.Value) -> None:
    """Make `g` the output ``grad/<name>``; through an Identity where it stands for something else already."""
    name = f"grad/{value.name}"
    producer = g.producer()
    if producer is None or g.is_graph_output() or "onnxamp.backward" not in producer.metadata_props or g.name != name:
        node = ir.node("Identity", [g], name=f"{name}/Identity", metadata_props={"onnxamp.backward": str(value.name)})
        graph.append(node)
        _release(graph, name)
        node.outputs[0].name = name
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        g = node.outputs[0]
    graph.outputs.append(g)
    if value.is_initializer() and not value.is_graph_input():
        graph.inputs.append(value)


def _release(graph: ir.Graph, name: str) -> None:
    """Rename the intermediate values that hold `name`, those of bodies included: they must not hide it."""
    values = list(all_values(graph))
    names = {value.name for value in values}
    for value in values:
        if value.name == name and not value.is_graph_output():
            value.name = _free(f"{name}/inner", names)
            names.add(value.name)


def _free(name: str, names: set[str | None]) -> str:
    while name in names:
        name += "_"
    return name
