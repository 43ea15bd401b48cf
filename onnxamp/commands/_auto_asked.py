"""What `convert --auto` is asked for: --tolerance and --metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxamp.evidence.tolerance import Tolerance


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is good enough.

    Attributes:
        tolerance: Bounds of our measures, and no new NaN or Inf.
        metric: The user's measure: takes the outputs of all samples, in order.
        least: The least that it must give.
    """

    tolerance: Tolerance
    metric: Callable[[Sequence[Mapping[str, Any]]], float] | None = None
    least: float = 0.0


def asked(entries: Iterable[str], metric: str | None = None) -> Asked:
    """What --tolerance and --metric ask for.

    Raises:
        UsageError: No bound is given, one is no MEASURE=NUMBER, or there is no such function.
    """
    from onnxamp.errors import UsageError
    from onnxamp.evidence.tolerance import Tolerance, parse

    every = [part.strip() for text in entries for part in text.split(",")]
    own = [entry for entry in every if entry.partition("=")[0] == "metric"]
    bounds = parse(entry for entry in every if entry not in own)
    if metric is None and own:
        raise UsageError(f"--tolerance {own[0]} is for --metric: add --metric MODULE:FUNCTION.")
    if metric is None:
        if not bounds:
            raise UsageError("--auto needs to know what is good enough: add for example --tolerance cosine=0.9999.")
        return Asked(Tolerance().replaced(bounds))
    try:
        least = float(own[-1].partition("=")[2])
    except (IndexError, ValueError):
        raise UsageError(
            "--metric needs the least that it must give: add for example --tolerance metric=0.91."
        ) from None
    return Asked(Tolerance().replaced(bounds), _function(metric), least)


def _function(place: str) -> Callable[[Sequence[Mapping[str, Any]]], float]:
    """The function MODULE:FUNCTION; modules in the working folder are found too. What it raises is an error of the data or of itself.

    Raises:
        UsageError: There is none.
    """
    import importlib
    import sys

    from onnxamp.errors import DataError, UsageError

    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as problem:  # whatever the user's module does when it is imported
        raise UsageError(f"--metric {place!r} is not to be had ({_said(problem)}): write MODULE:FUNCTION.") from None
    finally:
        sys.path.remove("")
    if not callable(function):
        raise UsageError(f"--metric {place!r} is no function: write MODULE:FUNCTION.")

    def measured(outputs: Sequence[Mapping[str, Any]]) -> float:
        try:
            return float(function(outputs))
        except Exception as problem:  # whatever the user's function does
            raise DataError(f"The metric {place!r} failed on the outputs of the samples: {_said(problem)}.") from None

    measured.__name__ = place  # a journal of another measure is not used
    return measured


def _said(problem: Exception) -> str:
    from onnxamp.errors import one_line

    return f"{type(problem).__name__}: {one_line(str(problem), 200) or 'no message'}"
