"""The page component without a browser: plots, tables, layout, folding, escaping."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
import random
import re
import zlib

import pytest

from onnxamp.report import Box, Figures, Graph, GraphView, LinePlot, Link, Note, Series, Table, page
from onnxamp.report.graph import LEVEL, Fold, common_prefix, folded, view_data
from onnxamp.report.layout import GAP, layout
from onnxamp.report.plots import line_plot, log_ticks, number, thin, tick_text, ticks

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'\u2028"


def boxes(count: int, **fields) -> list[Box]:
    return [Box(f"n{k}", "Relu", f"n{k}", **fields) for k in range(count)]


def payload(text: str) -> dict:
    packed = re.search(r'id="data">([^<]*)<', text).group(1)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_every_text_is_escaped() -> None:
    bad = HOSTILE
    graph = Graph(
        [Box(bad, bad, bad, bad, bad, "changed", facts=[(bad, [(bad, bad, "x")])], rule=bad)] * 2, [(0, 1, bad, bad)]
    )
    text = page(
        bad,
        [
            Figures([(bad, bad, bad)], bad),
            Note([bad], bad, bad),
            Table(bad, [bad], [[bad], [Link(bad, bad)]], bad),
            LinePlot(bad, [Series(bad, [0, 1], [0, 1])], bad, bad, marks=[(0, bad)], note=bad),
            GraphView(bad, graph, {bad: (bad, bad)}, bad),
        ],
        subtitle=bad,
    )
    assert len(re.findall("<script", text)) == 2
    assert "<img" not in text
    assert text.count(html.escape(bad)) >= 15
    assert payload(text)["g0"]["rules"] == {bad: [bad, bad]}


def test_the_policy_allows_this_script_and_no_connection() -> None:
    text = page("t", [GraphView("g", Graph(boxes(2), [(0, 1, "", "")]))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline'; script" in policy  # styles only
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)


def test_table_cells() -> None:
    text = page("t", [Table("T", ["a"], [[1234567], [0.1 + 0.2], [True], [None], [math.inf], ["x"]], limit=3)])
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text)
    assert cells == ["1,234,567", "0.3", "yes", "", "inf", "x"]
    assert text.count("<tr hidden") == 3
    assert "Show all 6" in text
    assert "The first 1,000 of 1,500 rows" in page("t", [Table("T", ["a"], [[1]] * 1500)])


def test_thinning_keeps_spikes_and_gaps() -> None:
    x = list(range(100_000))
    y = [0.0] * len(x)
    y[77_777], y[33_333], y[50_000] = 9.0, -9.0, math.nan
    few_x, few_y = thin(x, y)
    assert len(few_x) < 3000
    assert few_x == sorted(few_x)
    assert {9.0, -9.0} <= set(few_y)
    assert any(math.isnan(v) for v in few_y)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (30000, 140000, [32768, 65536, 131072]),
        (0.5, 200, [1, 10, 100]),
        (900, 1000, [900, 920, 940, 960, 980, 1000]),
        (0.4, 12, [0.5, 1, 2, 4, 8]),
        (0.3, 0.6, [0.3, 0.4, 0.5, 0.6]),
        (1, 2**24, [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7]),
    ],
)
def test_log_ticks(low: float, high: float, expected: list[float]) -> None:
    assert [10**y for y in log_ticks(math.log10(low), math.log10(high))] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0009, 0.00095, 0.0011], ["0.0009", "0.00095", "0.0011"]),
        ([8e-4, 9e-4], ["8e-4", "9e-4"]),
        ([0, 5000, 10000], ["0", "5,000", "10,000"]),
    ],
)
def test_ticks_of_an_axis_have_one_notation(values: list[float], texts: list[str]) -> None:
    assert [tick_text(value, values) for value in values] == texts


def test_a_logarithmic_axis_says_so_and_has_ticks() -> None:
    for values in ([0.7, 1.5], [65536.0, 65536.0], [0.02, 3.0], [1e-9, 1e9]):
        text = page("t", [LinePlot("Norm", [Series("s", range(2), values)], "window", log_y=True)])
        assert '<div class="ylabel">Norm, logarithmic</div>' in text
        assert text.count('text-anchor="end"') >= 2, values


def test_heads_are_aligned_as_their_columns() -> None:
    text = page("t", [Table("T", ["name", "size", "mixed"], [["a", 1, "x"], ["b", None, 2]])])
    heads = re.findall(r'<th tabindex="0" scope="col"([^>]*)>(\w+)', text)
    assert heads == [("", "name"), (' class="n"', "size"), ("", "mixed")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.03125, "0.03125"), (1e-5, "1e-5"), (65536, "65,536"), (1.5e7, "1.5e7"), (-2, "-2"), (math.nan, "nan"),
     (1e6, "1e6"), (123.456, "123.5")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("series", [[], [[]], [[math.nan]], [[1.0]], [[-1.0, 0.0]]], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_plots_of_little_or_nothing(series: list[list[float]], log: bool) -> None:
    text = page("t", [LinePlot("P", [Series("s", range(len(y)), y) for y in series], log_y=log)])
    assert "nan" not in re.sub(r'data-plot="[^"]*"', "", text)


def test_layout_puts_readers_below_and_nothing_overlaps() -> None:
    rng = random.Random(1)
    for _ in range(20):
        count = rng.randrange(2, 60)
        edges = [(rng.randrange(k), k) for k in range(1, count) for _ in range(rng.randrange(3))]
        widths = [rng.uniform(50, 200) for _ in range(count)]
        made = layout(widths, edges)
        row = {item: r for r, items in enumerate(made.rows) for item in items}
        assert all(row[a] < row[b] for a, b in edges)
        assert sorted(k for items in made.rows for k in items if k < count) == list(range(count))
        for items in made.rows:
            for left, right in itertools.pairwise(items):
                sizes = [widths[k] if k < count else 14 for k in (left, right)]
                assert made.centers[right] - made.centers[left] >= sum(sizes) / 2 + GAP - 1e-6
        for (a, b), route in zip(edges, made.routes, strict=True):
            assert [row[k] for k in route] == list(range(row[a] + 1, row[b]))[: len(route)]


def test_layout_of_a_chain_is_straight() -> None:
    made = layout([100.0] * 9, [(k, k + 1) for k in range(8)])
    assert len(set(made.centers)) == 1


def test_layout_ignores_edges_backward() -> None:
    assert layout([10.0, 10.0], [(1, 0), (0, 0)]).rows == [[0, 1]]


def test_runs_fold_and_differences_stay() -> None:
    items = folded(
        [*boxes(10), Box("c", "Cast", "c", kind="cast"), *boxes(3), *boxes(5, status="retyped", precision="fp16")]
    )
    kinds = [len(item.boxes()) if isinstance(item, Fold) else 1 for item in items]
    assert kinds == [10, 1, 1, 1, 1, 5]
    assert folded(boxes(10)) == list(range(10))  # a page of one fold would show nothing


def test_no_level_is_large_and_no_box_is_lost() -> None:
    some = [Box(f"n{k}", "Add", f"n{k}", status="changed") for k in range(20_000)]
    seen = []
    todo = [folded(some)]
    while todo:
        items = todo.pop()
        assert len(items) <= LEVEL
        for item in items:
            if isinstance(item, Fold):
                todo.append(item.items)
            else:
                seen.append(item)
    assert sorted(seen) == list(range(20_000))


def test_edges_of_folded_boxes_are_joined() -> None:
    graph = Graph([*boxes(5), Box("x", "Exp", "x", status="added")], [(k, k + 1, f"v{k}", "fp32") for k in range(5)])
    data = view_data(GraphView("g", graph))["graph"]
    fold, exp = data["items"]
    assert fold["fold"] == 5
    leave = len(fold["level"]["items"]) + 1
    assert [edge[:2] for edge in fold["level"]["edges"]] == [[0, 1], [1, 2], [2, 3], [3, 4], [4, leave]]
    assert [k for row in fold["level"]["rows"] for k in row] == [0, 1, 2, 3, 4, leave]  # nothing enters
    ((source, target, _, precision, route),) = data["edges"]
    assert (source, target, precision, route) == (0, 1, "fp32", [])
    assert exp["name"] == "x"


def test_edges_into_a_fold_start_at_its_border() -> None:
    """Two values of one box outside enter as two edges, and one that passes two folds enters each that reads it."""
    ends = Box("a", "Exp", "a", status="added"), Box("z", "Exp", "z", status="added")
    inner = [Box(f"n{k}", "Add", f"n{k}", status="retyped") for k in range(4)]
    graph = Graph(
        [ends[0], *inner, ends[1]], [(0, 1, "a", "fp32"), (0, 4, "b", "fp16"), (1, 2, "v", ""), (3, 5, "w", "")]
    )
    level = view_data(GraphView("g", graph))["graph"]["items"][1]["level"]
    assert sorted(edge[:2] for edge in level["edges"]) == [[0, 1], [2, 5], [4, 0], [4, 3]]
    assert level["rows"][0][0] == 4
    assert {edge[3] for edge in level["edges"] if edge[0] == 4} == {"fp32", "fp16"}


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["a/b/c1", "a/b/c2"], "a/b"),
        (["layer.1.x", "layer.1.y"], "layer.1"),
        (["abc", "abd"], ""),
        (["/m/x", "/m/x"], "m"),
    ],
)
def test_common_prefix(names: list[str], prefix: str) -> None:
    assert common_prefix(names) == prefix


def test_points_have_no_line_and_lone_ones_are_seen() -> None:
    series = [Series("met", [3, 1, 2], [1, 2, 3]), Series("not met", [2], [2])]
    text = line_plot(LinePlot("P", series, points=True, marks=[(1, "chosen")]))
    assert text.count("<circle") == 4
    assert "<path" not in text
    assert '<i class="mark"></i>chosen</span>' in text
    text = line_plot(
        LinePlot("P", [Series("a", range(6), [1, math.nan, 2, 3, math.nan, 4])], marks=[(1, "x"), (2, "y")])
    )
    assert text.count("<circle") == 2
    assert text.count("<path") == 1
    assert 'class="mark"></i>' not in text


def test_failed_rows_are_marked_and_cosines_told_from_1() -> None:
    text = page("T", [Table("T", ["name", "cosine"], [["a", 0.99999985], ["b", 1.0], ["c", 0.9999999998]], bad=[1])])
    assert text.count("<tr class=bad>") == 1
    assert "<tr class=bad><td>b</td>" in text
    assert [part.partition("</td>")[0].rpartition(">")[2] for part in text.split('<td class="n"')[1:]] == [
        "0.9999999",
        "1",
        "0.9999999998",
    ]
