"""A diff as plain text and as Markdown, from the same rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from onnxamp.comparison.numbers import Numbers
from onnxamp.comparison.records import LISTS, CastChange, ConstantChange, GraphDiff, Island, Retyped
from onnxamp.comparison.rules import rule
from onnxamp.errors import few

PARTS = ("islands", "casts", "constants", "nodes")


@dataclasses.dataclass(frozen=True)
class Part:
    """A titled table; `note` stands in for rows that were not listed."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def size(count: int | None, assumed: bool = False) -> str:
    """Bytes as text; "~" marks assumed dimensions."""
    if count is None:
        return "?"
    from onnxamp import console  # imports rich, which `diff` itself does not need

    text = console.size(count)
    return f"~{text}" if assumed else text


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def names(result: GraphDiff) -> tuple[str, str]:
    """What to call the two models."""
    return result.before.label or "the first model", result.after.label or "the second model"


def verdict(result: GraphDiff) -> str:
    """One sentence: what differs."""
    one, other = names(result)
    if result.empty:
        return f"{one} and {other} are the same."
    facts = []
    if result.retyped:
        kinds = Counter(f"{r.before or '-'} → {r.after or '-'}" for r in result.retyped if r.before != r.after)
        shown = f" ({', '.join(f'{n} {kind}' for kind, n in kinds.most_common())})" if kinds else ""
        facts.append(plural(len(result.retyped), "node") + " retyped" + shown)
    for change in ("added", "removed"):
        count = sum(c.change == change for c in result.casts)
        if count:
            facts.append(f"{plural(count, 'Cast')} {change}")
    for change, word in (("added", ""), ("removed", " less")):
        count = sum(i.change == change for i in result.islands)
        if count:
            facts.append(f"{plural(count, 'fp32 island')}{word}")
    if result.constants:
        altered = sum(c.altered for c in result.constants)
        retyped = len(result.constants) - altered
        if retyped:
            facts.append(f"{plural(retyped, 'constant')} retyped")
        if altered:
            facts.append(f"{plural(altered, 'constant')} with other values")
    facts += [f"{change.what} {change.before} → {change.after}" for change in result.raised]
    facts.append(f"{plural(result.others, 'other difference')}" if result.others else "nothing else")
    return f"{one} → {other}: {', '.join(facts)}."


def counts(result: GraphDiff) -> Part:
    """The table of counts, before and after."""
    a, b = result.before, result.after

    def row(label: str, before: object, after: object) -> tuple[str, str, str]:
        return label, str(before), str(after)

    rows = [row("nodes (without Casts)", a.nodes, b.nodes)]
    for title, ours, theirs in (
        ("", dict(a.precisions), dict(b.precisions)),
        ("heavy ", dict(a.heavy), dict(b.heavy)),
    ):
        for kind in sorted({*ours, *theirs}):
            rows.append(row(f"{title}nodes in {kind}", ours.get(kind, 0), theirs.get(kind, 0)))
    rows.append(row("float Casts", a.casts, b.casts))
    rows.append(row("bytes of constants", size(a.constant_bytes), size(b.constant_bytes)))
    rows += [row(change.what, change.before, change.after) for change in result.raised]
    for key in dict.fromkeys([*dict(a.options), *dict(b.options)]):
        rows.append(row(f"onnxamp {key}", dict(a.options).get(key, ""), dict(b.options).get(key, "")))
    return Part("Counts", ("", "before", "after"), rows)


def codes_text(codes: Iterable[tuple[str, int]]) -> str:
    """``AMP105 softmax (2), no recorded reason (1)``."""
    found = []
    for code, count in codes:
        page = rule(code) if code else None
        found.append(f"{code or 'no recorded reason'}{f' {page.title}' if page else ''} ({count})")
    return ", ".join(found)


