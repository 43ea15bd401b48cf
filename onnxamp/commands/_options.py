"""Options that several commands read alike, and what they do with files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from onnxamp import files
from onnxamp.errors import RuntimeMissingError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

BATCH_SIZE = 32
"""Rows of a micro-batch where neither the user nor a run says how many."""


def sizes(entries: Iterable[str]) -> dict[str, int]:
    """``NAME=N`` entries as a mapping.

    Raises:
        UsageError: An entry has another form, or N is no positive integer.
    """
    result = {}
    for entry in entries:
        name, _, text = entry.rpartition("=")
        if not name or not text.isdigit() or int(text) < 1:
            raise UsageError(
                f"--dim {entry!r} is not NAME=N with a positive integer N: write for example --dim batch=8."
            )
        result[name] = int(text)
    return result


def input_sizes(model: str | ir.Model, dims: Mapping[str, int]) -> dict[str, int]:
    """Those of the sizes that inputs of `model` have: what is made up has no others.

    Raises:
        UsageError: The model has no such dimension, in no value.
    """
    if not dims:
        return {}
    from onnxamp.evidence.inputs import model_inputs
    from onnxamp.model.preparation import prepared
    from onnxamp.policy.user import check_dims

    ready = prepared(model)
    check_dims(ready.graph, dims)
    own = {dim for item in model_inputs(ready) for dim in item.shape or ()}
    return {name: size for name, size in dims.items() if name in own}


def measured_sizes(model: str | ir.Model, data: str) -> dict[str, int]:
    """The sizes that the first sample of `data` gives to named dimensions of the inputs of `model`.

    Raises:
        DataError: An input is missing, or has another type or shape than the model asks for.
        UsageError: There is no such file, or nothing in it.
    """
    from onnxamp.evidence.inputs import model_inputs, samples
    from onnxamp.model.dimensions import names
    from onnxamp.model.io import load

    inputs = model_inputs(load(model))
    (sample,) = samples(data, inputs, limit=1)
    return {
        dim: int(size)
        for item in inputs
        for dim, size in zip(item.shape or (), getattr(sample[item.name], "shape", ()), strict=False)
        if isinstance(dim, str) and names(dim) == (dim,) and size > 0
    }


def check_outputs(paths: Iterable[str], reports: Iterable[str], force: bool, inputs: Iterable[str | None] = ()) -> None:
    """Refuse, before any work is done, what could not be written at its end or would destroy what was read.

    Args:
        paths: Files to write.
        reports: Files to write whose ending says what they are.
        force: Whether files that exist may be replaced.
        inputs: Files that are read; these are never replaced.

    Raises:
        UsageError: A file exists and `force` is off, its folder does not exist, two of the names mean one file, or a report's name does
            not say what it is.
    """
    reports = list(reports)
    for path in reports:
        if pathlib.Path(path).suffix not in (".json", ".html"):
            raise UsageError(f"--report {path} ends neither in .json nor in .html: the ending says what to write.")
    read = [path for path in inputs if path is not None]
    written: list[str] = []
    for path in (*paths, *reports):
        folder = pathlib.Path(path).parent
        if not folder.is_dir():
            raise UsageError(f"There is no folder {str(folder)!r} for {path}: make it first.")
        if any(_is_same_file(path, other) for other in read):
            raise UsageError(f"{path} would replace a file that is read: choose another name.")
        if any(_is_same_file(path, other) for other in written):
            raise UsageError(f"{path} would be written twice: choose different names.")
        if os.path.lexists(path) and not force:
            raise UsageError(f"{path} exists: choose another name or add --force.")
        written.append(path)


def _is_same_file(one: str, other: str) -> bool:
    """Whether two names mean one file, which need not exist."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def write_text(path: str, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        RuntimeMissingError: The file system refuses it.
    """
    try:
        files.write(path, text.encode())
    except OSError as problem:
        raise RuntimeMissingError(f"{path} cannot be written: {problem.strerror}.") from problem
