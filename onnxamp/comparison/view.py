"""The page of a diff: key figures, the graph that holds both models, the tables."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from onnxamp import report
from onnxamp.comparison import text
from onnxamp.comparison.boxes import Builder
from onnxamp.comparison.compare import Comparison, Source
from onnxamp.comparison.records import GraphDiff, NodeRef
from onnxamp.comparison.rules import rule
from onnxamp.report import Cell, Link

if TYPE_CHECKING:
    from onnxamp.conversion import ConvertResult


def diff_page(a: Source, b: Source) -> str:
    """The HTML text of the page that compares two models.

    Raises:
        ModelError: A file is no ONNX model or is broken.
    """
    comparison = Comparison(a, b)
    return page_of(comparison, comparison.result())


def conversion_page(source: Source, result: ConvertResult, label: str = "") -> str:
    """The HTML text of the page of a conversion: the diff of its source and its result, which goes by `label`."""
    comparison = Comparison(source, result.model, label)
    return page_of(comparison, comparison.result())


def page_of(comparison: Comparison, result: GraphDiff) -> str:
    """The page of a comparison that was already made."""
    builder = Builder(comparison, result)
    graph = builder.graph(comparison.a.at(comparison.a.model.graph), comparison.b.at(comparison.b.model.graph))
    functions = builder.functions()
    codes = dict.fromkeys(box_code for box_code in builder.codes)
    rules = {code: (page.title, page.text) for code in codes if (page := rule(code)) is not None}
    one, other = text.names(result)
    sections: list[report.Section] = [
        report.Note([text.verdict(result)], tone="good" if result.empty else "plain"),
        report.Figures(_figures(result)),
    ]
    sections.append(
        report.GraphView(
            "Graph",
            graph,
            rules,
            "Both models in one graph. Boxes with a corner behind them are folded runs; click to open them.",
        )
    )
    sections += [report.GraphView(f"Function {name}", body, rules) for name, body in functions]
    if result.numbers is not None:
        sections.append(_numbers(builder, result))
    sections += _tables(builder, result)
    return report.page(f"{one} → {other}", sections, subtitle="onnxamp diff")


def _figures(result: GraphDiff) -> list[tuple[str, str, str]]:
    a, b = result.before, result.after
    precisions = ", ".join(f"{count} {kind}" for kind, count in b.precisions) or "none"
    low = sum(count for kind, count in b.heavy if "fp32" not in kind)
    casts = collections.Counter(c.change for c in result.casts)
    return [
        ("Nodes", f"{b.nodes:,}", f"{a.nodes:,} before; {precisions}"),
        ("Heavy nodes in 16 bits", f"{low:,} of {sum(n for _, n in b.heavy):,}", ""),
        ("Retyped nodes", f"{len(result.retyped):,}", ""),
        ("Casts", f"{b.casts:,}", f"{casts['added']} added, {casts['removed']} removed"),
        ("fp32 islands", f"{sum(i.change == 'added' for i in result.islands):,}", ""),
        ("Constants", text.size(b.constant_bytes), f"{text.size(a.constant_bytes)} before"),
        ("Everything else", f"{result.others:,}", "" if result.others else "nothing"),
    ]


def _tables(builder: Builder, result: GraphDiff) -> list[report.Section]:
    def link(ref: NodeRef, added: bool) -> Link | str:
        target = builder.ids.get((added, ref.scope, ref.index))
        return Link(str(ref), target) if target else str(ref)

    found: list[report.Section] = []
    for part in text.parts(result):
        if part.title.startswith("Numbers"):
            continue
        rows: list[list[Cell | Link]] = [list(row) for row in part.rows]
        if part.title == "fp32 islands":
            for row, island in zip(rows, result.islands, strict=True):
                row[0] = link(island.head, island.change == "added")
                row[-1] = str(row[-1]).replace("`", "")
        elif part.title == "Casts":
            for row, cast in zip(rows, result.casts, strict=True):
                row[2] = Link(str(row[2]), target) if (target := _target(builder, cast.node, cast.change)) else row[2]
        elif part.title == "Retyped nodes":
            for row, retyped in zip(rows, result.retyped, strict=True):
                row[0] = link(retyped.counterpart, True)
        columns = ["main node", *part.columns[1:]] if part.title == "fp32 islands" else list(part.columns)
        found.append(report.Table(part.title, columns, rows, part.note, open=len(rows) <= 25))
    return found


def _target(builder: Builder, ref: NodeRef, change: str) -> str | None:
    return builder.ids.get((change == "added", ref.scope, ref.index))


def _numbers(builder: Builder, result: GraphDiff) -> report.Table:
    part = next(part for part in text.parts(result) if part.title.startswith("Numbers"))
    values = {v.name: v for v in result.numbers.values} if result.numbers else {}
    rows: list[list[Cell | Link]] = []
    for row in part.rows:
        value = values[row[0]]
        target = builder.value_ids.get(value.counterpart)
        where: Cell | Link = Link(row[1], target) if target else row[1]
        rows.append([row[0], where, value.max_error, value.scale, row[4], value.nonfinite])
    return report.Table(part.title, part.columns, rows, part.note, limit=20)
