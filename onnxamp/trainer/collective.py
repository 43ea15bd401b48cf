"""What data-parallel training needs of a communication library, and the case of one process.

All ranks hold the same parameters. The gradient arena, with the sums of losses and weights in its tail, is summed over
ranks once per window; everything after that is computed alike on every rank.
"""

from __future__ import annotations

from typing import Protocol

from onnxamp.ort.values import View


class Collective(Protocol):
    """A group of processes that train one model."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def all_reduce(self, memory: View, *, mean: bool = False) -> None:
        """Replace `memory` (float32) on every rank by its sum, or mean, over ranks, in place."""

    def broadcast(self, memory: View) -> None:
        """Replace `memory` on every rank by that of rank 0, in place."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class SingleProcess:
    """One process: every collective operation is already done."""

    rank = 0
    world_size = 1

    def all_reduce(self, memory: View, *, mean: bool = False) -> None:
        """A sum over one rank."""

    def broadcast(self, memory: View) -> None:
        """Rank 0 is the only one."""

    def barrier(self) -> None:
        """Nobody to wait for."""
