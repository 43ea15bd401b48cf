"""Line plots as static SVG; the page's script adds the tooltip from the same numbers."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from typing import Any

from onnxamp.report.sections import LinePlot, Series

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 40
POINTS = 1500
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def thin(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about `points` points that keep the least and greatest y of each stretch, so that no spike is lost."""
    if len(x) <= points:
        return [float(v) for v in x], [float(v) for v in y]
    size = math.ceil(2 * len(x) / points)
    keep: list[int] = []
    for start in range(0, len(x), size):
        span = range(start, min(start + size, len(x)))
        finite = [i for i in span if math.isfinite(y[i])]
        gaps = [i for i in span if not math.isfinite(y[i])][:1]
        ends = {min(finite, key=lambda i: y[i]), max(finite, key=lambda i: y[i])} if finite else set()
        keep += sorted(ends.union(gaps))
    return [float(x[i]) for i in keep], [float(y[i]) for i in keep]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Logarithms to base ten, inside [low, high], of round numbers, and at least two of them wherever there is room.

    Powers of ten if three or more lie inside, else powers of two, else round numbers at even distances.
    """
    found: list[list[float]] = []
    for base, least in ((1.0, 3), (math.log10(2), 2)):
        powers = range(math.ceil(low / base - 1e-9), math.floor(high / base + 1e-9) + 1)
        found.append([k * base for k in powers[:: max(1, round(len(powers) / count))]])
        if len(found[-1]) >= least:
            return found[-1]
    even = [math.log10(value) for value in ticks(10**low, 10**high) if value > 0]
    return max([even, *found], key=len)


def tick_text(value: float, others: Sequence[float]) -> str:
    """`number` for a tick: all of an axis in one notation, that of the largest."""
    largest = max((abs(v) for v in others), default=0.0)
    if value == 0 or not 1e-3 <= largest < 1e6:
        return number(value)
    return f"{value:.4g}" if largest < 1e4 and abs(value) >= 1e-4 else f"{value:,.10g}"


def number(value: float) -> str:
    """A short text for a number on an axis or in a table."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    if 0.999 < size < 1:  # a cosine: what it lacks to 1 is what it says
        return (f"{value:.7f}" if size < 0.9999999 else f"{value:.12g}").rstrip("0")
    return f"{value:.4g}" if size < 1e4 else f"{value:,.0f}"


def _bounds(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Where the numbers of a plot lie in its picture; y is their logarithm to base ten on a logarithmic axis.

    Attributes:
        x0: Least x.
        x1: Greatest x.
        y0: Least y.
        y1: Greatest y.
    """

    x0: float
    x1: float
    y0: float
    y1: float

    def px(self, x: float) -> float:
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def line_plot(plot: LinePlot) -> str:
    """The SVG of a plot and, beside it, its numbers for the tooltip."""
    series = [_ordered(s) for s in plot.series] if plot.points else plot.series
    thinned = [Series(s.name, *thin(s.x, s.y)) for s in series]
    lines = [(s.x, [_height(v, plot.log_y) for v in s.y]) for s in thinned]
    axes = _axes(lines, [x for x, _ in plot.marks])
    svg = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(plot.title)}">',
        *_grid(plot, axes),
        *_marks(plot, axes),
        *(_line(xs, ys, axes, k, plot.points) for k, (xs, ys) in enumerate(lines)),
        '<line class="cursor" y1="0" y2="0" x1="0" x2="0"/></svg>',
    ]
    legend = "".join(
        f'<span class="key"><i class="{"point " if plot.points else ""}c{k % 6}"></i>{html.escape(s.name)}</span>'
        for k, s in enumerate(plot.series)
    )
    if len(texts := {text for _, text in plot.marks}) == 1:
        legend += f'<span class="key"><i class="mark"></i>{html.escape(texts.pop())}</span>'
    words = f"{plot.y_label or plot.title}, logarithmic" if plot.log_y else plot.y_label
    label = f'<div class="ylabel">{html.escape(words)}</div>' if words else ""
    numbers = html.escape(json.dumps(_numbers(plot, thinned, axes)))
    return f'{label}<div class="plotbox" data-plot="{numbers}">{"".join(svg)}</div>{legend}'


def _ordered(series: Series) -> Series:
    """The same points by x, as the page's script looks for them."""
    order = sorted(range(len(series.x)), key=series.x.__getitem__)
    return Series(series.name, [series.x[k] for k in order], [series.y[k] for k in order])


def _height(value: float, log: bool) -> float:
    """Where a value lies on the y axis; NaN if nowhere."""
    if not math.isfinite(value):
        return math.nan
    if not log:
        return value
    return math.log10(value) if value > 0 else math.nan


def _axes(lines: Sequence[tuple[Sequence[float], Sequence[float]]], marks: Sequence[float]) -> _Axes:
    """Axes that hold all lines and marks, with some room above and below."""
    x0, x1 = _bounds([x for xs, _ in lines for x in xs] + list(marks))
    y0, y1 = _bounds([y for _, ys in lines for y in ys if math.isfinite(y)])
    pad = 0.04 * (y1 - y0)
    return _Axes(x0, x1, y0 - pad, y1 + pad)


def _grid(plot: LinePlot, axes: _Axes) -> list[str]:
    """A line and a number for each round y, a number for each round x, and what x is."""
    svg = []
    rows = log_ticks(axes.y0, axes.y1) if plot.log_y else ticks(axes.y0, axes.y1)
    for y in rows:
        text, at = number(10**y) if plot.log_y else tick_text(y, rows), axes.py(y)
        svg.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        svg.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for x in ticks(axes.x0, axes.x1, 7):
        svg.append(
            f'<text class="tick" x="{axes.px(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(x)}</text>'
        )
    svg.append(
        f'<text class="axis" x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(plot.x_label)}</text>"
    )
    return svg


def _marks(plot: LinePlot, axes: _Axes) -> list[str]:
    """A line from top to bottom for each mark."""
    return [
        f'<line class="mark" x1="{axes.px(x):.1f}" x2="{axes.px(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        f"<title>{html.escape(text)}</title></line>"
        for x, text in plot.marks
    ]


def _line(xs: Sequence[float], ys: Sequence[float], axes: _Axes, index: int, points: bool) -> str:
    """The path of a series, broken where y is NaN, and a circle for each point without a neighbour, or for all points."""
    path, circles, pen = [], [], "M"
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if not math.isfinite(y):
            pen = "M"
            continue
        at = (f"{axes.px(x):.1f}", f"{axes.py(y):.1f}")
        if points or (pen == "M" and (i + 1 == len(ys) or not math.isfinite(ys[i + 1]))):
            circles.append(f'<circle class="point c{index % 6}" cx="{at[0]}" cy="{at[1]}" r="3.5"/>')
        else:
            path.append(f"{pen}{at[0]} {at[1]}")
            pen = "L"
    dash = f' stroke-dasharray="{DASHES[index // 6 % len(DASHES)]}"' if index >= 6 else ""
    line = f'<path class="line c{index % 6}"{dash} d="{"".join(path)}"/>' if path else ""
    return line + "".join(circles)


def _numbers(plot: LinePlot, series: Sequence[Series], axes: _Axes) -> dict[str, Any]:
    """What the page's script needs for the tooltip."""
    return {
        "x0": axes.x0,
        "x1": axes.x1,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "width": WIDTH,
        "label": plot.x_label,
        "series": [
            {"name": s.name, "x": list(s.x), "y": [v if math.isfinite(v) else str(v) for v in s.y]} for s in series
        ],
    }
