"""Pages in headless Chromium: they open, search, fold and go dark without an error, a request or an overflow."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest

import onnxamp
from onnxamp.comparison import conversion_page
from onnxamp.report import Box, Figures, Graph, GraphView, LinePlot, Link, Series, Table, page

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def box(k: int, **fields) -> Box:
    precision = fields.pop("precision", "fp16")
    facts = [
        ("Inputs", [("0", f"value_{k} fp32 [n,8]", f"value_{k} fp16 [n,8]")]),
        ("Attributes", [("axis", "-1", "-1")]),
    ]
    return Box(
        f"layer/{k}/node",
        "MatMul",
        f"layer/{k}/node",
        precision,
        "fp32",
        "retyped",
        facts=facts,
        rule="AMP002",
        **fields,
    )


def view(count: int) -> GraphView:
    """A chain: 16-bit runs with a Cast and an fp32 island every 20 nodes, and a body in the middle."""
    inner = Graph([box(-k - 1) for k in range(3)], [(0, 1, "v", "fp16"), (1, 2, "v", "fp16")])
    boxes: list[Box] = []
    for k in range(count):
        if k % 20 == 7:
            boxes.append(Box(f"cast/{k}", "Cast", f"cast/{k}", "fp32", "fp16", "added", kind="cast"))
        elif k % 20 == 8:
            boxes.append(box(k, precision="fp32", island=k // 20 + 1))
        elif k == 3:
            boxes.append(Box("if", "If", "if", "fp16", "fp32", "retyped", bodies=[("then_branch", inner)]))
        else:
            boxes.append(box(k))
    edges = [(k, k + 1, f"value_{k}", "fp16") for k in range(count - 1)] + [(0, count - 1, "skip", "fp16")]
    return GraphView("Graph", Graph(boxes, edges), {"AMP002": ("heavy", HOSTILE)})


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "small.html"
    table = Table("Nodes", ["node", "n"], [[Link("layer/9/node", "layer/9/node"), 2], ["other", 10], [HOSTILE, 1]])
    plot = LinePlot("Loss", [Series(HOSTILE, range(5), [5, 4, 3, 2, 1])])
    path.write_text(page("Small", [Figures([("a", "1", "")]), view(10), table, plot]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "large.html"
    path.write_text(page("Large", [view(20_000)]), encoding="utf-8")
    assert path.stat().st_size < 8 << 20
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> pathlib.Path:
    """The page that `convert --report` writes, of a chain of 1,000 nodes."""
    lines, value = [], "x"
    for k in range(200):
        v = [f"v{k}_{i}" for i in range(5)]
        steps = [f"MatMul({value}, w)", f"Add({v[0]}, b)", f"Softmax({v[1]})", f"Relu({v[2]})", f"Add({v[3]}, {value})"]
        for i, step in enumerate(steps):
            lines.append(f'["/layer.{k}/{step.partition("(")[0]}_{i}"] {v[i]} = {step}')
        value = v[4]
    lines.append(f"y = Identity({value})")
    text = (
        f"""<ir_version: 9, opset_import: ["": 17]> chain (float[n, 8] x) => (float[n, 8] y) {{ {" ".join(lines)} }}"""
    )
    model = onnx.parser.parse_model(text)
    for name, value in (("w", np.eye(8, dtype=np.float32)), ("b", np.ones(8, np.float32))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    path = tmp_path_factory.mktemp("page") / "converted.html"
    path.write_text(conversion_page(model, onnxamp.convert(model)), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_small_page(browser, small: pathlib.Path, width: int, dark: bool) -> None:
    browser.ready(small, width=width, dark=dark)
    assert browser.js("document.querySelectorAll('g.item').length") == 10
    assert browser.js("document.title") == "Small"
    background = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (background != "rgb(255, 255, 255)") == dark
    browser.click("#theme")
    assert browser.js("getComputedStyle(document.body).backgroundColor") != background
    browser.click("#theme")
    browser.check(small)


def test_open_a_body_and_the_panel(browser, small: pathlib.Path) -> None:
    browser.ready(small)
    before = browser.js("document.querySelectorAll('g.item').length")
    browser.click('g[data-id="if"]')
    assert browser.js("document.querySelectorAll('g.item').length") == before + 3
    assert browser.js("document.querySelector('.bodyname').textContent") == "then_branch"
    browser.click('g[data-id="layer/-1/node"]')
    side = browser.js("document.querySelector('.side').innerText")
    assert "value_-1 fp16 [n,8]" in side
    assert "AMP002 heavy" in side
    assert browser.js("location.hash") == "#layer%2F-1%2Fnode"
    browser.click('g[data-id="if"]')
    assert browser.js("document.querySelectorAll('g.item').length") == before
    assert browser.js("document.title") == "Small"
    browser.check(small)


def test_search_and_keys(browser, small: pathlib.Path) -> None:
    browser.ready(small)
    browser.js("document.querySelector('.pane').focus()")
    browser.key("/")
    browser.type("layer/-2")
    assert browser.js("document.querySelector('.hits .total').textContent") == "1 found"
    browser.key("Enter")
    assert browser.js("document.querySelector('.current').dataset.id") == "layer/-2/node"
    browser.key("ArrowUp")
    assert browser.js("document.querySelector('.current').dataset.id") == "layer/-1/node"
    browser.key("n")
    assert browser.js("document.querySelector('.current').dataset.id") == "cast/7"
    browser.key("Escape")
    assert browser.js("getComputedStyle(document.querySelector('.side')).display") == "none"
    browser.check(small)


def test_a_fragment_opens_its_node(browser, small: pathlib.Path) -> None:
    browser.ready(small, at="layer%2F-3%2Fnode")
    assert browser.js("document.querySelector('.current').dataset.id") == "layer/-3/node"
    browser.click("td a")
    browser.until("document.querySelector('.current').dataset.id == 'layer/9/node'")
    browser.check(small)


def test_tables_sort(browser, small: pathlib.Path) -> None:
    browser.ready(small)
    column = "[...document.querySelectorAll('tbody tr')].map((r) => r.cells[1].textContent).join()"
    browser.click("th:nth-child(2)")
    assert browser.js(column) == "1,2,10"
    browser.click("th:nth-child(2)")
    assert browser.js(column) == "10,2,1"
    browser.check(small)


def test_plots_show_numbers(browser, small: pathlib.Path) -> None:
    browser.ready(small)
    browser.js("document.querySelector('.plotbox').scrollIntoView({block: 'center'})")
    x, y = browser.js(
        "(() => { const r = document.querySelector('.plot').getBoundingClientRect(); return [r.right - 20, r.y + 50]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.js("document.querySelector('.tip').textContent") == f"step 4{HOSTILE}: 1"
    assert browser.js("document.title") == "Small"
    browser.check(small)


def test_a_large_page(browser, large: pathlib.Path) -> None:
    browser.ready(large, at="layer%2F19999%2Fnode")
    assert browser.js("document.querySelector('.current').dataset.id") == "layer/19999/node"
    shown = browser.js("document.querySelectorAll('g.item').length")
    assert shown < 1000
    browser.js("document.querySelector('.pane').focus()")
    browser.key("n")
    assert browser.js("document.querySelector('.current').dataset.id") == "cast/7"
    browser.click("g.item.fold:not(.open)")
    assert browser.js("document.querySelectorAll('g.item').length") > shown
    browser.js("document.querySelectorAll('.toolbar button')[3].click()")
    assert browser.js("document.querySelectorAll('g.item').length") <= 160
    browser.check(large)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_a_conversion(browser, converted: pathlib.Path, dark: bool) -> None:
    browser.walk_through(converted, "/layer.199/Softmax_2", dark=dark)


def test_printing(browser, small: pathlib.Path) -> None:
    browser.ready(small)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.js("getComputedStyle(document.querySelector('.toolbar')).display") == "none"
    assert browser.js("getComputedStyle(document.querySelector('.graphbody')).maxHeight") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
