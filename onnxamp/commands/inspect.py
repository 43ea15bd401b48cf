"""`onnxamp inspect`: what a model holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import onnx_ir as ir


@click.command(
    epilog="""Example:

\b
    onnxamp inspect model.onnx
    onnxamp inspect model.onnx --json"""
)
@click.argument("model", type=click.Path())
@click.option("--all", "everything", is_flag=True, help="List every operator; the 20 most frequent else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, everything: bool, as_json: bool) -> None:
    """Show what MODEL holds: nodes, operators, types, inputs and outputs, opset, weights, heavy operators."""
    from onnxamp import console
    from onnxamp.model import io, types

    loaded = io.load(model)
    types.infer(loaded)
    found = describe(loaded)
    if as_json:
        console.print_json({"model": model, **found})
        return
    bodies = f" ({found['nodes_in_bodies']} of them in bodies)" if found["nodes_in_bodies"] else ""
    rows = [
        ("model", model),
        ("made by", found["producer"] or "unknown"),
        ("opset", ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found["opset"].items())),
        ("IR version", str(found["ir_version"])),
        ("nodes", f"{found['nodes']}{bodies}"),
        ("heavy nodes", ", ".join(f"{n} {op} {kind}" for (op, kind), n in _pairs(found["heavy"])) or "none"),
        ("results", ", ".join(f"{n} {kind}" for kind, n in found["values"].items()) or "none"),
        ("weights", ", ".join(f"{console.size(n)} {kind}" for kind, n in found["weights"].items()) or "none"),
        ("Casts", ", ".join(f"{n} to {kind}" for kind, n in found["casts"].items()) or "none"),
    ]
    if found["functions"]:
        rows.append(("functions", str(found["functions"])))
    rows.append(("converted", _conversion(found["converted"])))
    console.show(console.facts(rows))
    for side in ("inputs", "outputs"):
        console.show("")
        console.show(
            console.grid((side[:-1], "type", "shape"), [(v["name"], v["type"], v["shape"]) for v in found[side]])
        )
    operators = list(found["operators"].items())
    shown = operators if everything else operators[:20]
    console.show("")
    console.show(console.grid(("operator", "nodes"), [(op, str(n)) for op, n in shown], right=(1,)))
    if len(shown) < len(operators):
        console.show(f"and {len(operators) - len(shown)} more; --all lists them")


def describe(model: ir.Model) -> dict[str, Any]:
    """The facts that `onnxamp inspect` shows, in JSON types."""
    import collections

    import onnx_ir as ir

    from onnxamp.commands._wording import element_name, type_name
    from onnxamp.model.units import all_nodes

    nodes = list(all_nodes(model.graph))
    results: collections.Counter[str] = collections.Counter()
    casts: collections.Counter[str] = collections.Counter()
    weights: collections.Counter[str] = collections.Counter()
    for node in nodes:
        for value in node.outputs:
            if value.name:
                results[type_name(value)] += 1
        if node.op_type == "Cast":
            casts[type_name(node.outputs[0])] += 1
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref() and node.op_type == "Constant":
                weights[element_name(attribute.value.dtype)] += attribute.value.nbytes
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                weights[element_name(value.const_value.dtype)] += value.const_value.nbytes
    notes = model.metadata_props
    operators = collections.Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    return {
        "producer": " ".join(text for text in (model.producer_name, model.producer_version) if text),
        "ir_version": model.ir_version,
        "opset": dict(sorted(model.opset_imports.items())),
        "nodes": len(nodes),
        "nodes_in_bodies": len(nodes) - len(model.graph),
        "functions": len(model.functions),
        "operators": dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        "heavy": _heavy(model),
        "values": dict(results.most_common()),
        "weights": dict(weights.most_common()),
        "casts": dict(casts.most_common()),
        "inputs": [_value(value) for value in model.graph.inputs if not value.is_initializer()],
        "outputs": [_value(value) for value in model.graph.outputs],
        "converted": {key: notes.get(f"onnxamp.{key}", "unknown") for key in ("version", "level", "dtype", "target")}
        if "onnxamp.options" in notes
        else None,
    }


def _heavy(model: ir.Model) -> dict[str, int]:
    """Heavy nodes by operator and type, each call of a function counted with what it calls."""
    import collections

    from onnxamp.commands._wording import type_name
    from onnxamp.errors import UnsupportedError
    from onnxamp.model.preparation import prepared
    from onnxamp.model.units import all_nodes
    from onnxamp.policy.operators import Kind, operator

    try:
        flat = prepared(model) if model.functions else model
    except UnsupportedError:  # what cannot be inlined stays one node, as for a conversion
        flat = model
    heavy: collections.Counter[str] = collections.Counter()
    for node in all_nodes(flat.graph):
        if operator(node).kind is Kind.HEAVY:
            first = next((value for value in node.inputs if value is not None), None)
            heavy[f"{node.op_type} {type_name(first)}"] += 1
    return dict(heavy.most_common())


def _value(value: ir.Value) -> dict[str, str]:
    from onnxamp.commands._wording import type_name

    shape = "?" if value.shape is None else f"[{', '.join(str(dim) for dim in value.shape)}]"
    return {"name": value.name or "", "type": type_name(value), "shape": shape}


def _pairs(heavy: dict[str, int]) -> list[tuple[tuple[str, str], int]]:
    return [((op, kind), count) for text, count in heavy.items() for op, _, kind in [text.partition(" ")]]


def _conversion(converted: dict[str, str] | None) -> str:
    if converted is None:
        return "no"
    return f"by onnxamp {converted['version']}: level {converted['level']}, {converted['dtype']}, target {converted['target']}"
