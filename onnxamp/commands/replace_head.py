"""`onnxamp replace-head`: give a classifier a last layer for other classes."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp replace-head classifier.onnx --units 5 -o five.onnx
    onnxamp train five.onnx --data train.npz --loss cross_entropy --frozen '*' --trainable 'fc.*' -o run"""
)
@click.argument("model", type=click.Path())
@click.option("--units", required=True, type=click.IntRange(min=1), help="Number of classes or values.")
@click.option("--output-name", metavar="NAME", help="The output whose last layer is meant, if there are several.")
@click.option(
    "--init",
    type=click.Choice(["kaiming_uniform", "xavier_uniform", "normal", "zeros"]),
    default="kaiming_uniform",
    show_default=True,
    help="How the new weights are drawn.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the new weights.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The model file to write.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def command(model: str, units: int, output_name: str | None, init: str, seed: int, output: str, force: bool) -> int:
    """Replace the last layer of MODEL by a fresh one with that many units; its parameters keep their names."""
    from onnxamp.commands._options import check_outputs
    from onnxamp.model import io
    from onnxamp.training.head import replace_head

    check_outputs([output], [], force, [model])
    result = replace_head(model, output_name, units, init, seed)
    io.save(result, output, overwrite=force)
    click.echo(f"{output}: {units} units")
    return 0
