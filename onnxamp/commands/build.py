"""`onnxamp build`: the training graphs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxamp.commands._training_options import training_options


@click.command(
    epilog="""Example:

\b
    onnxamp build model.onnx --loss cross_entropy --optimizer adamw --lr 1e-3 -o bundle
    onnxamp build model.onnx --loss mse --optimizer sgd --momentum 0.9 --schedule cosine --total-steps 1000 -o bundle
    onnxamp build model.onnx --loss cross_entropy --frozen '*' --trainable 'head.*' --level O0 -o bundle"""
)
@click.argument("model", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="The folder to write.")
@click.option("--like", metavar="FILE", help="State dict (safetensors) of the model: export gives its names back.")
@training_options
@click.option("--force", is_flag=True, help="Replace a bundle that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, output: str, like: str | None, force: bool, as_json: bool, **options: Any) -> int:
    """Write the graphs that train MODEL as a folder: gradients, end of window, optimizer, evaluation, state and manifest.

    Any language with ONNX Runtime can drive them; `onnxamp train` does.
    """
    from onnxamp import console
    from onnxamp.commands._training_options import build_arguments
    from onnxamp.training import build
    from onnxamp.training.bundle import check_target

    arguments = build_arguments(options)
    check_target(output, overwrite=force)
    names = None
    if like is not None:
        from onnxamp.model import io
        from onnxamp.trainer import state_dict

        names = state_dict.names_of(io.load(model), like)
    with console.progress(f"building {model}"):
        bundle = build(model, **arguments).save(output, overwrite=force)
    if names is not None:
        names.save(Path(output) / "names.json")
    summary = bundle.summary()
    if as_json:
        console.print_json(summary)
        return 0
    rows = [
        (name.replace("_", " "), _shown(value)) for name, value in summary.items() if name != "notes" and value != ""
    ]
    console.stdout().print(console.facts(rows, title=output))
    for note in summary["notes"]:
        click.echo(f"Note: {note}")
    return 0


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
