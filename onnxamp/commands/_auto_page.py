"""The page that `convert --auto` writes."""

from __future__ import annotations

import math
import pathlib
from typing import TYPE_CHECKING

from onnxamp.commands._auto_words import remaining, verdict
from onnxamp.report import Figures, LinePlot, Note, Section, Series, Table, page

if TYPE_CHECKING:
    from onnxamp.commands._auto_asked import Asked
    from onnxamp.evidence.search import SearchResult

# Nodes of the table of sensitivities.
_MOST_NODES = 200


def page_of(model: str, found: SearchResult, wanted: Asked) -> str:
    """The page: error against share of 16-bit work, every evaluation, and the nodes that rounding hurts most."""
    sections: list[Section] = [
        _figures(found, wanted),
        _note(found),
        *_plot(found),
        _evaluations(found),
        *([_sensitivity(found)] if found.ranking else ()),
    ]
    return page(f"Search for {pathlib.Path(model).name}", sections, subtitle="onnxamp convert --auto")


def _figures(found: SearchResult, wanted: Asked) -> Figures:
    """The outcome in numbers."""
    first, best = found.trials[0], found.best
    return Figures(
        [
            ("16-bit work", f"{100 * best.share:.1f}%", f"O2 alone {100 * first.share:.1f}%"),
            ("cosine", f"{best.result.worst.cosine:.7f}", f"O2 alone {first.result.worst.cosine:.7f}"),
            ("evaluations", str(len(found.trials)), f"on {pathlib.PurePath(found.data).name}"),
            ("tolerance", ", ".join(_bounds(wanted)), "met" if found.feasible else "infeasible"),
        ]
    )


def _bounds(wanted: Asked) -> list[str]:
    """The bounds that were asked for, not those that hold anyway."""
    from onnxamp.evidence.tolerance import Tolerance

    asked = wanted.tolerance.to_dict().items() - Tolerance().to_dict().items()
    bounds = [
        f"{name} {'≥' if name in ('cosine', 'snr', 'top1') else '≤'} {value:.12g}" for name, value in sorted(asked)
    ]
    return bounds + ([f"metric ≥ {wanted.least:.12g}"] if wanted.metric is not None else [])


def _note(found: SearchResult) -> Note:
    """The outcome in words."""
    outcome = verdict(found)
    stays = remaining(found)
    paragraphs = [f"{outcome[0].upper()}{outcome[1:]}.", *([f"In fp32 stay {stays}."] if stays else ()), *found.notes]
    return Note(paragraphs, tone="good" if found.feasible else "bad")


def _plot(found: SearchResult) -> list[LinePlot]:
    """Error against share of 16-bit work; no plot if no evaluation has a finite error."""
    trials = sorted((t for t in found.trials if t.result.error < 1e30), key=lambda trial: trial.share)
    lines = [
        Series(name, [100 * t.share for t in group], [max(t.result.error, 1e-16) for t in group])
        for name, group in (
            ("within the tolerance", [t for t in trials if t.passed]),
            ("outside", [t for t in trials if not t.passed]),
        )
        if group
    ]
    if not lines:
        return []
    return [
        LinePlot(
            "Error against share of 16-bit work",
            lines,
            x_label="% of elements read and written in 16 bits",
            y_label="noise-to-signal ratio of the worst output",
            log_y=True,
            marks=[(100 * found.best.share, "share of the plan that is chosen")],
            points=True,
        )
    ]


def _evaluations(found: SearchResult) -> Table:
    """Every plan that was tried."""
    from onnxamp.console import size

    cells = [
        [
            trial.step,
            "met" if trial.passed else "; ".join(trial.result.missed),
            round(100 * trial.share, 2),
            size(trial.traffic).replace(" ", "\N{NO-BREAK SPACE}"),
            _finite(trial.result.worst.cosine),
            _finite(trial.result.worst.snr),
            _finite(trial.result.worst.max_rel),
            len(trial.raised),
            len(trial.lowered),
        ]
        for trial in found.trials
    ]
    columns = ["step", "verdict", "16-bit %", "traffic", "cosine", "SNR dB", "max rel", "raised", "lowered"]
    bad = [index for index, trial in enumerate(found.trials) if not trial.passed]
    return Table("Evaluations", columns, cells, bad=bad)


def _sensitivity(found: SearchResult) -> Table:
    """The nodes that rounding hurts most, and what the search did with them."""
    turned = dict.fromkeys(found.best.lowered, "lowered") | dict.fromkeys(found.best.raised, "raised")
    cells = [
        [
            item.node,
            item.op_type,
            _finite(item.local),
            _finite(item.effect),
            _finite(item.score),
            turned.get(item.node, ""),
        ]
        for item in found.ranking[:_MOST_NODES]
    ]
    note = "Local: noise-to-signal ratio of the node's result alone in 16 bits; effect: how much of it reaches the outputs."
    return Table("Sensitivity", ["node", "operator", "local", "effect", "score", "search"], cells, note=note)


def _finite(value: float) -> float | str:
    """A cell: a table has no infinities."""
    return value if math.isfinite(value) else str(value)
