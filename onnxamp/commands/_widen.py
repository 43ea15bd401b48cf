"""`convert --to`: what the command line makes of `onnxamp.widen`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

_ALWAYS = frozenset({"model", "output", "to", "io", "verified", "data", "dim", "force", "as_json"})


def check(to: str, given: set[str], io: tuple[str, ...]) -> None:
    """Refuse options that have no meaning beside --to.

    Args:
        to: The type.
        given: Names of the parameters that stand on the command line.
        io: The values of --io.

    Raises:
        UsageError: One of them is there.
    """
    from onnxamp.errors import UsageError

    if "dtype" in given:
        raise UsageError("--to and --dtype both name a type: leave --dtype out.")
    if "auto" in given:
        raise UsageError("--auto measures against an fp32 file: write one with --to fp32 and search on that.")
    if to != "fp32":
        return
    if "dim" in given and "verified" not in given:
        raise UsageError("--dim sets sizes of inputs that --verify makes up: add --verify.")
    for name in sorted(given - _ALWAYS):
        raise UsageError(f"--{name.replace('_', '-')} is about what becomes 16-bit: leave it out with --to fp32.")
    if io not in ((), ("keep",)):
        raise UsageError(
            f"--io {io[0]} names types, and --to fp32 makes all fp32: write --io keep for the types of the file."
        )


def source(model: str, to: str, io: tuple[str, ...]) -> tuple[ir.Model, tuple[str, ...], str]:
    """What a conversion to the 16-bit type `to` starts from, its --io, and what to warn of, or nothing.

    The --io is as asked for, else 16-bit inputs and outputs get the type. Sequences and optionals have no place in it: unless all is kept
    theirs are fp32, and are named in the warning.
    """
    import glob

    import onnx_ir as ir

    from onnxamp.conversion import widen
    from onnxamp.dtypes import LOW
    from onnxamp.model.io import load

    loaded = load(model)
    ends = (*(value for value in loaded.graph.inputs if not value.is_initializer()), *loaded.graph.outputs)
    low = [value for value in ends if value.type is not None and value.dtype in LOW]
    tensors = [value for value in low if isinstance(value.type, ir.TensorType)]
    types = tuple(f"{name}={to}" for name in dict.fromkeys(glob.escape(value.name or "") for value in tensors))
    kept = io == ("keep",)
    others = [] if kept else [f"{value.name} ({value.type})" for value in low if value not in tensors]
    warning = (
        f"Of inputs and outputs only tensors become {to}, these become fp32: {', '.join(others)}; --io keep leaves all as they are."
        if others
        else ""
    )
    return widen(loaded, keep_io=kept), io or types, warning


def run(
    model: str,
    output: str,
    io: tuple[str, ...],
    verified: bool,
    data: str | None,
    dims: dict[str, int],
    force: bool,
    as_json: bool,
) -> int:
    """`convert --to fp32`: the file, what was done, and whether MODEL computes the same within its rounding."""
    from onnxamp import console
    from onnxamp.commands._options import input_sizes
    from onnxamp.commands._verified import compare
    from onnxamp.conversion import widen
    from onnxamp.model.io import load, save

    loaded = load(model)
    made_up = input_sizes(loaded, dims)
    with console.progress(f"widening {model}"):
        result = widen(loaded, keep_io=io == ("keep",))
    save(result, output, overwrite=force)
    before, after = _counts(loaded), _counts(result)
    found: dict[str, Any] = {"model": model, "output": output}
    found |= {name: {"before": before[name], "after": after[name]} for name in before}
    evidence = compare(output, model, data, made_up) if verified else None
    if evidence is not None:
        found["verify"] = evidence.to_dict()
    if as_json:
        console.print_json(found)
    else:
        rows = [
            ("written", output),
            ("16-bit results", f"{before['low']} → {after['low']}"),
            ("Casts", f"{before['casts']} → {after['casts']}"),
            ("weights", f"{console.size(before['weights'])} → {console.size(after['weights'])}"),
        ]
        if not before["low"]:
            rows += [("warning", f"No node of {model} has a 16-bit result.")]
        console.show(console.facts(rows))
        if evidence is not None:
            evidence.show()
    return int(evidence is not None and evidence.failed())


def _counts(model: ir.Model) -> dict[str, int]:
    """16-bit results, Casts, and bytes of float constants."""
    from onnxamp.dtypes import LOW
    from onnxamp.model.constants import constant_bytes
    from onnxamp.model.signatures import operator_name
    from onnxamp.model.units import all_nodes
    from onnxamp.passes.constants import float_constants

    nodes = list(all_nodes(model.graph))
    return {
        "low": sum(value.type is not None and value.dtype in LOW for node in nodes for value in node.outputs),
        "casts": sum(operator_name(node) == "Cast" for node in nodes),
        "weights": sum(map(constant_bytes, float_constants(model.graph))),
    }
