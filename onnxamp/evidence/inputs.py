"""Inputs to run a model on: read from files or objects that users have, checked against what the model asks for.

A sample is one set of feeds, input name → array, as a session takes it.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.errors import DataError, UsageError, one_line
from onnxamp.evidence.metrics import is_float

Array = npt.NDArray[Any]
Sample = dict[str, Any]


@runtime_checkable
class CalibrationDataReader(Protocol):
    """ONNX Runtime's protocol: one sample a call, None at the end."""

    def get_next(self) -> Mapping[str, Any] | None:
        """The next sample."""


Data = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]] | CalibrationDataReader


@dataclasses.dataclass(frozen=True)
class Input:
    """What a model asks for.

    Attributes:
        name: The graph input's name.
        dtype: Type in memory; None for sequences and optionals, which are handed on as they are.
        shape: Sizes, or names (None if unnamed) of free dimensions; None if the rank is unknown.
        value: The graph input itself.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | str | None, ...] | None
    value: ir.Value

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ",".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {self.dtype or self.value.type}[{dims}]"


def model_inputs(model: ir.Model) -> list[Input]:
    """The inputs that a caller must feed, in order (initializers that are listed as inputs are not among them)."""
    result = []
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        shape = None
        if value.shape is not None:
            shape = tuple(_dimension(dim) for dim in value.shape)
        dtype = np.dtype(value.dtype.numpy()) if isinstance(value.type, ir.TensorType) and value.dtype else None
        result.append(Input(value.name or "", dtype, shape, value))
    return result


def _dimension(dim: int | ir.SymbolicDim) -> int | str | None:
    """The size or name; some exporters write -1 or the name ``?`` for any size."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    return None if dim.value in ("?", "", "-1", "None") else dim.value


def samples(data: Data, inputs: list[Input], limit: int | None = None) -> Iterator[Sample]:
    """The samples in `data`, checked and cast to the types of `inputs`.

    Args:
        data: An `.npz` file, a folder of `.npz` or `.npy` files, an `.npy` file for an only input, one mapping, an iterable of
            mappings, or a `CalibrationDataReader`. An array with one dimension more than its input is a stack of samples; where
            the model fixes the first dimension, rows are dealt out in that size, the last ones together with some before them.
        inputs: What the model asks for. Arrays that it does not ask for (labels, say) are left aside.
        limit: Stop after this many.

    Raises:
        DataError: An input is missing, or has another type or shape than the model asks for.
        UsageError: There is no such file, or nothing in it.
    """
    count = 0
    for where, group in _groups(data):
        for sample in _split(_named(group, inputs, where), inputs, where):
            if limit is not None and count >= limit:
                return
            yield sample
            count += 1
    if not count:
        raise UsageError("The data hold no sample: give at least one.")


def cast_sample(sample: Sample, candidate: ir.Model) -> Sample:
    """`sample` in the types of the candidate's inputs."""
    result = dict(sample)
    for value in candidate.graph.inputs:
        name, array = value.name or "", result.get(value.name or "")
        if isinstance(array, np.ndarray) and value.dtype in BY_IR and is_float(array):
            with np.errstate(over="ignore"):
                result[name] = array.astype(BY_IR[value.dtype].numpy, copy=False)
    return result


