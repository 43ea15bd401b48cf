"""Where numbers go wrong: the first value that is not finite or does not fit its type, forward or backward, and the ranges
and underflow of every node, at one level or several.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.conversion import convert
from onnxamp.dtypes import FP16, low_type
from onnxamp.errors import AmpError, DataError
from onnxamp.evidence.observe import Observed, observe
from onnxamp.ort.session import SessionConfig
from onnxamp.trainer.arenas import Arenas
from onnxamp.trainer.batch import BatchCheck
from onnxamp.trainer.batches import Batches, Binding
from onnxamp.trainer.data import Array, Arrays, Batch
from onnxamp.trainer.device import find_device
from onnxamp.trainer.evaluation import Evaluation
from onnxamp.trainer.loop import seed_divisor
from onnxamp.training.bundle import Bundle

# Rows of a column that are looked at together in the search for NaN.
_SCAN_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class BadData:
    """Rows of a column that hold NaN, or those that hold infinities.

    Attributes:
        column: The model's name of the column.
        rows: Their numbers.
        nan: Whether it is NaN that they hold.
        where: The rows in words, with their files.
    """

    column: str
    rows: tuple[int, ...]
    nan: bool
    where: str

    def __str__(self) -> str:
        return f"{self.column}: {'NaN' if self.nan else 'Inf'} in {self.where}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found at one level.

    Attributes:
        level: O0, OD, O1, O2 or O3.
        dtype: The 16-bit type; at O0 the one that values are measured against.
        values: Statistics of every float value, in the order in which they are made.
        failed: Why this level could not be looked at, or None.
    """

    level: str
    dtype: str
    values: tuple[Observed, ...]
    failed: str | None = None

    @property
    def title(self) -> str:
        """Level and type, as people call them: O0 has no 16-bit type."""
        return self.level if self.level == "O0" else f"{self.level} {self.dtype}"

    @property
    def bad(self) -> list[Observed]:
        """Values that are not finite or do not fit, in the order in which they are made."""
        return [value for value in self.values if value.bad]

    @property
    def first(self) -> Observed | None:
        """The first of them."""
        return next(iter(self.bad), None)

    def verdict(self) -> str:
        """One sentence."""
        name = self.title
        if self.failed is not None:
            return f"{name}: {self.failed}"
        first = self.first
        if first is None:
            return f"{name}: every value is finite and fits its type"
        half = "backward" if first.backward else "forward"
        return (
            f"{name}: first in {first.op} {first.node!r} ({half}, {first.precision}): {first.what()} in {first.value!r}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "level": self.level,
            "dtype": self.dtype,
            "failed": self.failed,
            "first": None if self.first is None else row_json(self.first),
            "bad": len(self.bad),
            "values": [row_json(value) for value in self.values],
        }


def row_json(row: Observed) -> dict[str, Any]:
    """One value's statistics as plain data."""
    plain = dataclasses.asdict(row)
    plain["absmin"] = row.absmin if np.isfinite(row.absmin) else None
    return {**plain, "bad": row.bad, "underflow": row.underflow}


def bad_rows(binding: Binding) -> list[BadData]:
    """Columns of floats with rows that are not finite; of data in a stream none, since they can be read only once."""
    data = binding.data
    if not isinstance(data, Arrays):
        return []
    found: dict[tuple[str, bool], list[int]] = collections.defaultdict(list)
    for first in range(0, data.rows, _SCAN_ROWS):
        rows = np.arange(first, min(first + _SCAN_ROWS, data.rows))
        for name, value in binding.convert(data.take(dict.fromkeys(binding.columns.values()), rows)).items():
            if value.dtype.kind != "f" or np.isfinite(value).all():
                continue
            for nan, wrong in ((True, np.isnan(value)), (False, np.isinf(value))):
                found[name, nan] += rows[wrong.reshape(len(rows), -1).any(1)].tolist()
    return [BadData(name, tuple(rows), nan, data.locate(np.array(rows))) for (name, nan), rows in found.items() if rows]


