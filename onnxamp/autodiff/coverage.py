"""The page of operators that have a gradient, made from the table of rules."""

from __future__ import annotations

import pathlib

import onnx

from onnxamp.autodiff.registry import RULES, ZERO_GRADIENT

_STANDARD = ("", "com.microsoft")


def page() -> str:
    """Markdown: each operator with a rule and its operands, then those that nothing flows back through."""
    counts = [sum(domain == wanted for domain, _ in RULES) for wanted in _STANDARD]
    lines = [
        "# Operators with a gradient",
        "",
        f"{sum(counts)} operators have a gradient: {counts[0]} of ONNX and {counts[1]} of ONNX Runtime (com.microsoft). Through "
        f"{len(ZERO_GRADIENT)} more nothing flows, which is not counted. Most variants within an operator are there; those that are not "
        "are listed under [Gradients](autodiff.md).",
        "",
        "A gradient through another operator, or through an operand that the table does not name, is refused with the node's name.",
        "",
        "| operator | operands with a gradient | operands whose derivative is zero |",
        "|---|---|---|",
    ]
    for domain, name in sorted(RULES):
        if domain not in _STANDARD:
            continue
        rule = RULES[domain, name]
        given = "all floats" if rule.inputs is None else _names(name, domain, rule.inputs)
        label = f"{domain}::{name}" if domain else name
        lines.append(f"| {label} | {given} | {_names(name, domain, rule.zero)} |")
    zero = ", ".join(sorted(name for _, name in ZERO_GRADIENT))
    lines += ["", "## Nothing flows back through", "", f"{zero}: their derivative is zero wherever it exists.", ""]
    return "\n".join(lines)


def write(path: pathlib.Path) -> None:
    """Write the page, unless the file has that text already."""
    text = page()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _names(op_type: str, domain: str, positions: frozenset[int]) -> str:
    try:
        inputs = [parameter.name for parameter in onnx.defs.get_schema(op_type, domain=domain).inputs]
    except onnx.defs.SchemaError:
        inputs = []
    return ", ".join(
        inputs[position] if position < len(inputs) else f"input {position}" for position in sorted(positions)
    )
