"""The rule pages, as far as a diff shows them."""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: its title, what it says, and what a user can do about it."""

    title: str
    text: str
    remedy: str


@functools.cache
def rule(code: str) -> Rule | None:
    """The rule of a code; None for a code that this version does not know."""
    return None
