"""What `Trainer.evaluate` and `Trainer.predict` compute: the loss, metrics and outputs of the state as it is now."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.errors import UsageError
from onnxamp.ort.session import SessionConfig
from onnxamp.ort.values import View
from onnxamp.trainer.arenas import Arenas
from onnxamp.trainer.batch import BatchCheck, CheckedBatch, NonFinite
from onnxamp.trainer.batches import Locate
from onnxamp.trainer.data import rows_of
from onnxamp.trainer.device import Device
from onnxamp.trainer.evaluator import Evaluator, without_loss
from onnxamp.trainer.inference import Trained
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.outputs import joined, label_name, prediction
from onnxamp.training.bundle import Bundle
from onnxamp.training.evaluation import evaluation_graph
from onnxamp.training.manifest import GraphPorts

logger = logging.getLogger("onnxamp")

Arrays = Mapping[str, NDArray[Any]]


class Evaluation:
    """Runs eval.onnx, or what `export` writes, on the state of a run; changes nothing.

    Args:
        bundle: What is trained.
        device: Where it runs.
        arenas: The state.
        config: How sessions are made.
        check: What a batch must have.
    """

    def __init__(
        self, bundle: Bundle, device: Device, arenas: Arenas, config: SessionConfig, check: BatchCheck
    ) -> None:
        self._bundle = dataclasses.replace(bundle, state={})  # the state is what the arenas hold
        self._ports = bundle.manifest.graphs["eval"]
        self._device = device
        self._arenas = arenas
        self._config = config
        self._check = check
        self._warned: set[str] = set()

    def evaluate(
        self,
        data: Arrays | CheckedBatch | Iterable[Arrays | CheckedBatch],
        metrics: Sequence[Metric],
        weights: str = "working",
        level: str | None = None,
        dtype: str | None = None,
        *,
        warns: bool = True,
    ) -> list[float]:
        """The mean loss, Σ weighted losses / Σ weights over all rows (NaN if no row has weight), then the metrics.

        NaN in the data, and infinities that make the loss infinite or NaN, are logged with their rows, unless `warns` is false.

        Raises:
            DataError: A batch does not fit.
            UsageError: Unknown level or weights, or metrics where `data` has no labels.
        """
        evaluator = self._evaluator(weights, level, dtype)
        for each in metrics:
            each.reset()
        totals = np.zeros(2)
        output, label = prediction(self._bundle).name, label_name(self._bundle)
        rows, found, ahead = 0, NonFinite(), True
        for batch in [data] if isinstance(data, (Mapping, CheckedBatch)) else data:
            if metrics and label not in (batch.feeds if isinstance(batch, CheckedBatch) else batch):
                raise UsageError("Metrics compare with labels, and the data have none.")
            ahead = ahead and isinstance(batch, CheckedBatch)
            checked = batch if isinstance(batch, CheckedBatch) else self._check(batch, _from(rows))
            outputs = evaluator.run(checked)
            totals += evaluator.sums.read()
            for each in metrics:
                each.update(outputs[output or ""], checked.feeds[label], checked.weights)
            rows += checked.rows
            found.add(checked.nan, checked.infinity)
        loss = float(totals[0] / totals[1]) if totals[1] else float("nan")
        if warns:
            # A run looks at the same data again and again, with batches that it has checked ahead.
            self._warn(found.consequence(infinity=not math.isfinite(loss)), once=ahead)
        return [loss, *(each.value() for each in metrics)]

    def predict(self, data: Arrays | Iterable[Arrays], weights: str = "working") -> dict[str, NDArray[Any]]:
        """The model's outputs by name, joined along the first axis if `data` is an iterable of batches.

        Raises:
            DataError: A batch does not fit, or an output of several batches has no row per input row.
            UsageError: There are no batches, or unknown weights.
        """
        average = _averages(weights)
        graph, ports = self._graph(weights, "O0" if weights == "master" else None, None)
        evaluator = Evaluator(without_loss(graph, ports), ports, self._arenas, self._config, average=average)
        check = BatchCheck(self._ports.of_kind("data"), self._bundle.manifest.rows, spare=self._bundle.input_names)
        compared = {port.name for port in self._ports.of_kind("labels", "weights")}

        rows, bad = 0, NonFinite()

        def outputs(batch: Arrays) -> tuple[int, dict[str, Any]]:
            nonlocal rows
            checked = check({name: value for name, value in batch.items() if name not in compared}, _from(rows))
            rows += checked.rows
            bad.add(checked.nan, None)
            return checked.rows, evaluator.run(checked)

        found = outputs(data)[1] if isinstance(data, Mapping) else joined(map(outputs, data))
        if not found:
            raise UsageError("There are no batches to predict.")
        self._warn(bad.consequence())
        return found

    def _warn(self, found: str | None, *, once: bool = False) -> None:
        """Log which values of the data are not finite; with `once` not the same text again."""
        if found is None or (once and found in self._warned):
            return
        self._warned.add(found)
        logger.warning("%s%s.", found[0].upper(), found[1:])

    def weight_sum(self, batch: CheckedBatch) -> View:
        """The sum of weights of a batch, a float32 scalar on the device."""
        self._working.run(batch)
        sums = self._working.sums
        return sums.buffer.view(4, (), sums.element_type)

    @functools.cached_property
    def _working(self) -> Evaluator:
        return Evaluator(self._device.graph(self._bundle, "eval"), self._ports, self._arenas, self._config)

    def _evaluator(self, weights: str, level: str | None, dtype: str | None) -> Evaluator:
        average = _averages(weights)
        if level is None and weights == "working":
            return self._working
        level = "O0" if weights == "master" and level is None else level
        graph, ports = self._graph(weights, level, dtype)
        return Evaluator(graph, ports, self._arenas, self._config, average=average and level is None)

    def _graph(self, weights: str, level: str | None, dtype: str | None) -> tuple[ir.Model, GraphPorts]:
        """The loss and outputs as training computes them; with a `level` those of what `export` writes at it, of `weights`."""
        if level is None:
            return self._device.graph(self._bundle, "eval"), self._ports
        trained, manifest = Trained(self._bundle, self._arenas.values), self._bundle.manifest
        exported = "ema" if weights == "ema" else "master"
        model, judge = trained.model(weights=exported), trained.loss_model(exported)
        graph, ports = evaluation_graph(model, manifest.options, level, dtype or manifest.dtype, judge)
        return self._device.rounding(graph), ports


def _from(first: int) -> Locate:
    """Where rows of a batch lie whose first is the row `first` of all."""
    return lambda rows: rows_of(np.array(rows) + first, "the data")


def _averages(weights: str) -> bool:
    """Whether `weights` asks for the moving average of the parameters."""
    if weights not in ("working", "master", "ema"):
        raise UsageError(f"Unknown weights {weights!r}: use working, master or ema.")
    return weights == "ema"
