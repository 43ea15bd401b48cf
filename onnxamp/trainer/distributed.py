"""Data-parallel training through `torch.distributed`: gloo on the CPU, NCCL on CUDA, started by `torchrun`."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxamp.errors import RankLostError, RuntimeMissingError, one_line
from onnxamp.ort.values import View
from onnxamp.trainer.device import require_gpu

TIMEOUT = 600.0
"""Seconds that a rank may be silent; that a process has ended is noticed at once."""
# A rank that ends leaves its last words; those that notice first give it so many seconds to do so.
_LAST_WORDS_SECONDS = 2.0
_LAST_WORDS = "onnxamp/last_words"
# How gloo and NCCL speak of a connection that is gone, and of what is this rank's own fault though it shows in an exchange.
_UNREACHABLE = re.compile(r"connection|peer|pipe|socket|time[ds]? ?out|ncclRemoteError|ncclSystemError", re.IGNORECASE)
_OWN_FAULT = re.compile(r"out of memory|CUDA error|ncclInvalid|ncclUnhandledCudaError", re.IGNORECASE)


def local_rank() -> int:
    """This process's number on its machine, as the launcher has given it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def launched() -> bool:
    """Whether this process is one of several that `torchrun` or its like has started."""
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR")) and os.environ.get("WORLD_SIZE", "1") != "1"


class TorchCollective:
    """The default process group of `torch.distributed`, joined if that has not been done yet.

    Args:
        backend: ``gloo`` or ``nccl``; by default what `torch.distributed` chooses.
        timeout: Seconds that a rank may be silent before the others give up.

    Raises:
        RuntimeMissingError: PyTorch is not installed, the process was not started by `torchrun` or its like, or there is no GPU
            for it (``nccl``).
    """

    def __init__(self, backend: str | None = None, timeout: float = TIMEOUT) -> None:
        # A lost rank is to be an exception, not the end of the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as problem:
            raise RuntimeMissingError(
                "Training in several processes needs PyTorch: `pip install 'onnxamp[distributed]'`."
            ) from problem
        self._torch: Any = torch
        self._distributed: Any = distributed
        self._store: Any = None
        if not distributed.is_initialized():
            if backend == "nccl":
                require_gpu(self.local_rank)
            limit = datetime.timedelta(seconds=timeout)
            try:
                self._store, rank, size = next(distributed.rendezvous("env://", timeout=limit))
                if backend == "nccl":
                    torch.cuda.set_device(self.local_rank)
                distributed.init_process_group(backend, store=self._store, rank=rank, world_size=size, timeout=limit)
            except (ValueError, RuntimeError) as problem:
                raise RuntimeMissingError(
                    f"The processes cannot meet ({_line(problem)}): start the program with `torchrun --nproc-per-node N`."
                ) from problem

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return int(self._distributed.get_rank())

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self._distributed.get_world_size())

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return local_rank()

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def all_reduce(self, memory: View, means: int = 0) -> None:
        """Replace `memory` (float32, flat) on every rank by its sum over ranks; its last `means` elements by their mean."""
        tensor = self._tensor(memory)
        if means:
            tensor[-means:] /= self.world_size
        with self._together(memory):
            self._distributed.all_reduce(tensor)

    def broadcast(self, memory: View) -> None:
        """Replace `memory` (float32) on every rank by that of rank 0, in place."""
        tensor = self._tensor(memory)
        with self._together(memory):
            self._distributed.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self._together(None):
            self._distributed.barrier()

    def leave(self, reason: str = "") -> None:
        """Leave the group; the other ranks are told `reason` if they still wait for this one."""
        with contextlib.suppress(Exception):  # who was to hear it may have gone
            if reason and self._store is not None:
                self._store.set(_LAST_WORDS, f"rank {self.rank}: {reason}")
            self._distributed.destroy_process_group()

    @contextlib.contextmanager
    def _together(self, memory: View | None) -> Iterator[None]:
        """Around what all ranks do together: waits for the device, and says in one sentence that a rank is gone, or what failed."""
        try:
            yield
            # The runtime works on a stream of its own and does not wait for that of the collective.
            if memory is not None and memory.buffer.device == "cuda":
                self._torch.cuda.current_stream().synchronize()
        except RuntimeError as problem:
            if not self._unreachable(problem):
                raise RuntimeMissingError(
                    f"The exchange between the {self.world_size} processes failed on rank {self.rank} ({_line(problem)})."
                ) from problem
            said = self._last_words()
            why = f"it said: {said}" if said else _line(problem)
            raise RankLostError(
                f"One of the {self.world_size} processes has ended or does not answer ({why}), so rank {self.rank} stops too."
            ) from problem

    def _unreachable(self, problem: RuntimeError) -> bool:
        """Whether an exchange failed because another rank has ended or does not answer: gloo has no type of its own for that."""
        text = str(problem)
        communicates = isinstance(problem, self._distributed.DistError) or _UNREACHABLE.search(text) is not None
        return communicates and _OWN_FAULT.search(text) is None

    def _last_words(self) -> str:
        """What a rank said when it ended; nothing if it was killed."""
        until = time.monotonic() + _LAST_WORDS_SECONDS
        with contextlib.suppress(RuntimeError, OSError):  # the store ends with the process that holds it
            while self._store is not None and time.monotonic() < until:
                if self._store.check([_LAST_WORDS]):
                    return str(self._store.get(_LAST_WORDS).decode())
                time.sleep(0.1)
        return ""

    def _tensor(self, memory: View) -> Any:
        """A torch tensor on the same memory."""
        start, stop = memory.offset, memory.offset + memory.nbytes
        if memory.buffer.device == "cpu":
            return self._torch.from_numpy(memory.buffer.host[start:stop].view(np.float32))
        return self._torch.from_dlpack(memory.buffer.remote)[start:stop].view(self._torch.float32)


def _line(problem: Exception) -> str:
    """What PyTorch's message says first, without the place in its source, its advice and the pages of trace behind it."""
    first = str(problem).strip().partition("\n")[0].partition(". This is")[0]
    return one_line(re.sub(r"^\[\S+:\d+\] ", "", first), 160)
