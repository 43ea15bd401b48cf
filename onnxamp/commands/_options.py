"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Iterable

from onnxamp.errors import UsageError


def sizes(entries: Iterable[str]) -> dict[str, int]:
    """``NAME=N`` entries as a mapping.

    Raises:
        UsageError: An entry has another form, or N is no positive integer.
    """
    result = {}
    for entry in entries:
        name, _, text = entry.rpartition("=")
        if not name or not text.isdigit() or int(text) < 1:
            raise UsageError(
                f"--dim {entry!r} is not NAME=N with a positive integer N: write for example --dim batch=8."
            )
        result[name] = int(text)
    return result
