"""From a run to a model for inference: which checkpoint, which parameters, in which form."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from onnxamp.errors import DataError, ModelError, UsageError, few
from onnxamp.model.io import load
from onnxamp.ort.quantize import quantize
from onnxamp.trainer import state_dict
from onnxamp.trainer.batches import bind
from onnxamp.trainer.checkpoint import read_with_bundle
from onnxamp.trainer.data import Array, open_data
from onnxamp.trainer.inference import Trained, weights_of
from onnxamp.trainer.predict import model_batches, model_fields
from onnxamp.trainer.run import Run
from onnxamp.training.assembly import ONCE
from onnxamp.training.bundle import Bundle

# Rows that ONNX Runtime takes ranges from; more change little and cost time.
_CALIBRATION_ROWS = 1024


def load_trained(folder: str | os.PathLike[str], which: str | None = None) -> Trained:
    """What a run's checkpoint holds, to export it: no session is made."""
    run = Run.open(folder)
    return read_trained(run.checkpoint(which), run.bundle_path)


def read_trained(path: Path, bundle: Bundle | str | os.PathLike[str] | None = None) -> Trained:
    """What a checkpoint holds.

    Args:
        path: The checkpoint.
        bundle: The bundle, if it is no longer where it was.

    Raises:
        ModelError: The file is broken, or is not of this bundle.
    """
    found, state, _ = read_with_bundle(path, bundle)

    def values(arena: str) -> dict[str, Array]:
        tensors = found.manifest.tensors_in(arena)
        lacking = next((tensor.key for tensor in tensors if tensor.key not in state), None)
        if lacking is not None:
            raise ModelError(f"{path} lacks {lacking!r}: use another checkpoint.")
        return {tensor.name: state[tensor.key] for tensor in tensors}

    return Trained(found, values)


@contextlib.contextmanager
def exported(
    source: str | os.PathLike[str], *, checkpoint: str | None = None, weights: str = "master"
) -> Iterator[Path]:
    """A model file: `source` itself, or that of a run's checkpoint, which lives as long as the context."""
    path = Path(source)
    if not path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
        target = Path(folder) / "model.onnx"
        load_trained(path, checkpoint).export(target, weights=weights)
        yield target


def quantized(source: Path, target: Path, data: object, columns: Mapping[str, str] | None = None) -> None:
    """Write the INT8 form of an FP32 model, with ranges from the first rows of `data`.

    Raises:
        UsageError: The model is not FP32.
        DataError: The data do not fit the model.
    """
    if "onnxamp.level" in load(source).metadata_props:
        raise UsageError("INT8 starts from FP32 parameters: leave --level out with --int8.")
    binding = bind(open_data(data), model_fields(source), columns=columns)
    batches = model_batches(binding, 32)
    limit = max(1, _CALIBRATION_ROWS // (batches.batch_size or 32))
    quantize(source, target, (batch for batch, _ in zip(batches.epoch(), range(limit), strict=False)))


def framework_names(run: Run, trained: Trained) -> state_dict.Names:
    """Which parameter is which tensor of the framework, if a state dict of them is the model that was trained.

    Raises:
        UsageError: The run was begun without `--like`.
        ModelError: The state dict that it was begun with is gone.
        DataError: A tensor that was trained is none of the framework's: without it, it would be another model.
    """
    if not run.names_path.is_file():
        raise UsageError(
            f"{run.folder} does not know the framework's names: begin the run with --like original.safetensors."
        )
    names = state_dict.Names.load(run.names_path)
    if not os.path.isfile(names.original):
        raise ModelError(f"{names.original}, which {run.folder} was begun with, is gone: put it back.")
    matched = {inner for inner, _ in names.tensors.values()}
    own = [tensor.name for tensor in trained.bundle.manifest.tensors_in("master") if tensor.name not in matched]
    # Adapters are none of the model's: they are merged into what is matched.
    lacking = sorted(weights_of(trained.bundle.model, own))
    if not lacking:
        return names
    twin = next((group for group in names.copies if lacking[0] in group), None)
    if twin is not None:
        other = next(name for name in twin if name in matched)
        raise DataError(
            f"{lacking[0]} of {run.folder} trained apart from {other}, which it equalled, and {names.original} has one tensor for "
            f"both: export the ONNX model with -o. {ONCE}, and train that."
        )
    raise DataError(
        f"{few(lacking, 3)} of {run.folder} trained and equalled no tensor of {names.original}: export the ONNX model with -o. To "
        "train them for it, export the model with optimize=False (or do_constant_folding=False, with dynamo=False), so that nothing is "
        f"joined or folded; or train with {' '.join(f'--frozen {shlex.quote(name)}' for name in lacking)}."
    )


def write_state_dict(names: state_dict.Names, trained: Trained, path: Path, weights: str = "master") -> tuple[str, ...]:
    """Write the trained parameters under the framework's names; which tensors are no longer equal, a sentence each."""
    parameters = state_dict.initializers(trained.model(weights=weights))
    state_dict.export(names, parameters, path)
    return names.parted(parameters)
