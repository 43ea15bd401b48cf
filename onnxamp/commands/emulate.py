"""`onnxamp emulate`: an fp32 model that rounds like the 16-bit one."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp emulate model.O2.fp16.onnx -o model.emulated.onnx"""
)
@click.argument("model", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="Where to write the result.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, output: str, force: bool, as_json: bool) -> None:
    """Write an fp32 twin of MODEL that rounds after every operator that is 16-bit in MODEL.

    It shows on any machine, at full range of fp32 inside an operator, what overflow, underflow and rounding do on a device.
    """
    import onnxamp
    from onnxamp import console
    from onnxamp.commands._options import check_outputs
    from onnxamp.model import io

    check_outputs([output], [], force, [model])
    source = io.load(model)
    result = onnxamp.emulate(source)
    io.save(result, output, overwrite=force)
    added = sum(1 for _ in result.graph.all_nodes()) - sum(1 for _ in source.graph.all_nodes())
    if as_json:
        console.print_json({"model": model, "output": output, "nodes_added": added})
    else:
        click.echo(f"{output}: {added} Casts added" if added else f"{output}: nothing is 16-bit in {model}")
