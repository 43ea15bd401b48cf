"""The one table of the float types that onnxamp decides between."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxamp.errors import UsageError


@dataclasses.dataclass(frozen=True)
class FloatType:
    """A float type with the limits that decide what fits into it.

    Attributes:
        name: The short name used in commands, file names and metadata: ``fp32``, ``fp16``, ``bf16``.
        ir: The type in the graph.
        numpy: The type in memory (bf16 comes from ml_dtypes).
        bits: Width in bits.
        max: Largest finite value.
        tiny: Smallest positive normal value.
        smallest: Smallest positive subnormal value.
        eps: Distance from 1 to the next value.
    """

    name: str
    ir: ir.DataType
    numpy: np.dtype
    bits: int
    max: float
    tiny: float
    smallest: float
    eps: float

    @property
    def integers(self) -> int:
        """Largest n such that every integer in [-n, n] is representable."""
        return int(2 / self.eps)


def _row(name: str, kind: ir.DataType, dtype: object) -> FloatType:
    numpy = np.dtype(dtype)  # type: ignore[call-overload]  # ml_dtypes has no types
    info = ml_dtypes.finfo(numpy)
    return FloatType(
        name=name,
        ir=kind,
        numpy=numpy,
        bits=8 * numpy.itemsize,
        max=float(info.max),
        tiny=float(info.smallest_normal),
        smallest=float(info.smallest_subnormal),
        eps=float(info.eps),
    )


FP32 = _row("fp32", ir.DataType.FLOAT, np.float32)
FP16 = _row("fp16", ir.DataType.FLOAT16, np.float16)
BF16 = _row("bf16", ir.DataType.BFLOAT16, ml_dtypes.bfloat16)

BY_NAME = {kind.name: kind for kind in (FP32, FP16, BF16)}
BY_IR = {kind.ir: kind for kind in (FP32, FP16, BF16)}
LOW = frozenset({FP16.ir, BF16.ir})


def low_type(name: str) -> FloatType:
    """The 16-bit type called `name` (``fp16`` or ``bf16``).

    Raises:
        UsageError: `name` is anything else.
    """
    if name not in ("fp16", "bf16"):
        raise UsageError(f"Unknown dtype {name!r}: use fp16 or bf16.")
    return BY_NAME[name]
