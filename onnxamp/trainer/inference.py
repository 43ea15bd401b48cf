"""The user's model with trained parameters, in inference form."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.conversion import convert
from onnxamp.errors import ModelError, UsageError
from onnxamp.evidence.opening import crash_on_cpu
from onnxamp.model import io
from onnxamp.model.preparation import prepare
from onnxamp.passes.merged import RestoreTensors
from onnxamp.training.bundle import Bundle
from onnxamp.training.lora import merge
from onnxamp.training.loss_model import PREFIX

logger = logging.getLogger("onnxamp")


@dataclasses.dataclass(frozen=True)
class Trained:
    """A bundle with trained parameters.

    Attributes:
        bundle: The bundle.
        read: The tensors of an arena of its state, by name.
    """

    bundle: Bundle
    read: Callable[[str], Mapping[str, NDArray[Any]]]

    def export(
        self,
        path: str | os.PathLike[str],
        level: str = "O0",
        dtype: str = "fp16",
        *,
        weights: str = "master",
        target: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write `model(...)` as a file. Where ONNX Runtime would end the process that opens it on the CPU, a warning is logged."""
        model = self.model(level, dtype, weights=weights, target=target)
        io.save(model, path, overwrite=overwrite)
        if level != "O0" and (text := crash_on_cpu(model, path)):
            logger.warning("%s: %s", os.fspath(path), text)

    def model(
        self, level: str = "O0", dtype: str = "fp16", *, weights: str = "master", target: str | None = None
    ) -> ir.Model:
        """The model for inference; see `Trainer.export` for the arguments.

        Raises:
            UsageError: Unknown weights, or the bundle keeps no moving average.
        """
        manifest = self.bundle.manifest
        values = self.values(weights)
        if manifest.adapters:
            known = weights_of(self.bundle.model, {adapter.weight for adapter in manifest.adapters})
            values = merge(manifest.adapters, values, known)
        model = inference_model(self.bundle.model, values)
        if level == "O0":
            return model
        options = manifest.options
        steering = {name: options[name] for name in ("keep", "keep_op", "lower", "lower_op")}
        return convert(model, level=level, dtype=dtype, target=target or options["target"], **steering).model

    def values(self, weights: str = "master") -> dict[str, NDArray[Any]]:
        """Trained parameters and statistics by name, without those of a loss model.

        Raises:
            UsageError: Unknown weights, or the bundle keeps no moving average.
        """
        manifest = self.bundle.manifest
        if weights not in ("master", "ema"):
            raise UsageError(f"Unknown weights {weights!r}: use master or ema.")
        if not manifest.has_arena(weights):
            raise UsageError("This bundle keeps no moving average of the parameters: build it with ema=0.999 or so.")
        found = {**self.read(weights), **(self.read("statistics") if manifest.has_arena("statistics") else {})}
        judged = self.bundle.loss_model is not None
        return {name: value for name, value in found.items() if not (judged and name.startswith(PREFIX))}

    def loss_model(self, weights: str = "master") -> ir.Model | None:
        """The user's loss model, with the parameters of it that train; None if the loss is none."""
        if self.bundle.loss_model is None:
            return None
        values = {name[len(PREFIX) :]: value for name, value in self.read(weights).items() if name.startswith(PREFIX)}
        return inference_model(self.bundle.loss_model, values)


def inference_model(source: ir.Model, values: Mapping[str, NDArray[Any]]) -> ir.Model:
    """A copy of `source` with other parameters and nothing that only training needs.

    1. Each parameter keeps its name, its type (values are cast to it) and its form: initializer or Constant node.
       One that was merged with an equal one gets a tensor of its own.
    2. Dropout goes, and with it what only it has read: its ratio and mode; BatchNormalization reads its running statistics.
    3. Everything else, names and metadata included, stays as it was.

    Args:
        source: The model that the bundle was built from.
        values: Parameters and statistics by name.

    Raises:
        ModelError: `source` has no parameter of that name and shape.
    """
    model = _restored(source)
    places = _places(model)
    for name, value in values.items():
        place = places.get(name)
        tensor = None if place is None else _tensor(place)
        if place is None or tensor is None or tuple(tensor.shape.numpy()) != value.shape:
            raise ModelError(
                f"The model has no parameter {name!r} of shape {list(value.shape)}: it is not the one that was trained."
            )
        _set(place, value.astype(tensor.dtype.numpy()))
    for graph in model.graphs():
        for node in list(graph):
            if node.domain == "" and node.op_type == "Dropout":
                settings = node.inputs[1:]
                _without_dropout(graph, node)
                for setting in settings:
                    _remove_unread(setting)
            elif node.domain == "" and node.op_type == "BatchNormalization":
                node.attributes.pop("training_mode", None)
                node.resize_outputs(1)
    return model