def island_rows(islands: Sequence[Island]) -> list[tuple[str, ...]]:
    """A row for each island; what to do about a code stands where the code first does."""
    rows: list[tuple[str, ...]] = []
    told: dict[str, str] = {}
    for k, island in enumerate(islands, 1):
        place = str(island.head)
        advice = []
        for remedy in island.remedies:
            nodes, _, text = remedy.partition("): ")
            first = told.setdefault(text, place)
            advice.append(remedy if first == place else f"{nodes}): as for the island of {first}")
        telling = [island.head, *(node for node in island.nodes if node != island.head)]
        shown = few([f"{node} ({node.op})" for node in telling], 4)
        rows.append(
            (
                ("+" if island.change == "added" else "-") + str(k),
                shown,
                f"{len(island.entering)} in, {len(island.leaving)} out, {size(island.bytes)}",
                codes_text(island.codes),
                "; ".join(advice) or "-",
            )
        )
    return rows


def cast_row(cast: CastChange) -> tuple[str, ...]:
    return (
        "+" if cast.change == "added" else "-",
        f"{cast.source or '?'} → {cast.target}",
        (f"{cast.node.scope}: " if cast.node.scope else "") + cast.tensor + (" (constant)" if cast.constant else ""),
        cast.shape or "?",
        size(cast.bytes, cast.assumed),
        str(cast.fan_out),
        cast.redundant or "-",
    )


def constant_effect(c: ConstantChange) -> str:
    """What happened to the values."""
    if not c.before or not c.after:
        return f"only in {'the first' if c.before else 'the second'} model, unused"
    facts = []
    if c.shape_before != c.shape_after:
        facts.append(f"shape {list(c.shape_before)} → {list(c.shape_after)}")
    for key, word in (
        ("clamped", "clamped"),
        ("overflowed", "overflowed to infinity"),
        ("flushed", "flushed to zero"),
        ("changed", "changed"),
        ("rounded", "rounded"),
    ):
        if count := getattr(c, key):
            facts.append(f"{count:,} {word}")
    if not facts and not c.moved:
        facts.append("exact")
    if c.moved:
        facts.append(c.moved)
    if c.max_error:
        facts.append(f"largest error {c.max_error:.3g}")
    return ", ".join(facts)


def constant_row(c: ConstantChange) -> tuple[str, ...]:
    name = c.before if c.before == c.after else " → ".join(filter(None, (c.before, c.after)))
    kinds = c.type_before if c.type_before == c.type_after else f"{c.type_before or '-'} → {c.type_after or '-'}"
    return name, kinds, f"{c.elements:,}", constant_effect(c), ", ".join(c.uses[:3]) + (" …" if len(c.uses) > 3 else "")


def other_rows(result: GraphDiff) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    rows += [("node " + n.change, f"{n.node} ({n.node.op})", "", "") for n in result.nodes]
    rows += [(f"{r.kind} renamed", r.scope or "main graph", r.before or "-", r.after or "-") for r in result.renamed]
    rows += [("node moved", str(m.node), f"{m.node.index}", f"{m.counterpart.index}") for m in result.moved]
    rows += [(e.what, f"{e.node} ({e.node.op})", e.before or "-", e.after or "-") for e in result.edited]
    rows += [("model", m.what, m.before or "-", m.after or "-") for m in result.model]
    return rows


def parts(result: GraphDiff, only: str | None = None) -> list[Part]:
    """The tables of a diff; `only` one of `PARTS`."""
    found = []
    if only in (None, "islands") and (result.islands or only):
        columns = ("", "nodes", "boundary Casts", "reasons", "what would dissolve it")
        found.append(Part("fp32 islands", columns, island_rows(result.islands)))
    if only in (None, "casts") and (result.casts or only):
        heads = ("", "direction", "tensor", "shape", "bytes", "reads", "redundant")
        found.append(Part("Casts", heads, [cast_row(c) for c in result.casts]))
    if only in (None, "constants") and (result.constants or only):
        found.append(_constants(result, everything=only is not None))
    if only in (None, "nodes") and (result.retyped or only):
        rows = [(str(r.node), r.node.op, _precision(r), _code(r)) for r in result.retyped]
        found.append(Part("Retyped nodes", ("node", "operator", "precision", "code"), rows))
    if only in (None, "nodes"):
        others = other_rows(result)
        found.append(
            Part("Everything else", ("what", "where", "before", "after"), others, "" if others else "Nothing.")
        )
    if result.numbers is not None and only is None:
        found.append(_numbers(result.numbers))
    return found


