"""Data-parallel training through `torch.distributed`: gloo on the CPU, NCCL on CUDA, started by `torchrun`."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxamp.errors import RuntimeMissingError
from onnxamp.ort.values import View


class TorchCollective:
    """The default process group of `torch.distributed`, joined if that has not been done yet.

    Args:
        backend: ``gloo`` or ``nccl``; by default what `torch.distributed` chooses.

    Raises:
        RuntimeMissingError: PyTorch is not installed, or the process was not started by `torchrun` or its like.
    """

    def __init__(self, backend: str | None = None) -> None:
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as problem:
            raise RuntimeMissingError(
                "Training in several processes needs PyTorch: `pip install 'onnxamp[distributed]'`."
            ) from problem
        self._torch: Any = torch
        self._distributed: Any = distributed
        if not distributed.is_initialized():
            try:
                distributed.init_process_group(backend)
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

    def all_reduce(self, memory: View, *, mean: bool = False) -> None:
        """Replace `memory` (float32) on every rank by its sum, or mean, over ranks, in place."""
        tensor = self._tensor(memory)
        self._distributed.all_reduce(tensor)
        if mean:
            tensor /= self.world_size
        self._finish(memory)

    def broadcast(self, memory: View) -> None:
        """Replace `memory` on every rank by that of rank 0, in place."""
        self._distributed.broadcast(self._tensor(memory), 0)
        self._finish(memory)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._distributed.barrier()

    def _tensor(self, memory: View) -> Any:
        """A torch tensor on the same memory."""
        start, stop = memory.offset, memory.offset + memory.nbytes
        if memory.buffer.device == "cpu":
            return self._torch.from_numpy(memory.buffer.host[start:stop].view(np.float32))
        return self._torch.from_dlpack(memory.buffer.remote)[start:stop].view(self._torch.float32)

    def _finish(self, memory: View) -> None:
        # The runtime works on a stream of its own and does not wait for that of the collective.
        if memory.buffer.device != "cpu":
            self._torch.cuda.current_stream().synchronize()


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:120]
