"""The backward pass of a micro-batch, with or without the accumulators in front of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.ort.values import View
from onnxamp.trainer.program import Place, Program
from onnxamp.training.manifest import Manifest


class Gradient:
    """Runs grad.onnx, and single.onnx for windows of one micro-batch.

    Each is opened when it is first needed; most runs need one of them.

    Args:
        manifest: The bundle's manifest.
        executable: Gives a graph of the bundle by name, as it is to be run.
        place: Where it runs.
    """

    def __init__(self, manifest: Manifest, executable: Callable[[str], ir.Model], place: Place) -> None:
        self._manifest = manifest
        self._executable = executable
        self._place = place
        self._programs: dict[str, Program] = {}
        self.hosts = {port.name: port.ref for port in manifest.graphs["grad"].of_kind("host")}

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
        name = "single" if alone and "single" in self._manifest.graphs else "grad"
        if name not in self._programs:
            self._programs[name] = Program(self._executable(name), self._manifest.graphs[name], self._place)
        return self._programs[name]
