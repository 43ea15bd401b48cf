"""The tables of `docs/cli.md` against the commands."""

from __future__ import annotations

import pathlib
import re

import click

from onnxamp.cli import cli
from onnxamp.commands._reference import filled

PAGE = pathlib.Path(__file__).parents[2] / "docs/cli.md"


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m onnxamp.commands._reference docs/cli.md"


def test_every_command_and_every_option_is_there():
    text = PAGE.read_text(encoding="utf-8")
    context = click.Context(cli)
    names = cli.list_commands(context)
    assert {"merge-adapter", "replace-head", "train"} <= {*names}
    assert [name for name in names if f"| `{name}` |" not in text] == []
    flags = {
        flag
        for name in names
        for param in cli.get_command(context, name).params
        for flag in param.opts
        if flag[:1] == "-"
    }
    assert len(flags) > 80
    assert sorted(flags - set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))) == []
