"""Counts the bytes that a written file moves in one run, without anything of onnxamp.

The convention is that of the traffic model (onnxamp/model/traffic.py): every node reads each non-empty operand whole, constants
included, and writes each result; Shape and Size read nothing, Constant writes nothing; a body counts once: both branches of If, the first
iteration of Loop and Scan. Types are read from the file alone. How many elements a value has is observed in a run of the source: `observe`
runs every body by itself on the values that it would meet, also the branch that is not taken. A sequence counts 64 elements.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

import judge
import numpy as np
import onnx
from onnx import TensorProto, helper

Shapes = dict[str, tuple[int, ...]]
# Elements of what has no shape; sizes of an unknown leading dimension and of any other.
UNRANKED, LEADING, OTHER = 64, 1, 64


def observe(source: onnx.ModelProto, *feeds: Mapping[str, object]) -> list[Shapes]:
    """The shapes of the values of each graph, in the order of `judge.scopes`.

    Args:
        source: A model without functions whose operators ONNX Runtime runs.
        feeds: Arrays by input name, several sets if one does not reach every branch: a graph is observed on the first that runs it.
    """
    model = judge.inferred(source)
    runs = [list(_observe(model, source.graph, set_)) for set_ in feeds]
    best = [max(found, key=lambda one: one[0]) for found in zip(*runs, strict=True)]
    return [{n: np.shape(array) for n, array in arrays.items() if not isinstance(array, list)} for _, arrays in best]


def _observe(
    model: onnx.ModelProto, graph: onnx.GraphProto, known: Mapping[str, object]
) -> Iterator[tuple[bool, dict[str, object]]]:
    """Whether `graph` ran, and its values, given those that it reads from outside; then those of its bodies."""
    found: dict[str, object] = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    try:
        found |= _run(model, graph, {**found, **known})
        ran = True
    except Exception:  # the branch that is not taken may not fit
        ran = False
    own = {name: array for name, array in {**known, **found}.items() if name in judge.defined(graph)}
    yield ran, own
    visible = {**known, **own}
    for node in graph.node:
        for body in judge.bodies(node):
            yield from _observe(model, body, {**visible, **_entered(node, body, visible)})


def _run(model: onnx.ModelProto, graph: onnx.GraphProto, known: Mapping[str, object]) -> dict[str, object]:
    """All results of the nodes of `graph`, as a model of its own whose inputs are the `known` values that it reads."""
    wanted = [name for node in graph.node for name in node.output if name]
    if not wanted:
        return {}
    results = set(wanted)
    feeds = {name: known[name] for name in sorted(_read(graph)) if name in known and name not in results}
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    alone.graph.name = "alone"
    alone.graph.node.extend(graph.node)
    for name, array in feeds.items():
        kind = helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
        alone.graph.input.append(helper.make_tensor_value_info(name, kind, np.shape(array)))
    typed = judge.inferred(alone)
    kinds = {value.name: value for value in typed.graph.value_info}
    alone.graph.output.extend(kinds[name] if name in kinds else onnx.ValueInfoProto(name=name) for name in wanted)
    return {name: array for name, array in judge.run(alone, feeds).items() if array is not None}


def _read(graph: onnx.GraphProto) -> set[str]:
    """The names that the nodes of a graph and of its bodies read."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for body in judge.bodies(node):
            names |= _read(body)
    return names


def _entered(node: onnx.NodeProto, body: onnx.GraphProto, visible: Mapping[str, object]) -> dict[str, object]:
    """What the inputs of a body are in its first iteration."""
    inputs = [value.name for value in body.input]
    operands = [visible.get(name) for name in node.input]
    values: list[object] = []
    if node.op_type == "Loop":
        values = [np.asarray(0, np.int64), np.asarray(True), *operands[2:]]
    elif node.op_type == "Scan":
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        count = attributes["num_scan_inputs"]
        axes = attributes.get("scan_input_axes", [0] * count)
        states, scanned = operands[: len(operands) - count], operands[len(operands) - count :]
        slices = [None if x is None else np.take(x, 0, axis) for x, axis in zip(scanned, axes, strict=True)]
        values = [*states, *slices]
    return {name: value for name, value in zip(inputs, values, strict=False) if value is not None}


