"""Training data: `open_data` turns whatever the user has into `Arrays` (rows by index) or a `Stream` (batches).

It takes an `.npz`, a folder of `.npy` or `.npz`, a dict of arrays, an iterable of dicts, a `CalibrationDataReader`.
Files are memory-mapped, and pages that were read are given back, so a data set may be larger than memory.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp.errors import AmpError, DataError, one_line

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = dict[str, Array]

# Pages read through a mapping stay in the process until they are given back; this many bytes may wait.
_RELEASE_BYTES = 32 << 20
# A page fault on a cached file maps the pages around it too (Linux: 64 KiB and more), so a row may cost this much.
_FAULT_BYTES = 256 << 10
# Mapped columns below this size are simply loaded: labels and the like.
_SMALL_BYTES = 4 << 20
# Rows, and files, that a message names before it only counts them.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Field:
    """One array that a model asks for.

    Attributes:
        name: The name of the graph input (or `labels`, `weights`).
        dtype: Its type in memory.
        shape: Its dimensions with the batch first; a string or None where any size fits. None if even their number is
            unknown.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{shape_text(self.shape)}"


class _Column:
    """Rows of one key, spread over one or more shards."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0] + [len(part) for part in parts])
        self.dtype = parts[0].dtype
        self.shape = parts[0].shape[1:]
        self.nbytes = sum(part.nbytes for part in parts)
        self._read = 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: npt.NDArray[np.int64]) -> Array:
        """A new array of these rows, in this order."""
        if len(self.parts) == 1:
            taken = np.asarray(self.parts[0])[rows]
        else:
            taken = np.empty((len(rows), *self.shape), self.dtype)
            owner = np.searchsorted(self.starts, rows, side="right") - 1
            for index in np.unique(owner):
                here = owner == index
                taken[here] = np.asarray(self.parts[index])[rows[here] - self.starts[index]]
        self._read += max(taken.nbytes, len(rows) * _FAULT_BYTES)
        if self._read >= _RELEASE_BYTES:
            self._read = 0
            for part in self.parts:
                _release(part)
        return taken


def _release(array: Array) -> None:
    """Give the pages of a mapped array back to the system; reading them again costs a page fault, not correctness."""
    mapping = getattr(array, "_mmap", None)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


class Arrays:
    """Rows by index: one array per column, all of the same length, in memory or mapped from files.

    Args:
        columns: The arrays of each column, one per shard.
        origin: Where they come from, in words.
        shards: Where each shard comes from, if they are more than one.
    """

    def __init__(self, columns: Mapping[str, Sequence[Array]], origin: str, shards: Sequence[str] = ()) -> None:
        self.origin = origin
        self._shards = tuple(shards) or (origin,)
        self._columns = {name: _Column(parts) for name, parts in columns.items()}
        if not self._columns:
            raise DataError(f"{origin} holds no arrays; save some with numpy.savez(path, input=..., labels=...).")
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"The columns of {origin} differ in their number of rows ({found}); they must agree.")
        self.rows = next(iter(lengths.values()))
        if self.rows == 0:
            raise DataError(f"{origin} has no rows.")
        self._chosen: npt.NDArray[np.int64] | None = None

    @property
    def fields(self) -> list[Field]:
        """The columns as they are stored."""
        return [Field(name, column.dtype, ("rows", *column.shape)) for name, column in self._columns.items()]

    def take(self, names: Iterable[str], rows: npt.NDArray[np.int64]) -> Batch:
        """The rows with these indices of these columns, as new arrays."""
        stored = self._stored(rows)
        return {name: self._columns[name].take(stored) for name in names}

    def only(self, rows: npt.NDArray[np.int64]) -> Arrays:
        """These rows alone, in this order; nothing is copied."""
        part = copy.copy(self)
        part._chosen, part.rows = self._stored(rows), len(rows)
        return part

    def _stored(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of rows in the files."""
        return rows if self._chosen is None else self._chosen[rows]

    def locate(self, rows: npt.NDArray[np.int64]) -> str:
        """Where rows lie, in words: their file, and their numbers in it from 0."""
        starts = next(iter(self._columns.values())).starts
        ordered = np.unique(self._stored(rows))
        owner = np.searchsorted(starts, ordered, side="right") - 1
        found = [rows_of(ordered[owner == index] - starts[index], self._shards[index]) for index in np.unique(owner)]
        more = len(found) - _NAMED
        return ", ".join(found[:_NAMED]) + (f" and rows of {more} more files" if more > 0 else "")


