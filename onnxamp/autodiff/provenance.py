"""Whether a float tensor was learned: what its exporter notes, how it is called, and what its numbers look like."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.model.modules import KIND

# PyTorch's exporter (`dynamo=True`) notes from which tensors it computed one.
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
# What frameworks call the variables of a model: by the attribute of a module (`head.temperature`), or TensorFlow's operators.
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_VARIABLE = re.compile(r"ReadVariableOp(:\d+)?$|/read(:\d+)?$")
# What exporters call constants (`val_7`, `Constant_3`, `c1`), and what people call those of a formula (`eps`, `sqrt_d`, `two`).
_NUMBERED = re.compile(r"^[a-z]\d*$|(^|[._])(const(ant)?|val|cst|tmp|initializer|literal)(?=[._\d]|$)", re.IGNORECASE)
_OF_FORMULA = re.compile(
    r"(^|_)(eps(ilon)?|inf|pi|zero|one|two|three|half|ten|min|max|low|high|r?sqrt)(?=[_\d]|$)", re.IGNORECASE
)
# How PyTorch's older exporter calls what it writes itself; parameters have names of their own, or `onnx::Conv_62`.
_WRITTEN = re.compile(r"(^|/)Constant(_\d+)?_output_\d+$")
# What frameworks call the statistics of a BatchNormalization: PyTorch, and TensorFlow and Keras.
_STATISTIC = re.compile(r"(^|[./_])(running_(mean|var)|num_batches_tracked|moving_(mean|var|variance))(?=$|[./:])")
# The part of a learned tensor's numbers that are different from each other (drawn or trained ones hardly ever meet), among so many of
# them; 16 bits hold few different ones (a binade of bf16 has 128), so fewer are looked at.
_DIFFERENT, _SAMPLE = 0.9, 4096
_DIFFERENT_16, _SAMPLE_16 = 0.75, 128
# What a formula must explain, so that drawn numbers do not follow it by chance.
_MANY = 16
# Tables above this number of elements are not looked at as a whole.
_WHOLE = 1 << 18
# How far points of one circle may be from it: tables of sines are stored in FP32 or FP16.
_CIRCLE = 2e-3
# How far steps of one ramp may differ, for the same reason, to its largest number.
_STEP = 1e-3
# Numbers within this part of the largest are one number and noise, which neither a ramp nor waves can be told from.
_SPREAD = 8 * _STEP


def noted(value: ir.Value) -> bool | None:
    """Whether the exporter notes an initializer as a parameter; None if it notes nothing."""
    kind = value.metadata_props.get(KIND)
    return None if kind is None else kind == "PARAMETER"


def folded_from(value: ir.Value) -> tuple[str, ...]:
    """Names of the tensors from which the exporter notes to have computed an initializer; empty if it notes nothing."""
    try:
        names = ast.literal_eval(value.metadata_props.get(_FOLDED, "()"))
    except (ValueError, SyntaxError):
        return ()
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()


def named(name: str) -> bool:
    """Whether a tensor is called like a variable of a model, and neither as exporters number constants nor like one of a formula."""
    if _VARIABLE.search(name):
        return True
    last = name.rpartition(".")[2]
    return bool(_ATTRIBUTE.fullmatch(name)) and not (_NUMBERED.search(name) or _OF_FORMULA.search(last))


def is_literal(value: ir.Value, notes: bool, computed: Set[str]) -> bool:
    """Whether ones or zeros were written by PyTorch's exporter, and are no fresh parameter.

    Args:
        value: The initializer.
        notes: The exporter notes what the file's parameters are; it would have noted this one.
        computed: Names of what nodes give; a constant may be noted as folded from the size of one.
    """
    learned = any(named(source) for source in folded_from(value) if source not in computed)
    if not (_WRITTEN.search(str(value.name)) or (notes and not learned)) or value.const_value is None:
        return False
    array = value.const_value.numpy()
    return bool((array == 0).all() or (array == 1).all())


def statistic_of(name: str) -> str | None:
    """Of which module a tensor is a statistic by its name (`bn1` of `bn1.running_mean`); None if it is called like none."""
    found = _STATISTIC.search(name)
    return None if found is None else name[: found.start()]


def module_of(name: str) -> str:
    """The module that a tensor belongs to by its name (`bn1` of `bn1.weight`, `net/bn` of `net/bn/gamma`)."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def looks_learned(array: NDArray[Any]) -> bool:
    """Whether the numbers look drawn or trained, and not made by a formula.

    Masks, grids, distances, zeros and ones repeat few numbers, or are whole multiples of one; tables of sines and cosines hold points
    of one circle; coordinates and frequencies go on by one step or one factor.
    """
    if array.size < 2 or not np.isfinite(array).all() or not _is_varied(array.reshape(-1)):
        return False
    return not any(_is_waves(part) or _is_ramp(part) for part in _parts(array))


