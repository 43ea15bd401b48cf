"""`onnxamp explain`: why a node has its precision, and what a code means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import onnx_ir as ir


@click.command(
    epilog="""Example:

\b
    onnxamp explain AMP103
    onnxamp explain model.O2.fp16.onnx /encoder/layer.0/Softmax
    onnxamp explain model.onnx /encoder/layer.0/Softmax --level O1 --dtype bf16"""
)
@click.argument("what", metavar="CODE | MODEL NODE", nargs=-1, required=True)
@click.option("--level", help="For a model that is not converted: the level to plan with. Default: O2.")
@click.option("--dtype", help="Likewise the 16-bit type. Default: fp16.")
@click.option("--target", help="Likewise the target. Default: ort-cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(what: tuple[str, ...], as_json: bool, **choices: str | None) -> None:
    """Print the page of a CODE, or why NODE of MODEL has its precision.

    NODE is a name, or the name of one of the node's results. A converted model tells from its metadata; for any other the
    decision is the one that a conversion would make.
    """
    import pathlib

    from onnxamp import console
    from onnxamp.errors import UsageError
    from onnxamp.policy.pages import title

    given = {name: value for name, value in choices.items() if value is not None}
    if len(what) == 1:
        if given:
            raise UsageError("--level, --dtype and --target go with MODEL NODE, not with a code.")
        if pathlib.Path(what[0]).is_file():
            raise UsageError(f"{what[0]} is a model: add the name of a node.")
        text = _page(what[0])
        if as_json:
            console.print_json({"code": what[0].upper(), "title": title(what[0].upper()), "page": text})
        else:
            _print_page(text)
        return
    if len(what) > 2:
        raise UsageError("explain takes a code, or a model and one node.")
    found = explanation(what[0], what[1], given)
    if as_json:
        console.print_json(found)
        return
    rows = [("node", found["node"]), ("operator", found["op_type"])]
    rows += [("scope", found["scope"])] if found["scope"] else []
    rows += [("reads", ", ".join(found["inputs"]) or "nothing"), ("gives", ", ".join(found["outputs"]) or "nothing")]
    if found["precision"]:
        rows.append(("precision", found["precision"] + found["how"]))
        rows += [("operands", ", ".join(f"{k} {v}" for k, v in found["operands"].items()))] if found["operands"] else []
        rows.append(("reason", f"{found['code']} {found['title'] or '(unknown to this version)'}"))
        evidence = ", ".join(f"{key} {_text(value)}" for key, value in found["evidence"].items())
        rows += [("evidence", evidence)] if evidence else []
    else:
        rows.append(("precision", found["how"]))
    if (maker := found["made_by"]) is not None:
        by = f"{maker['op_type']} {maker['node']!r}"
        decided = f", {maker['precision']} by {maker['code']} {maker['title']}".rstrip() if maker["code"] else ""
        rows.append(("value made by", by + decided))
    console.show(console.facts(rows))
    if found["title"]:
        console.show("")
        _print_page(_page(found["code"]))


def explanation(model: str, name: str, choices: dict[str, str]) -> dict[str, Any]:
    """What there is to say of the node called `name` (or that gives the value of that name), in JSON types."""
    from onnxamp.model import io, types
    from onnxamp.model.metadata import noted
    from onnxamp.model.preparation import prepare
    from onnxamp.model.units import all_nodes
    from onnxamp.passes.annotate import converted_with
    from onnxamp.policy.pages import title

    loaded = io.load(model)
    calls: dict[str | None, list[str]] = {}
    if converted_with(loaded) is None and choices.get("level") != "O0":
        calls = {
            node.name: [value.name or "" for value in node.outputs]
            for node in all_nodes(loaded.graph)
            if node.op_identifier() in loaded.functions
        }
        prepare(loaded)
    else:
        types.infer(loaded)
    node = _find(loaded, model, name, calls)
    notes: dict[str, Any] = {"precision": "", "code": "", "evidence": {}, "operands": {}}
    how = "none: it computes with no floats that onnxamp decides"
    if converted_with(loaded) is not None:
        if choices:
            from onnxamp.errors import UsageError

            raise UsageError(
                f"{model} is converted already and tells its own decisions: leave out --{next(iter(choices))}."
            )
        props = node.metadata_props
        if {"onnxamp.precision", "onnxamp.code"} <= set(props):
            how = ""
            notes = {
                "precision": props["onnxamp.precision"],
                "code": props["onnxamp.code"],
                "evidence": noted(props, "evidence", f"node {node.name!r}"),
                "operands": noted(props, "operands", f"node {node.name!r}"),
            }
        elif "onnxamp.cast" in props:
            how = f"a Cast that onnxamp added, from {props.get('onnxamp.source', '?')} to {props['onnxamp.cast']}"
    else:
        decision = _planned(loaded, node, choices)
        if decision is not None:
            how = f" (as {choices.get('level', 'O2')} with {choices.get('dtype', 'fp16')} would decide)"
            mixed = set(decision.operands.values()) != {decision.precision}
            notes = {
                "precision": decision.precision,
                "code": decision.code,
                "evidence": decision.evidence,
                "operands": decision.operands if mixed else {},
            }
    return {
        "node": node.name or "(no name)",
        "op_type": f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
        "scope": node.metadata_props.get("namespace") or node.metadata_props.get("pkg.torch.onnx.name_scopes") or "",
        "inputs": [_value(value) for value in node.inputs if value is not None],
        "outputs": [_value(value) for value in node.outputs],
        **notes,
        "title": title(notes["code"]) if notes["code"] else "",
        "how": how,
        "made_by": _maker(node) if "onnxamp.cast" in node.metadata_props else None,
    }


def _maker(cast: ir.Node) -> dict[str, str]:
    """Where the value comes from that a Cast of onnxamp rounds or widens: a node with its decision, an input or a constant."""
    from onnxamp.policy.pages import title

    value = cast.inputs[0]
    while value is not None and (node := value.producer()) is not None and "onnxamp.cast" in node.metadata_props:
        value = node.inputs[0]
    name = (value.name if value is not None else "") or "(no name)"
    node = value.producer() if value is not None else None
    if node is None:
        kind = "graph input" if value is not None and value.is_graph_input() else "constant"
        return {"node": name, "op_type": kind, "precision": "", "code": "", "title": ""}
    code = node.metadata_props.get("onnxamp.code", "")
    precision = node.metadata_props.get("onnxamp.precision", "")
    return {
        "node": node.name or name,
        "op_type": node.op_type,
        "precision": precision,
        "code": code,
        "title": title(code),
    }


def _planned(model: ir.Model, node: ir.Node, choices: dict[str, str]) -> Any:
    """The decision that a conversion of `model` would make for `node`; None if it makes none."""
    from onnxamp.policy.plan import Options
    from onnxamp.policy.raising import plan_at_best_opset
    from onnxamp.policy.user import label

    found = plan_at_best_opset(model, Options(**choices)).nodes  # type: ignore[arg-type]  # command-line options by name
    # A later opset is planned on a copy, in which the node has the same name.
    return found.get(node) or next((decided for twin, decided in found.items() if label(twin) == label(node)), None)


def _find(model: ir.Model, path: str, name: str, calls: dict[str | None, list[str]]) -> ir.Node:
    """The node of that name, in any body, or the one that gives the value of that name.

    Args:
        model: Prepared: the nodes of functions stand where the functions were called.
        path: The file, for messages.
        name: What to look for.
        calls: The results of the nodes that called functions, by their names.

    Raises:
        UsageError: There is none, or several of the same name.
    """
    import difflib

    from onnxamp.errors import UsageError
    from onnxamp.model.units import all_nodes

    nodes = list(all_nodes(model.graph))
    named = [node for node in nodes if node.name == name]
    giving = [node for node in nodes if any(value.name == name for value in node.outputs)]
    found = named or giving
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{path} has {len(found)} nodes called {name!r}: give the name of a result of the one you mean."
        )
    if name in calls:
        raise UsageError(
            f"{name!r} in {path} is a call of a function, which a conversion replaces by the function's nodes: name one "
            f"of them, or a result ({', '.join(calls[name])})."
        )
    names = [text for node in nodes for text in (node.name, *(value.name for value in node.outputs)) if text]
    # What begins with the text is more likely meant than what merely has its length.
    begins = [text for text in names if name and text.startswith(name)]
    holds = [text for text in names if name and name in text]
    close = list(dict.fromkeys([*begins, *holds, *difflib.get_close_matches(name, names, 3, 0.4)]))[:3]
    hint = f"; near it: {', '.join(close)}" if close else ""
    raise UsageError(f"{path} has no node called {name!r}{hint}.")


def _page(code: str) -> str:
    from onnxamp.policy.pages import page

    return page(code.upper())


def _print_page(text: str) -> None:
    """The page: typeset on a terminal, as it is elsewhere."""
    import sys

    if not sys.stdout.isatty():
        click.echo(text.rstrip())
        return
    from rich.markdown import Markdown

    from onnxamp import console

    console.show(Markdown(text, hyperlinks=False))


def _value(value: ir.Value) -> str:
    from onnxamp.commands._wording import type_name

    shape = "" if value.shape is None else f"[{', '.join(str(dim) for dim in value.shape)}]"
    return f"{value.name} {type_name(value)}{shape}"


def _text(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
