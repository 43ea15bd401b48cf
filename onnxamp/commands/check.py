"""`onnxamp check`: whether and how a model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxamp.autodiff.inspection import Inspection
    from onnxamp.autodiff.parameters import Parameter

_LEVELS = ("O0", "OD", "O1", "O2", "O3")


@click.command(
    epilog="""Example:

\b
    onnxamp check model.onnx
    onnxamp check model.onnx --dim batch=32 --json"""
)
@click.argument("model", type=click.Path())
@click.option(
    "--of", multiple=True, metavar="OUTPUT", help="Outputs that the loss would read. Default: all float ones."
)
@click.option(
    "--dtype", default="fp16", show_default=True, type=click.Choice(["fp16", "bf16"]), help="The 16-bit type."
)
@click.option("--dim", multiple=True, metavar="NAME=N", help="Size of a free dimension, for the memory of activations.")
@click.option("--all", "everything", is_flag=True, help="List every parameter; the first 20 of a class else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, of: tuple[str, ...], dtype: str, dim: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Say what training MODEL would meet: missing gradients, parameters, ties, folded tensors, memory per level.

    Exit code 1 when an operator on the way has no gradient.
    """
    from onnxamp import console
    from onnxamp.autodiff.inspection import inspect
    from onnxamp.commands._options import sizes
    from onnxamp.errors import UsageError
    from onnxamp.training import dropout
    from onnxamp.training.forward import rows, training_form

    dims = sizes(dim)
    with console.progress(f"checking {model}"):
        prepared = training_form(model)
        names = [str(value.name) for value in prepared.graph.outputs]
        unknown = [name for name in of if name not in names]
        if unknown:
            raise UsageError(f"The model has no output {unknown[0]!r}; it has {', '.join(names[:8])}.")
        found = inspect(prepared, of)
        first = rows(prepared.graph)
        masks = dropout.remarks(prepared.graph, next(value for value in prepared.graph.inputs if value.name == first))
        memory, assumed = _memory(prepared, found, of, dtype, dims)
    if as_json:
        console.print_json(
            {"model": model, **_json(found), "dropout": masks, "memory": memory, "assumed_dims": assumed}
        )
    else:
        _show(found, masks, memory, assumed, everything)
    return 1 if found.unsupported or not found.parameters.trainable else 0


def _memory(
    model: ir.Model, found: Inspection, of: tuple[str, ...], dtype: str, dims: dict[str, int]
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Bytes of state (AdamW) and of kept activations per level; empty when the model cannot be differentiated."""
    from onnxamp.autodiff.inspection import kept_bytes
    from onnxamp.conversion import mixed
    from onnxamp.errors import UnsupportedError
    from onnxamp.policy.options import Options
    from onnxamp.training.parameters import has_low_copy

    count = sum(parameter.size for parameter in found.parameters.trainable)
    outputs = of or tuple(str(value.name) for value in model.graph.outputs if value.dtype is not None)
    outputs = tuple(name for name in outputs if _is_float(model, name))
    result: dict[str, dict[str, int]] = {}
    assumed: dict[str, int] = {}
    if found.unsupported or not count:
        return {}, {}
    for level in _LEVELS:
        options = Options(level=level, dtype=dtype, dim=tuple(dims.items()), weights="cast")
        low = mixed(model, options).model if level != "O0" else model.clone()
        # FP32 master (at O3 too, of values that the low type has), gradient, two moments, and a low copy of what is read low.
        copies = sum(
            parameter.size
            for parameter in found.parameters.trainable
            if has_low_copy(low.graph.initializers[parameter.name], level in ("O2", "O3"))
        )
        state = 16 * count + 2 * copies
        try:
            kept, names = kept_bytes(low, outputs, dims)
        except UnsupportedError:
            result[level] = {"state": state}
            continue
        assumed |= names
        result[level] = {"state": state, "activations": kept}
    return result, assumed


def _is_float(model: ir.Model, name: str) -> bool:
    from onnxamp.autodiff.emitter import FLOATS

    return any(value.name == name and value.dtype in FLOATS for value in model.graph.outputs)


def _json(found: Inspection) -> dict[str, Any]:
    def rows(parameters: tuple[Parameter, ...]) -> list[dict[str, Any]]:
        return [
            {"name": p.name, "dtype": p.dtype.name, "shape": list(p.shape), "why": p.reason, "nodes": [u.node for u in p.uses]}
            for p in parameters
        ]  # fmt: skip

    parameters = found.parameters
    return {
        "unsupported": {operator: list(nodes) for operator, nodes in found.unsupported.items()},
        "trainable": rows(parameters.trainable),
        "unsure": rows(parameters.unsure),
        "frozen": rows(parameters.frozen),
        "buffers": rows(parameters.buffers),
        "tied": {name: list(nodes) for name, nodes in parameters.tied.items()},
        "copies": [list(names) for names in parameters.copies],
        "final": found.final,
        "folded": list(found.folded),
        "unknown_shapes": list(found.unknown_shapes),
    }


def _show(
    found: Inspection,
    masks: list[str],
    memory: dict[str, dict[str, int]],
    assumed: dict[str, int],
    everything: bool,
) -> None:
    from onnxamp import console

    parameters = found.parameters
    classes = {
        "trainable": parameters.trainable,
        "unsure": parameters.unsure,
        "frozen": parameters.frozen,
        "buffers": parameters.buffers,
    }
    if found.unsupported:
        rows = [(operator, str(len(nodes)), ", ".join(nodes[:5])) for operator, nodes in found.unsupported.items()]
        console.show(console.grid(("no gradient for", "nodes", "names"), rows, right=(1,)))
    else:
        console.show("Every operator between the parameters and the outputs has a gradient.")
    console.show("")
    summary = [
        (kind, f"{len(items)} tensors, {sum(p.size for p in items):,} numbers") for kind, items in classes.items()
    ]
    console.show(console.facts(summary))
    for kind, items in classes.items():
        if not items:
            continue
        shown = items if everything else items[:20]
        table = [(p.name, p.dtype.name, "x".join(map(str, p.shape)) or "scalar", p.reason) for p in shown]
        console.show("")
        console.show(console.grid((kind, "type", "shape", "why"), table))
        if len(shown) < len(items):
            console.show(f"and {len(items) - len(shown)} more; --all lists them")
    remarks = [f"{name} is tied: {', '.join(nodes)} use it." for name, nodes in parameters.tied.items()]
    remarks += found.folded
    remarks += [f"{name} ends in {kind}: cross-entropy attaches to its input." for name, kind in found.final.items()]
    remarks += masks
    if found.unknown_shapes:
        remarks.append(f"Shape unknown: {', '.join(found.unknown_shapes[:5])} ({len(found.unknown_shapes)} in all).")
    if remarks:
        console.show("")
        console.show(*remarks)
    if memory:
        console.show("")
        rows = [
            (level, console.size(row["state"]), console.size(row["activations"]) if "activations" in row else "unknown")
            for level, row in memory.items()
        ]
        console.show(console.grid(("level", "state with AdamW", "kept activations"), rows, right=(1, 2)))
        if assumed:
            sizes = ", ".join(f"{name}={size}" for name, size in assumed.items())
            console.show(f"Assumed sizes: {sizes}; --dim NAME=N sets them.")
