"""`onnxamp doctor`: the installed ONNX Runtime, and what mends it."""

from __future__ import annotations

from typing import Any

import click

# Shipped kernel tables, by the provider whose kernels they list.
_TABLES = {"cpu": "ort-cpu", "cuda": "ort-cuda"}
_FLOATS = ("float", "float16", "bfloat16")


@click.command(
    epilog="""Example:

\b
    onnxamp doctor
    onnxamp doctor --json"""
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> int:
    """Say which ONNX Runtime is installed, which providers really load, and the command that mends a bad mix.

    Compares the shipped kernel tables with the installed runtime too. Exit code 5 if something is wrong.
    """
    import dataclasses

    from onnxamp import console
    from onnxamp.ort.doctor import diagnose

    with console.progress("trying providers"):
        found = diagnose()
    tables = {name: compared for provider, name in _TABLES.items() if (compared := _compare(found, provider, name))}
    if as_json:
        console.print_json({"healthy": found.healthy, **dataclasses.asdict(found), "tables": tables})
        return 0 if found.healthy else 5
    console.show(
        console.facts(
            [
                ("Python", found.python),
                ("onnxamp", _version()),
                (
                    "installed",
                    ", ".join(f"{name} {number}" for name, number in found.distributions.items()) or "nothing",
                ),
                ("ONNX Runtime", found.version or "does not import"),
                *(("provider", _provider(p.name, p.loads, p.reason)) for p in found.providers),
                *found.cuda.items(),
                *((f"table {name}", _table(row)) for name, row in tables.items()),
            ]
        )
    )
    console.show("")
    for text in found.findings:
        console.show(text)
    if found.commands:
        console.show("To mend it:")
        for line in found.commands:
            click.echo(f"    {line}")  # never wrapped: it is to be copied
    if found.healthy:
        console.show("Nothing is wrong.")
    return 0 if found.healthy else 5


def _provider(name: str, loads: bool, reason: str) -> str:
    return f"{name}: loads" if loads else f"{name}: does not load ({reason})"


def _compare(found: Any, provider: str, name: str) -> dict[str, Any] | None:
    """How the shipped table of `provider` differs from the installed runtime's kernels, float types only; None if it has none."""
    from onnxamp.errors import RuntimeMissingError
    from onnxamp.ort.doctor import kernels
    from onnxamp.policy.targets import table

    loads = {p.name: p.loads for p in found.providers}
    # A runtime whose CUDA provider does not load crashes when it is asked for kernels, of whichever provider.
    if not loads.get(provider) or not loads.get("cuda", True):
        return None
    shipped = table(name)
    try:
        rows = kernels(provider)
    except RuntimeMissingError:
        return None
    if not rows:
        return None
    here = {
        (f"{domain}::{op}" if domain else op, first, parameter, kind)
        for (domain, op), versions in rows.items()
        for first, _, types in versions
        for parameter, kinds in types.items()
        for kind in kinds
        if kind in _FLOATS
    }
    ours = {
        (op, first, parameter, kind)
        for op, versions in shipped.kernels.items()
        for first, _, types in versions
        for parameter, kinds in types.items()
        for kind in kinds
        if kind in _FLOATS
    }
    known = {op for op, *_ in ours}
    return {
        "made_from": shipped.runtime,
        "kernels": len(ours),
        "missing_here": sorted(f"{op} ({kind}, since {first})" for op, first, _, kind in ours - here),
        "new_here": sorted(f"{op} ({kind}, since {first})" for op, first, _, kind in here - ours if op in known),
    }


def _table(row: dict[str, Any]) -> str:
    missing, new = row["missing_here"], row["new_here"]
    text = f"made from {row['made_from']}: "
    if not missing and not new:
        return text + f"all {row['kernels']} kernels agree with the installed runtime"
    few = ", ".join((missing or new)[:3])
    return (
        text
        + f"{len(missing)} kernels are missing here and {len(new)} are new ({few}{', ...' if len(missing or new) > 3 else ''})"
    )


def _version() -> str:
    import onnxamp

    return onnxamp.__version__
