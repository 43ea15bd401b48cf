"""`onnxamp predict`: the outputs of a model, or of a run's trained model, over a data set."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp predict run --data test.npz -o predictions.npz
    onnxamp predict run --data test.npz --metric accuracy --metric f1
    onnxamp predict model.onnx --data images/ --batch-size 128 -o predictions.npz"""
)
@click.argument("model")
@click.option("--data", required=True, help=".npz file or folder of .npy or .npz; columns are named like the inputs.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The .npz file to write.")
@click.option("--metric", multiple=True, help="Measure against the column labels: accuracy, f1, r2, ...; repeatable.")
@click.option("--checkpoint", help="Of a run: best (default), last, or a checkpoint's file.")
@click.option(
    "--weights", type=click.Choice(["master", "ema"]), default="master", help="Of a run: parameters or their average."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Rows at a time.")
@click.option("--column", multiple=True, metavar="INPUT=NAME", help="The data call this input NAME; repeatable.")
@click.option("--provider", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def command(
    model: str,
    data: str,
    output: str | None,
    metric: tuple[str, ...],
    checkpoint: str | None,
    weights: str,
    batch_size: int,
    column: tuple[str, ...],
    provider: str,
    force: bool,
    as_json: bool,
) -> int:
    """Write the outputs of MODEL (an ONNX file or the folder of a run) for every row of the data, or measure them."""
    import json
    import math
    from pathlib import Path

    from onnxamp.commands._configured import pairs
    from onnxamp.commands._options import check_outputs
    from onnxamp.errors import UsageError
    from onnxamp.trainer.data import open_data
    from onnxamp.trainer.export import exported, load_trained
    from onnxamp.trainer.metrics import metrics_of
    from onnxamp.trainer.predict import compared_columns, predict, score, write_npz

    if output is None and not metric:
        raise UsageError("What should come of it? Give -o FILE.npz, --metric NAME, or both.")
    if output is not None:
        if Path(output).suffix != ".npz":
            raise UsageError(f"The output {output} must end in .npz.")
        check_outputs([output], [], force, [model, data])
    metrics_of(metric)  # an unknown name is said before any work is done
    if not Path(model).is_dir() and (checkpoint or weights != "master"):
        raise UsageError("--checkpoint and --weights are for the folder of a run, and MODEL is a file.")
    columns, source = pairs(column, "--column"), open_data(data)
    bundle = load_trained(model, checkpoint).bundle if metric and Path(model).is_dir() else None
    compared = compared_columns(bundle) if metric else ()
    with exported(model, checkpoint=checkpoint, weights=weights) as path:
        outputs, notes = predict(
            path, source, batch_size=batch_size, columns=columns, compared=compared, provider=provider
        )
    if output is not None:
        write_npz(output, outputs)
    for note in notes:
        click.echo(note, err=True)
    if output is not None:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items())
        click.echo(f"{output}: {shapes}", err=as_json)
    if metric:
        values = score(outputs, source, metric, columns=columns, bundle=bundle)
        rows = len(next(iter(outputs.values())))
        said = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        click.echo(json.dumps({"rows": rows, **plain}) if as_json else f"{said}  ({rows:,} rows)")
    return 0