class Stream:
    """Batches in their own order, from a function that starts them anew.

    An iterator that cannot be started again serves one epoch. Its rows are numbered from the start of a pass.
    """

    def __init__(self, start: Callable[[], Iterator[Mapping[str, Any]]], origin: str) -> None:
        self.origin = origin
        self._start = start
        self._first: Batch | None = None
        self._begun: Iterator[Mapping[str, Any]] | None = None
        self._open()

    def _open(self) -> None:
        self._begun = iter(self._start())
        try:
            self._first = _as_batch(next(self._begun), self.origin)
        except StopIteration:
            raise DataError(
                f"{self.origin} gave no batch; an iterator that is used up cannot be read again: "
                "pass a list, or an object whose __iter__ starts anew."
            ) from None

    @property
    def fields(self) -> list[Field]:
        """The columns of the first batch."""
        assert self._first is not None
        return [Field(name, value.dtype, ("rows", *value.shape[1:])) for name, value in self._first.items()]

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the batches."""
        if self._begun is None:
            self._open()
        begun, first = self._begun, self._first
        assert begun is not None
        assert first is not None
        self._begun = None
        yield first
        for batch in begun:
            yield _as_batch(batch, self.origin)

    def locate(self, rows: npt.NDArray[np.int64]) -> str:
        """Where rows lie, in words: their numbers in a pass, from 0."""
        return rows_of(np.unique(rows), self.origin)


Data: TypeAlias = Arrays | Stream


def rows_of(rows: npt.NDArray[np.int64], origin: str) -> str:
    """Rows in words: their numbers, as far as they are few, and what they are rows of."""
    names = [str(row) for row in rows[:_NAMED]]
    if (more := len(rows) - _NAMED) > 0:
        names.append(f"{more} more")
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"row{'s' * (len(rows) > 1)} {listed} of {origin}"


def hold_out(data: Arrays, share: float, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Part data into rows to train on and rows to evaluate on.

    Args:
        data: The data.
        share: The part of the rows to evaluate on, between 0 and 1; at least one row.
        seed: Which rows these are.

    Raises:
        DataError: One of the two would have no row.
    """
    count = max(1, round(share * data.rows))
    if not 0 < share < 1 or count >= data.rows:
        raise DataError(
            f"A part of {share:g} of the {data.rows} rows of {data.origin} leaves none to train on, or holds none out."
        )
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed], spawn_key=(1,)))).permutation(data.rows)
    return data.only(np.sort(order[count:])), data.only(np.sort(order[:count]))


def _as_batch(batch: object, origin: str) -> Batch:
    if not isinstance(batch, Mapping):
        raise DataError(f"{origin} must give dicts of arrays by input name; it gave a {type(batch).__name__}.")
    return {str(name): np.asarray(value) for name, value in batch.items()}


def open_data(source: object) -> Data:
    """Open training or evaluation data.

    Args:
        source: A path of an `.npz` file (one array per column), of a folder of `.npy` files (one file per column) or
            of `.npz` files (shards, read in the order of their names); a dict of arrays; an iterable of dicts
            (each a batch); an object with `get_next()` like ORT's `CalibrationDataReader`. Already opened data pass.

    Raises:
        DataError: The source is none of these, is unreadable, empty, or has columns of different lengths.
    """
    if isinstance(source, Arrays | Stream):
        return source
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source))
    if isinstance(source, Mapping):
        return Arrays({str(name): [_rows(np.asarray(value), name)] for name, value in source.items()}, "the data")
    if callable(getattr(source, "get_next", None)):
        return Stream(lambda: _read_calibration(source), f"the {type(source).__name__}")
    if isinstance(source, Iterable):
        return Stream(lambda: iter(source), f"the {type(source).__name__}")
    raise DataError(
        f"Cannot read training data from a {type(source).__name__}; give an .npz file, a folder of .npy or .npz "
        "files, a dict of arrays, or an iterable of dicts."
    )


