"""`onnxamp predict`: the outputs of a model, or of a run's trained model, over a data set."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp predict run --data test.npz -o predictions.npz
    onnxamp predict model.onnx --data images/ --batch-size 128 -o predictions.npz"""
)
@click.argument("model")
@click.option("--data", required=True, help=".npz file or folder of .npy or .npz; columns are named like the inputs.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The .npz file to write.")
@click.option("--checkpoint", help="Of a run: best (default), last, or a checkpoint's file.")
@click.option(
    "--weights", type=click.Choice(["master", "ema"]), default="master", help="Of a run: parameters or their average."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Rows at a time.")
@click.option("--column", multiple=True, metavar="INPUT=NAME", help="The data call this input NAME; repeatable.")
@click.option("--provider", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def command(
    model: str,
    data: str,
    output: str,
    checkpoint: str | None,
    weights: str,
    batch_size: int,
    column: tuple[str, ...],
    provider: str,
    force: bool,
) -> int:
    """Write the outputs of MODEL (an ONNX file or the folder of a run) for every row of the data."""
    from pathlib import Path

    from onnxamp.commands._configured import pairs
    from onnxamp.commands._options import check_outputs
    from onnxamp.errors import UsageError
    from onnxamp.trainer.export import exported
    from onnxamp.trainer.predict import predict, write_npz

    target = Path(output)
    if target.suffix != ".npz":
        raise UsageError(f"The output {output} must end in .npz.")
    check_outputs([output], [], force, [model, data])
    if not Path(model).is_dir() and (checkpoint or weights != "master"):
        raise UsageError("--checkpoint and --weights are for the folder of a run, and MODEL is a file.")
    with exported(model, checkpoint=checkpoint, weights=weights) as path:
        outputs, notes = predict(
            path, data, batch_size=batch_size, columns=pairs(column, "--column"), provider=provider
        )
    write_npz(target, outputs)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"{output}: " + ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items()))
    return 0
