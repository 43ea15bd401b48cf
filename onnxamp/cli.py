"""The command group: finds the commands by their files and turns errors into one sentence and an exit code.

A command is a file in `commands/` that defines a click command named `command`. Exit codes: 0 ok, 1 finding or
tolerance missed, 2 usage, 3 invalid model or data, 4 unsupported, 5 environment, 70 internal, 130 interrupted, 141 nobody reads
the output any more.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

import click

import onnxamp
import onnxamp.commands
from onnxamp.errors import AmpError, one_line


class _UnreadError(Exception):
    """Who reads our output has gone: `onnxamp ... | head`."""


class _Commands(click.Group):
    """Loads a command's module when the command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(onnxamp.commands.__path__))
        return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"onnxamp.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # which click would end with 1, as if a tolerance were missed
            raise _UnreadError from None
        return result


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(onnxamp.__version__, prog_name="onnxamp")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Mixed precision and training for ONNX models, on the runtime you already ship."""


def _rank() -> str:
    """Which of the processes that `torchrun` has started speaks."""
    return f"[rank {os.environ.get('RANK')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def main() -> None:
    """Run the command line; every failure ends in one sentence on stderr and its exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except _UnreadError:
        # What is still buffered goes nowhere. Neither 0 nor 1: the verdict of a command may not have been reached.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except AmpError as problem:
        if debug:
            raise
        click.echo(f"{_rank()}Error: {problem}", err=True)
        sys.exit(problem.exit_code)
    except MemoryError as problem:
        if debug:
            raise
        what = f" ({one_line(problem)})" if str(problem) else ""
        click.echo(
            f"Error: The machine ran out of memory{what}; use a smaller model, batch or number of samples.", err=True
        )
        sys.exit(5)
    except Exception as problem:  # a defect of ours: the last resort before a traceback
        if debug:
            raise
        click.echo(
            f"Error: onnxamp failed unexpectedly ({type(problem).__name__}: {one_line(problem)}); "
            "run again as `onnxamp --debug ...` and report the traceback.",
            err=True,
        )
        sys.exit(70)
