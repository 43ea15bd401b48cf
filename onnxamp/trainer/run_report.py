"""The page of a run: key figures, curves and what went wrong, from the records in its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnxamp.report import Figures, LinePlot, Note, Section, Series, Table, page
from onnxamp.trainer.position import INTERRUPTED
from onnxamp.trainer.progress import amount, scale_text

Entry = Mapping[str, Any]

# Ends that are told by their names; any other reason is a sentence, and a card holds a word or two.
_NAMED = ("done", INTERRUPTED)


def run_page(
    title: str, entries: Iterable[Entry], options: Mapping[str, Any], reason: str, *, failed: bool = False
) -> str:
    """The HTML text.

    Args:
        title: Heading of the page.
        entries: The records of `metrics.jsonl`.
        options: The options of the run.
        reason: Why it ended.
        failed: An error ended it, and `reason` is its text.
    """
    entries = list(entries)
    windows = [entry for entry in entries if entry["kind"] == "window"]
    evaluations = [entry for entry in entries if entry["kind"] == "evaluation"]
    ended = "failed" if failed else reason if reason in _NAMED else "stopped early"
    sections: list[Section] = [_figures(windows, evaluations, ended)]
    if reason != ended:
        sections.append(Note([reason], "Why it ended", "bad" if failed else "plain"))
    if hint := scale_hint(windows):
        sections.append(Note([hint], "Loss scale", "warn"))
    if windows:
        sections += _plots(windows, evaluations)
    sections += _skipped(windows)
    if evaluations:
        names = [name for name in evaluations[-1] if name not in ("kind", "window", "step", "epoch")]
        rows = [[e["window"], e["epoch"] + 1, *(_round(e.get(name)) for name in names)] for e in evaluations]
        sections.append(Table("Evaluations", ["window", "epoch", *names], rows, open=len(rows) <= 20))
    settings = [[name, _text(value)] for name, value in options.items() if value not in (None, [], {}, ())]
    sections.append(Table("Options", ["option", "value"], settings, open=False))
    return page(title, sections)


def scale_hint(windows: Sequence[Entry], limit: int = 2000) -> str | None:
    """What the first `limit` windows say about the initial loss scale; None if there is nothing to say."""
    if not windows:
        return None
    first = windows[0]["loss_scale"]
    skipped = [entry for entry in windows[:limit] if entry["skipped"]]
    moved = any(entry["next_loss_scale"] != first for entry in windows)
    leading = 0
    for entry in windows:
        if not entry["skipped"]:
            break
        leading += 1
    if leading >= 2 and leading < len(windows) and moved:
        settled = windows[leading]["loss_scale"]
        return (
            f"The initial loss scale {scale_text(first)} was too high: the first {leading} windows were skipped until it "
            f"had come down to {scale_text(settled)}. Start with --init-scale {scale_text(settled)} to save them."
        )
    if 1 < first < 2**24 and not skipped and not moved and len(windows) >= 100:
        return (
            f"The loss scale never had to back off from {scale_text(first)}: --loss-scale dynamic --init-scale "
            f"{scale_text(min(16 * first, 2.0**24))} would keep more of small gradients."
        )
    return None


def _figures(windows: Sequence[Entry], evaluations: Sequence[Entry], ended: str) -> Figures:
    rows = sum(entry["rows"] for entry in windows)
    seconds = sum(entry["seconds"] for entry in windows)
    waited = sum(entry["waited"] for entry in windows)
    skipped = sum(entry["skipped"] for entry in windows)
    items = [("ended", ended, "")]
    if windows:
        items.append(("steps applied", f"{windows[-1]['step']:,}", f"{len(windows):,} windows"))
        items.append(("skipped", f"{skipped:,}", f"{skipped / len(windows):.1%} of the windows"))
        tail = [e["loss"] for e in windows[-20:] if math.isfinite(e["loss"]) and not e["empty"]]
        items.append(("loss", f"{sum(tail) / len(tail):.4g}" if tail else "not finite", "mean of the last windows"))
    if evaluations:
        best = min(evaluations, key=lambda entry: entry["val_loss"] if math.isfinite(entry["val_loss"]) else math.inf)
        note = f"at the best val_loss, window {best['window']:,}"
        items += [(k, f"{v:.4g}", note) for k, v in best.items() if k not in ("kind", "window", "step", "epoch")]
    if seconds:
        items.append(("rows per second", f"{rows / seconds:,.0f}", f"{waited / seconds:.1%} waiting for data"))
        items.append(("training time", amount(seconds), f"{rows:,} rows"))
    memory = [entry["memory"] for entry in windows if entry.get("memory")]
    if memory:
        items.append(("memory", f"{max(memory) / 2**20:,.0f} MB", "most held by the process"))
    return Figures(items)


def _plots(windows: Sequence[Entry], evaluations: Sequence[Entry]) -> list[Section]:
    x = [float(entry["window"]) for entry in windows]
    marks = [(float(entry["window"]), "skipped") for entry in windows if entry["skipped"]]
    marks = marks if len(marks) <= 100 else []

    def series(name: str, key: str) -> Series:
        return Series(name, x, [float(entry[key]) for entry in windows])

    loss = [series("training", "loss")]
    if len(windows) >= 50:
        keep = min(0.98, max(0.8, 1 - 10 / len(windows)))
        loss.append(Series("training, smoothed", x, smooth([float(entry["loss"]) for entry in windows], keep)))
    at = [float(entry["window"]) for entry in evaluations]
    if evaluations:
        loss.append(Series("validation", at, [float(entry["val_loss"]) for entry in evaluations]))
    plots: list[Section] = [LinePlot("Loss", loss, "window", "loss", marks=marks)]
    named = [
        k for k in (evaluations[-1] if evaluations else {}) if k not in ("kind", "window", "step", "epoch", "val_loss")
    ]
    plots += [
        LinePlot(name, [Series(name, at, [float(e.get(name, math.nan)) for e in evaluations])], "window")
        for name in named
    ]
    plots.append(LinePlot("Learning rate", [series("learning rate", "learning_rate")], "window"))
    if any(entry["loss_scale"] != 1 for entry in windows):
        plots.append(LinePlot("Loss scale", [series("loss scale", "loss_scale")], "window", log_y=True, marks=marks))
    plots.append(
        LinePlot("Gradient norm", [series("norm before clipping", "gradient_norm")], "window", log_y=True, marks=marks)
    )
    if marks or any(entry["skipped"] for entry in windows):
        count, total = [], 0
        for entry in windows:
            total += bool(entry["skipped"])
            count.append(float(total))
        plots.append(LinePlot("Skipped windows", [Series("skipped so far", x, count)], "window"))
    rate = [entry["rows"] / entry["seconds"] if entry["seconds"] else math.nan for entry in windows]
    plots.append(LinePlot("Throughput", [Series("rows per second", x, rate)], "window", "rows/s"))
    if any(entry.get("memory") for entry in windows):
        held = [(entry.get("memory") or math.nan) / 2**20 for entry in windows]
        plots.append(LinePlot("Memory of the process", [Series("resident", x, held)], "window", "MB"))
    return plots


def smooth(values: Sequence[float], keep: float) -> list[float]:
    """Exponential moving average with its start corrected; values that are not finite are passed over."""
    result = []
    total = weight = 0.0
    for value in values:
        if math.isfinite(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        result.append(total / weight if weight else math.nan)
    return result


def _skipped(windows: Sequence[Entry]) -> list[Section]:
    rows = [
        [e["window"], e.get("cause", ""), scale_text(e["loss_scale"]), scale_text(e["next_loss_scale"])]
        for e in windows
        if e["skipped"]
    ]
    return [Table("Skipped windows", ["window", "cause", "scale", "scale after"], rows)] if rows else []


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
