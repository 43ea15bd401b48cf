"""Options that several commands read alike, and what they do with files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from onnxamp.errors import RuntimeMissingError, UsageError


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


def check_outputs(paths: Iterable[str], reports: Iterable[str], force: bool) -> None:
    """Refuse, before any work is done, what could not be written at its end.

    Raises:
        UsageError: A file exists and `force` is off, or a report's name does not say what it is.
    """
    reports = list(reports)
    for path in reports:
        if not path.endswith((".json", ".html")):
            raise UsageError(f"--report {path} ends neither in .json nor in .html: the ending says what to write.")
    for path in (*paths, *reports):
        if pathlib.Path(path).exists() and not force:
            raise UsageError(f"{path} exists: choose another name or add --force.")


def write_text(path: str, text: str) -> None:
    """Write a text file.

    Raises:
        RuntimeMissingError: The file system refuses it.
    """
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise RuntimeMissingError(f"{path} cannot be written: {problem.strerror}.") from problem
