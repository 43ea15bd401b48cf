"""`convert --auto`: what the command line makes of `onnxamp.evidence.search`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from onnxamp.commands._auto_words import remaining, verdict

if TYPE_CHECKING:
    from onnxamp.commands._auto_asked import Asked
    from onnxamp.evidence.search import SearchResult
    from onnxamp.policy.options import Options


def beside(path: str) -> tuple[str, str, str]:
    """The policy file, the page and the journal that go with an output."""
    stem = pathlib.Path(path).with_suffix("")
    return f"{stem}.policy.toml", f"{stem}.auto.html", f"{stem}.search.jsonl"


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
    try:
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
    except KeyboardInterrupt:
        if os.path.exists(journal):
            click.echo(f"{journal} keeps the evaluations so far: the same command goes on from there.", err=True)
        raise
    head = [
        f"level {options.level}, {options.dtype}, target {options.target}: what differs from the level's own decisions",
        f"found by `onnxamp convert --auto` on {found.data}: {verdict(found)}",
    ]
    write_text(policy, policy_text(found.policy, head))
    write_text(page, page_of(model, found, wanted) + "\n")
    return found


def to_dict(found: SearchResult, path: str) -> dict[str, Any]:
    """The search in JSON types."""

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