def _read_calibration(reader: Any) -> Iterator[Mapping[str, Any]]:
    if callable(getattr(reader, "rewind", None)):
        reader.rewind()
    while (batch := reader.get_next()) is not None:
        yield batch


def _rows(array: Array, name: object, origin: str = "the data") -> Array:
    if array.dtype.hasobject:
        raise DataError(f"Column {name!r} of {origin} holds Python objects; save it with a numeric dtype.")
    if array.ndim == 0:
        raise DataError(f"Column {name!r} of {origin} is a scalar; a column has one entry per row.")
    return array


def _open_path(path: Path) -> Arrays:
    if not path.exists():
        raise DataError(f"There are no data at {path}.")
    if path.is_file():
        if path.suffix != ".npz":
            raise DataError(f"{path} is no .npz file; save the columns with numpy.savez(path, input=..., labels=...).")
        return Arrays({name: [array] for name, array in _open_npz(path).items()}, str(path))
    shards = sorted(path.glob("*.npz"))
    singles = sorted(path.glob("*.npy"))
    if shards and singles:
        raise DataError(f"{path} mixes .npz shards and .npy columns; keep one kind.")
    if singles:
        return Arrays({single.stem: [_open_npy(single)] for single in singles}, str(path))
    if not shards:
        raise DataError(f"{path} holds no .npz or .npy file.")
    opened = [_open_npz(shard) for shard in shards]
    columns: dict[str, list[Array]] = {name: [] for name in opened[0]}
    for shard, arrays in zip(shards, opened, strict=True):
        if arrays.keys() != columns.keys():
            raise DataError(
                f"The shards of {path} differ: {shards[0].name} has {', '.join(sorted(columns))} and {shard.name} has "
                f"{', '.join(sorted(arrays))}."
            )
        for name, array in arrays.items():
            first = opened[0][name]
            if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
                raise DataError(
                    f"Column {name!r} is {first.dtype.name}{shape_text(first.shape)} in {shards[0].name} and "
                    f"{array.dtype.name}{shape_text(array.shape)} in {shard.name} of {path}; shards must agree."
                )
            columns[name].append(array)
    return Arrays(columns, str(path), list(map(str, shards)))


def _open_npy(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as problem:  # of many kinds, as below
        raise DataError(f"{path} is no readable .npy file ({one_line(problem)}).") from problem
    array = _rows(array, path.stem, str(path))
    return np.array(array) if array.nbytes <= _SMALL_BYTES else array


def _open_npz(path: Path) -> dict[str, Array]:
    """The arrays of an npz: mapped where they are stored plainly, loaded where they are small or compressed."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            packed = [info for info in members if info.compress_type != zipfile.ZIP_STORED]
            _refuse_too_large(sum(info.file_size for info in packed), path)
            arrays = {}
            for info in members:
                name = info.filename.removesuffix(".npy")
                if info.compress_type == zipfile.ZIP_STORED and info.file_size > _SMALL_BYTES:
                    arrays[name] = _map_member(path, file, info)
                else:
                    with archive.open(info) as member:
                        arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    except AmpError:
        raise
    except Exception as problem:  # archives and headers fail in as many ways as there are damages and compressions
        raise DataError(f"{path} is no readable .npz file ({one_line(problem)}).") from problem
    return {name: _rows(array, name, str(path)) for name, array in arrays.items()}


def _map_member(path: Path, file: Any, info: zipfile.ZipInfo) -> Array:
    """Map an array that lies uncompressed inside a zip archive (`numpy.savez` writes it so)."""
    file.seek(info.header_offset)
    header = file.read(30)
    file.seek(
        info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    )
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if file.tell() - start + math.prod(shape) * dtype.itemsize > info.file_size:
        raise ValueError(f"{info.filename} is shorter than its header says")
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _refuse_too_large(size: int, path: Path) -> None:
    """Compressed arrays must be loaded whole: refuse what memory cannot hold instead of being killed."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    if free is not None and size > 0.8 * free:
        raise DataError(
            f"{path} is compressed and needs {size / 1e9:.1f} GB in memory; save it with numpy.savez "
            "(uncompressed), which is memory-mapped."
        )


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    if shape is None:
        return "[...]"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