def annotated(source: onnx.ModelProto, shapes: list[Shapes]) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The model with the observed shapes declared on its values, in bodies too, and sizes for its inputs.

    Dimensions of inputs get names instead: shape inference would else contradict a branch that was observed on another set of feeds.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source)
    kinds = [seen for _, seen in judge.scopes(judge.inferred(source).graph)]
    for (graph, _), seen, found in zip(judge.scopes(model.graph), kinds, shapes, strict=True):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.name in found and seen.get(value.name, 0) > 0:
                value.CopyFrom(helper.make_tensor_value_info(value.name, seen[value.name], found[value.name]))
        borders = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        for name, shape in found.items():
            if name not in borders and seen.get(name, 0) > 0:
                graph.value_info.append(helper.make_tensor_value_info(name, seen[name], shape))
    sizes = {}
    constants = {tensor.name for tensor in model.graph.initializer}
    for number, value in enumerate(model.graph.input):
        if value.name not in constants:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                name = f"input{number}_{axis}"
                sizes[name] = dim.dim_value
                dim.dim_param = name
    return model, sizes


def moved_bytes(model: onnx.ModelProto, source: onnx.ModelProto, shapes: list[Shapes]) -> int:
    """Bytes that the nodes of a written file read and write.

    Args:
        model: The file.
        source: What it was made of; only where a value was not observed, its inferred shape is taken from here.
        shapes: What `observe` saw of the source.
    """
    sizes = _sizes(annotated(source, shapes)[0], shapes)
    graph = judge.inferred(model).graph
    return _moved(graph, zip(judge.scopes(graph), sizes, strict=True), collections.ChainMap())


def _moved(
    graph: onnx.GraphProto,
    scopes: Iterator[tuple[tuple[onnx.GraphProto, judge.Types], dict[str, int]]],
    outer: collections.ChainMap[str, int],
) -> int:
    """The bytes of one graph and of its bodies; `scopes` goes on to the next graph with each call."""
    (_, seen), own = next(scopes)
    elements = {value.name: judge.leaf(value.type) for value in (*graph.input, *graph.output, *graph.value_info)}
    sizes = outer.new_child(own)
    sizes.update((tensor.name, math.prod(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Cast" and not node.domain:  # one of the two has the source's name
            count = sizes.get(node.input[0], sizes.get(node.output[0]))
            assert count is not None, node
            sizes.setdefault(node.input[0], count)
            sizes.setdefault(node.output[0], count)
        elif node.op_type == "Constant":
            sizes[node.output[0]] = int(np.size(_constant(node)))
    total = 0
    for node in graph.node:
        if node.op_type != "Constant":
            read = () if node.op_type in ("Shape", "Size") else filter(None, node.input)
            names = [*read, *filter(None, node.output)]
            total += sum(sizes[name] * _width(elements.get(name) or seen.get(name, 0)) for name in names)
    return total + sum(_moved(body, scopes, sizes) for node in graph.node for body in judge.bodies(node))


def _constant(node: onnx.NodeProto) -> object:
    (attribute,) = node.attribute
    value = helper.get_attribute_value(attribute)
    return np.empty(value.dims) if isinstance(value, TensorProto) else value


def _width(kind: int) -> int:
    """Bytes of an element; 8 of a string, 4 where an operator without schema gives no type."""
    if kind == TensorProto.STRING:
        return 8
    return helper.tensor_dtype_to_np_dtype(kind or TensorProto.FLOAT).itemsize


def _sizes(source: onnx.ModelProto, shapes: list[Shapes]) -> Iterator[dict[str, int]]:
    """Elements of the values of each graph: observed, else inferred with the sizes for unknown dimensions."""
    typed = onnx.ModelProto()
    typed.CopyFrom(judge.inferred(source))
    for (graph, _), found in zip(judge.scopes(typed.graph), shapes, strict=True):
        sizes = dict.fromkeys(judge.defined(graph), UNRANKED)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.HasField("shape"):
                dims = value.type.tensor_type.shape.dim
                known = [
                    d.dim_value if d.HasField("dim_value") else (OTHER if i else LEADING) for i, d in enumerate(dims)
                ]
                sizes[value.name] = math.prod(known)
        yield sizes | {name: math.prod(shape) for name, shape in found.items()}
