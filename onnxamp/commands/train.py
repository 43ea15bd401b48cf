"""`onnxamp train`: a model and data in, a trained model, checkpoints, records and a page out."""

from __future__ import annotations

from typing import Any

import click

from onnxamp.commands._configured import ConfiguredCommand
from onnxamp.commands._options import BATCH_SIZE
from onnxamp.commands._training_options import OPTION_NAMES, training_options

# What a run that goes on cannot change: it is in the graphs, or decides which rows come next.
_FIXED = frozenset(
    {*OPTION_NAMES, "model", "data", "val_split", "column", "batch_size", "accumulate", "global_batch", "shuffle"}
    | {"init_from", "like", "replace_head"}
)


@click.command(
    cls=ConfiguredCommand,
    epilog="""Example:

\b
    onnxamp train model.onnx --data train.npz --val test.npz --loss cross_entropy --lr 1e-3 \\
        --epochs 10 --batch-size 64 --level O2 --metric accuracy -o run
    onnxamp train --resume -o run
    onnxamp train --config run/config.toml --lr 3e-4 -o run2
    torchrun --nproc-per-node 4 -m onnxamp train model.onnx ... -o run""",
)
@click.argument("model", required=False)
@click.option("--data", help=".npz file, or folder of .npy columns or .npz shards; columns are named like the inputs.")
@click.option("--val", help="Data to evaluate on after each epoch.")
@click.option(
    "--val-split", type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="PART",
    help="Hold this part of the rows of --data out, drawn by --seed, and evaluate on them.",
)  # fmt: skip
@click.option("--column", multiple=True, metavar="INPUT=NAME", help="The data call this input NAME; repeatable.")
@click.option("-o", "--output", metavar="RUN", help="The folder of the run.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data.  [default: 1, if no --steps]")
@click.option("--steps", type=click.IntRange(min=1), help="Updates after which to end.")
@click.option("--batch-size", type=click.IntRange(min=1), help=f"Rows of a micro-batch.  [default: {BATCH_SIZE}]")
@click.option("--accumulate", type=click.IntRange(min=1), help="Micro-batches in a window.  [default: 1]")
@click.option("--global-batch", type=click.IntRange(min=1), help="Rows of a window: finds the largest micro-batch.")
@click.option(
    "--metric", multiple=True, help="accuracy, top5, precision, recall, f1, mse, mae, r2, perplexity; repeatable."
)
@click.option("--early-stop", metavar="METRIC", help="Stop when val_loss or a metric gets no better.")
@click.option(
    "--patience", type=click.IntRange(min=1), default=3, show_default=True, help="Evaluations to wait for that."
)
@click.option("--eval-every", type=click.IntRange(min=1), help="Windows between evaluations.  [default: an epoch]")
@click.option("--save-every", type=click.IntRange(min=1), help="Windows between checkpoints.  [default: an epoch]")
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints that are kept.")
@click.option("--shuffle/--no-shuffle", default=True, show_default=True, help="A new order of the rows each epoch.")
@click.option("--provider", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option("--provider-option", multiple=True, metavar="NAME=VALUE", help="Option of the provider; repeatable.")
@click.option(
    "--rank-timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Under torchrun: how long a process may be silent before the others give up.",
)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads of the CPU.  [default: all]")
@click.option("--init-from", metavar="RUN", help="Start from the parameters of that run (of its model, without MODEL).")
@click.option("--replace-head", metavar="[OUTPUT:]UNITS", help="Give the last layer that many new units.")
@click.option("--like", metavar="FILE", help="State dict (safetensors) of the model: export gives its names back.")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard events too.")
@training_options
@click.option("--config", metavar="FILE", help="Options from a TOML file; those given here win.")
@click.option("--resume", is_flag=True, help="Go on with the run in RUN; begin it if there is none.")
@click.option("--force", is_flag=True, help="Replace the run in RUN.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to stderr.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    """Train MODEL (an ONNX file, or a bundle made by `onnxamp build`) and leave everything in the folder RUN."""
    import json

    from onnxamp import console
    from onnxamp.commands._train import Session
    from onnxamp.errors import UsageError
    from onnxamp.files import jsonable
    from onnxamp.trainer.position import INTERRUPTED

    assert isinstance(ctx.command, ConfiguredCommand)
    if not options["output"]:
        raise UsageError("Where should the run go? Give -o RUN.")
    screen = console.stderr() if as_json else console.stdout()
    building = ctx.command.given(ctx, frozenset(OPTION_NAMES) - {"seed"})
    session = Session(options, ctx.command.effective(ctx), screen, building)
    if session.resumes and (changed := ctx.command.changed(ctx, _FIXED)):
        flag, before = changed
        raise UsageError(
            f"{flag} is fixed in a run that goes on, and was {before} when it was begun: leave it out, or begin a new run from its "
            f"parameters with `--init-from {options['output']} -o OTHER`."
        )
    history = session.train()
    if as_json and session.collective.rank == 0:
        click.echo(json.dumps(jsonable(session.result(history)), allow_nan=False))
    return 130 if history.reason == INTERRUPTED else 0