def weights_of(model: ir.Model, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Parameters of a model in FP32, by name; those that its exporter merged are apart."""
    places = _places(_restored(model))
    tensors = {name: _tensor(places[name]) for name in names if name in places}
    return {name: tensor.numpy().astype(np.float32) for name, tensor in tensors.items() if tensor is not None}


def take_weights(model: ir.Model, source: ir.Model) -> list[str]:
    """Give `model`, in place, the weights of `source` that have its names, types and shapes, in whatever form each model holds them.

    Returns:
        The float weights that it has and `source` has not, by name; single numbers in Constant nodes are not counted as weights.
    """
    RestoreTensors()(model)
    known = {
        name: tensor for name, place in _places(_restored(source)).items() if (tensor := _tensor(place)) is not None
    }
    left = []
    for name, place in _places(model).items():
        own, other = _tensor(place), known.get(name)
        # Exporters number their Constant nodes: those that hold no weight may have the same name in two models by chance.
        if own is None or (place.producer() is not None and (own.size == 1 or not own.dtype.is_floating_point())):
            continue
        if other is not None and (other.dtype, other.shape) == (own.dtype, own.shape):
            _set(place, other.numpy().copy())
        elif own.dtype.is_floating_point():
            left.append(name)
    return left


def _restored(source: ir.Model) -> ir.Model:
    """A copy in which tensors that the exporter merged are apart, as they are in training.

    Functions stay, unless such tensors are in them.
    """
    model = io.load(source)
    if model.functions:
        inlined = io.load(source)
        prepare(inlined)
        if RestoreTensors()(inlined).modified:
            return inlined
    RestoreTensors()(model)
    return model


def _places(model: ir.Model) -> dict[str, ir.Value]:
    """Values that hold a parameter, by name."""
    places: dict[str, ir.Value] = {}
    for graph in model.graphs():
        places.update((str(value.name), value) for value in graph.initializers.values())
        for node in graph:
            if node.op_type == "Constant" and node.domain == "":
                places.setdefault(str(node.outputs[0].name), node.outputs[0])
    return places


def _tensor(place: ir.Value) -> ir.TensorProtocol | None:
    node = place.producer()
    if node is None:
        return place.const_value
    for form, attribute in node.attributes.items():
        if form == "value":
            return attribute.as_tensor()
        if form in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(attribute.value, np.float32))
    return None


def _set(place: ir.Value, value: NDArray[Any]) -> None:
    tensor = ir.Tensor(np.ascontiguousarray(value).reshape(value.shape), name=place.name)
    node = place.producer()
    if node is None:
        place.const_value = tensor
    else:
        node.attributes.clear()
        node.attributes.add(ir.AttrTensor("value", tensor))


def _without_dropout(graph: ir.Graph | ir.Function, node: ir.Node) -> None:
    result, source = node.outputs[0], node.inputs[0]
    assert source is not None
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        node.resize_inputs(2)  # somebody reads the mask: in inference form it is all true
        return
    if result.is_graph_output():
        node.op_type = "Identity"
        node.resize_inputs(1)
        node.resize_outputs(1)
        node.attributes.clear()
        return
    result.replace_all_uses_with(source)
    graph.remove(node, safe=True)


def _remove_unread(value: ir.Value | None) -> None:
    """Remove what nobody reads any more: an initializer, or a node and what only that has read."""
    if value is None or value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    node = value.producer()
    if node is None:
        if value.is_initializer() and value.graph is not None:
            del value.graph.initializers[str(value.name)]
    elif node.graph is not None and not any(output.uses() or output.is_graph_output() for output in node.outputs):
        read = list(node.inputs)
        node.graph.remove(node, safe=True)
        for source in read:
            _remove_unread(source)
