"""Whether a converted file is sound as it is: valid for `onnx.checker`, and loaded and run by ONNX Runtime in a process of its own."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxamp.dtypes import LOW
from onnxamp.errors import RuntimeMissingError, UnsupportedError, one_line
from onnxamp.evidence.inputs import Sample
from onnxamp.evidence.sampling import Model
from onnxamp.model import io
from onnxamp.ort import worker
from onnxamp.ort.session import SessionConfig


def run(
    reference: Model, candidate: Model, model: ir.Model, sample: Sample, provider: str
) -> tuple[list[str], list[str]]:
    """Check the candidate as it is, not its emulation, and as a program opens it that sets nothing but the provider.

    Args:
        reference: The original: what is wrong with it too is not held against the candidate.
        candidate: The candidate.
        model: The same, loaded and prepared.
        sample: What to run it on.
        provider: Where.

    Returns:
        Why the file fails, and what to know besides.

    Raises:
        RuntimeMissingError: The provider does not load in the other process, or fails there.
    """
    problems: list[str] = []
    notes: list[str] = []
    if wrong := _checker(candidate):
        if _checker(reference):
            notes.append(f"onnx.checker refuses the candidate, and the reference too: {wrong}.")
        else:
            problems.append(f"onnx.checker refuses the candidate: {wrong}.")
    if not any(value.dtype in LOW for node in model.graph.all_nodes() for value in node.outputs):
        return problems, notes
    answer = worker.shared().run(candidate, [sample], SessionConfig(provider=provider, optimization="all"))
    if answer.note:
        notes.append(answer.note)
    if answer.kind == RuntimeMissingError.__name__:  # what the machine lacks says nothing of the file
        raise RuntimeMissingError(answer.error)
    if answer.kind == UnsupportedError.__name__:
        notes.append(f"The file itself was not run, only its emulation: {answer.error}")
    elif answer.error:
        text = answer.error if answer.kind else f"ONNX Runtime crashes on it, {answer.error}."
        problems.append(f"The file does not run as it is: {text}")
    return problems, notes


def _checker(model: Model) -> str:
    """What `onnx.checker` says against a model; empty if nothing."""
    try:
        if isinstance(model, (str, os.PathLike)):
            onnx.checker.check_model(os.fspath(model), full_check=True)
        else:
            onnx.checker.check_model(
                model if isinstance(model, onnx.ModelProto) else io.to_proto(model), full_check=True
            )
    except Exception as problem:  # it raises many types, some from C++
        return one_line(problem, 200)
    return ""
