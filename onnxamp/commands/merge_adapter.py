"""`onnxamp merge-adapter`: a model with the adapters of a file in its weights."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp train model.onnx --data train.npz --loss cross_entropy --lora rank=8,alpha=16,target='*attn*' -o run
    onnxamp export run --adapter tuned.safetensors
    onnxamp merge-adapter model.onnx tuned.safetensors -o tuned.onnx"""
)
@click.argument("model", type=click.Path())
@click.argument("adapter", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The model file to write.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, adapter: str, output: str, force: bool, as_json: bool) -> int:
    """Add the trained adapters of ADAPTER to the weights of MODEL, the model that they were trained beside."""
    from pathlib import Path

    from onnxamp import console
    from onnxamp.commands._options import check_outputs
    from onnxamp.model import io
    from onnxamp.trainer.adapter import merged_model

    check_outputs([output], [], force, [model, adapter])
    io.save(merged_model(io.load(model), Path(adapter)), output, overwrite=force)
    size = Path(output).stat().st_size
    if as_json:
        console.print_json({"output": output, "bytes": size})
    else:
        click.echo(f"{output}: {size:,} bytes")
    return 0
