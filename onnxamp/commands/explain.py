"""`onnxamp explain`: why a node has its precision, and what a code means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

_UNDECIDED = "none: it computes with no floats that onnxamp decides"


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
    from onnxamp import console
    from onnxamp.errors import UsageError

    given = {name: value for name, value in choices.items() if value is not None}
    if len(what) > 2:
        raise UsageError("explain takes a code, or a model and one node.")
    if len(what) == 1:
        _explain_code(what[0], given, as_json)
        return
    found = explanation(what[0], what[1], given)
    if as_json:
        console.print_json(found)
    else:
        _show(found)


def _explain_code(code: str, given: dict[str, str], as_json: bool) -> None:
    """Print the page of a code.

    Raises:
        UsageError: It is no code, or options are there that go with a model.
    """
    import pathlib

    from onnxamp import console
    from onnxamp.errors import UsageError
    from onnxamp.policy.pages import title

    if given:
        raise UsageError("--level, --dtype and --target go with MODEL NODE, not with a code.")
    if pathlib.Path(code).is_file():
        raise UsageError(f"{code} is a model: add the name of a node.")
    text = _page(code)
    if as_json:
        console.print_json({"code": code.upper(), "title": title(code.upper()), "page": text})
    else:
        _print_page(text)


def _show(found: dict[str, Any]) -> None:
    """Print an explanation as a table, and the page of its code."""
    from onnxamp import console

    rows = [("node", found["node"]), ("operator", found["op_type"])]
    rows += [("scope", found["scope"])] if found["scope"] else []
    rows += [("reads", ", ".join(found["inputs"]) or "nothing"), ("gives", ", ".join(found["outputs"]) or "nothing")]
    if found["precision"]:
        rows.append(("precision", f"{found['precision']} ({found['how']})" if found["how"] else found["precision"]))
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
    from onnxamp.errors import UsageError
    from onnxamp.model.modules import SCOPES
    from onnxamp.passes.annotate import converted_with
    from onnxamp.policy.pages import title

    loaded, calls = _loaded(model, choices)
    node = _find(loaded, model, name, calls)
    if converted_with(loaded) is None:
        decision, how = _planned(loaded, node, choices)
    elif not choices:
        decision, how = _noted(node)
    else:
        raise UsageError(
            f"{model} is converted already and tells its own decisions: leave out --{next(iter(choices))}."
        )
    return {
        "node": node.name or "(no name)",
        "op_type": f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
        "scope": node.metadata_props.get("namespace") or node.metadata_props.get(SCOPES) or "",
        "inputs": [_value(value) for value in node.inputs if value is not None],
        "outputs": [_value(value) for value in node.outputs],
        **decision,
        "title": title(decision["code"]) if decision["code"] else "",
        "how": how,
        "made_by": _maker(node) if "onnxamp.cast" in node.metadata_props else None,
    }


def _loaded(model: str, choices: dict[str, str]) -> tuple[ir.Model, dict[str | None, list[str]]]:
    """The model as a conversion decides on it, and the results of the calls of functions that are gone from it, by name."""
    from onnxamp.model import io, types
    from onnxamp.model.preparation import prepare
    from onnxamp.model.units import all_nodes
    from onnxamp.passes.annotate import converted_with

    loaded = io.load(model)
    if converted_with(loaded) is not None or choices.get("level") == "O0":
        types.infer(loaded)
        return loaded, {}
    calls = {
        node.name: [value.name or "" for value in node.outputs]
        for node in all_nodes(loaded.graph)
        if node.op_identifier() in loaded.functions
    }
    prepare(loaded)
    return loaded, calls


def _decision(
    precision: str = "",
    code: str = "",
    evidence: Mapping[str, Any] | None = None,
    operands: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A decision in JSON types; by default that there is none."""
    return {"precision": precision, "code": code, "evidence": evidence or {}, "operands": operands or {}}


def _noted(node: ir.Node) -> tuple[dict[str, Any], str]:
    """The decision that stands in a converted model, and what to say of the precision besides."""
    from onnxamp.model.metadata import noted

    props, where = node.metadata_props, f"node {node.name!r}"
    if {"onnxamp.precision", "onnxamp.code"} <= set(props):
        evidence, operands = noted(props, "evidence", where), noted(props, "operands", where)
        return _decision(props["onnxamp.precision"], props["onnxamp.code"], evidence, operands), ""
    if "onnxamp.cast" in props:
        source = props.get("onnxamp.source", "?")
        return _decision(), f"a Cast that onnxamp added, from {source} to {props['onnxamp.cast']}"
    return _decision(), _UNDECIDED


def _planned(model: ir.Model, node: ir.Node, choices: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The decision that a conversion of `model` would make, and what to say of the precision besides."""
    from onnxamp.policy.plan import Options
    from onnxamp.policy.raising import plan_at_best_opset
    from onnxamp.policy.user import label

    plan = plan_at_best_opset(model, Options(**choices)).nodes  # type: ignore[arg-type]  # command-line options by name
    # A later opset is planned on a copy, in which the node has the same name.
    found = plan.get(node) or next((made for twin, made in plan.items() if label(twin) == label(node)), None)
    if found is None:
        return _decision(), _UNDECIDED
    operands = found.operands if set(found.operands.values()) != {found.precision} else {}
    how = f"as {choices.get('level', 'O2')} with {choices.get('dtype', 'fp16')} would decide"
    return _decision(found.precision, found.code, found.evidence, operands), how


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
