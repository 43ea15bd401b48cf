"""What a graph minimizes: exact sums over a micro-batch, and where its gradient enters the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import FLOAT, INT64, Fragment
from onnxamp.training.losses import AnyLoss, LossModel, ModelOutput, Sum, Terms
from onnxamp.training.manifest import Labels

Take = Callable[[str, ir.DataType, Sequence[int | str], str], ir.Value]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sums of a micro-batch.

    Attributes:
        loss_sum: Σ loss·w, FP32 scalar.
        weight_sum: Σ w, FP32 scalar.
        seeds: Appends seed · d(Σ loss·w) for a scalar seed: the gradient of each value of the graph that the loss reads.
        labels: What it expects of the labels; empty if the model computes its own loss.
    """

    loss_sum: ir.Value
    weight_sum: ir.Value
    seeds: Callable[[ir.Value], Mapping[ir.Value, ir.Value]]
    labels: tuple[Labels, ...]


def objective(op: Fragment, loss: AnyLoss, predictions: Sequence[ir.Value], rows: ir.Value, take: Take) -> Objective:
    """Append the loss.

    Args:
        op: The graph.
        loss: The loss.
        predictions: The outputs that it reads, in its order.
        rows: The input whose first dimension counts rows.
        take: Makes an input: name, type, shape, kind.
    """
    values = [op.cast(value, FLOAT) for value in predictions]
    if isinstance(loss, (ModelOutput, LossModel)):
        return _computed(op, values, rows)
    if isinstance(loss, Sum):
        return _sum(op, loss, values, take)
    labels = loss.labels(values[0])
    target = _labels(labels, take)
    terms = loss.terms(op, values[0], target, _row_weights(op, values[0], _weights(take)))
    return Objective(terms.loss_sum, terms.weight_sum, lambda seed: {values[0]: terms.backward(seed)}, (labels,))


def _computed(op: Fragment, values: Sequence[ir.Value], rows: ir.Value) -> Objective:
    """A scalar that the graph computes is the mean of its rows; two are Σ loss·w and Σ w."""
    scalars = [op.Reshape(value, np.zeros(0, np.int64)) for value in values]
    if len(values) == 2:
        total, weight = scalars
        return Objective(total, weight, lambda seed: {values[0]: op.reshape(seed, values[0])}, ())
    count = op.count(rows, [0])
    weight = count if isinstance(count, ir.Value) else op.number(count)

    def seeds(seed: ir.Value) -> Mapping[ir.Value, ir.Value]:
        return {values[0]: op.reshape(op.Mul(seed, weight), values[0])}

    return Objective(op.Mul(scalars[0], weight), weight, seeds, ())


def _labels(labels: Labels, take: Take) -> ir.Value:
    return take(labels.name, INT64 if labels.dtype == "int64" else FLOAT, labels.shape, "labels")


def _weights(take: Take) -> ir.Value:
    return take("weights", FLOAT, ("weights",), "weights")


def _row_weights(op: Fragment, prediction: ir.Value, weights: ir.Value) -> ir.Value:
    """One weight per row of the prediction."""
    per_row = op.Expand(weights, op.dim(prediction, 0))
    per_row.shape = ir.Shape([op.dims(prediction)[0]])
    return per_row


def _sum(op: Fragment, loss: Sum, values: Sequence[ir.Value], take: Take) -> Objective:
    """Each loss divided by the number of its terms in a row: then the weight of the rows is the denominator of all."""
    firsts = {op.dims(value)[0] for value in values}
    if len(firsts) != 1 or None in firsts:
        names = ", ".join(f"{value.name!r} {value.shape}" for value in values)
        raise UsageError(f"The losses of a sum must read outputs with as many rows, not {names}.")
    known: dict[str, Labels] = {}
    wanted = [dataclasses.replace(p.loss.labels(v), name=p.label_name) for p, v in zip(loss.parts, values, strict=True)]
    for labels in wanted:
        other = known.setdefault(labels.name, labels)
        if (other.dtype, other.shape) != (labels.dtype, labels.shape):
            raise UsageError(
                f"Two losses compare with {labels.name!r} and expect different labels: give one of them labels of another name."
            )
    targets = {name: _labels(labels, take) for name, labels in known.items()}
    weights = _row_weights(op, values[0], _weights(take))
    parts: list[tuple[ir.Value, Terms, ir.Value]] = []
    for part, value in zip(loss.parts, values, strict=True):
        terms = part.loss.terms(op, value, targets[part.label_name], weights)
        count = part.loss.per_row(op, value)
        share = op.Div(op.number(part.factor), count) if isinstance(count, ir.Value) else op.number(part.factor / count)
        parts.append((value, terms, share))
    totals = [op.Mul(terms.loss_sum, share) for _, terms, share in parts]

    def seeds(seed: ir.Value) -> Mapping[ir.Value, ir.Value]:
        found: dict[ir.Value, ir.Value] = {}
        for value, terms, share in parts:
            slope = terms.backward(op.Mul(seed, share))
            found[value] = op.Add(found[value], slope) if value in found else slope
        return found

    total = totals[0] if len(totals) == 1 else op.Sum(*totals)
    return Objective(total, op.sum_all(weights), seeds, tuple(known.values()))
