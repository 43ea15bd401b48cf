"""How several commands call codes and types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def element_name(dtype: ir.DataType) -> str:
    """An element type in onnxamp's words (fp16), or in ONNX's if it has none."""
    from onnxamp.dtypes import BY_IR

    return BY_IR[dtype].name if dtype in BY_IR else dtype.name.lower()


def type_name(value: ir.Value | None) -> str:
    """The element type of a tensor; the whole type of anything else."""
    import onnx_ir as ir

    if value is None or value.type is None:
        return "untyped"
    return element_name(value.type.dtype) if isinstance(value.type, ir.TensorType) else str(value.type)
