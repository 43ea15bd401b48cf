"""The backward pass of a micro-batch, with or without the accumulators in front of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.ort.values import View
from onnxamp.passes.assume import AssumePass
from onnxamp.trainer.lowering import lower_gradient
from onnxamp.trainer.program import Place, Program
from onnxamp.training.manifest import GraphPorts

# Fusions that take place only where nothing else reads the inner values. The backward half reads those of nodes that are
# computed once; of nodes that are computed twice it does not, and they would be rounded differently.
_UNEVEN = ("GeluFusionL1", "GeluFusionL2", "BiasGeluFusion", "FastGeluFusion", "LayerNormFusionL1", "LayerNormFusionL2",
           "SkipLayerNormFusion", "GemmActivationFusion", "ConvActivationFusion", "BiasSoftmaxFusion")  # fmt: skip


class Gradient:
    """Runs grad.onnx.

    A window of one micro-batch adds nothing up: for those the graph is specialized, so that gradients are written straight to
    their place. Each form is opened when it is first needed; most runs need one of them.

    Args:
        model: The graph.
        ports: What the manifest says about it.
        place: Where it runs.
    """

    def __init__(self, model: ir.Model, ports: GraphPorts, place: Place) -> None:
        self._model = lower_gradient(model, place.config)
        self._ports = ports
        # In the file a weight's gradient comes right behind what it needs. By default the runtime takes those of all layers last,
        # and keeps what they need until then.
        file_order = place.config.provider == "cpu"
        config = dict(place.config.config)
        if place.arenas.manifest.options.get("memory_budget") is not None:
            config["optimization.disable_specified_optimizers"] = ";".join(_UNEVEN)
        self._place = dataclasses.replace(
            place, config=dataclasses.replace(place.config, file_order=file_order, config=config)
        )
        self._first = next(port.name for port in ports.inputs if port.ref == "first")
        self.hosts = {port.name: port.ref for port in ports.of_kind("host")}

    def run(self, feeds: Mapping[str, NDArray[Any]], fresh: Mapping[str, View], alone: bool) -> None:
        """Add the gradients of one micro-batch to the accumulators.

        Args:
            feeds: The batch and the host's scalars, by name.
            fresh: Memory for outputs that are not state.
            alone: This is the only micro-batch of its window.
        """
        program = self.program(alone)
        program.run({name: value for name, value in feeds.items() if name in program.names}, fresh)
        program.turn()

    def program(self, alone: bool) -> Program:
        """The session for windows of one micro-batch, or that for all others."""
        return self._single if alone else self._added

    @functools.cached_property
    def _added(self) -> Program:
        return Program(self._model, self._ports, self._place)

    @functools.cached_property
    def _single(self) -> Program:
        model = self._model.clone()
        AssumePass(self._first, True)(model)
        return Program(model, self._ports, self._place)