def _precision(retyped: Retyped) -> str:
    if retyped.before != retyped.after:
        return f"{retyped.before} → {retyped.after}"
    return ", ".join(f"{slot} {before} → {after}" for slot, before, after in retyped.slots)


def _code(retyped: Retyped) -> str:
    made = retyped.decision or retyped.decision_before
    return made.code if made else "-"


def _constants(result: GraphDiff, everything: bool) -> Part:
    """Altered constants, and in a sentence those that only got another type; or all of them."""
    listed = [c for c in result.constants if c.altered or everything]
    rest = [c for c in result.constants if not (c.altered or everything)]
    note = ""
    if rest:
        worst = max(rest, key=lambda c: c.max_error)
        note = f"{plural(len(rest), 'constant')} only got another type"
        note += (
            f", largest rounding error {worst.max_error:.3g} in {worst.before}." if worst.max_error else ", exactly."
        )
    columns = ("constant", "type", "elements", "values", "read by")
    return Part("Constants", columns, [constant_row(c) for c in listed], note)


def _numbers(numbers: Numbers) -> Part:
    worst_first = sorted(numbers.values, key=lambda v: (v.nonfinite == 0, v.decibels))
    rows = [
        (
            v.name,
            f"{v.node} ({v.op})",
            f"{v.max_error:.3g}",
            f"{v.scale:.3g}",
            v.ratio,
            str(v.nonfinite) + (f", {v.clamped} clamped" if v.clamped else ""),
        )
        for v in worst_first
    ]
    note = (
        f"Values of the main graph (not inside If, Loop, Scan and functions), {plural(numbers.samples, 'sample')} of {numbers.data}, "
        "both models under strict emulation. "
    )
    if numbers.first_divergence:
        note += f"The first to diverge (below {numbers.diverged:g} dB, or not finite) is {numbers.first_divergence}."
    else:
        note += f"None diverges: all are finite and at {numbers.diverged:g} dB or better."
    return Part("Numbers, worst first", ("value", "node", "max error", "max value", "SNR", "NaN/Inf"), rows, note)


def to_text(result: GraphDiff, only: str | None = None, limit: int | None = 30) -> str:
    """Plain text: the verdict, the counts, the tables, at most `limit` rows of each."""
    blocks = [verdict(result)]
    if not only and not result.empty:
        blocks.append(_aligned(counts(result).columns, counts(result).rows))
    if only or not result.empty or result.numbers is not None:
        for part in parts(result, only):
            shown = part.rows if limit is None else part.rows[:limit]
            lines = [f"{part.title} ({len(part.rows):,})"]
            if part.note:
                lines.append("  " + part.note)
            if shown:
                lines.append(_aligned(part.columns, shown))
            if len(shown) < len(part.rows):
                lines.append(f"  … and {len(part.rows) - len(shown):,} more (--all lists them)")
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    clean = [tuple(_line(cell) for cell in row) for row in (columns, *rows)]
    widths = [min(max(map(len, column)), 60) for column in zip(*clean, strict=True)]
    return "\n".join(
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in clean
    )


def _line(text: str) -> str:
    """Text on one line, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def to_markdown(result: GraphDiff, only: str | None = None) -> str:
    """GitHub-flavoured Markdown: the same tables, whole."""
    lines = [f"**{_escape(verdict(result))}**"]
    tables = parts(result, only) if only or not result.empty or result.numbers is not None else []
    for part in ([] if only or result.empty else [counts(result)]) + tables:
        lines += ["", f"## {part.title}", ""]
        if part.note:
            lines += [_escape(part.note), ""]
        if part.rows:
            lines.append("| " + " | ".join(part.columns) + " |")
            lines.append("|" + " --- |" * len(part.columns))
            lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in part.rows]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    clean = _line(text)
    for mark in "\\`*_[]|#":
        clean = clean.replace(mark, "\\" + mark)
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def select(data: dict[str, Any], only: str | None) -> dict[str, Any]:
    """JSON data in which the lists of the other parts are empty, so that the schema holds for it too."""
    if only is None:
        return data
    own = ("islands", "casts", "constants")
    kept = [only] if only in own else [name for name in LISTS if name not in own]
    return {k: [] if k in LISTS and k not in kept else v for k, v in data.items()}
