"""The tables of `docs/cli.md`, made from the commands themselves: a test compares them, so that they cannot go stale.

python -m onnxamp.commands._reference docs/cli.md
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterator

import click

_BLOCK = re.compile(r"(<!-- (commands|options of [a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OTHERS = "options of the other commands"


def filled(text: str) -> str:
    """A page with its tables made anew: between ``<!-- commands -->`` or ``<!-- options of NAME -->`` and ``<!-- end -->``."""
    shown = {match[2].removeprefix("options of ") for match in _BLOCK.finditer(text)}

    def table(match: re.Match[str]) -> str:
        if match[2] == "commands":
            rows = [(f"`{name}`", _sentence(command)) for name, command in _commands()]
            body = _table(("command", "what it does"), rows)
        elif match[2] == _OTHERS:
            parts = [f"### {name}\n\n{_options(command)}" for name, command in _commands() if name not in shown]
            body = "\n".join(parts)
        else:
            body = _options(dict(_commands())[match[2].removeprefix("options of ")])
        return f"{match[1]}\n{body}\n{match[3]}"

    return _BLOCK.sub(table, text)


def _commands() -> Iterator[tuple[str, click.Command]]:
    from onnxamp.cli import cli

    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command


def _sentence(command: click.Command) -> str:
    """The first sentence of a command's help."""
    text = " ".join((command.help or "").split())
    return _plain(re.split(r"(?<=\.)\s", text)[0].rstrip("."))


def _options(command: click.Command) -> str:
    context = click.Context(command)
    records = [param.get_help_record(context) for param in command.params if isinstance(param, click.Option)]
    return _table(("option", "meaning"), [(f"`{_cell(name)}`", _plain(text)) for name, text in filter(None, records)])


def _table(heads: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {first} | {second} |" for first, second in [heads, ("---", "---"), *rows]) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is, apart from what stands between backticks."""
    return _cell(re.sub(r"[*_<]", lambda mark: f"\\{mark[0]}", text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Rewrite the pages that are named."""
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