def _groups(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Mappings, each with the words that say where it came from."""
    if isinstance(data, (str, os.PathLike)):
        yield from _files(pathlib.Path(data))
    elif isinstance(data, Mapping):
        yield "the data", data
    elif isinstance(data, CalibrationDataReader):
        for index, sample in enumerate(iter(data.get_next, None)):
            yield f"sample {index}", sample
    else:
        for index, sample in enumerate(data):
            if not isinstance(sample, Mapping):
                raise DataError(
                    f"Sample {index} is a {type(sample).__name__}: give a mapping of input names to arrays."
                )
            yield f"sample {index}", sample


def _files(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.is_dir():
        single = sorted(path.glob("*.npy"))
        packed = sorted(path.glob("*.npz"))
        if single:
            yield str(path), {file.stem: _load(file) for file in single}
        for file in packed:
            yield str(file), _load(file)
        if not single and not packed:
            raise UsageError(f"The folder {path} holds neither .npz nor .npy files.")
    elif path.is_file():
        loaded = _load(path)
        yield str(path), loaded if isinstance(loaded, Mapping) else {"arr_0": loaded}
    else:
        raise UsageError(f"No such data file or folder: {path}.")


def _load(path: pathlib.Path) -> Any:
    try:
        loaded = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
        if isinstance(loaded, Mapping):
            with loaded:  # type: ignore[attr-defined]  # np.load gives no other mapping
                return dict(loaded)
        return loaded
    except Exception as problem:  # archives and headers fail in as many ways as there are damages and compressions
        raise DataError(f"{path} is no readable .npz or .npy file: {one_line(problem)}.") from problem


def _named(group: Mapping[str, Any], inputs: list[Input], where: str) -> dict[str, Any]:
    """The arrays of the inputs, by their names or by numpy's for arrays without one (``arr_0``), as that of a lone ``.npy`` file."""
    names = [item.name for item in inputs]
    if not set(names) <= set(group):
        positions = [f"arr_{index}" for index in range(len(names))]
        if set(positions) == set(group):
            return dict(zip(names, (group[name] for name in positions), strict=True))
        missing = [str(item) for item in inputs if item.name not in group]
        found = ", ".join(f"{name} {_describe(value)}" for name, value in group.items()) or "nothing"
        raise DataError(f"{where} lacks the model's input {', '.join(missing)}; it holds {found}.")
    return {name: group[name] for name in names}


def _split(group: dict[str, Any], inputs: list[Input], where: str) -> Iterator[Sample]:
    """One sample, or the samples of a stack, or rows dealt out to a fixed batch."""
    arrays = {
        item.name: group[item.name] if item.dtype is None else _cast(group[item.name], item, where) for item in inputs
    }
    ranked = [item for item in inputs if item.shape is not None and item.dtype is not None]
    stacked = [item for item in ranked if np.ndim(arrays[item.name]) == len(item.shape or ()) + 1]
    if stacked:
        sizes = {len(arrays[item.name]) for item in stacked}
        if len(stacked) != len(inputs) or len(sizes) > 1:
            raise _misfit(where, inputs, arrays)
        for index in range(sizes.pop()):
            yield _checked({name: array[index] for name, array in arrays.items()}, inputs, where)
        return
    fixed = {item.shape[0] for item in ranked if item.shape}
    rows = {len(arrays[item.name]) for item in ranked if item.shape and np.ndim(arrays[item.name])}
    size = next(iter(fixed)) if len(fixed) == 1 else None
    if isinstance(size, int) and len(rows) == 1 and len(ranked) == len(inputs) and all(item.shape for item in ranked):
        total = rows.pop()
        if total > size > 0:
            # The last rows go with some that were there before, so that none is left out.
            for start in (min(row, total - size) for row in range(0, total, size)):
                yield _checked({name: array[start : start + size] for name, array in arrays.items()}, inputs, where)
            return
    yield _checked(arrays, inputs, where)


def _cast(value: Any, item: Input, where: str) -> Array:
    """`value` in the input's type: floats to floats, integers to integers that hold them, never across kinds."""
    assert item.dtype is not None
    array = np.asarray(value)
    wanted = ir.DataType.from_numpy(item.dtype) if item.dtype.kind != "O" else ir.DataType.STRING
    if array.dtype == item.dtype or (wanted == ir.DataType.STRING and array.dtype.kind in "OUS"):
        return array
    floating = array.dtype.kind == "f" or str(array.dtype) == "bfloat16"
    if floating and wanted.is_floating_point():
        with np.errstate(over="ignore"):
            cast = array.astype(item.dtype)
        if item.dtype == np.float32 and (beyond := np.isfinite(array) & np.isinf(cast)).any():
            value = array[beyond].flat[0]
            raise DataError(f"{where}: {value:g} in {item.name} is beyond the range of float32, which the model takes.")
        return cast  # a 16-bit input may overflow: what the model makes of that is to be seen
    if array.dtype.kind in "iu" and item.dtype.kind in "iu":
        cast = array.astype(item.dtype)
        if np.array_equal(cast, array):
            return cast
    raise DataError(f"{where}: {item.name} is {_describe(value)}, the model asks for {item}.")


def _checked(sample: Sample, inputs: list[Input], where: str) -> Sample:
    """`sample`, if every array has the input's shape, and equal names of first axes mean equal sizes."""
    sizes: dict[str, set[int]] = collections.defaultdict(set)
    for item in inputs:
        if item.shape is None or item.dtype is None:
            continue
        shape = np.shape(sample[item.name])
        if len(shape) != len(item.shape):
            raise _misfit(where, inputs, sample)
        for axis, (got, want) in enumerate(zip(shape, item.shape, strict=True)):
            if isinstance(want, int) and want != got:
                raise _misfit(where, inputs, sample)
            if isinstance(want, str) and axis == 0:  # further axes often carry names that mean nothing
                sizes[want].add(got)
    if any(len(found) > 1 for found in sizes.values()):
        raise _misfit(where, inputs, sample)
    return sample


def _misfit(where: str, inputs: list[Input], arrays: Mapping[str, Any]) -> DataError:
    found = ", ".join(f"{name} {_describe(value)}" for name, value in arrays.items())
    return DataError(f"{where} does not fit the model: found {found}; expected {', '.join(map(str, inputs))}.")


def _describe(value: Any) -> str:
    array = np.asarray(value) if not isinstance(value, list) else None
    return f"{array.dtype}[{','.join(map(str, array.shape))}]" if array is not None else f"list of {len(value)}"
