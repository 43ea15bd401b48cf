"""One offline HTML file from sections.

The file carries its style and script, opens no connection (its content security policy forbids any) and runs no other
script than its own: the policy names that script's hash, so text from a model cannot run even if an escape were missed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import zlib
from collections.abc import Iterable
from importlib import resources

from onnxamp.report.plots import line_plot, number
from onnxamp.report.sections import Cell, Figures, GraphView, LinePlot, Link, Note, Section, Table

MOST_ROWS = 1000  # of a table on a page


def _asset(name: str) -> str:
    return resources.files("onnxamp.report").joinpath(name).read_text(encoding="utf-8")


def embed(data: object) -> str:
    """JSON, compressed (zlib) and in base64: safe inside a script element, and small for large graphs."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()


def _cell(value: Cell | Link) -> str:
    if isinstance(value, Link):
        return f'<td><a href="#{html.escape(value.target)}" data-node>{html.escape(value.text)}</a></td>'
    if isinstance(value, bool) or value is None:
        return f"<td>{'' if value is None else 'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else number(value)
        return f'<td class="n" data-v="{value!r}">{text}</td>'
    return f"<td>{html.escape(value)}</td>"


def _table(table: Table) -> str:
    cells = [[row[k] for row in table.rows if row[k] not in (None, "")] for k in range(len(table.columns))]
    numeric = [bool(column) and all(type(cell) in (int, float) for cell in column) for column in cells]
    head = "".join(
        f'<th tabindex="0" scope="col"{kind}>{html.escape(column)}</th>'
        for column, kind in zip(table.columns, [' class="n"' if right else "" for right in numeric], strict=True)
    )
    rows = [
        f"<tr{' class=bad' if k in table.bad else ''}{' hidden' if k >= table.limit else ''}>{''.join(_cell(c) for c in row)}</tr>"
        for k, row in enumerate(table.rows[:MOST_ROWS])
    ]
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    if len(table.rows) > MOST_ROWS:
        note += f"<p>The first {MOST_ROWS:,} of {len(table.rows):,} rows.</p>"
    more = f'<button class="more">Show all {len(rows):,}</button>' if len(rows) > table.limit else ""
    body = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{more}'
        if rows
        else ""
        if table.note
        else "<p>None.</p>"
    )
    return (
        f"<details{' open' if table.open else ''}><summary><h2>{html.escape(table.title)}</h2>"
        f'<span class="count">{len(table.rows):,}</span></summary>{note}{body}</details>'
    )


def _section(section: Section, data: dict[str, object]) -> str:
    title = f"<h2>{html.escape(section.title)}</h2>" if section.title else ""
    if isinstance(section, Figures):
        cards = "".join(
            f'<div class="card"><div class="label">{html.escape(label)}</div><div class="value">{html.escape(value)}'
            f"</div>{f'<div class=hint>{html.escape(note)}</div>' if note else ''}</div>"
            for label, value, note in section.items
        )
        return f'{title}<div class="cards">{cards}</div>'
    if isinstance(section, Note):
        text = "".join(f"<p>{html.escape(p)}</p>" for p in section.paragraphs)
        return f'{title}<div class="note {html.escape(section.tone)}">{text}</div>'
    if isinstance(section, Table):
        return _table(section)
    if isinstance(section, LinePlot):
        note = f"<p>{html.escape(section.note)}</p>" if section.note else ""
        return f"{title}{note}{line_plot(section)}"
    return _graph(section, title, data)


def _graph(section: GraphView, title: str, data: dict[str, object]) -> str:
    from onnxamp.report.graph import view_data  # the layout is needed by few pages

    key = f"g{len(data)}"
    data[key] = view_data(section)
    note = f"<p>{html.escape(section.note)}</p>" if section.note else ""
    return f'{title}{note}<div class="graph" data-graph="{key}"></div>'


def page(title: str, sections: Iterable[Section], *, subtitle: str = "") -> str:
    """The HTML text of a page.

    Args:
        title: Heading and window title.
        sections: What the page shows, in order.
        subtitle: A line under the heading.
    """
    data: dict[str, object] = {}
    parts = []
    for plots, group in itertools.groupby(sections, lambda section: isinstance(section, LinePlot)):
        inner = "\n".join(f"<section>{_section(section, data)}</section>" for section in group)
        parts.append(f'<div class="plots">{inner}</div>' if plots else inner)
    body = "\n".join(parts)
    script = _asset("page.js")
    if data:
        script += "\n" + _asset("graph.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = _asset("page.css")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    payload = f'<script type="text/plain" id="data">{embed(data)}</script>\n' if data else ""
    lead = f'<p class="subtitle">{html.escape(subtitle)}</p>' if subtitle else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{html.escape(title)}</h1><button id="theme" title="Light or dark">◐</button>{lead}</header>
<main>
{body}
</main>
{payload}<script>{script}</script>
</body>
</html>
"""
