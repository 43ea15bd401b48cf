"""What commands print: tables for people, JSON for programs, progress on stderr.

Colours follow the terminal and NO_COLOR (rich does both). Where stdout is no terminal, tables are as wide as they need, so
that names are never cut.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

# Wide enough for any row; rich pads nothing to it.
_UNLIMITED = 10_000


class _Console(Console):
    """A console that leaves it to the command line what happens when nobody reads its output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """The console for results."""
    return _Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _UNLIMITED)


def show(*items: RenderableType) -> None:
    """Print each item on stdout, without blanks at the ends of lines; text is no markup."""
    console = stdout()
    for item in items:
        with console.capture() as capture:
            console.print(item, markup=False)
        sys.stdout.write(re.sub(r"[ \t]+$", "", capture.get(), flags=re.MULTILINE))


def stderr() -> Console:
    """The console for progress and remarks."""
    return Console(stderr=True, highlight=False)


def facts(rows: Iterable[tuple[str, str]], *, title: str = "") -> Table:
    """A table of names and values without lines."""
    table = Table(
        box=None, show_header=False, title=title or None, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), title: str = "") -> Table:
    """A table with a header; columns whose index is in `right` are aligned there. Cells are text, never markup."""
    table = Table(
        box=None, title=title or None, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def number(value: float) -> str:
    """A float in few characters."""
    return f"{value:.4g}"


def print_json(data: Any) -> None:
    """`data` as indented JSON on stdout; numbers that JSON lacks must be gone."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Any]:
    """A bar (or a spinner) on stderr for work that may take longer than a second; gives a function that counts one on.

    Nothing is shown where stderr is no terminal.
    """
    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn()]
    console = stderr()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount=1: bar.advance(task, amount)
