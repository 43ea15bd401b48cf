"""`convert --auto`: what the command line makes of `onnxamp.evidence.search`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxamp.evidence.search import SearchResult
    from onnxamp.evidence.tolerance import Tolerance
    from onnxamp.policy.options import Options


def beside(path: str) -> tuple[str, str, str]:
    """The policy file, the page and the journal that go with an output."""
    stem = pathlib.Path(path).with_suffix("")
    return f"{stem}.policy.toml", f"{stem}.auto.html", f"{stem}.search.jsonl"


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


def options(choices: Mapping[str, Any], dims: Mapping[str, int]) -> Options:
    """What the search starts from.

    Args:
        choices: Arguments of `onnxamp.convert` by name; `policy` is a file.
        dims: Sizes for the traffic model.
    """
    from onnxamp.policy.file import read_policy
    from onnxamp.policy.options import Options

    policy = read_policy(choices["policy"]) if choices["policy"] is not None else ()
    return Options(**{**choices, "dim": tuple(sorted(dims.items())), "policy": policy})


def run(
    model: str,
    path: str,
    options: Options,
    wanted: Asked,
    data: str | None,
    max_evals: int,
    dim: Mapping[str, int],
) -> SearchResult:
    """Search, with a step of the progress for each evaluation, and write policy file and page.

    `dim` are sizes of inputs that are made up; those of the traffic model are in `options`.
    """
    from onnxamp import console
    from onnxamp.commands._auto_page import page_of
    from onnxamp.commands._options import write_text
    from onnxamp.evidence.search import search
    from onnxamp.policy.file import policy_text

    policy, page, journal = beside(path)
    with console.progress(f"searching {model}", max_evals) as advance:
        found = search(
            model,
            options,
            wanted.tolerance,
            data,
            max_evals=max_evals,
            score=wanted.metric,
            least=wanted.least,
            dim=dim,
            journal=journal,
            on_trial=lambda trial: advance(),
        )
    head = [
        f"level {options.level}, {options.dtype}, target {options.target}: what differs from the level's own decisions",
        f"found by `onnxamp convert --auto` on {found.data}: {verdict(found)}",
    ]
    write_text(policy, policy_text(found.policy, head))
    write_text(page, page_of(model, found, wanted) + "\n")
    return found


def verdict(found: SearchResult) -> str:
    """The outcome in one sentence."""
    from onnxamp.console import number

    best, first = found.best, found.trials[0]
    worst = best.result.worst
    count = len(found.trials)
    evaluations = f"{count} evaluation" + "s" * (count != 1)
    figures = f"cosine {worst.cosine:.7f}, SNR {number(worst.snr)} dB" + (
        f", score {best.result.score:.6g}" if best.result.score is not None else ""
    )
    alone = ""
    if found.weights is not None and found.weights.result.missed:
        alone = f"; infeasible with all of O2's weights in 16 bits: rounding them alone gives {found.weights.result.missed[0]}"
    if not found.feasible:
        return f"infeasible: the nearest plan of {evaluations} has {best.result.missed[0]} ({figures}){alone}"
    turned = [
        f"{len(names)} node{'s' * (len(names) != 1)} {what}"
        for what, names in (("raised", best.raised), ("lowered", best.lowered))
        if names
    ]
    return (
        f"met with {figures} in {evaluations}; {100 * best.share:.1f}% of the work in 16 bits, O2 alone "
        f"{100 * first.share:.1f}%; {' and '.join(turned) or 'nothing to change'}{alone}"
    )


def remaining(found: SearchResult) -> str:
    """Why what stays fp32 does, in one sentence; empty if there is nothing to say."""
    if not found.remaining:
        return ""
    count = sum(found.remaining.values())
    nodes = f"{count} node" + "s" * (count != 1)
    if len(found.remaining) == 1:
        return f"{nodes} {next(iter(found.remaining))}"
    return f"{nodes}: " + ", ".join(f"{number} {reason}" for reason, number in found.remaining.items())


def to_dict(found: SearchResult, path: str) -> dict[str, Any]:
    """The search in JSON types."""
    import dataclasses

    from onnxamp.files import jsonable

    policy, page, _ = beside(path)
    fields = {
        "feasible": found.feasible,
        "verdict": verdict(found),
        "policy": policy,
        "page": page,
        "data": found.data,
        "notes": list(found.notes),
        "remaining": found.remaining,
        "raised": list(found.best.raised),
        "lowered": list(found.best.lowered),
        "weights": None if found.weights is None else dataclasses.asdict(found.weights.result),
        "trials": [
            {
                "step": trial.step,
                "passed": trial.passed,
                "share": trial.share,
                "traffic": trial.traffic,
                "worst": dataclasses.asdict(trial.result.worst),
                "missed": list(trial.result.missed),
                "score": trial.result.score,
            }
            for trial in found.trials
        ],
    }
    result: dict[str, Any] = jsonable(fields)
    return result


def rows(found: SearchResult, path: str) -> list[tuple[str, str]]:
    """Lines of the table that ends the conversion."""
    policy, page, _ = beside(path)
    lines = [("tolerance", verdict(found))]
    if text := remaining(found):
        lines.append(("stays fp32", text))
    lines += [("policy", policy), ("page", page)]
    return lines + [("note", text) for text in found.notes]
