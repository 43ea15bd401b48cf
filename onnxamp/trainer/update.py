"""The optimizer's pass over the parameter arenas at the end of a window."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools

import onnx_ir as ir

from onnxamp.passes.assume import AssumePass
from onnxamp.trainer.arenas import Piece
from onnxamp.trainer.device import processors
from onnxamp.trainer.lowering import lower_update
from onnxamp.trainer.program import Place, Program
from onnxamp.training.manifest import GraphPorts

# Elements worked on at a time on the CPU: few enough that what passes between two nodes stays in the cache.
_CHUNK = 1 << 16
# A piece has a binding of its own, so very large models get larger pieces.
_PIECES = 1 << 12


class Update:
    """Runs update.onnx over all segments.

    On the CPU four things make it several times faster:

    1. The segments are cut into pieces that fit the cache.
    2. The pieces are shared out to threads, so that no node waits for another thread.
    3. A window that is not applied does not run at all, so that the graph needs no selections.
    4. Where the runtime can add a scaled tensor in one pass, it does.

    Args:
        model: The graph.
        ports: What the manifest says about it.
        place: Where it runs.
        threads: How many pieces are worked on at a time on the CPU; 0 for one per processor.
    """

    def __init__(self, model: ir.Model, ports: GraphPorts, place: Place, threads: int = 0) -> None:
        arenas = place.arenas
        self._ok = None
        self._pieces: list[Piece]
        self._threads = 1
        if arenas.device == "cpu":
            self._ok = next((place.results.view(port) for port in ports.inputs if port.ref == "ok"), None)
            if self._ok is not None:
                model = model.clone()
                AssumePass("ok", True)(model)
            place = dataclasses.replace(place, config=dataclasses.replace(place.config.on_cpu(), threads=1))
            model = lower_update(model, place.config)
            elements = arenas.manifest.arena("master").elements
            chunk = max(_CHUNK, -(-elements // _PIECES // _CHUNK) * _CHUNK)
            self._pieces = arenas.pieces(chunk)
            # Fewer elements than a chunk are done before another thread has woken.
            self._threads = max(min(threads or processors(), len(self._pieces), elements // chunk), 1)
        else:
            self._pieces = arenas.pieces(None)
        self._program = Program(model, ports, place)
        self.refusals = self._program.refusals

    def run(self) -> None:
        """Update every parameter, if the window is to be applied."""
        if self._ok is not None and not self._ok.buffer.host[0]:
            return
        others = [self._pool.submit(self._share, index) for index in range(1, self._threads)]
        self._share(0)
        for other in others:
            other.result()
        self._program.turn()

    def _share(self, index: int) -> None:
        for piece in self._pieces[index :: self._threads]:
            self._program.run(piece=piece)

    @functools.cached_property
    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(self._threads - 1, "onnxamp-update")
