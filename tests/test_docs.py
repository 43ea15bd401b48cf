"""The documentation claims of GPUs only what was measured or placed, and says which, in one form."""

import ast
import importlib
import pathlib
import re

import pytest

from onnxamp.policy import pages

ROOT = pathlib.Path(__file__).parents[1]
# `(placed)`, `(placed, not run)`, `(placed: why)`; `(measured on CARD, DATE)`. In a table the same in bold, as the state of a provider.
MARK = re.compile(
    r"\(placed(, not run)?(: [^)]+)?\)"
    r"|\*\*placed, not run\*\*"
    r"|\(measured on [^,()]+, \d{4}-\d\d-\d\d(, [^)]+)?\)"
)
NAMES = re.compile(r"\b(CUDA\w*|GPUs?|NCCL|cuDNN|compute capability|pinned memory|matrix units)\b")
# All that this page says of devices is of GPUs.
OF_GPUS = {"gpu.md": re.compile(NAMES.pattern + r"|\b(devices?|streams?|arenas|card)\b")}
# Sentences that name a GPU and claim nothing that runs there: how to install, what is not known, where to read on.
DESCRIPTIVE = {
    "README.md": {
        "On a GPU machine install CODE instead of CODE; never both, since the two runtimes share one folder."
    },
    "gpu.md": {
        "# On a GPU",
        "No GPU was at hand, so nothing here was measured on one.",
        "What 16 bits do to the numbers is measured on the CPU, where each rounding is made explicit ({doc}CODE).",
        "Several GPUs: {doc}CODE.",
    },
    "providers.md": {"* Its CUDA sibling is CODE 1.19.2, for CUDA 11.8: untested."},
}


def sentences(text: str) -> list[str]:
    """Sentences and table rows of a Markdown page, without code. A list or table carries the mark of the line that leads it in."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", text)
    found, lead = [], ""
    for part in re.split(r"\n\s*\n|\n(?=[|#]|\s*[*-] )", text):
        part = " ".join(part.split())
        item = part.startswith(("|", "* ", "- "))
        split = [s for s in re.split(r"(?<=[.!?])\s+", part) if s]
        if not item:
            lead = split[-1] if split and split[-1].endswith(":") else ""
        mark = MARK.search(lead)
        found += [f"{s} {mark[0]}" if item and mark else s for s in split]
    return found


def silent(name: str, text: str) -> list[str]:
    """The sentences of a page that claim something of a GPU and do not say on what ground."""
    names = OF_GPUS.get(name, NAMES)
    claims = [s for s in sentences(text) if names.search(s) and s not in DESCRIPTIVE.get(name, ())]
    return [s for s in claims if not MARK.search(s)]


def texts() -> dict[str, str]:
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.name: path.read_text(encoding="utf-8") for path in files} | {
        code: pages.page(code) for code in pages.entries()
    }


def test_every_claim_on_gpus_says_measured_or_placed():
    found = texts()
    assert {name: part for name, text in found.items() if (part := silent(name, text))} == {}
    marked = {name: sum(bool(MARK.search(s)) for s in sentences(text)) for name, text in found.items()}
    assert all(
        marked[name] for name in ("README.md", "gpu.md", "providers.md", "distributed.md", "trainer.md", "AMP301")
    )
    assert sum(marked.values()) >= 30


def blocks(text: str) -> str:
    """The Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


def test_names_that_the_pages_teach_are_in_the_api():
    listed = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = set(re.findall(r"auto(?:function|class):: ([\w.]+)", listed))
    modules = [importlib.import_module(name) for name in re.findall(r"automodule:: ([\w.]+)", listed)]
    taught = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for node in ast.walk(ast.parse(blocks(page.read_text(encoding="utf-8")))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("onnxamp."):
                taught |= {(node.module, alias.name) for alias in node.names}
    assert len(taught) >= 10
    for module, name in sorted(taught):
        taught_one = getattr(importlib.import_module(module), name)
        alone = {f"{module}.{name}", f"{taught_one.__module__}.{name}"} & names
        assert alone or any(getattr(each, name, None) is taught_one for each in modules), f"{module}.{name}"


def test_the_readme_links_to_files_that_the_repository_has():
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()}
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) >= 8
    for link in links:
        assert (ROOT / link).exists(), link
        assert not {link, *map(str, pathlib.PurePath(link).parents)} & ignored, link


def test_the_list_of_descriptive_sentences_has_no_dead_entry():
    found = texts()
    for name, known in DESCRIPTIVE.items():
        assert known <= set(sentences(found[name]))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is fast on CUDA.", 1),
        ("It is fast on CUDA (placed).", 0),
        ("It is fast on CUDA; nothing was measured.", 1),
        ("It is fast on CUDA (measured).", 1),
        ("It is fast on CUDA (measured on an H200, 2026-11-30).", 0),
        ("It is fast on CUDA (placed, not run: every node has a kernel). NCCL is faster.", 1),
        ("All of it (placed, not run):\n\n* It copies nothing to the device.\n* NCCL\n\nOn a GPU it is fast.", 1),
        ("In general:\n\n* It is fast on CUDA.", 1),
        ("`CUDA` is a word of code.", 0),
    ],
)
def test_the_form_is_strict(text, count):
    assert len(silent("some.md", text)) == count


def test_every_provider_of_the_table_has_a_state():
    table = (
        (ROOT / "docs" / "providers.md").read_text(encoding="utf-8").partition("| provider |")[2].partition("\n\n")[0]
    )
    rows = table.splitlines()[2:]
    assert len(rows) >= 6
    for row in rows:
        assert re.search(r"\*\*(measured|placed, not run|untested)\*\*", row.split("|")[-2]), row
