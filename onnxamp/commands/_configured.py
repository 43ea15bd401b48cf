"""A command whose options may come from a TOML file, under the same names, and from the run that it goes on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from onnxamp import config
from onnxamp.errors import UsageError


class ConfiguredCommand(click.Command):
    """Reads `--config FILE` before anything else; what stands on the command line wins over the file.

    With `--resume` and a run in `--output`, that run's saved options come first. Parameters named in `local` are about
    one call and neither read from a file nor saved.
    """

    local = frozenset({"config", "resume", "force", "output", "as_json", "debug", "help"})
    paths = frozenset({"model", "data", "val", "like", "init_from"})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Look at the arguments once to find the files, then parse them with the files' values as defaults."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.default_map = {**self._saved(given), **self._file(given)}
        return super().parse_args(ctx, args)

    def _saved(self, given: dict[str, Any]) -> dict[str, Any]:
        if not _flag(given.get("resume")) or not isinstance(given.get("output"), str):
            return {}
        path = Path(given["output"]) / "config.toml"
        return self.read(path) if path.is_file() else {}

    def _file(self, given: dict[str, Any]) -> dict[str, Any]:
        path = given.get("config")
        return self.read(Path(path)) if isinstance(path, str) else {}

    def read(self, path: Path) -> dict[str, Any]:
        """The options in a file by parameter name; relative paths in it start at the file's own folder.

        Raises:
            UsageError: A name is no option of this command.
        """
        raw = {name.replace("_", "-"): value for name, value in config.read(path).items()}
        names = {
            self.flag(param).replace("_", "-"): param.name or ""
            for param in self.params
            if param.name not in self.local
        }
        config.check_names(raw, names, os.fspath(path), listing=f"`onnxamp {self.name} --help` lists the options.")
        values = {names[name]: value for name, value in raw.items()}
        for name in self.paths & values.keys():
            if isinstance(values[name], str):
                values[name] = os.path.normpath(path.parent / values[name])
        return values

    def effective(self, ctx: click.Context) -> dict[str, Any]:
        """The options of this call as a file that does the same again; paths are absolute."""
        values = {}
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if param.name in self.local or value is None or value == () or not param.expose_value:
                continue
            if param.name in self.paths:
                value = os.path.abspath(str(value))
            values[self.flag(param)] = list(value) if isinstance(value, tuple) else value
        return values

    def changed(self, ctx: click.Context, fixed: frozenset[str]) -> tuple[str, str] | None:
        """The first option, on the command line or in a file, that is fixed by the run that goes on and differs from it.

        Returns:
            The option as people write it, and what it was in the run: ``not given``, or its value.
        """
        begun = click.Context(self, default_map=self._saved(ctx.params))
        super().parse_args(begun, [])  # with nothing given, its parameters are the run's
        for param in self.params:
            name = param.name or ""
            if name not in fixed:
                continue
            before, now = begun.params[name], ctx.params[name]
            if name in self.paths and before is not None and now is not None:
                same = os.path.abspath(str(before)) == os.path.abspath(str(now))
            else:
                same = before == now
            if not same:
                flag = f"--{self.flag(param)}" if isinstance(param, click.Option) else param.human_readable_name
                values = before if isinstance(before, tuple) else () if before is None or before is False else (before,)
                return flag, ", ".join(map(str, values)) or "not given"
        return None

    def given(self, ctx: click.Context, names: frozenset[str]) -> list[str]:
        """Flags of those parameters that stand on the command line or in a file."""
        told = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.DEFAULT_MAP)
        return [
            self.flag(param)
            for param in self.params
            if param.name in names and ctx.get_parameter_source(param.name) in told
        ]

    @staticmethod
    def flag(param: click.Parameter) -> str:
        """The name of a parameter in a file: its long option without the dashes."""
        longest = max(param.opts, key=len)
        return longest.removeprefix("--") if isinstance(param, click.Option) else (param.name or "")


def _flag(value: object) -> bool:
    return value is True


def pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict.

    Raises:
        UsageError: A value has no `=`.
    """
    result = {}
    for value in values:
        name, sign, content = value.partition("=")
        if not sign or not name or not content:
            raise UsageError(f"{option} takes NAME=VALUE, not {value!r}.")
        result[name] = content
    return result
