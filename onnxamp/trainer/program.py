"""One graph of a bundle, ready to run: its session, the proof of what it may overwrite, and its bindings."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.errors import InternalError
from onnxamp.ort.aliasing import Aliasing
from onnxamp.ort.binding import Binding
from onnxamp.ort.providers import COMPILERS
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.ort.values import Buffer, View, element_type
from onnxamp.trainer.arenas import FLOAT, Arenas, Block, Piece, numpy_dtype
from onnxamp.training.manifest import GraphPorts, Manifest, Port

_STATE = ("tensor", "arena", "slice")


class Results:
    """Scalars that reduce.onnx leaves for update.onnx, one cache line each, at places that never change."""

    def __init__(self, device: str = "cpu", device_id: int = 0) -> None:
        self._device = (device, device_id)
        self._views: dict[str, View] = {}

    def view(self, port: Port) -> View:
        """The memory of the result that `port` gives or takes."""
        ref = port.ref or port.name
        if ref not in self._views:
            shape = tuple(size for size in port.shape if isinstance(size, int))
            if len(shape) != len(port.shape):
                raise InternalError(f"The result {ref!r} has a free size.")
            dtype = numpy_dtype(port.dtype)
            nbytes = max(int(np.prod(shape)) * dtype.itemsize, 1)
            self._views[ref] = Buffer(nbytes, *self._device).view(0, shape, element_type(dtype))
        return self._views[ref]


def segment_scalars(manifest: Manifest, device: str, device_id: int = 0) -> tuple[dict[str, View], ...]:
    """For each segment the memory of its scalars, by name."""
    segments = []
    for segment in manifest.segments:
        views = {name: Buffer(4, device, device_id).view(0, (), FLOAT) for name in segment.scalars}
        for name, value in segment.scalars.items():
            views[name].write(np.array(value, np.float32))
        segments.append(views)
    return tuple(segments)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program runs.

    Attributes:
        arenas: The state.
        results: What graphs hand on to each other.
        config: How sessions are made.
        in_place: Overwrite state where that is proved safe; else use two buffers in turn everywhere.
        segments: For each segment of the manifest the memory of its scalars, by name.
    """

    arenas: Arenas
    results: Results
    config: SessionConfig
    in_place: bool = True
    segments: tuple[Mapping[str, View], ...] = ()


