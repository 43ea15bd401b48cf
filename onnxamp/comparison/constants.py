"""What happened to a constant's values, in blocks so that no tensor is copied whole."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxamp.comparison.records import ConstantChange
from onnxamp.comparison.side import type_name
from onnxamp.dtypes import BY_IR

_BLOCK = 1 << 20  # elements


def compare(
    before: tuple[str, ir.TensorProtocol], after: tuple[str, ir.TensorProtocol], uses: tuple[str, ...], moved: str
) -> ConstantChange | None:
    """The change between two constants (name, tensor); None if type, shape and values are equal and it did not move.

    Rounding is what conversion to the nearest value of the narrower type gives. NaNs are equal to NaNs.
    """
    (name, one), (other_name, other) = before, after
    shapes = tuple(one.shape.numpy()), tuple(other.shape.numpy())
    change = ConstantChange(
        before=name,
        after=other_name,
        type_before=type_name(one.dtype),
        type_after=type_name(other.dtype),
        shape_before=shapes[0],
        shape_after=shapes[1],
        bytes_before=one.nbytes,
        bytes_after=other.nbytes,
        uses=uses,
        moved=moved,
    )
    if shapes[0] != shapes[1]:
        return change
    if one is other:
        return change if moved else None
    counts = _count(one, other)
    if one.dtype == other.dtype and not any(counts.values()) and not moved:
        return None
    return ConstantChange(**{**vars(change), "elements": one.size, **counts})


def _count(one: ir.TensorProtocol, other: ir.TensorProtocol) -> dict[str, float]:
    if ir.DataType.STRING in (one.dtype, other.dtype):
        if one.dtype != other.dtype:
            return {"changed": one.size}
        pairs = zip(np.ravel(one.numpy()), np.ravel(other.numpy()), strict=True)
        return {"changed": sum(_text(x) != _text(y) for x, y in pairs)}
    if one.dtype.is_floating_point() and other.dtype.is_floating_point() and one.dtype.bitwidth < other.dtype.bitwidth:
        one, other = other, one  # from the wider type to the narrower one
    total: dict[str, float] = {}
    x, y = np.ravel(one.numpy()), np.ravel(other.numpy())
    for start in range(0, x.size, _BLOCK):
        for key, value in _block(x[start : start + _BLOCK], y[start : start + _BLOCK], other.dtype).items():
            total[key] = max(total.get(key, 0), value) if key == "max_error" else total.get(key, 0) + value
    return total


def _text(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _block(x: np.ndarray, y: np.ndarray, kind: ir.DataType) -> dict[str, float]:
    if x.dtype == y.dtype and x.tobytes() == y.tobytes():
        return {}
    if (x.dtype != y.dtype and not (_is_float(x) and _is_float(y))) or not _is_number(x):
        return {"changed": int(np.count_nonzero(x.astype(object) != y.astype(object)))}
    exact = np.float64 if _is_float(x) else x.dtype
    wide, narrow = x.astype(exact), y.astype(exact)
    unequal = wide != narrow
    if not _is_float(x):
        gap = np.abs(wide.astype(np.float64) - narrow.astype(np.float64))
        return {"changed": int(unequal.sum()), "max_error": float(gap.max(initial=0.0))}
    unequal &= ~(np.isnan(wide) & np.isnan(narrow))
    signs = (wide == 0) & (narrow == 0) & (np.signbit(wide) != np.signbit(narrow))
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(y.dtype).astype(np.float64)
        gap = np.abs(wide - narrow)
    rounded = unequal & (nearest == narrow) & (x.dtype != y.dtype)
    limit = BY_IR[kind].max if kind in BY_IR and x.dtype != y.dtype else np.inf
    finite = np.isfinite(narrow)
    clamped = unequal & finite & ((np.abs(wide) > limit) | np.isinf(wide))
    overflowed = unequal & np.isinf(narrow) & np.isfinite(wide)
    flushed = unequal & (narrow == 0) & ~np.isnan(wide) & ~clamped & (x.dtype != y.dtype)
    named = clamped | overflowed | flushed
    both = unequal & finite & np.isfinite(wide)
    return {
        "rounded": int((rounded & ~named).sum()),
        "clamped": int(clamped.sum()),
        "overflowed": int(overflowed.sum()),
        "flushed": int(flushed.sum()),
        "changed": int((unequal & ~rounded & ~named).sum() + signs.sum()),
        "max_error": float(gap[both].max(initial=0.0)),
    }


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype.name in ("bfloat16",)


def _is_number(x: np.ndarray) -> bool:
    return _is_float(x) or x.dtype.kind in "iub"
