"""Checks of one micro-batch against what the graphs ask for, before the runtime sees it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxamp.errors import DataError
from onnxamp.trainer.arenas import numpy_dtype
from onnxamp.trainer.batches import Locate
from onnxamp.trainer.data import Field
from onnxamp.training.bundle import Bundle
from onnxamp.training.manifest import Labels, Manifest, Port


@dataclasses.dataclass(frozen=True)
class CheckedBatch:
    """A micro-batch that fits.

    Attributes:
        feeds: Contiguous arrays for every data input.
        rows: Size of the first dimension of the input that counts rows.
        nan: Which input holds NaN, and where, in words; None if none does.
        infinity: The same of infinities, which may be meant (an attention mask) or not.
        weights: The weights of its rows; None if it has none.
    """

    feeds: dict[str, NDArray[Any]]
    rows: int
    nan: str | None
    infinity: str | None = None
    weights: NDArray[Any] | None = None


class NonFinite:
    """What is known of NaN and infinities in the batches of a pass: where the first are, and how many batches more have some."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._batches: collections.Counter[str] = collections.Counter()

    def add(self, nan: str | None, infinity: str | None) -> None:
        """Take note of a batch, with the words that `nonfinite` has for it."""
        for what, text in (("NaN", nan), ("Inf", infinity)):
            if text is not None:
                self._first.setdefault(what, text)
                self._batches[what] += 1

    def consequence(self, *, infinity: bool = False) -> str | None:
        """Which input holds NaN, where, and what that means; None if none does, or none holds infinities, if those matter too."""
        what = next((what for what in (("NaN", "Inf") if infinity else ("NaN",)) if what in self._first), None)
        if what is None:
            return None
        more = self._batches[what] - 1
        others = f", and {more} more batch{'es hold' if more > 1 else ' holds'} some" if more else ""
        return f"{self._first[what]}{others}: what is computed from them is not finite either"


def _ports(manifest: Manifest) -> tuple[Port, ...]:
    """What a batch has: an input that only an output of the model needs is not in grad.onnx."""
    trained = manifest.graphs["grad"].of_kind("data", "labels", "weights")
    known = {port.name for port in trained}
    return (*trained, *(port for port in manifest.graphs["eval"].of_kind("data") if port.name not in known))


def fields(manifest: Manifest) -> tuple[Field, ...]:
    """The same as the arrays of a data set."""
    return tuple(Field(port.name, numpy_dtype(port.dtype), port.shape) for port in _ports(manifest))


