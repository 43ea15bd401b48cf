"""Inference with the state of a run: sums of the loss for evaluation, and outputs for metrics and predictions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxamp.errors import UsageError
from onnxamp.ort.binding import Binding
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.ort.values import Buffer, View, element_type
from onnxamp.trainer.arenas import Arenas, numpy_dtype
from onnxamp.trainer.batch import CheckedBatch
from onnxamp.training.manifest import GraphPorts, Port

_SUMS = ("amp.loss_sum", "amp.weight_sum")


class Evaluator:
    """One session on eval.onnx, bound to the parameters in the arenas.

    Args:
        model: The graph; without its loss if predictions are all that is wanted.
        ports: What the manifest says about it.
        arenas: The state.
        config: How the session is made.
        average: Read the moving average of the parameters instead of the parameters. Its low copies are rounded when the
            evaluator is made: make one for each evaluation.
    """

    def __init__(
        self, model: ir.Model, ports: GraphPorts, arenas: Arenas, config: SessionConfig, *, average: bool = False
    ) -> None:
        self._arenas = arenas
        self._average = average
        self._session = open_session(model, config)
        self._low: Buffer | None = None
        if average:
            if not arenas.manifest.has_arena("ema"):
                raise UsageError(
                    "This bundle keeps no moving average of the parameters: build it with ema=0.999 or so."
                )
            if arenas.manifest.has_arena("low"):
                size = arenas.manifest.arena("ema").elements
                rounded = arenas.rounded(arenas.range("ema", 0, (size,)).read())
                self._low = Buffer(rounded.nbytes, arenas.device, arenas.device_id)
                self._low.write(0, rounded.view("uint8"))
        present = {value.name for value in model.graph.inputs}
        self._inputs = [port for port in ports.inputs if port.name in present]
        self._outputs = [value.name or "" for value in model.graph.outputs]
        self.feeds = frozenset(port.name for port in self._inputs if port.kind in ("data", "labels", "weights"))
        self.sums = Buffer(8, arenas.device, arenas.device_id).view(0, (2,), _element_type("float32"))
        self._bindings: dict[tuple[int, ...], Binding] = {}

    def run(self, batch: CheckedBatch) -> dict[str, Any]:
        """The outputs for one batch; the sums of losses and weights are left in `sums`."""
        key = tuple(block.current for block in self._arenas.blocks.values())
        if key not in self._bindings:
            self._bindings[key] = self._bound()
        binding = self._bindings[key]
        for name, values in batch.feeds.items():
            if name in self.feeds:
                binding.feed(name, values)
        binding.run()
        return binding.fetched()

    def _bound(self) -> Binding:
        binding = Binding(self._session, self._arenas.stream)
        for port in self._inputs:
            if port.name not in self.feeds:
                binding.input(port.name, self._view(port))
        for name in self._outputs:
            if name in _SUMS:
                offset = 4 * _SUMS.index(name)
                binding.output(name, self.sums.buffer.view(offset, (), self.sums.element_type))
            else:
                binding.fetch(name)
        return binding

    def _view(self, port: Port) -> View:
        tensor = self._arenas.manifest.tensor(port.ref)
        arena = tensor.arena
        if self._average and arena == "low" and self._low is not None:
            start = tensor.offset * numpy_dtype(port.dtype).itemsize
            return self._low.view(start, tensor.shape, _element_type(port.dtype))
        if self._average and arena == "master":
            arena = "ema"
        return self._arenas.range(arena, tensor.offset, tensor.shape)


def without_loss(model: ir.Model, ports: GraphPorts) -> ir.Model:
    """The graph reduced to the outputs of the user's model: it takes neither labels nor weights."""
    compared = {port.name for port in ports.of_kind("labels", "weights")}
    model = model.clone()
    outputs = model.graph.outputs
    for value in [value for value in outputs if value.name in _SUMS]:
        outputs.remove(value)
    RemoveUnusedNodesPass()(model)
    for value in [value for value in model.graph.inputs if value.name in compared and not value.uses()]:
        model.graph.inputs.remove(value)
    return model


def _element_type(name: str) -> int:
    return element_type(numpy_dtype(name))
