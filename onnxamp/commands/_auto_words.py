"""The outcome of a search in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxamp.evidence.search import SearchResult


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
