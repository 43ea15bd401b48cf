"""Memory that sessions read and write in place: flat buffers on one device and typed views into them.

A view is a pointer with a shape and an ONNX element type. It is bound as it is, so that nothing is copied and 16-bit
types need no counterpart in numpy. Every byte that does cross between such memory and the host goes through
`Buffer.read` or `Buffer.write`, which count it: tests use the counter to show that a training step copies nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx

from onnxamp.errors import InternalError, RuntimeMissingError
from onnxamp.ort import cuda
from onnxamp.ort.providers import runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bytes of a buffer that small tensors share, and of copies that need no alignment.
_SMALL = 1 << 14
BFLOAT16 = int(onnx.TensorProto.BFLOAT16)
ALIGNMENT = 64
"""Bytes: a cache line, and more than any vector instruction wants."""


@dataclasses.dataclass
class Transfers:
    """How often, and how many bytes of, session memory were copied from or to the host.

    Attributes:
        reads: Copies to the host.
        writes: Copies from the host.
        bytes: Their bytes together.
    """

    reads: int = 0
    writes: int = 0
    bytes: int = 0


transfers = Transfers()


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` of zeroed host memory that starts at a multiple of `ALIGNMENT`."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


@functools.cache
def numpy_type(element_type: int) -> np.dtype[Any]:
    """The numpy type of an ONNX element type; bf16 comes from ml_dtypes."""
    dtype: np.dtype[Any] = (
        np.dtype(ml_dtypes.bfloat16) if element_type == BFLOAT16 else onnx.helper.tensor_dtype_to_np_dtype(element_type)
    )
    return dtype


def element_type(dtype: np.dtype[Any]) -> int:
    """The ONNX element type of a numpy type.

    Raises:
        InternalError: ONNX has no such tensors.
    """
    if dtype == np.dtype(ml_dtypes.bfloat16):
        return BFLOAT16
    try:
        return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
    except (KeyError, ValueError) as problem:
        raise InternalError(f"ONNX has no tensors of the numpy type {dtype}.") from problem


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor inside a buffer, ready to be bound.

    Attributes:
        buffer: The memory, kept alive by this reference.
        offset: Bytes from the start of the buffer.
        shape: The shape.
        element_type: The ONNX element type.
    """

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    element_type: int

    @property
    def pointer(self) -> int:
        """The address of the first element."""
        return self.buffer.pointer + self.offset

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * numpy_type(self.element_type).itemsize

    def read(self) -> NDArray[Any]:
        """A copy of the values on the host."""
        dtype = numpy_type(self.element_type)
        return self.buffer.read(self.offset, self.nbytes).view(dtype).reshape(self.shape)

    def write(self, values: NDArray[Any]) -> None:
        """Set the values.

        Raises:
            InternalError: `values` has another shape or type.
        """
        if values.shape != self.shape or values.dtype != numpy_type(self.element_type):
            raise InternalError(
                f"A view of {numpy_type(self.element_type)}{list(self.shape)} cannot take "
                f"{values.dtype}{list(values.shape)}."
            )
        self.buffer.write(self.offset, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


class Buffer:
    """Zeroed flat memory on one device.

    Args:
        nbytes: The size.
        device: What ONNX Runtime calls the device: ``cpu``, ``cuda``...
        device_id: Which of them.

    Raises:
        RuntimeMissingError: The memory cannot be had.
    """

    def __init__(self, nbytes: int, device: str = "cpu", device_id: int = 0) -> None:
        self.nbytes = nbytes
        self.device = device
        self.device_id = device_id
        self._host: NDArray[np.uint8] | None = None
        self._remote: Any = None
        try:
            if device == "cpu":
                self._host = aligned(nbytes)
                self.pointer: int = self._host.ctypes.data
            else:
                # Allocators of devices align to 256 bytes, and a fresh block holds what its last owner left.
                zeros = np.zeros(max(nbytes, 1), np.uint8)
                self._remote = runtime().OrtValue.ortvalue_from_numpy(zeros, device, device_id)
                self.pointer = self._remote.data_ptr()
        except (MemoryError, RuntimeError) as problem:
            raise RuntimeMissingError(
                f"No {nbytes / 2**20:.0f} MiB of memory on {device} for the training state; "
                "use a smaller model, fewer trainable parameters or another optimizer."
            ) from problem

    def view(self, offset: int, shape: tuple[int, ...], element_type: int) -> View:
        """A tensor at `offset` bytes.

        Raises:
            InternalError: It does not lie inside the buffer.
        """
        view = View(self, offset, tuple(shape), element_type)
        if offset < 0 or offset + view.nbytes > self.nbytes:
            raise InternalError(f"A view of {view.nbytes} bytes at {offset} leaves a buffer of {self.nbytes} bytes.")
        return view

    @property
    def host(self) -> NDArray[np.uint8]:
        """The memory itself, without a copy; only on the CPU.

        Raises:
            InternalError: The memory is on another device.
        """
        if self._host is None:
            raise InternalError(f"Memory on {self.device} has no address on the host.")
        return self._host

    @property
    def remote(self) -> Any:
        """The `OrtValue` of bytes that holds the memory; only on another device than the CPU."""
        return self._remote

    def read(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """A copy of a range of bytes on the host (the rest of the buffer by default)."""
        stop = self.nbytes if nbytes is None else offset + nbytes
        transfers.reads += 1
        transfers.bytes += stop - offset
        copy: NDArray[np.uint8] = (
            np.empty(stop - offset, np.uint8) if stop - offset <= _SMALL else aligned(stop - offset)
        )
        if self.device == "cuda":
            cuda.driver().read(self.pointer + offset, copy)
            return copy
        source = self._host if self._host is not None else self._remote.numpy()
        copy[:] = source[offset:stop]
        return copy

    def write(self, offset: int, values: NDArray[np.uint8]) -> None:
        """Copy bytes from the host into the buffer."""
        transfers.writes += 1
        transfers.bytes += values.nbytes
        if self.device == "cuda":
            cuda.driver().write(self.pointer + offset, np.ascontiguousarray(values))
            return
        if self._host is not None:
            self._host[offset : offset + values.nbytes] = values
            return
        whole = values
        if values.nbytes != self.nbytes:
            whole = self._remote.numpy()[: self.nbytes].copy()
            whole[offset : offset + values.nbytes] = values
        self._remote.update_inplace(np.ascontiguousarray(whole))


class Slots:
    """Small zeroed tensors on one device, many to a buffer: none is handed out twice, and a buffer lives as long as one of them.

    Args:
        device: What ONNX Runtime calls the device.
        device_id: Which of them.
    """

    def __init__(self, device: str = "cpu", device_id: int = 0) -> None:
        self._device = (device, device_id)
        self._buffer: Buffer | None = None
        self._next = 0

    def take(self, shape: tuple[int, ...], element_type: int) -> View:
        """A tensor that nobody else has."""
        nbytes = max(math.prod(shape), 1) * numpy_type(element_type).itemsize
        if self._buffer is None or self._next + nbytes > self._buffer.nbytes:
            self._buffer, self._next = Buffer(max(nbytes, _SMALL), *self._device), 0
        view = self._buffer.view(self._next, shape, element_type)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return view
