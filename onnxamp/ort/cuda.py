"""What training on CUDA asks of the driver itself: one stream for all sessions, copies of ranges, pinned memory, and facts.

Everything goes through `libcuda`, which every NVIDIA driver installs and whose interface is stable; the primary context is the
one that ONNX Runtime uses. ONNX Runtime gives each session a stream of its own and waits for the device after each run. Here
all sessions of a trainer get the same stream, so that the device keeps their order and the host need not wait.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxamp.errors import RuntimeMissingError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUdevice_attribute.
_MAJOR, _MINOR = 75, 76


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device as the driver sees it.

    Attributes:
        name: Its name.
        capability: Compute capability, such as (8, 6).
        memory: Bytes of its memory.
    """

    name: str
    capability: tuple[int, int]
    memory: int


class Driver:
    """The CUDA driver.

    Args:
        library: What answers its calls; `libcuda` by default.

    Raises:
        RuntimeMissingError: There is no driver, or no device.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(_LIBRARY)
        except OSError as problem:
            raise RuntimeMissingError("No NVIDIA driver is installed here (libcuda is missing).") from problem
        self.call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        # Pairs of streams that no trainer has now, by device. A session may outlive the trainer and still know its stream, so
        # streams are used again and never destroyed.
        self.idle: dict[int, list[tuple[int, int]]] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeMissingError: It fails.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeMissingError(f"The CUDA driver failed in {name} with code {code}.")

    @property
    def version(self) -> str:
        """The newest CUDA that the driver runs, such as ``13.0``."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def gpus(self) -> list[Gpu]:
        """The devices of this process."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> Gpu:
        device, size = ctypes.c_int(), ctypes.c_size_t()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        numbers = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
            self.call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        return Gpu(name.value.decode(), (numbers[0].value, numbers[1].value), size.value)

    def enter(self, device_id: int) -> None:
        """Make the primary context of a device that of this thread."""
        if device_id not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), device_id)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        self.call("cuCtxSetCurrent", self._contexts[device_id])

    def memory(self) -> tuple[int, int]:
        """Free and all bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def read(self, pointer: int, values: NDArray[np.uint8]) -> None:
        """Fill `values` from device memory; waits for what was put on streams before."""
        self.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_uint64(pointer),
            ctypes.c_size_t(values.nbytes),
        )

    def write(self, pointer: int, values: NDArray[np.uint8]) -> None:
        """Copy `values` to device memory; waits for what was put on streams before."""
        self.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(pointer),
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_size_t(values.nbytes),
        )


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        RuntimeMissingError: There is none.
    """
    return Driver()


class Stream:
    """A stream on which all sessions of a trainer run, and a second one that brings batches while they do.

    Args:
        device_id: The device.
        cuda: The driver.

    Attributes:
        pointer: What the provider option ``user_compute_stream`` takes.
        device: What ONNX Runtime calls the device.
        device_id: Which of them.
    """

    device = "cuda"

    def __init__(self, device_id: int = 0, cuda: Driver | None = None) -> None:
        self.cuda = cuda or driver()
        self.device_id = device_id
        self.cuda.enter(device_id)
        idle = self.cuda.idle.setdefault(device_id, [])
        # The first waits for the legacy default stream and it for the first: copies of `Driver.read` and `write` are in order.
        pair = idle.pop() if idle else (self.new("cuStreamCreate"), self.new("cuStreamCreate", 1))
        self.pointer, self.copies = pair
        weakref.finalize(self, idle.append, pair).atexit = False

    def new(self, function: str, flags: int = 0) -> int:
        """The handle that a function of the driver makes."""
        handle = ctypes.c_void_p()
        self.cuda.call(function, ctypes.byref(handle), flags)
        return int(handle.value or 0)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked for."""
        self.cuda.call("cuStreamSynchronize", ctypes.c_void_p(self.pointer))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that the device reads by itself; whoever takes it gives it back with `cuMemFreeHost`."""
        pointer = ctypes.c_void_p()
        self.cuda.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)), 0)
        address = int(pointer.value or 0)
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(nbytes, 1)).from_address(address))


def expectation(capability: tuple[int, int], dtype: str) -> str | None:
    """What to expect of a 16-bit type on a device of this compute capability, if it is less than on others.

    fp16 has matrix units from 7.0 on, bf16 from 8.0 on; below, ONNX Runtime's kernels convert or compute at the speed of FP32.
    """
    needed = {"fp16": (7, 0), "bf16": (8, 0)}[dtype]
    if capability >= needed:
        return None
    have, want = (".".join(map(str, version)) for version in (capability, needed))
    what = "no matrix units for fp16" if dtype == "fp16" else "no bf16 units"
    other = "train at O0, or to save memory only" if dtype == "fp16" else "use --dtype fp16"
    return f"compute capability {have} has {what} (they begin at {want}): expect no gain in speed from {dtype}; {other}"
