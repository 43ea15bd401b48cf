"""Samples for a model: those that a user has, else made up so that the model runs on them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp.errors import DataError, UsageError
from onnxamp.evidence import synthesis
from onnxamp.evidence.inputs import Data, Sample, model_inputs, samples
from onnxamp.model.dimensions import ALTERNATIVES
from onnxamp.ort.session import run

Model = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def path_of(model: Model) -> str | None:
    """The path of a model that is given as one."""
    return os.fspath(model) if isinstance(model, (str, os.PathLike)) else None


@dataclasses.dataclass(frozen=True)
class Samples:
    """Feeds for one model.

    Attributes:
        take: Gives them anew, one after the other (once only if the data were an iterator or a reader).
        source: Where they came from, in words.
        made_up: Whether they were made up.
    """

    take: Callable[[], Iterator[Sample]]
    source: str
    made_up: bool

    def __iter__(self) -> Iterator[Sample]:
        return self.take()

    def kept(self) -> Samples:
        """These samples, held in memory."""
        held = list(self)
        return dataclasses.replace(self, take=lambda: iter(held))


def choose(
    model: ir.Model,
    session: Any,
    data: Data | None,
    *,
    dim: Mapping[str, int] | None = None,
    count: int = 4,
    seed: int = 0,
) -> Samples:
    """The samples of `data`; made up where that is None.

    Args:
        model: The model to feed.
        session: A session on it, to see with which sizes of free dimensions it runs.
        data: See `onnxamp.evidence.inputs.samples`.
        dim: Sizes of free dimensions of samples that are made up.
        count: How many samples to make up.
        seed: Seed of those.

    Raises:
        UsageError: `count` is below 1, or `dim` names a dimension that no input has.
        DataError: The model runs on nothing that can be made up.
        UnsupportedError: Inputs cannot be made up for this model.
    """
    if data is not None:
        source = os.fspath(data) if isinstance(data, (str, os.PathLike)) else "the data given"
        given = data
        return Samples(lambda: samples(given, model_inputs(model)), source, made_up=False)
    if count < 1:
        raise UsageError(f"count is {count}: at least one sample is to be made up.")
    made, source = _made_up(model, session, dim, count, seed)
    return Samples(lambda: iter(made), source, made_up=True)


def _made_up(
    model: ir.Model, session: Any, dim: Mapping[str, int] | None, count: int, seed: int
) -> tuple[list[Sample], str]:
    """Samples made up from `model`, of the first size of free dimensions with which it runs, and the words for them."""
    first: DataError | None = None
    lacking: MemoryError | None = None
    tried = set()
    for other in (synthesis.OTHER, *ALTERNATIVES):
        made, sizes = synthesis.synthesize(model, count, dim=dim, seed=seed, other=other)
        source = synthesis.describe(made, sizes)
        shapes = tuple(np.shape(value) for value in made[0].values())
        if shapes in tried:  # nothing is free
            continue
        tried.add(shapes)
        try:
            run(session, made[0])
        except MemoryError as problem:  # a smaller size may fit
            lacking = problem
        except DataError as problem:
            first = first or DataError(
                f"The reference does not run on {source}: {problem} Give real inputs with --data, or sizes with --dim."
            )
        else:
            return _with_both_flags(made, model, session, dim, count, seed, other), source
    failed = first or lacking
    assert failed is not None
    raise failed


def _with_both_flags(
    made: list[Sample],
    model: ir.Model,
    session: Any,
    dim: Mapping[str, int] | None,
    count: int,
    seed: int,
    other: int,
) -> list[Sample]:
    """The samples, if the model runs on the other truth values too; else those with one kind of them."""
    if count < 2 or not any(np.asarray(value).dtype == bool for value in made[1].values()):
        return made
    try:
        run(session, made[1])
    except DataError:  # a branch that needs other shapes, say
        return synthesis.synthesize(model, count, dim=dim, seed=seed, other=other, flags=False)[0]
    return made
