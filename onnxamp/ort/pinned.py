"""Batches on their way to a CUDA device: pinned on the host, copied while the device computes."""

from __future__ import annotations

import contextlib
import ctypes
import weakref

import numpy as np
from numpy.typing import NDArray

from onnxamp.errors import RuntimeMissingError
from onnxamp.ort.cuda import Stream
from onnxamp.ort.values import Buffer


class Slot:
    """Memory for one input of one micro-step: pinned on the host, and its place on the device.

    When a slot is dropped, both are given back as soon as no micro-step reads them any more, which is waited for.

    Args:
        stream: The streams.
        buffer: The place on the device.
    """

    def __init__(self, stream: Stream, buffer: Buffer) -> None:
        self.buffer = buffer
        self._stream = stream
        self._host = stream.pinned(buffer.nbytes)
        self._arrived, self._used = stream.new("cuEventCreate", 2), stream.new("cuEventCreate", 2)  # 2: no timing
        held = (stream, self._host.ctypes.data, (self._used, self._arrived), buffer)
        weakref.finalize(self, _give_back, *held).atexit = False

    def bring(self, values: NDArray[np.uint8]) -> None:
        """Copy `values` to the device while it computes; what is run on the stream after this sees them.

        Waits only if the micro-step that last read this slot is still running.
        """
        call, copies = self._stream.cuda.call, ctypes.c_void_p(self._stream.copies)
        arrived = ctypes.c_void_p(self._arrived)
        call("cuEventSynchronize", ctypes.c_void_p(self._used))
        self._host[: values.nbytes] = values
        address = ctypes.c_void_p(self._host.ctypes.data)
        target = ctypes.c_uint64(self.buffer.pointer)
        call("cuMemcpyHtoDAsync_v2", target, address, ctypes.c_size_t(values.nbytes), copies)
        call("cuEventRecord", arrived, copies)
        call("cuStreamWaitEvent", ctypes.c_void_p(self._stream.pointer), arrived, 0)

    def release(self) -> None:
        """Say that what is on the stream now is the last to read the slot."""
        self._stream.cuda.call("cuEventRecord", ctypes.c_void_p(self._used), ctypes.c_void_p(self._stream.pointer))


def _give_back(stream: Stream, pinned: int, events: tuple[int, ...], buffer: Buffer) -> None:
    """Free what a slot had, once the device has passed `events`; `buffer` lives until then because it is named here."""
    call = stream.cuda.call
    with contextlib.suppress(RuntimeMissingError):  # a device that has failed has said so, and gives nothing back
        stream.cuda.enter(stream.device_id)  # whatever thread this runs on
        for event in events:
            call("cuEventSynchronize", ctypes.c_void_p(event))
            call("cuEventDestroy_v2", ctypes.c_void_p(event))
        call("cuMemFreeHost", ctypes.c_void_p(pinned))
