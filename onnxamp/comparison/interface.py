"""What differs about the models as a whole: interface, opset, functions, producer, metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxamp.comparison.casts import shape_text
from onnxamp.comparison.match import Match
from onnxamp.comparison.records import ModelChange
from onnxamp.comparison.side import Side, type_name


def model_changes(match: Match, same: Callable[[ir.Value, ir.Value], bool]) -> list[ModelChange]:
    """Changes in the order: interface, opsets, functions, header, metadata. Renames are not among them."""
    a, b = match.a.model, match.b.model
    found = list(_values("input", _inputs(a), _inputs(b), match, same))
    found += _values("output", a.graph.outputs, b.graph.outputs, match, same)
    found += _mapping("opset", _opsets(a.opset_imports), _opsets(b.opset_imports))
    functions = [{"::".join(filter(None, key)): str(len(f)) for key, f in m.functions.items()} for m in (a, b)]
    for name in dict.fromkeys([*functions[0], *functions[1]]):
        if (name in functions[0]) != (name in functions[1]):
            count = [f"{f[name]} nodes" if name in f else "" for f in functions]
            found.append(ModelChange(f"function {name}", *count))
    for key, one in a.functions.items():
        other = b.functions.get(key)
        if other is not None:
            name = "::".join(filter(None, key))
            found += _mapping(f"opset of {name}", _opsets(one.opset_imports), _opsets(other.opset_imports))
    for what, before, after in (
        ("ir_version", a.ir_version, b.ir_version),
        ("producer_name", a.producer_name, b.producer_name),
        ("producer_version", a.producer_version, b.producer_version),
        ("domain", a.domain, b.domain),
        ("model_version", a.model_version, b.model_version),
        ("doc_string", a.doc_string, b.doc_string),
        ("graph name", a.graph.name, b.graph.name),
        ("graph doc_string", a.graph.doc_string, b.graph.doc_string),
    ):
        if (before or "") != (after or ""):
            found.append(ModelChange(what, str(before or ""), str(after or "")))
    found += _mapping("metadata", _foreign(a.metadata_props), _foreign(b.metadata_props))
    found += _mapping("graph metadata", _foreign(a.graph.metadata_props), _foreign(b.graph.metadata_props))
    return found


def signature_text(value: ir.Value) -> str:
    """Type and shape of an input or output."""
    kind = type_name(value.dtype) or "?"
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        kind = str(value.type)
    shape = shape_text(value.shape)
    return f"{kind} {shape}".strip()


def _declared(side: Side, value: ir.Value) -> str:
    return side.declared.get(value) or signature_text(value)


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs; below IR 4 without the initializers among them, which are constants there."""
    return [v for v in model.graph.inputs if model.ir_version >= 4 or not v.is_initializer()]


def _values(
    kind: str,
    ours: Sequence[ir.Value],
    theirs: Sequence[ir.Value],
    match: Match,
    same: Callable[[ir.Value, ir.Value], bool],
) -> Iterator[ModelChange]:
    named = {v.name: v for v in theirs}
    pairs: list[tuple[ir.Value, ir.Value]] = []
    lone: list[ir.Value] = []
    back: set[ir.Value] = set()
    for value in ours:
        other = named.get(value.name)
        if other is None:
            image = match.values.get(match.a.root(value))
            other = next((v for v in theirs if v not in back and match.b.root(v) is image), None) if image else None
            if other is not None and other.name in {v.name for v in ours}:
                other = None
        if other is None:
            lone.append(value)
        else:
            pairs.append((value, other))
            back.add(other)
    for value, other in pairs:
        before, after = _declared(match.a, value), _declared(match.b, other)
        if before != after:
            yield ModelChange(f"{kind} {value.name}", before, after)
        if kind == "output" and not same(value, other):
            yield ModelChange(
                f"source of output {value.name}", match.a.root(value).name or "", match.b.root(other).name or ""
            )
    for value in lone:
        yield ModelChange(f"{kind} {value.name}", _declared(match.a, value), "")
    for value in theirs:
        if value not in back:
            yield ModelChange(f"{kind} {value.name}", "", _declared(match.b, value))
    place = {v: k for k, v in enumerate(theirs)}
    order = [place[other] for _, other in pairs]
    if order != sorted(order):
        yield ModelChange(
            f"order of {kind}s",
            ", ".join(v.name or "" for v, _ in pairs),
            ", ".join(v.name or "" for v in theirs if v in back),
        )


def _opsets(imports: Mapping[str, int]) -> dict[str, str]:
    return {("" if k == "ai.onnx" else k): str(v) for k, v in imports.items()}


def _foreign(metadata: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in metadata.items() if not k.startswith("onnxamp.")}


def _mapping(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[ModelChange]:
    return [
        ModelChange(f"{what} {key or 'ai.onnx'}", ours.get(key, ""), theirs.get(key, ""))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