class BatchCheck:
    """Knows what a batch must look like.

    Args:
        ports: The inputs of kind data, labels and weights.
        rows: Name of the input whose first size is the number of rows.
        labels: What the loss expects of labels: their range, if they are indices.
        spare: Inputs of the user's model that nothing computes with; a batch may have them.
    """

    def __init__(
        self, ports: Sequence[Port], rows: str, labels: Sequence[Labels] = (), spare: Collection[str] = ()
    ) -> None:
        self._ports = tuple(ports)
        self._rows = rows
        self._labels = {one.name: one for one in labels}
        self._spare = frozenset(spare)

    @classmethod
    def of(cls, bundle: Bundle) -> BatchCheck:
        """What training on `bundle`, and its evaluation, asks of a batch."""
        manifest = bundle.manifest
        return cls(_ports(manifest), manifest.rows, manifest.labels, bundle.input_names)

    def __call__(self, batch: Mapping[str, Any], locate: Locate | None = None) -> CheckedBatch:
        """The batch, ready to be fed; without `weights` every row weighs 1.

        Args:
            batch: Arrays by name.
            locate: Says where rows of it lie in the data, if that is known.

        Raises:
            DataError: An input is missing, unknown, empty, or of the wrong type, shape or range; or weights are not one
                per row (or a single one), finite and not negative.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"A batch is a dict from input names to arrays, not {type(batch).__name__}; inputs: {self._expected()}."
            )
        names = [port.name for port in self._ports]
        missing = [port.name for port in self._ports if port.name not in batch and port.kind != "weights"]
        extra = [name for name in batch if name not in names and name not in self._spare]
        if missing or extra:
            parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
            parts += [f"has {', '.join(map(repr, extra))}, which the model does not take"] if extra else []
            raise DataError(f"The batch {' and '.join(parts)}; expected inputs: {self._expected()}.")
        feeds: dict[str, NDArray[Any]] = {}
        sizes: dict[str, tuple[int, str]] = {}
        for port in self._ports:
            if port.name not in batch:
                feeds[port.name] = np.ones(1, np.float32)
                continue
            array = np.asarray(batch[port.name])
            _check_form(port, array, sizes)
            feeds[port.name] = np.ascontiguousarray(array).reshape(array.shape)
            if port.name in self._labels:
                _check_labels(port.name, array, self._labels[port.name])
        rows = int(feeds[self._rows].shape[0])
        for port in self._ports:
            if port.kind == "weights":
                _check_weights(port.name, feeds[port.name], rows)
        weights = next(
            (feeds[port.name] for port in self._ports if port.kind == "weights" and port.name in batch), None
        )
        return CheckedBatch(feeds, rows, *nonfinite(feeds, rows, locate), weights)

    def _expected(self) -> str:
        return ", ".join(f"{port.name} {port.dtype}{_sizes(port.shape)}" for port in self._ports)


def _check_form(port: Port, array: NDArray[Any], sizes: dict[str, tuple[int, str]]) -> None:
    def differs() -> str:
        found = f"{array.dtype}{_sizes(array.shape)}"
        return f"The input {port.name!r} should be {port.dtype}{_sizes(port.shape)}, the batch has {found}"

    if array.dtype != numpy_dtype(port.dtype):
        raise DataError(f"{differs()}: cast it to {port.dtype}.")
    if array.ndim != len(port.shape):
        raise DataError(f"{differs()}.")
    for axis, (expected, size) in enumerate(zip(port.shape, array.shape, strict=True)):
        if size == 0:
            found = f"{array.dtype}{_sizes(array.shape)}"
            raise DataError(f"The input {port.name!r} is empty ({found}): a batch needs at least one row.")
        if isinstance(expected, int) and expected != size:
            raise DataError(f"{differs()} (dimension {axis}).")
        if isinstance(expected, str) and not (port.kind == "weights" and array.size == 1):
            known, owner = sizes.setdefault(expected, (size, port.name))
            if known != size:
                raise DataError(
                    f"The inputs {owner!r} and {port.name!r} share the size {expected!r}, "
                    f"but the batch has {known} in the first and {size} in the second."
                )


def _check_labels(name: str, array: NDArray[Any], labels: Labels) -> None:
    if labels.classes is None or array.dtype.kind not in "iu":
        return
    lowest, highest = int(array.min()), int(array.max())
    if lowest >= 0 and highest < labels.classes:
        return
    wrong = (array < 0) | (array >= labels.classes)
    if labels.ignore_index is not None:
        wrong &= array != labels.ignore_index
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        ignored = "" if labels.ignore_index is None else f" (or {labels.ignore_index}, which is ignored)"
        problem = DataError(
            f"The input {name!r} has the label {int(array[tuple(place)])} at {place}, "
            f"but the model has {labels.classes} classes: labels are 0 to {labels.classes - 1}{ignored}."
        )
        problem.row = place[0] if place else None
        raise problem


def _check_weights(name: str, array: NDArray[Any], rows: int) -> None:
    if array.size not in (1, rows):
        raise DataError(f"The input {name!r} has {array.size} values, but the batch has {rows} rows: give one per row.")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        place = int(np.argmax(wrong))
        raise DataError(
            f"The input {name!r} has the value {float(array.reshape(-1)[place]):g} at [{place}]: "
            "a weight is finite and not negative, 0 leaves a row out."
        )


def nonfinite(
    feeds: Mapping[str, NDArray[Any]], rows: int, locate: Locate | None = None
) -> tuple[str | None, str | None]:
    """Which array of a batch holds NaN, and which infinities, and where, in words; None where none does.

    Args:
        feeds: Arrays by name.
        rows: Rows of the batch.
        locate: Says where rows of it lie in the data, if that is known.
    """
    unfit = [(name, array) for name, array in feeds.items() if not _is_finite(array)]
    nan, infinity = (
        next((text for name, array in unfit if (text := _said(name, array, what, rows, locate))), None)
        for what in ("NaN", "Inf")
    )
    return nan, infinity


def _is_finite(array: NDArray[Any]) -> bool:
    """Whether a float array holds neither NaN nor infinities."""
    if array.dtype.kind not in "fV":
        return True
    values = array if array.dtype.kind == "f" and array.dtype.itemsize >= 4 else array.astype(np.float32)
    flat = values.reshape(-1)
    # One pass at the speed of memory; only a sum that is not finite needs a second look (it may have overflowed).
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(values).all())


def _said(name: str, array: NDArray[Any], what: str, rows: int, locate: Locate | None) -> str | None:
    """How many NaN (or Inf) an array holds and where, in words; None if it holds none."""
    bad = np.isnan(array) if what == "NaN" else np.isinf(array)
    if not bad.any():
        return None
    count, first = int(bad.sum()), np.argwhere(bad)[0].tolist()
    if locate is None or array.shape[:1] != (rows,):
        return f"the input {name!r} holds {count} {what}, the first at {first}"
    where = locate(np.flatnonzero(bad.reshape(rows, -1).any(1)).tolist())
    return f"the input {name!r} holds {count} {what} in {where}"


def _sizes(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