def _is_varied(numbers: NDArray[Any]) -> bool:
    """Whether hardly any two numbers of a sample are equal; those of 16 bits must not all be multiples of one either."""
    values = _sample(numbers, _SAMPLE).astype(np.float64)
    with np.errstate(over="ignore"):
        short = any((values == values.astype(dtype)).all() for dtype in (np.float16, ml_dtypes.bfloat16))
    if not short:
        return len(np.unique(values)) >= _DIFFERENT * values.size
    sizes = np.abs(values[values != 0])
    few = _sample(values, _SAMPLE_16)
    return len(np.unique(few)) >= _DIFFERENT_16 * few.size and bool((sizes % sizes.min(initial=np.inf) != 0).any())


def _sample(numbers: NDArray[Any], count: int) -> NDArray[Any]:
    """Some of the numbers, drawn with a seed: evenly spaced ones might all be of one column of a table."""
    if numbers.size <= count:
        return numbers
    return numbers[np.sort(np.random.default_rng(0).choice(numbers.size, count, replace=False))]


def _parts(array: NDArray[Any]) -> list[NDArray[np.float64]]:
    """A tensor as a whole, or where it is large a few whole rows and a few whole columns of it, which tell as much."""
    if array.size <= _WHOLE:
        return [np.asarray(array, np.float64)]
    few = (slice(0, 8),) * (array.ndim - 1)
    parts = (array[*few, :], array[:, *few])
    return [np.asarray(part, np.float64) for part in parts if part.size <= _WHOLE]


def follows_formula(array: NDArray[Any]) -> bool:
    """Whether a weight or table was computed and not drawn: sines and cosines, or one row of successive whole numbers."""
    return array.ndim > 1 and any(_is_formula(part) for part in _parts(array))


def _is_formula(values: NDArray[np.float64]) -> bool:
    if not np.isfinite(values).all() or len(np.unique(np.abs(values))) < _MANY:
        return False
    if values.size == max(values.shape):
        return bool((np.diff(values.ravel()) == 1).all())
    return _is_waves(values)


def _is_ramp(values: NDArray[np.float64]) -> bool:
    """Whether all numbers, or those along some axis, go on by one step or by one factor."""
    for table in (values, np.log(np.abs(values) + (values == 0))):
        for ramp in (table.reshape(1, -1), *(np.moveaxis(table, axis, -1) for axis in range(table.ndim))):
            steps = np.diff(ramp, axis=-1)
            if steps.shape[-1] < 2:
                continue
            largest = np.abs(ramp).max()
            even = (np.abs(steps - np.median(steps, -1, keepdims=True)) <= _STEP * largest).all()
            if even and (np.abs(ramp[..., -1] - ramp[..., 0]) > _SPREAD * largest).any():
                return True
    return False


def _is_waves(values: NDArray[np.float64]) -> bool:
    """Whether along some axis neighbours, halves, or halves of halves are sine and cosine of something."""
    if np.ptp(values) <= _SPREAD * np.abs(values).max():
        return False
    for sums in _pairs(values):
        drawn = sums[sums > 0]  # a row of zeros in front is left out
        if drawn.size and (np.abs(drawn / np.median(drawn) - 1) <= _CIRCLE).mean() >= _DIFFERENT:
            return True
    return False


def _pairs(values: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Sums of squares of what may be sine and cosine."""
    for axis, size in enumerate(values.shape):
        table = np.moveaxis(values, axis, -1)
        for distance in {1, size // 2, size // 4} - {0}:
            if size % (2 * distance) == 0:
                yield (table.reshape(*table.shape[:-1], -1, 2, distance) ** 2).sum(-2)
