"""Training data: what can be opened, how its columns meet a model's inputs, and in which order its rows come.

Three steps, each its own object:

1. `open_data` turns whatever the user has (an `.npz`, a folder of `.npy` or `.npz`, a dict of arrays, an iterable of
   dicts, a `CalibrationDataReader`) into an `Arrays` (rows by index) or a `Stream` (batches in their own order).
2. `bind` matches its columns with the fields that a model asks for, and says which casts and leftovers there are.
3. `Batches` yields the micro-batches of one epoch in a seeded order, from any position, read ahead by a thread.

Files are memory-mapped, and pages that were read are given back, so a data set may be larger than memory.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import queue
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp.errors import DataError

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = dict[str, Array]

# Pages read through a mapping stay in the process until they are given back; this many bytes may wait.
_RELEASE_BYTES = 32 << 20
# A page fault on a cached file maps the pages around it too (Linux: 64 KiB and more), so a row may cost this much.
_FAULT_BYTES = 256 << 10
# Mapped columns below this size are simply loaded: labels and the like.
_SMALL_BYTES = 4 << 20


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
        return f"{self.name} {self.dtype.name}{_shape(self.shape)}"


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
    """Rows by index: one array per column, all of the same length, in memory or mapped from files."""

    def __init__(self, columns: Mapping[str, Sequence[Array]], origin: str) -> None:
        self.origin = origin
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

    @property
    def fields(self) -> list[Field]:
        """The columns as they are stored."""
        return [Field(name, column.dtype, ("rows", *column.shape)) for name, column in self._columns.items()]

    def take(self, names: Iterable[str], rows: npt.NDArray[np.int64]) -> Batch:
        """The rows with these indices of these columns, as new arrays."""
        return {name: self._columns[name].take(rows) for name in names}


class Stream:
    """Batches in their own order, from a function that starts them anew.

    An iterator that cannot be started again serves one epoch.
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


Data: TypeAlias = Arrays | Stream


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
                    f"Column {name!r} is {first.dtype.name}{_shape(first.shape)} in {shards[0].name} and "
                    f"{array.dtype.name}{_shape(array.shape)} in {shard.name} of {path}; shards must agree."
                )
            columns[name].append(array)
    return Arrays(columns, str(path))


def _open_npy(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as problem:
        raise DataError(f"{path} is no readable .npy file ({_first_line(problem)}).") from problem
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
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as problem:
        raise DataError(f"{path} is no readable .npz file ({_first_line(problem)}).") from problem
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


def _first_line(problem: BaseException) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]


def _shape(shape: Sequence[int | str | None] | None) -> str:
    if shape is None:
        return "[...]"
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


@dataclasses.dataclass(frozen=True)
class Binding:
    """Which column feeds which field.

    Attributes:
        data: The data.
        fields: What the model asks for, in its order.
        columns: Field name to column name.
        notes: What is worth a line to the user: casts done, columns not used.
    """

    data: Data
    fields: tuple[Field, ...]
    columns: Mapping[str, str]
    notes: tuple[str, ...]

    def convert(self, batch: Mapping[str, Array]) -> Batch:
        """One stored batch as the model wants it.

        Raises:
            DataError: A column is missing from this batch, or its type or shape does not fit.
        """
        result = {}
        for field in self.fields:
            column = self.columns[field.name]
            if column not in batch:
                raise DataError(f"A batch of {self.data.origin} lacks column {column!r}; it has {', '.join(batch)}.")
            value = batch[column]
            found = Field(column, value.dtype, value.shape)
            if problem := _misfit(field, found):
                raise DataError(f"{self.data.origin}: {problem}")
            result[field.name] = np.ascontiguousarray(value, dtype=field.dtype)
        return result


def bind(
    data: Data, fields: Iterable[Field], *, columns: Mapping[str, str] | None = None, optional: Iterable[str] = ()
) -> Binding:
    """Match the columns of `data` with the fields that a model asks for.

    Columns are found by name. A type that holds every value of the column's (uint8 → float32, int32 → int64) is
    taken with a cast, and so is float64 → float32; both are noted. Nothing else is converted.

    Args:
        data: Opened data.
        fields: The fields, `labels` and `weights` among them.
        columns: Field name to column name, where they differ.
        optional: Names of fields that may be absent from the data; they are then absent from the batches.

    Raises:
        DataError: A field has no column, or the column's type or shape does not fit; the text lists what was
            expected and what was found.
    """
    wanted = list(fields)
    columns = dict(columns or {})
    if unknown := sorted(columns.keys() - {field.name for field in wanted}):
        raise DataError(f"The model has no input {unknown[0]!r}; it takes {', '.join(str(field) for field in wanted)}.")
    stored = {field.name: field for field in data.fields}
    chosen = {field.name: columns.get(field.name, field.name) for field in wanted}
    absent = set(optional) - columns.keys()
    wanted = [field for field in wanted if field.name not in absent or chosen[field.name] in stored]
    problems: list[str] = []
    notes: list[str] = []
    for field in wanted:
        found = stored.get(chosen[field.name])
        if found is None:
            problems.append(f"{chosen[field.name]!r} is missing")
        elif problem := _misfit(field, found):
            problems.append(problem)
        elif found.dtype != field.dtype:
            notes.append(f"{found.name} is {found.dtype.name} in the data and is cast to {field.dtype.name}")
    left = [name for name in stored if name not in {chosen[field.name] for field in wanted}]
    if problems:
        raise DataError(
            f"{data.origin} does not fit the model: {'; '.join(problems)}.\n"
            f"  expected: {', '.join(str(field) for field in wanted)}\n"
            f"  found:    {', '.join(str(field) for field in stored.values())}{_hint(wanted, stored, chosen, left)}"
        )
    if left:
        notes.append(f"not used: {', '.join(left)}")
    return Binding(data, tuple(wanted), {field.name: chosen[field.name] for field in wanted}, tuple(notes))


