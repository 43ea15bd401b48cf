"""The pages of the codes, from `codes.toml`: what `onnxamp explain CODE` prints and what the docs list."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import os
import pathlib
import tomllib

from onnxamp.errors import UsageError

_FAMILIES = {
    "0": "The level",
    "1": "Numerical rules",
    "2": "Legality",
    "3": "The target",
    "4": "The user",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One code.

    Attributes:
        title: A phrase that says why, fit to follow "because".
        what: What the code does.
        why: The reason.
        example: A small graph and what happens to it.
        remedy: What to do about it.
        references: Where it is known from.
    """

    title: str
    what: str
    why: str
    example: str
    remedy: str
    references: str


@functools.cache
def entries() -> dict[str, Entry]:
    """All codes in order."""
    text = importlib.resources.files("onnxamp.policy").joinpath("codes.toml").read_text(encoding="utf-8")
    return {code: Entry(**fields) for code, fields in sorted(tomllib.loads(text).items())}


def title(code: str) -> str:
    """The phrase that stands for a code; empty for one that this version does not know, as a file may hold any."""
    return entries()[code].title if code in entries() else ""


def page(code: str) -> str:
    """The page of a code, in Markdown.

    Raises:
        UsageError: No such code exists.
    """
    entry = _entry(code)
    sections = {
        "What it does": entry.what,
        "Why": entry.why,
        "Example": entry.example,
        "What to do": entry.remedy,
        "References": entry.references,
    }
    body = "\n\n".join(f"## {heading}\n\n{text.strip()}" for heading, text in sections.items())
    return f"# {code.upper()}: {entry.title}\n\n{body}\n"


def write(folder: str | os.PathLike[str]) -> None:
    """Write `folder`/CODE.md for every code, and `index.md` that lists them by family."""
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = ["# Decision codes", "", "Every decision has a code; `onnxamp explain AMP103` prints the same page.", ""]
    family = ""
    for code, entry in entries().items():
        (target / f"{code}.md").write_text(page(code), encoding="utf-8")
        if code[3] != family:
            family = code[3]
            lines += ["", f"## AMP{family}xx: {_FAMILIES[family]}", ""]
        lines.append(f"* [{code}]({code}.md) {entry.title}")
    lines += ["", "```{toctree}", ":hidden:", "", *entries(), "```", ""]
    (target / "index.md").write_text("\n".join(lines), encoding="utf-8")


def _entry(code: str) -> Entry:
    if code.upper() not in entries():
        raise UsageError(f"Unknown code {code!r}: the codes are {', '.join(entries())}.")
    return entries()[code.upper()]
