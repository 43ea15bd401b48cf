"""What data-parallel training needs of a communication library, the case of one process, and how rows are dealt out.

All ranks hold the same parameters. The gradient arena, with the sums of losses and weights in its tail, is summed over
ranks once per window; everything after that is computed alike on every rank.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxamp.errors import UsageError
from onnxamp.ort.values import Buffer, View
from onnxamp.trainer.arenas import FLOAT, Arenas

# Bytes of a text that reach the other ranks: a sentence.
_TEXT_BYTES = 512


class Collective(Protocol):
    """A group of processes that train one model.

    Its operations raise `RankLostError` when another process has ended or does not answer.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def local_rank(self) -> int:
        """This process's number on its machine: which device it takes."""

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine, which share its processors and memory."""

    def all_reduce(self, memory: View, means: int = 0) -> None:
        """Replace `memory` (float32, flat) on every rank by its sum over ranks; its last `means` elements by their mean."""

    def broadcast(self, memory: View) -> None:
        """Replace `memory` (float32) on every rank by that of rank 0, in place."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class SingleProcess:
    """One process: every collective operation is already done."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1

    def all_reduce(self, memory: View, means: int = 0) -> None:
        """A sum over one rank."""

    def broadcast(self, memory: View) -> None:
        """Rank 0 is the only one."""

    def barrier(self) -> None:
        """Nobody to wait for."""


def share_state(collective: Collective, arenas: Arenas) -> None:
    """Give every rank the state of rank 0."""
    for block in dict.fromkeys(arenas.blocks.values()):
        for side in dict.fromkeys((block.side(), block.side(other=True))):
            collective.broadcast(side.view(0, (side.nbytes // 4,), FLOAT))


def of_rank_0(collective: Collective, values: NDArray[np.float64], arenas: Arenas) -> NDArray[np.float64]:
    """The values of rank 0, so that all ranks decide alike by them; they travel by memory of the device of `arenas`."""
    if collective.world_size == 1:
        return values
    shared = Buffer(values.nbytes, arenas.device, arenas.device_id).view(0, (2 * values.size,), FLOAT)
    shared.write(values.view(np.float32))
    collective.broadcast(shared)
    return shared.read().view(np.float64)


def texts(collective: Collective, text: str, arenas: Arenas) -> tuple[str, ...]:
    """The texts of all ranks, by rank, each cut to a sentence's length (and ending in "…" then); all ranks call this together.

    The only exchange that all libraries have is a sum of floats: a byte goes as one, in the rank's own row.
    """
    bytes_ = np.zeros((collective.world_size, _TEXT_BYTES), np.float32)
    own = text.encode()
    if len(own) > _TEXT_BYTES:
        own = own[: _TEXT_BYTES - len("…".encode())].decode(errors="ignore").encode() + "…".encode()
    bytes_[collective.rank, : len(own)] = np.frombuffer(own, np.uint8)
    shared = Buffer(bytes_.nbytes, arenas.device, arenas.device_id).view(0, (bytes_.size,), FLOAT)
    shared.write(bytes_.reshape(-1))
    collective.all_reduce(shared)
    rows = shared.read().reshape(bytes_.shape).astype(np.uint8)
    return tuple(row[row > 0].tobytes().decode(errors="ignore") for row in rows)


def divided(window: int, ranks: int, largest: int, done: int = 0, what: str = "rows") -> tuple[int, int]:
    """Rows of a micro-batch of one rank, and micro-batches in a window, for windows of `window` rows in all.

    A run keeps its windows, and with them its results, when the number of processes changes.

    Args:
        window: Rows of a window over all ranks.
        ranks: The number of ranks.
        largest: The most rows that a micro-batch may have; as many as can be are taken.
        done: Rows of the window that is open, which must be whole micro-batches of all ranks too.
        what: What is counted, if not rows.

    Raises:
        UsageError: `window` or `done` is no multiple of `ranks`.
    """
    for size in range(min(largest, window // ranks), 0, -1):
        if window % (size * ranks) == 0 and done % (size * ranks) == 0:
            return size, window // (size * ranks)
    held = f"Windows of {window} {what}" if window % ranks else f"The {done} {what} of the window that is open"
    fitting = [n for n in range(1, max(2 * ranks, 8) + 1) if window % n == 0 and done % n == 0]
    raise UsageError(
        f"{held} cannot be shared evenly by {ranks} processes: take {', '.join(map(str, fitting))}"
        " (`torchrun --nproc-per-node N`)."
    )
