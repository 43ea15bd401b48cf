"""Outputs of a model file over a whole data set, and how good they are."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from onnxamp.errors import DataError, UnsupportedError, UsageError
from onnxamp.evidence.inputs import model_inputs
from onnxamp.model.io import load
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.trainer.batch import NonFinite, nonfinite
from onnxamp.trainer.batches import Batches, Binding, Locate, bind
from onnxamp.trainer.checkpoint import atomic, disk_error
from onnxamp.trainer.data import Array, Arrays, Batch, Field, open_data
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.metrics import metrics_of
from onnxamp.trainer.outputs import joined, label_name, metric_options, prediction
from onnxamp.training.bundle import Bundle


def model_fields(path: str | os.PathLike[str]) -> tuple[Field, ...]:
    """What a model file asks for.

    Raises:
        UnsupportedError: An input is a sequence or an optional.
    """
    fields = []
    for item in model_inputs(load(path)):
        if item.dtype is None:
            raise UnsupportedError(
                f"Input {item.name!r} of {os.fspath(path)} is no tensor; columns of data cannot feed it."
            )
        fields.append(Field(item.name, item.dtype, item.shape))
    return tuple(fields)


def model_batches(
    binding: Binding, batch_size: int, prepare: Callable[[Batch, Locate], Batch] | None = None
) -> Batches:
    """The data in order, in batches of the size that the model wants where its first dimension is fixed.

    `prepare` is that of `Batches`.

    Raises:
        DataError: The rows do not fill batches of a fixed size.
    """
    size = binding.fixed_size or batch_size
    if size != batch_size:
        binding.check_size(size)
    return Batches(binding, size, shuffle=False, prepare=prepare)


def predict(
    model: str | os.PathLike[str],
    data: object,
    *,
    batch_size: int = 64,
    columns: Mapping[str, str] | None = None,
    compared: Collection[str] = (),
    provider: str = "auto",
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The outputs by name, rows joined along the first axis, and notes on casts, unused columns and NaN in the data.

    Args:
        model: The model file.
        data: Anything `data.open_data` opens; `labels` and other columns that the model does not take are left out.
        batch_size: Rows at a time.
        columns: Input name to column name, where they differ.
        compared: Names in `columns` that `score` reads, and not the model; see `compared_columns`.
        provider: Where to run.

    Raises:
        DataError: The data do not fit, or an output has no row per input row.
    """
    binding = bind(open_data(data), model_fields(model), columns=columns, compared=compared)
    session = open_session(model, SessionConfig(provider=provider))
    found = NonFinite()

    def noted(batch: Batch, locate: Locate) -> Batch:
        found.add(*nonfinite(batch, len(next(iter(batch.values()))), locate))
        return batch

    batches = model_batches(binding, batch_size, noted)
    binding.check_size(batches.batch_size)
    outputs = joined((len(next(iter(batch.values()))), run(session, batch)) for batch in batches)
    bad = found.consequence()
    return outputs, (*binding.notes, *([bad] if bad else []))


def compared_columns(bundle: Bundle | None) -> tuple[str, str]:
    """What `score` reads: the labels of what was trained (``labels`` without a bundle), and the weights."""
    return ("labels" if bundle is None else label_name(bundle)), "weights"


def score(
    outputs: Mapping[str, Array],
    data: object,
    metrics: Iterable[str | Metric],
    *,
    columns: Mapping[str, str] | None = None,
    bundle: Bundle | None = None,
) -> dict[str, float]:
    """Metrics of what `predict` gave for these data, by name, which have a column `labels` (and may have `weights`).

    Args:
        outputs: The outputs.
        data: What they were predicted from.
        metrics: Metrics, or their names.
        columns: Name of an input, `labels` or `weights` to column name, where they differ.
        bundle: What the model was trained as: says which output is meant and how it is read. Without one it is the first.

    Raises:
        DataError: There are no labels, or they do not belong to the output.
        UsageError: A metric does not exist.
    """
    source, names = open_data(data), compared_columns(bundle)
    label, weights = names
    if not isinstance(source, Arrays):
        raise UsageError("Metrics need data with a known number of rows.")
    name = next(iter(outputs)) if bundle is None else str(prediction(bundle).name)
    stored = {field.name for field in source.fields}
    chosen = {key: (columns or {}).get(key, key) for key in names}
    for key, use in ((label, f"compare {name!r} with"), (weights, "weigh rows by")):
        if chosen[key] not in stored and (key == label or key in (columns or {})):
            raise DataError(
                f"{source.origin} has no column {chosen[key]!r} to {use}; it has {', '.join(sorted(stored))}."
            )
    taken = source.take(stored & set(chosen.values()), np.arange(source.rows))
    measures = metrics_of(metrics, **({} if bundle is None else metric_options(bundle)))
    for each in measures:
        each.update(outputs[name], taken[chosen[label]], taken.get(chosen[weights]))
    return {each.name: each.value() for each in measures}


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Write arrays as an `.npz` that is there whole or not at all; any name goes, unlike with `numpy.savez`.

    Raises:
        RuntimeMissingError: The disk is full or the folder may not be written to.
    """
    target = Path(path)
    try:
        with atomic(target) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as problem:
        raise disk_error(target, problem) from problem
