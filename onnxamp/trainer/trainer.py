"""`Trainer`: a bundle running on ONNX Runtime."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.errors import UsageError
from onnxamp.ort import gradient_builder
from onnxamp.ort.session import SessionConfig
from onnxamp.trainer import checkpoint
from onnxamp.trainer.arenas import Arenas
from onnxamp.trainer.batch import BatchCheck, CheckedBatch, fields
from onnxamp.trainer.batches import Locate
from onnxamp.trainer.collective import Collective, SingleProcess, divided, of_rank_0, share_state, texts
from onnxamp.trainer.data import Field
from onnxamp.trainer.device import emulated, find_device, usable_threads
from onnxamp.trainer.evaluation import Evaluation
from onnxamp.trainer.fit import History, fit
from onnxamp.trainer.inference import Trained
from onnxamp.trainer.loop import StepResult, Window, WindowLoop
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.metrics import metrics_of
from onnxamp.trainer.outputs import metric_options
from onnxamp.trainer.step import open_step
from onnxamp.training.bundle import Bundle

logger = logging.getLogger("onnxamp")

# The runtime's threads wait for the next run in a busy loop. The graphs of a step take turns, so those of the one that has ended
# would take the processors from the next: the update took twice as long.
_CONFIG = {"session.force_spinning_stop": "1"}

Batch = Mapping[str, NDArray[Any]]


class Trainer:
    """Trains a bundle.

    Args:
        bundle: A bundle, or the folder of one.
        provider: ``auto``, ``cpu``, ``cuda``... (`onnxamp doctor` lists what is there).
        accumulate: Micro-batches in a window.
        threads: Threads of the CPU to compute with, at most one a processor; 0 leaves it to the runtime.
        in_place: Overwrite state in memory where that is proved safe. False uses two buffers in turn everywhere; the
            results are the same bit for bit.
        collective: The processes that train together.
        provider_options: Options of the provider, over those of `onnxamp.ort.providers.default_options`.

    Attributes:
        position: What the data loop wants to find again after a restart; saved with each checkpoint.

    Raises:
        RuntimeMissingError: The runtime, the provider or the memory is not there.
        UsageError: `accumulate` is not positive, `threads` is negative, or a provider option is one that the trainer sets.
        ModelError: The bundle is broken.
    """

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str],
        provider: str = "auto",
        accumulate: int = 1,
        *,
        threads: int = 0,
        in_place: bool = True,
        collective: Collective | None = None,
        provider_options: Mapping[str, str] | None = None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate must be at least 1, not {accumulate}.")
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
        self.manifest = self.bundle.manifest
        self.position: dict[str, Any] = {}
        self.collective: Collective = collective or SingleProcess()
        if emulated(self.manifest):
            gradient_builder.require()  # its operators are in no other runtime
        self._device = find_device(provider, self.collective.local_rank)
        self.provider = self._device.provider
        threads = usable_threads(threads, self.collective.local_world_size)
        stream = self._device.stream()
        if self.manifest.level != "O0" and (text := self._device.expectation(self.manifest.dtype)):
            logger.warning("%s", text)
        options = self._device.options(stream, provider_options)
        self._config = SessionConfig(
            self.provider, threads=threads, memory_pattern=False, provider_options=options, config=_CONFIG
        )
        self._arenas = Arenas(self.manifest, self._device.memory, self._device.id, stream)
        self._arenas.load(self.bundle.state)
        self._environment = checkpoint.environment(self.provider, threads)
        self._programs = open_step(self.bundle, self._device, self._arenas, self._config, in_place, threads)
        self._programs.grad.program(accumulate == 1)  # what cannot run here should be said now
        self._check = BatchCheck.of(self.bundle)
        self._evaluation = Evaluation(self.bundle, self._device, self._arenas, self._config, self._check)
        self._loop = WindowLoop(
            self.manifest,
            self._arenas,
            self._programs,
            accumulate,
            self.collective,
            self._evaluation.weight_sum,
        )
        self.join(self.collective)

    @property
    def accumulate(self) -> int:
        """Micro-batches in a window; may be changed at any time."""
        return self._loop.accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if value < 1:
            raise UsageError(f"accumulate must be at least 1, not {value}.")
        self._loop.accumulate = value

    def regroup(self, batch_size: int) -> int:
        """After `load`: keep the rows of windows, whatever the number of processes is now.

        Where batches of a stream are taken as they are, it is their number that windows keep.

        Args:
            batch_size: The most rows that a micro-batch may have.

        Returns:
            The rows of a micro-batch of each process; `accumulate` is set to go with it.

        Raises:
            UsageError: The rows, or batches, of a window cannot be shared evenly by so many processes.
        """
        before, ranks = self.position.get("size"), self.collective.world_size
        if not before:
            then = self.position.get("world_size", ranks)
            _, accumulate = divided(then * self.accumulate, ranks, 1, then * self._loop.window.micro_steps, "batches")
            self._loop.regroup(accumulate)
            return batch_size
        rows = self._loop.window.rows
        size, accumulate = divided(before * self.accumulate, ranks, batch_size, rows)
        self._loop.regroup(accumulate)
        return size

    @property
    def fields(self) -> tuple[Field, ...]:
        """The arrays that a batch has: the model's inputs, `labels`, and `weights` (optional)."""
        return fields(self.manifest)

    @property
    def metric_options(self) -> dict[str, Any]:
        """How metrics that are given by name have to read outputs and labels."""
        return metric_options(self.bundle)

    @property
    def refusals(self) -> dict[str, str]:
        """Outputs that the bundle lets overwrite their input but this runtime does not, each with the reason."""
        return self._programs.refusals(self.manifest, self.accumulate == 1)

    @property
    def step(self) -> int:
        """Applied windows since the beginning."""
        return int(self._arenas.tensor("counters/step"))

    @property
    def state_bytes(self) -> int:
        """Memory of parameters, gradients and optimizer state."""
        return self._arenas.nbytes

    def memory_report(self) -> dict[str, int]:
        """Bytes: ``state``, and on CUDA what is ``free`` on the device and its ``total``."""
        report = {"state": self.state_bytes}
        if (stream := self._arenas.stream) is not None:
            report["free"], report["total"] = stream.cuda.memory()
        return report

    def checked(self, batch: Batch, locate: Locate | None = None) -> CheckedBatch:
        """A micro-batch, checked: `micro_step` takes it too, so that this may be done ahead, in another thread.

        Args:
            batch: As for `micro_step`.
            locate: Says where rows of it lie in the data, for what is said of NaN.

        Raises:
            DataError: The batch does not fit: names, types, shapes, or labels that are no classes.
        """
        return self._check(batch, locate)

    def micro_step(self, batch: Batch | CheckedBatch | None, rows: Sequence[int] | None = None) -> StepResult:
        """Add the gradients of a micro-batch to the window; the last one of a window applies it.

        Args:
            batch: Arrays by input name, `labels` and, if rows weigh differently, `weights`; or what `checked` made of them.
                None only where several processes train and `rows` leaves this one nothing.
            rows: Where several processes train, the rows of each of them in this micro-step, if that is known: then nothing
                is exchanged before the window ends, and all must take the same number of micro-steps.

        Raises:
            DataError: The batch does not fit: names, types, shapes, or labels that are no classes.
            DivergedError: Too many windows in a row were skipped at the lowest loss scale.
            RankLostError: Another process has ended or does not answer.
        """
        if batch is None and rows is None:
            raise UsageError("A micro-step without a batch needs the rows of every process.")
        fit = batch if batch is None or isinstance(batch, CheckedBatch) else self._check(batch)
        return self._loop.micro_step(fit, rows)

    def flush(self) -> StepResult | None:
        """Apply the window as it is, if it has any micro-batch."""
        return self._loop.flush()

    def interrupt(self) -> None:
        """Tell the other processes that this one wants the run to end: `StepResult.interrupted` is true at the next window's
        end, on every rank alike."""
        self._loop.interrupting = True

    def texts(self, text: str) -> tuple[str, ...]:
        """What every process says, by rank, if all of them call this together."""
        return texts(self.collective, text, self._arenas)

    def leave(self) -> None:
        """Give up the open window and go on as the only process; the state is that of the last window."""
        self._loop.window = Window()
        self.join(SingleProcess())

    def fit(self, data: Any, **options: Any) -> History:
        """Train on a data set: see `onnxamp.trainer.fit.fit` for the arguments."""
        return fit(self, data, **options)

    def evaluate(
        self,
        data: Batch | CheckedBatch | Iterable[Batch | CheckedBatch],
        level: str | None = None,
        *,
        dtype: str | None = None,
        weights: str = "working",
        metrics: Sequence[str | Metric | Callable[[NDArray[Any], NDArray[Any]], float]] = (),
    ) -> dict[str, float]:
        """Mean loss over a data set, and metrics of the output that the loss reads.

        Args:
            data: A batch, or an iterable of batches; each may be what `checked` made of it.
            level: Evaluate what `export` writes at this level; None evaluates in the precision of training.
            dtype: The 16-bit type of `level`; that of the training by default.
            weights: ``working``, the parameters as training computes with them; ``master``, the FP32 ones (in FP32 unless
                `level` says otherwise); ``ema``, their moving average.
            metrics: Metrics besides the loss: names, objects or functions, as `fit` takes them.

        Where several processes train, give each of them all the data; all get the numbers of rank 0. NaN in the data is logged with
        its rows.

        Raises:
            DataError: A batch does not fit.
            UsageError: Unknown level, weights or metric.
        """
        measures = metrics_of(metrics, **self.metric_options)
        warns = self.collective.rank == 0
        found = self._evaluation.evaluate(data, measures, weights, level, dtype, warns=warns)
        values = of_rank_0(self.collective, np.array(found), self._arenas)
        return dict(zip(["loss", *(each.name for each in measures)], map(float, values), strict=True))

    def predict(self, data: Batch | Iterable[Batch], *, weights: str = "working") -> dict[str, NDArray[Any]]:
        """The model's outputs, joined along the first axis if `data` is an iterable of batches; `weights` as for `evaluate`.

        Labels and weights may be there, and are not used. NaN in the data is logged with its rows.

        Raises:
            DataError: A batch does not fit, or an output of several batches has no row per input row.
            UsageError: There are no batches, or unknown weights.
        """
        return self._evaluation.predict(data, weights)

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the FP32 parameters, by their names in the user's model."""
        return self._arenas.values("master")

    def export(
        self,
        path: str | os.PathLike[str],
        level: str = "O0",
        dtype: str = "fp16",
        *,
        weights: str = "master",
        target: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the model for inference, with its original names and structure and the trained parameters.

        Args:
            path: The file.
            level: ``O0`` keeps the types of the model; other levels convert it.
            dtype: The 16-bit type of other levels.
            weights: ``master`` or ``ema``, their moving average.
            target: Whose kernels a converted model must have; that of the training by default.
            overwrite: Replace a file that is there.
        """
        self.trained.export(path, level, dtype, weights=weights, target=target, overwrite=overwrite)

    def inference_model(
        self, level: str = "O0", dtype: str = "fp16", *, weights: str = "master", target: str | None = None
    ) -> ir.Model:
        """The model that `export` writes."""
        return self.trained.model(level, dtype, weights=weights, target=target)

    def nonfinite_gradients(self) -> list[str]:
        """Parameters whose gradient in the current or last window is not finite everywhere."""
        return [name for name, values in self._arenas.values("gradient").items() if not np.isfinite(values).all()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, at any micro-step; an existing file is replaced in one step. Rank 0 writes, others do nothing.

        The bundle is found again by its place relative to the file. If it was never saved, it is written beside the file.

        Raises:
            RuntimeMissingError: The disk is full, or the folder may not be written to.
            UsageError: Several processes train, and a window is open.
        """
        window = self._loop.window
        if self.collective.world_size > 1 and window.micro_steps:
            raise UsageError("Each rank has gradients of its own in the middle of a window: flush, then save.")
        if self.collective.rank:
            return
        target = Path(path).absolute()
        digest = self.manifest.digest
        folder = self.bundle.path
        if folder is None:
            folder = target.parent / f"bundle-{digest[:12]}"
            if not folder.exists():
                self.bundle.save(folder)
        progress = checkpoint.Progress(
            accumulate=self.accumulate,
            micro_steps=window.micro_steps,
            rows=window.rows,
            nan=window.nan,
            position=self.position,
            bundle=os.path.relpath(folder, target.parent),
            manifest=digest,
            environment=self._environment,
            infinity=window.infinity,
        )
        checkpoint.write(target, self._arenas.saved(), progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        provider: str = "auto",
        *,
        bundle: Bundle | str | os.PathLike[str] | None = None,
        threads: int = 0,
        in_place: bool = True,
        collective: Collective | None = None,
        provider_options: Mapping[str, str] | None = None,
    ) -> Trainer:
        """A trainer that goes on where a checkpoint was made.

        With the same runtime, provider and number of threads it goes on bit for bit; a difference is logged.

        Args:
            path: The checkpoint.
            provider: See `Trainer`.
            bundle: The bundle, if it is no longer where it was.
            threads: See `Trainer`.
            in_place: See `Trainer`.
            collective: See `Trainer`.
            provider_options: See `Trainer`.

        Raises:
            ModelError: The file is broken, or is not of this bundle.
        """
        found, state, progress = checkpoint.read_with_bundle(Path(path), bundle)
        trainer = cls(
            dataclasses.replace(found, state=state),  # so that ranks that join hand each other this state alone
            provider,
            progress.accumulate,
            threads=threads,
            in_place=in_place,
            collective=collective,
            provider_options=provider_options,
        )
        trainer.bundle = found
        checkpoint.warn_of_differences(progress.environment, trainer._environment)
        # The gradients of a window that is open are rank 0's to contribute.
        own = None if trainer.collective.rank == 0 else 0
        trainer._loop.restore(Window(progress.micro_steps, progress.rows, progress.nan, own, progress.infinity))
        trainer.position = dict(progress.position)
        return trainer

    @property
    def trained(self) -> Trained:
        """The trained parameters, as `export` takes them."""
        return Trained(self.bundle, self._arenas.values)

    def join(self, collective: Collective) -> None:
        """Train with other processes from now on; every rank begins with the state of rank 0."""
        self.collective = collective
        self._loop.join(collective)
        if collective.world_size > 1:
            share_state(collective, self._arenas)
