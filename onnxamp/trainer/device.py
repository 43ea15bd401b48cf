"""Where a trainer computes: the provider that sessions really get, and the memory that it reads and writes."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.errors import RuntimeMissingError, UsageError
from onnxamp.model.units import all_values
from onnxamp.ort import cuda
from onnxamp.ort.cuda import Stream
from onnxamp.ort.providers import provider_list, short_name
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.passes.emulate import emulate
from onnxamp.training.bundle import Bundle
from onnxamp.training.manifest import Manifest

logger = logging.getLogger("onnxamp")

# Providers with memory of their own, as ONNX Runtime calls the device.
_MEMORY = {"cuda": "cuda", "cann": "cann", "rocm": "cuda", "migraphx": "cuda"}
_COMPUTES_LOW = frozenset({"cuda", "tensorrt", "tensorrt-rtx", "cann", "rocm", "migraphx"})


@dataclasses.dataclass(frozen=True)
class Device:
    """A provider with its memory.

    Attributes:
        provider: Its short name.
        memory: What ONNX Runtime calls the device that the state lies on.
        computes_low: It computes in 16 bits where a graph says so. Elsewhere the rounding of each node is made explicit.
        id: Which of the devices.
    """

    provider: str
    memory: str
    computes_low: bool
    id: int = 0

    def stream(self) -> Stream | None:
        """On CUDA the stream that all sessions of a trainer share."""
        return Stream(self.id) if self.provider == "cuda" else None

    def options(self, stream: Stream | None, others: Mapping[str, str] | None = None) -> dict[str, str]:
        """Provider options that put sessions on this device and on `stream`, and `others` beside them.

        Raises:
            UsageError: `others` has an option of these: the state lies on this device, and is in order on this stream only.
        """
        own = {} if self.memory == "cpu" else {"device_id": str(self.id)}
        if stream is not None:
            own["user_compute_stream"] = str(stream.pointer)
        if taken := sorted(own.keys() & (others or {}).keys()):
            raise UsageError(
                f"The provider option {taken[0]} is the trainer's own (it takes device {self.id}, that of its local rank): leave it "
                "out, and choose the devices that it sees with CUDA_VISIBLE_DEVICES or its like."
            )
        return {**own, **(others or {})}

    def graph(self, bundle: Bundle, name: str) -> ir.Model:
        """A graph of the bundle as this device is to run it."""
        graph = bundle.graphs[name]
        return self.rounding(graph) if name in ("grad", "eval") and not emulated(bundle.manifest) else graph

    def rounding(self, graph: ir.Model) -> ir.Model:
        """`graph`, with the rounding of its 16-bit values made explicit where the device does not compute in 16 bits.

        A model that came in 16 bits has such values at O0 too.
        """
        if self.computes_low or not any(value.dtype in LOW for value in all_values(graph.graph)):
            return graph
        return emulate(graph)

    def expectation(self, dtype: str) -> str | None:
        """What to expect of a 16-bit type here, if it is less than on other devices."""
        if self.provider != "cuda":
            return None
        gpu = cuda.driver().gpus()[self.id]
        text = cuda.expectation(gpu.capability, dtype)
        return text and f"{gpu.name}: {text}."


def emulated(manifest: Manifest) -> bool:
    """Whether the bundle's own graphs round each result, instead of computing in 16 bits."""
    return manifest.options.get("engine") == "ort-training"


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_threads(threads: int, processes: int = 1) -> int:
    """`threads`, but not more than there are processors, which is logged; 0 stays 0, or is a share of them if others train too.

    The runtime's threads spin while they wait: with more of them than processors, each waits for one that does not run, and a
    step may take minutes.

    Raises:
        UsageError: The number is negative.
    """
    if threads < 0:
        raise UsageError(f"threads must be at least 0, not {threads}.")
    if threads > (most := processors()):
        logger.warning(
            "%d threads were asked for and this process may use %d processors: it uses %d.", threads, most, most
        )
        return most
    return threads or (max(1, processors() // processes) if processes > 1 else 0)


def require_gpu(local_rank: int) -> None:
    """Ask for an NVIDIA GPU for each process of this machine.

    Raises:
        RuntimeMissingError: There are fewer, or there is no driver.
    """
    count = len(cuda.driver().gpus())
    if local_rank >= count:
        raise RuntimeMissingError(
            f"There is no GPU for local rank {local_rank}: this machine shows {count} to its processes, and each takes one; start "
            f"at most {count} on it (`torchrun --nproc-per-node {count}`)."
        )


def find_device(provider: str, local_rank: int = 0) -> Device:
    """The device that sessions asked for by `provider` run on; ``auto`` may have to fall back to the CPU.

    Args:
        provider: ``auto``, or a name.
        local_rank: This process's number on its machine: which device it takes.

    Raises:
        UsageError: No such provider exists.
        RuntimeMissingError: The installed runtime does not have it, or there is no GPU for this process.
    """
    name = short_name(provider_list(provider)[0])
    if provider == "auto" and name != "cpu":
        x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])) for name in "xy")
        graph = ir.Graph([x], [y], nodes=[ir.node("Neg", [x], outputs=[y])], opset_imports={"": 21}, name="probe")
        session = open_session(ir.Model(graph, ir_version=10), SessionConfig(provider))
        name = short_name(session.get_providers()[0])
    if name == "cuda":
        require_gpu(local_rank)
    memory = _MEMORY.get(name, "cpu")
    return Device(name, memory, name in _COMPUTES_LOW, local_rank if memory != "cpu" else 0)
