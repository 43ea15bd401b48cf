"""From data to micro-batches: which column feeds which input, and in which order the rows come.

`bind` matches the columns with the fields that a model asks for, and says which casts and leftovers there are.
`Batches` yields the micro-batches of one epoch in a seeded order, from any position, read ahead by a thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from onnxamp.errors import DataError
from onnxamp.trainer.data import Array, Arrays, Batch, Data, Field, Stream, shape_text

_T = TypeVar("_T")

Locate: TypeAlias = Callable[[Sequence[int]], str]
"""Says where rows of a micro-batch lie in the data, in words."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank has of a micro-step that all ranks take together.

    Attributes:
        batch: Its micro-batch, prepared; None where no row is left for it.
        rows: Rows of every rank, by rank.
    """

    batch: Any
    rows: tuple[int, ...]


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

    @property
    def fixed_size(self) -> int | None:
        """The only number of rows that the model takes at a time; None where it takes any."""
        sizes = {size for field in self.fields if field.shape and isinstance(size := field.shape[0], int)}
        return sizes.pop() if len(sizes) == 1 else None

    def check_size(self, batch_size: int | None, ranks: int = 1) -> None:
        """Find out before the first batch whether also the last one has as many rows as the model takes.

        Raises:
            DataError: The model takes another number of rows at a time, or the rows do not divide into it.
        """
        size = self.fixed_size
        if size is None or batch_size is None:
            return
        if batch_size != size:
            raise DataError(
                f"The model takes batches of exactly {size} rows: take batch size {size}, not {batch_size}."
            )
        if isinstance(self.data, Arrays) and (left := self.data.rows % (size * ranks)):
            each = f" in each of {ranks} processes" if ranks > 1 else ""
            raise DataError(
                f"The model takes batches of exactly {size} rows{each}, and {self.data.rows} rows of {self.data.origin} do "
                f"not divide into them; leave {left} out, or export the model with a free batch dimension."
            )

    def convert(self, batch: Mapping[str, Array]) -> Batch:
        """One stored batch as the model wants it.

        Raises:
            DataError: A column is missing from this batch, its type or shape does not fit, or a value of it is beyond
                the range of the field's type.
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
            with np.errstate(over="ignore"):  # said below, with the name
                result[field.name] = np.ascontiguousarray(value, dtype=field.dtype)
            if value.dtype.kind == "f" and value.dtype.itemsize > field.dtype.itemsize:
                beyond = np.isfinite(value) & ~np.isfinite(result[field.name])
                if beyond.any():
                    raise DataError(
                        f"{self.data.origin}: {value[beyond].flat[0]:g} in column {column!r} is beyond the range of "
                        f"{field.dtype.name}, the type of the input {field.name!r}: scale the column or leave the row out."
                    )
        return result


