"""`onnxamp diff`: what changed between two models, where, why, and what it did to the numbers."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp diff model.onnx model.O2.fp16.onnx
    onnxamp diff model.onnx model.O2.fp16.onnx --data samples.npz --format html -o diff.html"""
)
@click.argument("a")
@click.argument("b")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["text", "json", "markdown", "html"]),
    help="Form of the output. Default: by the ending of -o, else text.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file.")
@click.option(
    "--data",
    help="Inputs (.npz file or folder, or 'synthetic'): measure the error of each matched value of the main graph.",
)
@click.option("--only", type=click.Choice(["casts", "islands", "constants", "nodes"]), help="Show one part.")
@click.option("--all", "everything", is_flag=True, help="List every row; text shows 30 of each table else.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the models differ.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def command(
    a: str,
    b: str,
    kind: str | None,
    as_json: bool,
    output: str | None,
    data: str | None,
    only: str | None,
    everything: bool,
    exit_code: bool,
    force: bool,
) -> int:
    """Compare the models A and B: retyped nodes, Casts, fp32 islands, changed constants, and everything else."""
    import json
    from pathlib import Path

    from onnxamp import console
    from onnxamp.commands._options import check_outputs, write_text
    from onnxamp.comparison.compare import Comparison
    from onnxamp.errors import UsageError

    endings = {".json": "json", ".md": "markdown", ".html": "html", ".htm": "html"}
    if as_json and kind not in (None, "json"):
        raise UsageError(f"--json and --format {kind} exclude each other.")
    kind = "json" if as_json else kind or (endings.get(Path(output).suffix.lower()) if output else None) or "text"
    if kind == "html" and not output:
        raise UsageError("A page needs a file: add -o FILE.html.")
    if kind == "html" and only:
        raise UsageError("--only does not apply to a page, which shows all parts.")
    check_outputs([output] if output else [], [], force, [a, b, data])

    with console.progress("comparing"):
        comparison = Comparison(a, b)
        result = comparison.result()
    if data is not None:
        from onnxamp.comparison.measure import measured

        with console.progress("measuring") as step:
            result = measured(comparison, result, data, step=step)
    if kind == "html":
        from onnxamp.comparison.view import page_of

        text = page_of(comparison, result)
    elif kind == "json":
        from onnxamp.comparison.text import select

        text = json.dumps(select(result.to_json(), only), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    elif kind == "markdown":
        from onnxamp.comparison.text import to_markdown

        text = to_markdown(result, only)
    else:
        from onnxamp.comparison.text import to_text

        text = to_text(result, only, None if everything or output else 30)
    if output:
        write_text(output, text)
    else:
        click.echo(text, nl=False)
    return int(exit_code and not result.empty)
