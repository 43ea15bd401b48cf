"""`onnxamp grad`: a model that also gives the gradients of one of its outputs."""

from __future__ import annotations

import click


@click.command(
    epilog="""Example:

\b
    onnxamp grad loss.onnx --of loss -o loss.grad.onnx
    onnxamp grad loss.onnx --of loss --wrt 'encoder.*' --wrt input"""
)
@click.argument("model", type=click.Path())
@click.option("--of", metavar="OUTPUT", help="The scalar output to differentiate. Default: the only output.")
@click.option("--wrt", multiple=True, metavar="PATTERN",
              help="Inputs and initializers: a glob on names, or re:REGEX. Default: all float ones.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Default: MODEL.grad.onnx beside the input.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, of: str | None, wrt: tuple[str, ...], output: str | None, force: bool, as_json: bool) -> None:
    """Write MODEL with the gradients of one scalar output as outputs grad/NAME, in plain ONNX operators."""
    import pathlib

    from onnxamp import console
    from onnxamp.autodiff import gradient_model
    from onnxamp.commands._options import check_outputs
    from onnxamp.model import io

    path = output or str(pathlib.Path(model).with_suffix(".grad.onnx"))
    check_outputs([path], [], force, [model])
    with console.progress(f"differentiating {model}"):
        result = gradient_model(model, of, wrt or ("*",))
    io.save(result, path, overwrite=force)
    gradients = [value for value in result.graph.outputs if str(value.name).startswith("grad/")]
    total = result.graph.num_nodes()
    backward = sum("onnxamp.backward" in node.metadata_props for node in result.graph)
    if as_json:
        console.print_json(
            {
                "output": path,
                "gradients": [value.name for value in gradients],
                "nodes": total,
                "backward_nodes": backward,
            }
        )
        return
    console.show(
        console.facts(
            [("written", path), ("nodes", f"{total - backward} forward, {backward} backward")], title="Gradients"
        )
    )
    console.show("")
    rows = [(str(value.name), str(value.dtype), str(value.shape)) for value in gradients]
    console.show(console.grid(("output", "type", "shape"), rows))
