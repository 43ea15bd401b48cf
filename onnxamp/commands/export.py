"""`onnxamp export`: the model for inference that a run has made."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp export run -o tuned.onnx
    onnxamp export run -o tuned.fp16.onnx --level O2
    onnxamp export run -o tuned.int8.onnx --int8 --data train.npz
    onnxamp export run --state-dict tuned.safetensors
    onnxamp export run --adapter adapter.safetensors"""
)
@click.argument("run")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The model file to write.")
@click.option("--checkpoint", help="best (default), last, or a checkpoint's file.")
@click.option(
    "--weights",
    type=click.Choice(["master", "ema"]),
    default="master",
    show_default=True,
    help="Parameters or their average.",
)
@click.option(
    "--level",
    type=click.Choice(["O0", "OD", "O1", "O2", "O3"]),
    default="O0",
    show_default=True,
    help="Convert to mixed precision.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp16", "bf16"]),
    default="fp16",
    show_default=True,
    help="The 16-bit type of the other levels.",
)
@click.option("--target", default="ort-cuda", show_default=True, help="Whose kernels a converted model must have.")
@click.option("--int8", is_flag=True, help="Quantize with ONNX Runtime's static quantization; needs --data.")
@click.option("--data", help="With --int8: rows to take ranges from.")
@click.option("--column", multiple=True, metavar="INPUT=NAME", help="The data call this input NAME; repeatable.")
@click.option(
    "--state-dict",
    type=click.Path(dir_okay=False),
    help="Write the parameters under the framework's names, if the run was begun with --like.",
)
@click.option("--adapter", type=click.Path(dir_okay=False), help="Write what --lora has trained as a file of its own.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def command(
    run: str,
    output: str | None,
    checkpoint: str | None,
    weights: str,
    level: str,
    dtype: str,
    target: str,
    int8: bool,
    data: str | None,
    column: tuple[str, ...],
    state_dict: str | None,
    adapter: str | None,
    force: bool,
) -> int:
    """Write the trained model of RUN: original names and structure, FP32 parameters, no node of training."""
    import tempfile
    from pathlib import Path

    from onnxamp.commands._configured import pairs
    from onnxamp.commands._options import check_outputs
    from onnxamp.errors import UsageError
    from onnxamp.trainer import export
    from onnxamp.trainer.adapter import check_adapters, write_adapter
    from onnxamp.trainer.run import Run

    if output is None and state_dict is None and adapter is None:
        raise UsageError(
            "Nothing to write: give -o MODEL.onnx, --state-dict FILE.safetensors or --adapter FILE.safetensors."
        )
    if int8 and not data:
        raise UsageError("--int8 takes ranges from data: add --data FILE.npz or a folder.")
    if int8 and level != "O0":
        raise UsageError("--int8 starts from FP32 parameters: leave --level out.")
    check_outputs([path for path in (output, state_dict, adapter) if path], [], force, [data])
    trained = export.load_trained(run, checkpoint)
    # Before any file is written.
    names = export.framework_names(Run.open(run), trained) if state_dict is not None else None
    if adapter is not None:
        check_adapters(trained)
    if output is not None:
        if int8:
            with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
                plain = Path(folder) / "model.onnx"
                trained.export(plain, weights=weights)
                export.quantized(plain, Path(output), data, pairs(column, "--column"))
        else:
            trained.export(output, level, dtype, weights=weights, target=target, overwrite=force)
        form = "INT8" if int8 else "FP32" if level == "O0" else f"{level} {dtype}"
        click.echo(f"{output}: {form}, {Path(output).stat().st_size:,} bytes")
    if state_dict is not None and names is not None:
        parted = export.write_state_dict(names, trained, Path(state_dict), weights)
        click.echo(f"{state_dict}: {len(names.tensors)} tensors trained")
        for text in parted:
            click.echo(f"warning: {text}")
        if names.absent:
            click.echo(f"copied from {names.original}: {', '.join(names.absent)}")
    if adapter is not None:
        count = write_adapter(trained, Path(adapter), weights)
        click.echo(f"{adapter}: {count} tensors, {Path(adapter).stat().st_size:,} bytes")
    return 0
