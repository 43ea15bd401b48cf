"""Outputs of a model: which one metrics read, and how; and those of many batches as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.errors import DataError
from onnxamp.training.bundle import Bundle


def prediction(bundle: Bundle) -> ir.Value:
    """The output that metrics compare with labels: the one that the (first) loss reads, or the first if the model has its own loss."""
    manifest = bundle.manifest
    parts = manifest.options.get("loss", {}).get("parts")
    wanted = parts[0]["output"] if parts else manifest.options.get("output") if manifest.labels else None
    outputs = bundle.model.graph.outputs
    return next((value for value in outputs if value.name == wanted), outputs[0])


def label_name(bundle: Bundle) -> str:
    """The input that metrics compare `prediction` with."""
    labels = bundle.manifest.labels
    return labels[0].name if labels else "labels"


def joined(parts: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, NDArray[Any]]:
    """The outputs of several batches, joined along the first axis.

    Args:
        parts: The number of rows and the outputs by name, of each batch.

    Raises:
        DataError: An output has no row for each row of the input, so that there is no way to join it.
    """
    found: dict[str, list[NDArray[Any]]] = {}
    for rows, outputs in parts:
        for name, value in outputs.items():
            if not isinstance(value, np.ndarray) or value.shape[:1] != (rows,):
                shape = list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__
                raise DataError(f"Output {name!r} ({shape}) has no row for each of the {rows} input rows.")
            found.setdefault(name, []).append(value)
    return {name: np.concatenate(values) for name, values in found.items()}


def metric_options(bundle: Bundle) -> dict[str, Any]:
    """The keyword arguments of `metrics.metric` that fit a bundle's loss and output."""
    manifest = bundle.manifest
    loss = manifest.options.get("loss", {})
    loss = loss["parts"][0]["loss"] if "parts" in loss else loss
    name = loss.get("name")
    producer = prediction(bundle).producer()
    options: dict[str, Any] = {
        "binary": name == "binary_cross_entropy_with_logits",
        "probabilities": producer is not None and producer.op_type in ("Softmax", "Sigmoid"),
    }
    if "axis" in loss:
        options["class_axis"] = 1 if loss["axis"] is None else loss["axis"]  # as the losses do
    if manifest.labels and manifest.labels[0].ignore_index is not None:
        options["ignore_index"] = manifest.labels[0].ignore_index
    return options
