"""A session whose inputs and outputs are bound once to memory and then run as often as wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from onnxamp.errors import InternalError
from onnxamp.ort.cuda import Stream
from onnxamp.ort.dlpack import Shared
from onnxamp.ort.pinned import Slot
from onnxamp.ort.providers import failures, runtime
from onnxamp.ort.session import run_error, to_numpy
from onnxamp.ort.values import BFLOAT16, Buffer, View, element_type, numpy_type

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Binding:
    """One way to run a session: where each input comes from and where each output goes.

    Views are bound by pointer and stay bound: a run copies none of them. Batches are fed by name before a run. On the
    CPU their memory is read where it lies. With a `Stream` they travel through pinned memory while the device computes, and a
    run that fetches nothing returns before it is done. On other devices they are copied in the run.

    Args:
        session: An `onnxruntime.InferenceSession`.
        stream: The stream that the session was opened on (CUDA), or None.
    """

    def __init__(self, session: Any, stream: Stream | None = None) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._stream = stream
        self._slots: dict[str, list[Slot]] = {}
        self._fed: list[Slot] = []
        self._unwaited = None
        if stream is not None:
            self._unwaited = runtime().RunOptions()
            self._unwaited.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # A bound pointer does not keep its memory alive.
        self._alive: dict[tuple[str, str], object] = {}
        self._order: dict[str, bool] = {}  # outputs in the order of their first binding; True if the runtime allocates

    def input(self, name: str, view: View) -> None:
        """Read the input `name` from `view` in every run from now on."""
        buffer = view.buffer
        if _needs_dlpack(view):
            shared = Shared(view)
            self._binding._iobinding.bind_ortvalue_input(name, shared.value)
            self._alive["input", name] = shared
            return
        kind = _bound_type(view.element_type)
        self._binding.bind_input(name, buffer.device, buffer.device_id, kind, view.shape, view.pointer)
        self._alive["input", name] = buffer

    def output(self, name: str, view: View) -> None:
        """Write the output `name` to `view` in every run from now on."""
        buffer = view.buffer
        self._order[name] = False
        if _needs_dlpack(view):
            shared = Shared(view)
            self._binding._iobinding.bind_ortvalue_output(name, shared.value)
            self._alive["output", name] = shared
            return
        kind = _bound_type(view.element_type)
        self._binding.bind_output(name, buffer.device, buffer.device_id, kind, view.shape, view.pointer)
        self._alive["output", name] = buffer

    def feed(self, name: str, values: NDArray[Any]) -> None:
        """Read the input `name` from `values`, an array on the host, from now on.

        Raises:
            InternalError: `values` is not contiguous: the runtime would read something else.
        """
        if not values.flags.c_contiguous:
            raise InternalError(f"The input {name!r} is not contiguous in memory.")
        if self._stream is not None:
            self._bring(self._stream, name, values)
            return
        if values.dtype.kind == "V":  # bf16 of ml_dtypes: the runtime only knows its bits
            raw = values.view(np.uint16)
            value = runtime().OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element_type(values.dtype))
            self._binding.bind_ortvalue_input(name, value)
            self._alive["input", name] = (values, value)
        else:
            self._binding.bind_cpu_input(name, values)
            self._alive["input", name] = values

    def fetch(self, name: str) -> None:
        """Let the runtime allocate the output `name` on the host, anew in every run: its shape depends on the batch."""
        self._order[name] = True
        self._binding.bind_output(name, "cpu")  # now, so that the runtime's order of outputs is this one

    def run(self) -> None:
        """Run the session once.

        Raises:
            DataError: A node fails on these values.
            UnsupportedError: A node has no kernel for the types that arrive.
            MemoryError: There is not enough for it, on the host or the device.
        """
        for name, fetched in self._order.items():
            if fetched:  # what a run allocated stays bound, in the shape of that run
                self._binding.bind_output(name, "cpu")
        options = None if any(self._order.values()) else self._unwaited  # what is fetched must have arrived
        try:
            self._session.run_with_iobinding(self._binding, options)
        except failures() as problem:
            raise run_error(problem) from problem
        finally:  # nodes in front of one that failed may still read
            for slot in self._fed:
                slot.release()
            self._fed.clear()

    def _bring(self, stream: Stream, name: str, values: NDArray[Any]) -> None:
        """Two slots take turns, so that one is filled while the other is read."""
        raw = values.reshape(-1).view(np.uint8)
        slots = self._slots.setdefault(name, [])
        slot = slots.pop(0) if len(slots) > 1 else None
        if slot is None or slot.buffer.nbytes < raw.nbytes:
            slot = Slot(stream, Buffer(max(raw.nbytes, 1), stream.device, stream.device_id))
        slots.append(slot)
        slot.bring(raw)
        self._fed.append(slot)
        self.input(name, slot.buffer.view(0, values.shape, element_type(values.dtype)))

    def fetched(self) -> dict[str, Any]:
        """The outputs of the last run that were to be fetched, by name."""
        values = dict(zip(self._order, self._binding.get_outputs(), strict=True))
        return {name: to_numpy(values[name]) for name, fetched in self._order.items() if fetched}


def _needs_dlpack(view: View) -> bool:
    """Whether `bind_input` has no name for the type: before version 1.20 it knows those of numpy only."""
    return view.element_type == BFLOAT16 and view.buffer.device == "cpu"


def _bound_type(element_type: int) -> Any:
    return element_type if element_type == BFLOAT16 else numpy_type(element_type).type