def _misfit(field: Field, found: Field) -> str | None:
    if found.dtype != field.dtype and not (
        np.can_cast(found.dtype, field.dtype, "safe") or (found.dtype == np.float64 and field.dtype == np.float32)
    ):
        return f"{field.name!r} must be {field.dtype.name} and is {found.dtype.name}"
    if field.shape is None or found.shape is None:
        return None
    fits = len(field.shape) == len(found.shape) and all(
        not isinstance(want, int) or not isinstance(have, int) or want == have
        for want, have in zip(field.shape[1:], found.shape[1:], strict=True)
    )
    return None if fits else f"{field.name!r} must be {_shape(field.shape)} and is {_shape(found.shape)}"


def _hint(wanted: list[Field], stored: Mapping[str, Field], chosen: Mapping[str, str], left: list[str]) -> str:
    missing = [field for field in wanted if chosen[field.name] not in stored]
    fitting = [(field.name, name) for field in missing for name in left if not _misfit(field, stored[name])]
    if not fitting:
        return ""
    return "\n  if a column has another name, say so: " + " ".join(
        f"--column {name}={column}" for name, column in fitting
    )


class Batches:
    """The micro-batches of an epoch, in an order that depends only on the seed and the epoch.

    With several ranks every rank sees the same order and takes its own slice of each global micro-batch, so the rows
    of a window do not depend on the number of ranks.

    Args:
        binding: The data and the fields.
        batch_size: Rows of a micro-batch on one rank; None keeps the batches of a stream as they are.
        shuffle: Draw a new order each epoch (data in a stream keep theirs).
        seed: Seed of the order.
        prefetch: Batches read ahead by a thread; 0 reads in the calling thread.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        binding: Binding,
        batch_size: int | None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 2,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size is None and isinstance(binding.data, Arrays):
            raise DataError("Data held as arrays need a batch size.")
        if batch_size is not None and batch_size < 1:
            raise DataError(f"The batch size must be at least 1, not {batch_size}.")
        self.binding = binding
        self.batch_size = batch_size
        self.shuffle = shuffle and isinstance(binding.data, Arrays)
        self.seed = seed
        self.prefetch = prefetch
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Micro-batches of an epoch.

        Raises:
            TypeError: The data are a stream, whose length is not known.
        """
        if not isinstance(self.binding.data, Arrays):
            raise TypeError("a stream of batches has no known length")
        assert self.batch_size is not None
        return math.ceil(self.binding.data.rows / (self.batch_size * self.world_size))

    @property
    def rows(self) -> int | None:
        """Rows of an epoch over all ranks; None for a stream."""
        return self.binding.data.rows if isinstance(self.binding.data, Arrays) else None

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The micro-batches of one epoch, the last one shorter where the rows do not divide.

        Args:
            epoch: Number of the epoch: with the seed it fixes the order.
            start: Micro-batches to leave out at the beginning, to go on where a run stopped.
        """
        batches = self._arrays(epoch, start) if isinstance(self.binding.data, Arrays) else self._stream(start)
        return _read_ahead(batches, self.prefetch) if self.prefetch else batches

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The rows of an epoch in the order in which they are used."""
        assert isinstance(self.binding.data, Arrays)
        if not self.shuffle:
            return np.arange(self.binding.data.rows)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch])))
        return generator.permutation(self.binding.data.rows)

    def _arrays(self, epoch: int, start: int) -> Iterator[Batch]:
        data = self.binding.data
        assert isinstance(data, Arrays)
        assert self.batch_size is not None
        order = self.order(epoch)
        names = list(dict.fromkeys(self.binding.columns.values()))
        whole = self.batch_size * self.world_size
        for first in range(start * whole, data.rows, whole):
            rows = order[first : first + whole]
            # A short last global batch is dealt evenly, so that every rank takes part in every window.
            mine = np.array_split(rows, self.world_size)[self.rank] if len(rows) < whole else rows[self._slice()]
            yield self.binding.convert(data.take(names, mine))

    def _slice(self) -> slice:
        assert self.batch_size is not None
        return slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)

    def _stream(self, start: int) -> Iterator[Batch]:
        data = self.binding.data
        assert isinstance(data, Stream)
        pieces = self._rebatch(data) if self.batch_size else iter(data)
        for index, batch in enumerate(pieces):
            if index >= start * self.world_size and index % self.world_size == self.rank:
                yield self.binding.convert(batch)

    def _rebatch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Cut and join the batches of a stream into micro-batches of the size asked for."""
        assert self.batch_size is not None
        kept: Batch = {}
        for batch in batches:
            kept = {name: np.concatenate([kept[name], value]) if kept else value for name, value in batch.items()}
            rows = len(next(iter(kept.values())))
            for first in range(0, rows - self.batch_size + 1, self.batch_size):
                yield {name: value[first : first + self.batch_size] for name, value in kept.items()}
            kept = {name: value[rows - rows % self.batch_size :] for name, value in kept.items()}
            if not rows % self.batch_size:
                kept = {}
        if kept:
            yield kept


def _read_ahead(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """Run an iterator in a thread, at most `depth` items ahead; its errors are raised here."""
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
            put((None, None))
        except BaseException as problem:
            put((None, problem))

    thread = threading.Thread(target=work, name="onnxamp-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            batch, problem = ready.get()
            if problem is not None:
                raise problem
            if batch is None:
                return
            yield batch
    finally:
        stopped.set()
        thread.join()