class Program:
    """A session that reads and writes the arenas.

    Blocks whose every output in this graph is proved to be safe are written in place. All others get a second side: the
    graph reads one and writes the other, and `turn` makes the written side the state.

    Args:
        model: The graph.
        ports: What the manifest says about it.
        place: Where it runs.

    Attributes:
        names: The graph's inputs; a specialized graph may lack some of the ports.
        refusals: For each output that may not overwrite its input, why.
    """

    def __init__(self, model: ir.Model, ports: GraphPorts, place: Place) -> None:
        self.names = frozenset(value.name for value in model.graph.inputs)
        self.ports = dataclasses.replace(ports, inputs=tuple(port for port in ports.inputs if port.name in self.names))
        self._place = place
        self._session: Any = None
        self._bindings: dict[tuple[object, ...], Binding] = {}
        self.refusals = self._open(model)
        arenas = place.arenas
        written = [port for port in self.ports.outputs if port.kind in _STATE]
        refused = {arenas.blocks[arenas.arena_of(port)] for port in written if port.name in self.refusals}
        self._turning: set[Block] = refused
        for block in refused:
            block.double()
        used = [port for port in (*self.ports.inputs, *self.ports.outputs) if port.kind in _STATE]
        self._blocks = list(dict.fromkeys(arenas.blocks[arenas.arena_of(port)] for port in used))

    def _open(self, model: ir.Model) -> dict[str, str]:
        """Open the session; why each output may not be written in place."""
        place = self._place
        if place.config.provider in COMPILERS:
            self._session = open_session(model, place.config)
            why = f"{place.config.provider} compiles the graph, and its order cannot be seen"
            return {port.name: why for port in self.ports.outputs if port.kind in _STATE}
        with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
            path = Path(folder) / "optimized.onnx"
            # Weights need not travel through the file that is only read for its nodes.
            config = {
                **place.config.config,
                "session.optimized_model_external_initializers_file_name": "weights.bin",
                "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            }
            self._session = open_session(model, dataclasses.replace(place.config, optimized_path=path, config=config))
            return self._prove(Aliasing(ir.load(path)))

    def run(
        self,
        feeds: Mapping[str, NDArray[Any]] | None = None,
        fresh: Mapping[str, View] | None = None,
        piece: Piece | None = None,
    ) -> None:
        """Run the graph once on the current sides of the state.

        Args:
            feeds: Arrays for the inputs that are not state, by name.
            fresh: Memory for outputs that are not state and are kept by the caller.
            piece: The range to update (update.onnx).
        """
        binding = self._binding(piece)
        for name, values in (feeds or {}).items():
            binding.feed(name, values)
        for name, view in (fresh or {}).items():
            binding.output(name, view)
        binding.run()

    def turn(self) -> None:
        """Make what was written to the other sides the state (after the last piece, for update.onnx)."""
        for block in self._turning:
            block.turn()

    def _binding(self, piece: Piece | None) -> Binding:
        key = (piece, *(block.current for block in self._blocks))
        if key not in self._bindings:
            self._bindings[key] = self._bound(piece)
        return self._bindings[key]

    def _bound(self, piece: Piece | None) -> Binding:
        place, arenas = self._place, self._place.arenas
        binding = Binding(self._session, arenas.stream)
        for port in self.ports.inputs:
            if port.kind in _STATE:
                view = arenas.view(port, piece)
                if view is None:
                    raise InternalError(f"The input {port.name!r} has no place in the state.")
                binding.input(port.name, view)
            elif port.kind == "result":
                binding.input(port.name, place.results.view(port))
            elif port.kind == "segment" and piece is not None:
                binding.input(port.name, place.segments[piece.segment][port.ref])
        for port in self.ports.outputs:
            if port.kind in _STATE:
                block = arenas.blocks[arenas.arena_of(port)]
                target = arenas.view(port, piece, other=block in self._turning)
                if target is None and piece is not None:
                    dtype = numpy_dtype(port.dtype)
                    size = piece.stop - piece.start
                    scratch = Buffer(size * dtype.itemsize, arenas.device, arenas.device_id)
                    target = scratch.view(0, (size,), element_type(dtype))
                if target is None:
                    raise InternalError(f"The output {port.name!r} has no place in the state.")
                binding.output(port.name, target)
            elif port.kind == "result":
                binding.output(port.name, place.results.view(port))
            else:
                binding.fetch(port.name)
        return binding

    def _prove(self, aliasing: Aliasing) -> dict[str, str]:
        """Why each output that may not be written in place may not."""
        refusals = {}
        for output in (port for port in self.ports.outputs if port.kind in _STATE):
            if not self._place.in_place:
                refusals[output.name] = "two buffers were asked for"
            elif output.alias is None and any(self._overlap(source, output) for source in self.ports.inputs):
                refusals[output.name] = "the bundle allows no input to be overwritten by it"
            else:
                for source in self.ports.inputs:
                    if source.kind in _STATE and self._overlap(source, output):
                        congruent = source.name == output.alias
                        reason = aliasing.refusal(source.name, output.name, congruent=congruent)
                        if reason is not None:
                            refusals[output.name] = reason
        return refusals

    def _overlap(self, source: Port, output: Port) -> bool:
        arenas = self._place.arenas
        if source.kind not in _STATE:
            return False
        if arenas.blocks[arenas.arena_of(source)] is not arenas.blocks[arenas.arena_of(output)]:
            return False
        if "slice" in (source.kind, output.kind):
            return arenas.arena_of(source) == arenas.arena_of(output)
        first, second = arenas.view(source), arenas.view(output)
        if first is None or second is None:
            return False
        return first.offset < second.offset + second.nbytes and second.offset < first.offset + first.nbytes