def bind(
    data: Data,
    fields: Iterable[Field],
    *,
    columns: Mapping[str, str] | None = None,
    optional: Iterable[str] = (),
    compared: Iterable[str] = (),
) -> Binding:
    """Match the columns of `data` with the fields that a model asks for.

    Columns are found by name. A type that holds every value of the column's (uint8 → float32, int32 → int64) is
    taken with a cast, and so is float64 → float32; both are noted. Nothing else is converted.

    Args:
        data: Opened data.
        fields: The fields, `labels` and `weights` among them.
        columns: Field name to column name, where they differ.
        optional: Names of fields that may be absent from the data; they are then absent from the batches.
        compared: What metrics read beside the model: names that `columns` may have, whose columns count as used.

    Raises:
        DataError: A field has no column, or the column's type or shape does not fit; the text lists what was
            expected and what was found.
    """
    wanted = list(fields)
    columns = dict(columns or {})
    aside = {columns.pop(name, name) for name in set(compared) - {field.name for field in wanted}}
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
    left = [name for name in stored if name not in aside | {chosen[field.name] for field in wanted}]
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
    return None if fits else f"{field.name!r} must be {shape_text(field.shape)} and is {shape_text(found.shape)}"


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
        prepare: What is done with each micro-batch where it is read: ahead, in the thread. It gets the batch and a function
            that says where rows of it lie in the data.
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
        prepare: Callable[[Batch, Locate], Any] | None = None,
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
        self._prepare = prepare

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

    @property
    def size(self) -> int | None:
        """Rows of a micro-batch over all ranks; None for the batches of a stream as they are."""
        return self.batch_size * self.world_size if self.batch_size else None

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        """The micro-batches of one epoch, the last one shorter where the rows do not divide.

        Args:
            epoch: Number of the epoch: with the seed it fixes the order.
            start: Micro-batches to leave out at the beginning, to go on where a run stopped.
        """
        return (share.batch for share in self.shares(epoch, start) if share.batch is not None)

    def shares(self, epoch: int = 0, start: int = 0) -> Generator[Share, None, None]:
        """The micro-steps of one epoch: as many on every rank, and each rank knows what all of them have.

        Args:
            epoch: As for `epoch`.
            start: As for `epoch`.
        """
        shares = self._arrays(epoch, start) if isinstance(self.binding.data, Arrays) else self._stream(start)
        return _read_ahead(shares, self.prefetch) if self.prefetch else shares

    def __iter__(self) -> Iterator[Any]:
        return self.epoch()

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The rows of an epoch in the order in which they are used."""
        assert isinstance(self.binding.data, Arrays)
        if not self.shuffle:
            return np.arange(self.binding.data.rows)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch])))
        return generator.permutation(self.binding.data.rows)

    def _arrays(self, epoch: int, start: int) -> Generator[Share, None, None]:
        data = self.binding.data
        assert isinstance(data, Arrays)
        assert self.size is not None
        order = self.order(epoch)
        names = list(dict.fromkeys(self.binding.columns.values()))
        for first in range(start * self.size, data.rows, self.size):
            dealt = self._dealt(order, first)
            rows = dealt[self.rank]
            batch = self._prepared(data.take(names, rows), rows) if len(rows) else None
            yield Share(batch, tuple(map(len, dealt)))

    def _prepared(self, stored: Batch, rows: npt.NDArray[np.int64]) -> Any:
        """A stored batch as the trainer takes it; `rows` are its rows' numbers in the data."""
        batch = self.binding.convert(stored)
        if self._prepare is None:
            return batch
        data = self.binding.data
        try:
            return self._prepare(batch, lambda some: data.locate(rows[list(some)]))
        except DataError as problem:
            if problem.row is None:
                raise
            where = data.locate(rows[[problem.row]])
            raise DataError(f"{where[0].upper()}{where[1:]}: {problem}") from problem

    def _dealt(self, order: npt.NDArray[np.int64], first: int) -> list[npt.NDArray[np.int64]]:
        """The rows of every rank in the micro-step that begins at `first`; a short last one is dealt evenly."""
        assert self.size is not None
        return np.array_split(order[first : first + self.size], self.world_size)

    def _stream(self, start: int) -> Generator[Share, None, None]:
        data = self.binding.data
        assert isinstance(data, Stream)
        pieces = iter(self._rebatch(data) if self.batch_size else data)
        counted = self.binding.columns[self.binding.fields[0].name]
        first = 0
        for step in itertools.count():
            dealt = list(itertools.islice(pieces, self.world_size))
            if not dealt:
                return
            rows = [len(piece[counted]) if counted in piece else 0 for piece in dealt]
            if step >= start:
                batch = None
                if self.rank < len(dealt):
                    begin = first + sum(rows[: self.rank])
                    batch = self._prepared(dealt[self.rank], np.arange(begin, begin + rows[self.rank]))
                yield Share(batch, (*rows, *[0] * (self.world_size - len(dealt))))
            first += sum(rows)

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


def _read_ahead(items: Iterator[_T], depth: int) -> Generator[_T, None, None]:
    """Run an iterator in a thread, at most `depth` items ahead; its errors are raised here."""
    ready: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each item that may be ahead
    stopped = threading.Event()
    for _ in range(depth):
        room.put(None)

    def work() -> None:
        try:
            for item in items:
                room.get()
                if stopped.is_set():
                    return
                ready.put((item, None))
            ready.put((None, None))
        except BaseException as problem:
            ready.put((None, problem))

    thread = threading.Thread(target=work, name="onnxamp-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, problem = ready.get()
            room.put(None)
            if problem is not None:
                raise problem
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        room.put(None)
        thread.join()
