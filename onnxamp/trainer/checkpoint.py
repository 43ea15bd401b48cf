"""Checkpoints: the whole state in one safetensors file that is replaced in one step.

The file is written beside its final name, flushed to the disk and renamed over it, so that at any moment the name stands
for a complete checkpoint, the old one or the new one. Tensors go from the arenas to the file without another copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

import onnxamp
from onnxamp import files
from onnxamp.errors import ModelError, RuntimeMissingError
from onnxamp.ort.providers import runtime
from onnxamp.trainer.device import processors
from onnxamp.training.bundle import Bundle
from onnxamp.training.manifest import Arena, StateTensor

logger = logging.getLogger("onnxamp")

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
_KEY = "onnxamp.checkpoint"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands, apart from its tensors.

    Attributes:
        accumulate: Micro-batches in a window.
        micro_steps: Micro-batches in the window that is open.
        rows: Rows in the window that is open, over all ranks.
        nan: What is known of NaN in the open window, in words.
        position: What the data loop wants to find again: epoch, batch...
        bundle: Folder of the bundle, relative to the checkpoint's.
        manifest: `Manifest.digest` of the bundle.
        environment: What bit-identical continuation depends on.
        infinity: What is known of infinities in the open window, in words.
    """

    accumulate: int
    micro_steps: int
    rows: int
    nan: str | None
    position: Mapping[str, Any]
    bundle: str
    manifest: str
    environment: Mapping[str, Any]
    infinity: str | None = None


def environment(provider: str, threads: int) -> dict[str, Any]:
    """What the bits of a result depend on besides the state: versions, provider, threads, processor.

    `threads` 0 means as many as there are processors, and is recorded as that number.
    """
    return {
        "onnxamp": onnxamp.__version__,
        "onnxruntime": str(runtime().__version__),
        "numpy": metadata.version("numpy"),
        "provider": provider,
        "threads": threads or processors(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def warn_of_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Log what differs from the environment in which a checkpoint was made."""
    differences = [f"{key} {saved.get(key)} → {value}" for key, value in here.items() if saved.get(key) != value]
    if differences:
        logger.warning(
            "The checkpoint was made in another environment (%s): training goes on, but not bit for bit as it would have.",
            ", ".join(differences),
        )


def write(
    path: Path, arenas: Iterable[tuple[Arena, NDArray[np.uint8], tuple[StateTensor, ...]]], progress: Progress
) -> None:
    """Write a checkpoint, or leave the one that is there untouched.

    Raises:
        RuntimeMissingError: The disk is full, or the folder may not be written to.
    """
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(dataclasses.asdict(progress))}}
    parts: list[NDArray[np.uint8]] = []
    position = 0
    for arena, raw, tensors in arenas:
        item = raw.size // arena.elements if arena.elements else 1
        for tensor in tensors:
            part = raw[tensor.offset * item : (tensor.offset + tensor.size) * item]
            offsets = [position, position + part.nbytes]
            header[tensor.key] = {"dtype": _NAMES[arena.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            parts.append(part)
            position += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with atomic(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                file.write(part.data)
    except OSError as problem:
        raise disk_error(path, problem) from problem


def read(path: Path) -> tuple[dict[str, NDArray[Any]], Progress | None]:
    """The tensors of a checkpoint or of a fresh bundle's state (without progress).

    Raises:
        ModelError: The file is missing, truncated or no checkpoint.
    """
    try:
        with safetensors.safe_open(os.fspath(path), framework="np") as file:
            keys = list(file.keys())
            state = {key: file.get_tensor(key) for key in keys}
            text = (file.metadata() or {}).get(_KEY)
        return state, None if text is None else Progress(**json.loads(text))
    except FileNotFoundError as problem:
        raise ModelError(f"There is no state file {path}.") from problem
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as problem:
        raise ModelError(f"The state file {path} is truncated or no checkpoint ({problem}).") from problem


def read_with_bundle(
    path: Path, bundle: Bundle | str | os.PathLike[str] | None = None
) -> tuple[Bundle, dict[str, NDArray[Any]], Progress]:
    """A checkpoint and the bundle that it belongs to.

    Args:
        path: The checkpoint.
        bundle: The bundle or its folder, if it is no longer where it was.

    Raises:
        ModelError: The file is broken, or is not of this bundle.
    """
    state, progress = read(path)
    if progress is None:
        raise ModelError(f"{path} is the state of a fresh bundle, not a checkpoint: open the bundle itself.")
    place = path.absolute().parent / progress.bundle if bundle is None else bundle
    found = place if isinstance(place, Bundle) else Bundle.load(place)
    if found.manifest.digest != progress.manifest:
        name = found.path if isinstance(place, Bundle) else place
        raise ModelError(f"{path} was made with another bundle than {name}: name the right one with bundle=.")
    return found, state, progress


@contextlib.contextmanager
def atomic(path: Path) -> Any:
    """A binary file that takes the name `path` when all of it is on the disk, and vanishes if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.Unfinished(path) as unfinished:
        yield unfinished.file
        unfinished.publish(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        RuntimeMissingError: The disk is full or the folder may not be written to.
    """
    try:
        with atomic(path) as file:
            file.write(text.encode())
    except OSError as problem:
        raise disk_error(path, problem) from problem


def disk_error(path: Path, problem: OSError) -> RuntimeMissingError:
    """One sentence on why a file could not be written."""
    reason = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}.get(problem.errno or 0)
    return RuntimeMissingError(
        f"Cannot write {path}: {reason or problem.strerror or problem}; what was saved before is intact."
    )


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
