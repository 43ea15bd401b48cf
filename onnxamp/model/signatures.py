"""Operator signatures: which operands and results share a type variable, and which types the schema allows for it.

Standard operators come from `onnx.defs` at the model's opset; ONNX Runtime's own operators from a shipped table
(`contrib_operators.json`, written by `benchmarks/contrib_operators.py`), so that no runtime is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

import onnx.defs
import onnx.helper
import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class Formal:
    """A formal operand or result: its name, its type variable (a literal type string if it has none), and whether it repeats."""

    name: str
    variable: str
    variadic: bool
    homogeneous: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """What a schema says of an operator at one version; compared by identity, since `signature` makes one of each.

    `types` maps a type variable to the strings of the types it may take, as ONNX writes them: ``tensor(float16)``.
    """

    since: int
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    types: dict[str, frozenset[str]]

    def input(self, index: int) -> Formal | None:
        """The formal of operand `index`, the last variadic one repeating; None beyond the signature."""
        return _formal(self.inputs, index)

    def output(self, index: int) -> Formal | None:
        """The formal of result `index`, the last variadic one repeating; None beyond the signature."""
        return _formal(self.outputs, index)

    def allows(self, variable: str, dtype: ir.DataType) -> bool:
        """Whether `variable` may be a tensor of `dtype`."""
        return TENSOR[dtype] in self.types.get(variable, {variable})


# Attributes that name an element type; where one may be 0, that says nothing.
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})

TENSOR = {
    ir.DataType.FLOAT: "tensor(float)",
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
    ir.DataType.DOUBLE: "tensor(double)",
}


def _formal(formals: tuple[Formal, ...], index: int) -> Formal | None:
    if index < len(formals):
        return formals[index]
    if formals and formals[-1].variadic:
        return formals[-1]
    return None


def standard_opset(model: ir.Model) -> int:
    """The version of ai.onnx that `model` imports; if it imports none, the one that came with its IR version."""
    versions = [row[2] for row in onnx.helper.VERSION_TABLE if row[1] <= model.ir_version]
    return model.opset_imports.get("", max(versions, default=1))


def operator_name(node: ir.Node) -> str:
    """The operator with its domain where that is not ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type  # onnx_ir writes ai.onnx as ""


@functools.cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """The signature of an operator in `domain` as of `opset`, or None if nothing known defines it."""
    domain = "" if domain == "ai.onnx" else domain
    try:
        return _from_schema(onnx.defs.get_schema(op_type, opset, domain))
    except onnx.defs.SchemaError:
        pass
    versions = [row for row in _contrib().get(domain, {}).get(op_type, []) if row["since"] <= opset]
    return _from_row(versions[-1]) if versions else None


def node_signature(node: ir.Node, opsets: Mapping[str, int]) -> Signature | None:
    """The signature of a node at the version that it names itself, else at the one that is imported."""
    return signature(node.domain, node.op_type, node.version or opsets.get(node.domain, 0))


def _from_schema(schema: onnx.defs.OpSchema) -> Signature:
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic

    def formals(items: Any) -> tuple[Formal, ...]:
        return tuple(Formal(f.name, f.type_str, f.option == variadic, f.is_homogeneous) for f in items)

    return Signature(
        since=schema.since_version,
        inputs=formals(schema.inputs),
        outputs=formals(schema.outputs),
        types={c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
    )


def _from_row(row: dict[str, Any]) -> Signature:
    return Signature(
        since=row["since"],
        inputs=tuple(Formal(*formal) for formal in row["inputs"]),
        outputs=tuple(Formal(*formal) for formal in row["outputs"]),
        types={variable: frozenset(types) for variable, types in row["types"].items()},
    )


@functools.cache
def _contrib() -> dict[str, Any]:
    text = importlib.resources.files("onnxamp.model").joinpath("contrib_operators.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
