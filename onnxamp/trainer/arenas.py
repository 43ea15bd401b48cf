"""The state of a run in memory: one flat buffer per arena of the manifest, and views of what lies in them.

Arenas that are neighbours share a block: behind the gradients lie the window's sums and the running statistics, so that
ranks exchange all of it in one all-reduce. A block has one buffer as long as every graph that writes to it may do so in
place, else two that are used in turn: a graph reads one side and writes the other, then the sides change places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxamp.errors import InternalError, ModelError
from onnxamp.ort.cuda import Stream
from onnxamp.ort.values import ALIGNMENT, Buffer, View, element_type
from onnxamp.training.manifest import Arena, Manifest, Port, StateTensor

FLOAT = element_type(np.dtype(np.float32))
_STATISTICS = "statistics_work"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that the manifest calls `name`."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of the parameter arenas that one run of update.onnx changes.

    Attributes:
        segment: Index of the segment in the manifest.
        start: First element.
        stop: One past the last element.
        low_start: Where the same range begins in the low arena; None if it has no low copy.
    """

    segment: int
    start: int
    stop: int
    low_start: int | None


class Block:
    """Arenas that lie next to each other, in one buffer or in two that are used in turn."""

    def __init__(self, nbytes: int, device: str, device_id: int) -> None:
        self._sides = [Buffer(nbytes, device, device_id)]
        self.current = 0

    @property
    def nbytes(self) -> int:
        """Memory that the block holds, both sides together."""
        return sum(side.nbytes for side in self._sides)

    def double(self) -> None:
        """Have a second side, equal to the first."""
        if len(self._sides) == 1:
            first = self._sides[0]
            self._sides.append(Buffer(first.nbytes, first.device, first.device_id))
            self._sides[1].write(0, first.read())

    def side(self, other: bool = False) -> Buffer:
        """The buffer that holds the state, or the one that the next state is written to."""
        return self._sides[(self.current + other) % len(self._sides)]

    def turn(self) -> None:
        """The next state has been written: it is the state now."""
        self.current = (self.current + 1) % len(self._sides)

    def write(self, offset: int, values: NDArray[np.uint8]) -> None:
        """Copy bytes from the host to every side, so that what no graph ever writes is right on both."""
        for side in self._sides:
            side.write(offset, values)


