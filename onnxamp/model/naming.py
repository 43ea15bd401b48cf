"""Names that nothing has yet."""

from __future__ import annotations


def unique(wanted: str, taken: set[str] | set[str | None]) -> str:
    """`wanted`, or the first of ``wanted_2``, ``wanted_3``, ... that is not taken; it is taken from now on."""
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name
