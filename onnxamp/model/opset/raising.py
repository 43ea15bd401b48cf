"""Raising a model to a later version of ai.onnx, one version at a time, with the rows of the opset table."""

from __future__ import annotations

import functools

import onnx.defs
import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.model.naming import Names
from onnxamp.model.opset.editing import Edit, OpsetError
from onnxamp.model.opset.table import ROWS
from onnxamp.model.signatures import Signature, signature, standard_opset
from onnxamp.model.units import all_nodes

# The table was made for versions up to this one: a later step may change what a schema does not show.
HIGHEST = 22

_Option = onnx.defs.OpSchema.FormalParameterOption


def raise_opset(model: ir.Model, version: int) -> None:
    """Write a model in a later version of ai.onnx, in place: same results; names, metadata, functions and other domains stay.

    1. Step by step: a node whose operator has a new version in an opset goes through its row, else the new version must only add.
    2. Bodies and model-local functions too, each function from the version that it imports.
    3. A row may put nodes in front; a value keeps its producer's place and its name, a node's name stays with its operator.
    4. Nothing else is touched; operators that are in their newest version stay byte for byte.

    Values are typed (`model.types.infer`); those that rows add are not.

    Raises:
        OpsetError: A node cannot be written in that version; the model is then half way and of no use.
        UnsupportedError: The version is beyond the table, or lower than the model's.
    """
    current = standard_opset(model)
    if not current <= version <= HIGHEST:
        raise UnsupportedError(
            f"The model has opset {current} and cannot be brought to {version}: ask for {current} to {HIGHEST}."
        )
    names = Names(model)
    _raise(model.graph, current, version, names, model.ir_version)
    model.opset_imports[""] = version
    for function in model.functions.values():
        own = function.opset_imports.get("", version)
        if own < version:
            _raise(function.graph, own, version, names, model.ir_version)
            function.opset_imports[""] = version


def _raise(graph: ir.Graph, current: int, version: int, names: Names, ir_version: int) -> None:
    for step in range(current + 1, version + 1):
        for node in list(all_nodes(graph)):
            if not node.domain and step in versions(node.op_type) and (node.version or 0) < step:
                _step(Edit(node, step, names, ir_version))
                node.version = None
    for node in all_nodes(graph):
        if not node.domain:
            _check_types(node, version)


def _step(edit: Edit) -> None:
    """Bring a node to the version of its operator that comes with `edit.version`."""
    node = edit.node
    if row := ROWS.get((node.op_type, edit.version)):
        row.apply(edit)
    elif changes := changed(node.op_type, edit.version):
        raise edit.refuse(f"its version {edit.version} changed in {', '.join(sorted(changes))}")


@functools.cache
def _history() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(schema.since_version)
    return found


@functools.cache
def versions(op_type: str) -> tuple[int, ...]:
    """The opsets in which the operator came or changed, up to the table's end."""
    return tuple(sorted(v for v in _history().get(op_type, ()) if v <= HIGHEST))


@functools.cache
def changed(op_type: str, version: int) -> frozenset[str]:
    """What the operator's version takes away or means otherwise, by the schemas: attributes, ``operands``, ``results``, ``deprecated``."""
    earlier = [v for v in versions(op_type) if v < version]
    if not earlier:
        return frozenset()
    old, new = (onnx.defs.get_schema(op_type, v, "") for v in (earlier[-1], version))
    found = {name for name, attribute in old.attributes.items() if not _same(attribute, new.attributes.get(name))}
    found |= {name for name, attribute in new.attributes.items() if name not in old.attributes and attribute.required}
    for what, one, other in (("operands", old.inputs, new.inputs), ("results", old.outputs, new.outputs)):
        kept = all(a.option == b.option or b.option == _Option.Optional for a, b in zip(one, other, strict=False))
        if not kept or len(other) < len(one) or any(f.option != _Option.Optional for f in other[len(one) :]):
            found.add(what)
    if new.deprecated:
        found.add("deprecated")
    return frozenset(found)


def _same(old: onnx.defs.OpSchema.Attribute, new: onnx.defs.OpSchema.Attribute | None) -> bool:
    """Whether an attribute, given or not, means in the later version what it meant."""
    return (
        new is not None
        and old.type == new.type
        and (old.required or not new.required)
        and (old.required or old.default_value == new.default_value)
    )


def _check_types(node: ir.Node, version: int) -> None:
    """Every known type of an operand must be one that the later version takes."""
    signed: Signature | None = signature("", node.op_type, version)
    if signed is None:
        raise OpsetError(node, version, "onnx does not know the operator")
    for index, value in enumerate(node.inputs):
        formal = signed.input(index)
        if value is not None and value.type is not None and formal is not None:
            allowed = signed.types.get(formal.variable, frozenset({formal.variable}))
            if (kind := _written(value)) and kind not in allowed:
                raise OpsetError(node, version, f"it takes no {kind} there")


def _written(value: ir.Value) -> str | None:
    """The type as schemas write it; None for what is no tensor."""
    if not isinstance(value.type, ir.TensorType):
        return None
    return f"tensor({value.type.dtype.name.lower()})"
