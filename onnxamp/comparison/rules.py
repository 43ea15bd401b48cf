"""The rule pages, as far as a diff shows them."""

from __future__ import annotations

import dataclasses

from onnxamp.policy import pages


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: its title, what it says, and what a user can do about it."""

    title: str
    text: str
    remedy: str


def rule(code: str) -> Rule | None:
    """The rule of a code; None for a code that this version does not know (metadata may come from any file)."""
    entry = pages.entries().get(code)
    if entry is None:
        return None
    parts = (entry.what, entry.why, f"What to do: {entry.remedy.strip()}" if entry.remedy.strip() else "")
    return Rule(
        entry.title, "\n\n".join(part.strip() for part in parts if part.strip()), " ".join(entry.remedy.split())
    )