class Arenas:
    """Every arena of a manifest, zeroed.

    Args:
        manifest: The bundle's manifest.
        device: What ONNX Runtime calls the device.
        device_id: Which of them.
        stream: The stream that all graphs run on (CUDA).
    """

    def __init__(
        self, manifest: Manifest, device: str = "cpu", device_id: int = 0, stream: Stream | None = None
    ) -> None:
        self.manifest = manifest
        self.stream = stream
        self.device = device
        self.device_id = device_id
        self._arenas = {arena.name: arena for arena in manifest.arenas}
        self._tensors = {tensor.key: tensor for tensor in manifest.tensors}
        self._segments = manifest.segments
        self._offsets: dict[str, int] = {}
        self.blocks: dict[str, Block] = {}
        for first in (arena for arena in manifest.arenas if arena.after is None and arena.name != _STATISTICS):
            chain, size = [first], 0
            while following := [arena for arena in manifest.arenas if arena.after == chain[-1].name]:
                chain.extend(following[:1])
            if first.name == "gradient" and manifest.has_arena(_STATISTICS):
                chain.append(manifest.arena(_STATISTICS))
            for arena in chain:
                self._offsets[arena.name] = size
                size += arena.elements * numpy_dtype(arena.dtype).itemsize
                if arena is not chain[-1] and size % ALIGNMENT:
                    raise ModelError(f"The arena {arena.name!r} ends off a multiple of {ALIGNMENT} bytes.")
            block = Block(max(size, ALIGNMENT), device, device_id)
            self.blocks.update((arena.name, block) for arena in chain)

    @property
    def nbytes(self) -> int:
        """Memory of all state."""
        return sum(block.nbytes for block in set(self.blocks.values()))

    def arena_of(self, port: Port) -> str:
        """The arena that a port of kind tensor, arena or slice refers to."""
        if port.kind == "tensor":
            return self._tensors[port.ref].arena
        return port.ref

    def view(self, port: Port, piece: Piece | None = None, *, other: bool = False) -> View | None:
        """The memory that a port of kind tensor, arena or slice means; None where a piece has no low copy.

        Args:
            port: The port.
            piece: The range that is being updated (kind slice).
            other: The side that is to be written, not the one that holds the state.
        """
        if port.kind == "tensor":
            tensor = self._tensors[port.ref]
            return self.range(tensor.arena, tensor.offset, tensor.shape, other=other)
        arena = self._arenas[port.ref]
        if port.kind == "arena":
            return self.range(arena.name, 0, (arena.elements,), other=other)
        if port.kind != "slice" or piece is None:
            raise InternalError(f"The port {port.name!r} of kind {port.kind!r} is no place in the state.")
        start: int | None = piece.low_start if arena.name == "low" else piece.start
        if start is None:
            return None
        return self.range(arena.name, start, (piece.stop - piece.start,), other=other)

    def range(self, arena: str, offset: int, shape: tuple[int, ...], *, other: bool = False) -> View:
        """A view of elements of an arena, from `offset` elements on."""
        dtype = numpy_dtype(self._arenas[arena].dtype)
        start = self._offsets[arena] + offset * dtype.itemsize
        return self.blocks[arena].side(other).view(start, shape, element_type(dtype))

    def reduced(self) -> tuple[View, int]:
        """What ranks exchange at the end of a window, as one flat tensor, and how many elements at its end are means.

        These are the gradients and the window's sums, to be added, and the running statistics, to be averaged.
        """
        names = [name for name in self._arenas if self.blocks[name] is self.blocks["gradient"]]
        if any(self._arenas[name].dtype != "float32" for name in names):
            raise InternalError("The gradients and the window's sums are not all float32.")
        size = sum(self._arenas[name].elements for name in names)
        means = self._arenas[_STATISTICS].elements if _STATISTICS in names else 0
        return self.blocks["gradient"].side().view(0, (size,), FLOAT), means

    def tensor(self, key: str) -> NDArray[Any]:
        """A copy of one state tensor."""
        tensor = self._tensors[key]
        return self.range(tensor.arena, tensor.offset, tensor.shape).read()

    def values(self, arena: str) -> dict[str, NDArray[Any]]:
        """Copies of all tensors of an arena by name, with one transfer from the device; none if there is no such arena."""
        if arena not in self._arenas:
            return {}
        whole = self.range(arena, 0, (self._arenas[arena].elements,)).read()
        return {
            tensor.name: whole[tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape).copy()
            for tensor in self.manifest.tensors_in(arena)
        }

    def write(self, key: str, values: NDArray[Any]) -> None:
        """Set one state tensor.

        Raises:
            ModelError: `values` has another shape or type than the manifest says.
        """
        tensor = self._tensors[key]
        dtype = numpy_dtype(self._arenas[tensor.arena].dtype)
        if values.shape != tensor.shape or values.dtype != dtype:
            raise ModelError(
                f"The state tensor {key!r} should be {dtype}{list(tensor.shape)}, not {values.dtype}{list(values.shape)}."
            )
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.blocks[tensor.arena].write(self._offsets[tensor.arena] + tensor.offset * dtype.itemsize, raw)

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Set all saved tensors; those that `state` lacks become zero, low copies are rounded from the masters.

        Raises:
            ModelError: `state` has a tensor that the manifest lacks, or one of another shape or type.
        """
        unknown = sorted(set(state) - set(self._tensors))
        if unknown:
            raise ModelError(
                f"The state holds {unknown[0]!r}, which the bundle does not know: it belongs to another one."
            )
        whole: dict[str, NDArray[Any]] = {
            arena.name: np.zeros(arena.elements, numpy_dtype(arena.dtype)) for arena in self.manifest.arenas
        }
        for key, values in state.items():
            tensor = self._tensors[key]
            target = whole[tensor.arena]
            if tuple(values.shape) != tensor.shape or values.dtype != target.dtype:
                raise ModelError(
                    f"The state tensor {key!r} should be {target.dtype}{list(tensor.shape)}, "
                    f"not {values.dtype}{list(values.shape)}."
                )
            target[tensor.offset : tensor.offset + tensor.size] = values.reshape(-1)
        if "low" in whole:
            whole["low"] = self.rounded(whole["master"])
        for name, values in whole.items():
            self.blocks[name].write(self._offsets[name], values.view(np.uint8))

    def rounded(self, master: NDArray[np.float32]) -> NDArray[Any]:
        """The low arena that belongs to a master arena: each value rounded to nearest even."""
        arena = self._arenas["low"]
        low = np.zeros(arena.elements, numpy_dtype(arena.dtype))
        with np.errstate(over="ignore"):
            for segment in self._segments:
                if segment.low_start is not None:
                    values = master[segment.start : segment.stop]
                    low[segment.low_start : segment.low_start + values.size] = values.astype(low.dtype)
        return low

    def pieces(self, chunk: int | None) -> list[Piece]:
        """The segments, cut into pieces of at most `chunk` elements (whole if None)."""
        pieces = []
        for index, segment in enumerate(self._segments):
            step = chunk or max(segment.stop - segment.start, 1)
            for start in range(segment.start, segment.stop, step):
                low = None if segment.low_start is None else segment.low_start + start - segment.start
                pieces.append(Piece(index, start, min(start + step, segment.stop), low))
        return pieces

    def saved(self) -> Iterator[tuple[Arena, NDArray[np.uint8], tuple[StateTensor, ...]]]:
        """The arenas of a checkpoint: each with its bytes on the host and the tensors in it, by offset."""
        for arena in self.manifest.arenas:
            if not arena.saved:
                continue
            start = self._offsets[arena.name]
            nbytes = arena.elements * numpy_dtype(arena.dtype).itemsize
            side = self.blocks[arena.name].side()
            raw = side.host[start : start + nbytes] if self.device == "cpu" else side.read(start, nbytes)
            yield arena, raw, self.manifest.tensors_in(arena.name)