def chosen_batches(binding: Binding, batch_size: int, rows: int, first: Sequence[int] = ()) -> list[Batch]:
    """`rows` rows (all, if there are fewer) in as few micro-batches as hold them, of nearly one size.

    Rows known to be bad are among the others, as in training: a batch normalization of one row alone would say nothing of a batch.

    Args:
        binding: The data.
        batch_size: The most rows of a micro-batch.
        rows: How many rows to take.
        first: Rows that come before the others, some perhaps named twice.
    """
    data = binding.data
    if isinstance(data, Arrays):
        order = [*dict.fromkeys(first), *np.setdiff1d(np.arange(data.rows), np.array(first, np.int64))][:rows]
        names = list(dict.fromkeys(binding.columns.values()))
        parts = np.array_split(np.array(order, np.int64), -(-len(order) // batch_size) or 1)
        batches = [binding.convert(data.take(names, part)) for part in parts if len(part)]
    else:
        batches = []
        for batch in Batches(binding, batch_size, shuffle=False).epoch():
            count = len(next(iter(batch.values())))
            batches.append({name: value[:rows] for name, value in batch.items()})
            rows -= count
            if rows <= 0:
                break
    if not batches:
        raise DataError(f"{data.origin} has no rows to look at.")
    return batches


def _inputs(batches: Iterable[Batch]) -> list[Observed]:
    """The columns that are not finite: what comes in by the data is no node's doing."""
    found: dict[str, Observed] = {}
    for index, batch in enumerate(batches):
        for name, array in batch.items():
            if array.dtype.kind == "f":
                row = found.setdefault(name, Observed(name, name, "input", False, "fp32"))
                row.add(array, FP16, index)
    return [row for row in found.values() if row.nan or row.inf]


def diagnose_model(model: ir.Model, batches: Sequence[Batch], level: str, dtype: str) -> Diagnosis:
    """Look at the forward pass of a model at a level."""
    try:
        mixed = model if level == "O0" else convert(model, level=level, dtype=dtype).model
    except AmpError as problem:
        return Diagnosis(level, dtype, (), str(problem))
    return Diagnosis(level, dtype, (*_inputs(batches), *observe(mixed, batches, low_type(dtype))))


def diagnose_bundle(bundle: Bundle, state: Mapping[str, Array], batches: Sequence[Batch]) -> Diagnosis:
    """Look at forward, loss and backward of a bundle with a given state.

    Args:
        bundle: The bundle.
        state: Its state, of a checkpoint or of the beginning.
        batches: Micro-batches with labels.
    """
    manifest = bundle.manifest
    arenas = Arenas(manifest)
    arenas.load(state)
    if not arenas.tensor("scalars/seed_divisor"):  # the run has not begun
        arenas.write("scalars/seed_divisor", np.array(seed_divisor(_first_weight(bundle, arenas, batches)), np.float32))
    feeds = (_feeds(bundle, arenas, batch) for batch in batches)
    values = observe(bundle.graphs["grad"], feeds, low_type(manifest.dtype))
    return Diagnosis(manifest.level, manifest.dtype, (*_inputs(batches), *values))


def _first_weight(bundle: Bundle, arenas: Arenas, batches: Sequence[Batch]) -> float:
    """The sum of weights by which a run on these batches would choose its divisor: that of the first batch that has any."""
    check = BatchCheck.of(bundle)
    evaluation = Evaluation(bundle, find_device("cpu"), arenas, SessionConfig("cpu"), check)
    sums = (float(evaluation.weight_sum(check(batch)).read()) for batch in batches)
    return next((weight for weight in sums if 0 < weight < math.inf), 0.0)


def _feeds(bundle: Bundle, arenas: Arenas, batch: Batch) -> dict[str, Array]:
    """What grad.onnx takes for the first micro-batch of a window."""
    manifest = bundle.manifest
    hosts: dict[str, Array] = {
        "first": np.array(True),
        "row_offset": np.array(0, np.int64),
        "micro_step": np.array(0, np.int64),
    }
    feeds: dict[str, Array] = {}
    for port in manifest.graphs["grad"].inputs:
        if port.kind in ("data", "labels"):
            feeds[port.name] = batch[port.name]
        elif port.kind == "weights":
            feeds[port.name] = batch.get(port.name, np.ones(1, np.float32))
        elif port.kind == "host":
            feeds[port.name] = hosts[port.ref]
        else:
            feeds[port.name] = arenas.tensor(port.ref)
    return feeds


def with_state(bundle: Bundle, state: Mapping[str, Array]) -> dict[str, Array]:
    """The state of one level's bundle moved into another's: tensors that both have, of one shape and type."""
    known = {tensor.key: tensor for tensor in bundle.manifest.tensors}
    moved = {
        key: value
        for key, value in state.items()
        if key in known and tuple(value.shape) == known[key].shape and not key.startswith(("scalars/", "counters/"))
    }
    return {**bundle.state, **moved}


def ranked(values: Iterable[Observed]) -> list[Observed]:
    """Values by what matters: bad ones in their order, then those that lose most to underflow, 16-bit ones first."""
    values = list(values)
    losing = [value for value in values if not value.bad and value.underflow > 0]
    losing.sort(key=lambda value: (value.precision == "fp32", -value.underflow))
    return [value for value in values if value.bad] + losing
