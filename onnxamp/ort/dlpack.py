"""Views into flat memory as `OrtValue`s, without a copy and without PyTorch: through DLPack, which ONNX Runtime takes.

A DLPack capsule is a pointer with a device, a type and a shape. The runtime calls the capsule's deleter when its value goes, which
may be after Python has gone, so that it must be a C function; here it is one that does nothing, and the struct and the memory
live as long as the wrapper that holds the value.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

import onnx

from onnxamp.errors import RuntimeMissingError
from onnxamp.ort.providers import runtime

if TYPE_CHECKING:
    from onnxamp.ort.values import View

# dlpack.h: DLDeviceType, and DLDataTypeCode with the bits of each ONNX element type that state or data can have.
_DEVICES = {"cpu": 1, "cuda": 2}
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_TYPES: dict[int, tuple[int, int]] = {
    onnx.TensorProto.FLOAT: (_FLOAT, 32),
    onnx.TensorProto.DOUBLE: (_FLOAT, 64),
    onnx.TensorProto.FLOAT16: (_FLOAT, 16),
    onnx.TensorProto.BFLOAT16: (_BFLOAT, 16),
    onnx.TensorProto.INT8: (_INT, 8),
    onnx.TensorProto.INT32: (_INT, 32),
    onnx.TensorProto.INT64: (_INT, 64),
    onnx.TensorProto.UINT8: (_UINT, 8),
    onnx.TensorProto.BOOL: (_BOOL, 8),
}


class _Tensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_NAME = b"dltensor"


@functools.cache
def _nothing() -> int | None:
    """The address of a function of C's standard library: the absolute value of the pointer, of which nobody takes notice."""
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    return ctypes.cast(library.labs, ctypes.c_void_p).value


class Shared:
    """An `OrtValue` on the memory of a view.

    Args:
        view: The memory; on the CPU or a CUDA device.

    Attributes:
        value: The C++ `OrtValue`, as `onnxruntime.IOBinding` takes it; valid as long as this object lives.

    Raises:
        RuntimeMissingError: The installed runtime takes no DLPack.
    """

    def __init__(self, view: View) -> None:
        from onnxruntime.capi import _pybind_state as binding

        if not hasattr(binding.OrtValue, "from_dlpack"):
            raise RuntimeMissingError(
                f"ONNX Runtime {runtime().__version__} shares no memory through DLPack: use 1.23 or newer."
            )
        code, bits = _TYPES[view.element_type]
        shape = (ctypes.c_int64 * max(len(view.shape), 1))(*view.shape)
        tensor = _Tensor(
            view.pointer, _DEVICES[view.buffer.device], view.buffer.device_id, len(view.shape), code, bits, 1, shape
        )
        tensor.deleter = _nothing()
        self._alive = (view.buffer, shape, tensor)
        capsule = _capsule(ctypes.addressof(tensor), _NAME, None)
        take = binding.OrtValue.from_dlpack
        try:
            self.value: Any = take(capsule, code == _BOOL)
        except TypeError:  # version 1.26 and newer see a bool by its type
            self.value = take(capsule)
