"""Which operators a target computes in which types, from shipped tables: the result never depends on the machine.

`ort-cuda.json` and `ort-cpu.json` list the kernels of one release of ONNX Runtime (`benchmarks/target_tables.py` writes them). The
other targets are the ONNX schemas less a short list of what is known to be missing.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import onnx.defs
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.model.signatures import Formal, Signature, operator_name
from onnxamp.policy.functions import body, body_opset, types_agree

_NAMES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
_LOW = frozenset({"float16", "bfloat16"})
# ONNX Runtime folds these, or rewrites them to Cast, before it looks for a kernel.
_WITHOUT_KERNEL = frozenset({"Constant", "CastLike"})


class TargetTable:
    """What one target computes.

    A row of a kernel table serves the operator versions from `since` to `until`; one without `until` only the version that `since`
    names, since a later version may mean something else. All type parameters must be found in the same row. A function without any kernel
    is written out by the runtime: the operators of its body count.
    """

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        self.name = name
        self.runtime: str = content["runtime"]
        self.tested: bool = content["tested"]
        self._kernels: dict[str, list[tuple[int, int | None, dict[str, list[str]]]]] | None = content.get("kernels")
        self._without: dict[str, dict[str, str]] = content.get("without", {})
        self._found: dict[tuple[object, ...], bool] = {}

    @property
    def kernels(self) -> dict[str, list[tuple[int, int | None, dict[str, list[str]]]]]:
        """The rows of the kernel table by operator (``domain::Op`` outside ai.onnx); empty for a target without one."""
        return self._kernels or {}

    def supports(self, node: ir.Node, signature: Signature, types: dict[str, ir.DataType]) -> bool:
        """Whether the target computes `node` with the type variables bound to `types`; those not named keep the source's type."""
        if self._kernels is None:
            low = {_short(dtype) for dtype in types.values()}
            if any(operator_name(node) in self._without.get(dtype, {}) for dtype in low):
                return False
            function = body(node.domain, node.op_type, signature.since)
            return function is None or _agrees(function, node, signature, types)
        name = operator_name(node)
        if name in _WITHOUT_KERNEL or (name == "Dropout" and _copies(node)):
            return True
        operands = [value and value.dtype for value in node.inputs]
        key = (signature, *types.items(), *operands, None, *[value.dtype for value in node.outputs])
        if key not in self._found:
            computes = self._has_row if self._rows(node) else self._computes_body
            self._found[key] = computes(node, signature, types)
        return self._found[key]

    def _has_row(self, node: ir.Node, signature: Signature, types: Mapping[str, ir.DataType]) -> bool:
        """Whether one row has the types of all type parameters."""
        bound = dict(_bound(node, signature))
        bound.update({variable: _name(dtype) for variable, dtype in types.items()})
        aliases = _aliases(signature)
        for since, until, allowed in self._rows(node):
            if _serves(signature.since, since, until):
                for parameter, kinds in allowed.items():
                    kind = bound.get(parameter) or bound.get(aliases.get(parameter, ""))
                    if kind is not None and kind not in kinds:
                        break
                else:
                    return True
        return False

    def _computes_body(self, node: ir.Node, signature: Signature, types: Mapping[str, ir.DataType]) -> bool:
        """Whether the runtime, which writes a function without kernel out, has kernels for the operators of its body."""
        function = body(node.domain, node.op_type, signature.since)
        if function is None or not _agrees(function, node, signature, types):
            return False
        opset, low = body_opset(function), {_name(dtype) for dtype in types.values()} & _LOW
        return all(self._has_kernel(inner.op_type, opset, low) for inner in function.node)

    def _has_kernel(self, op_type: str, opset: int, low: set[str]) -> bool:
        if op_type in (*_WITHOUT_KERNEL, "Cast"):
            return True
        since = onnx.defs.get_schema(op_type, opset).since_version
        assert self._kernels is not None
        return any(
            _serves(since, row[0], row[1]) and all(any(kind in kinds for kinds in row[2].values()) for kind in low)
            for row in self._kernels.get(op_type, [])
        )

    def reason(self, node: ir.Node, signature: Signature | None, dtype: FloatType) -> str | None:
        """What a list of gaps, or the operator's own definition, says of `node` in `dtype`."""
        function = (
            body(node.domain, node.op_type, signature.since) if signature is not None and not self._rows(node) else None
        )
        if signature is not None and function is not None:
            all_low = dict.fromkeys(signature.types, dtype.ir)
            if not _agrees(function, node, signature, all_low):
                return "the function that defines it mixes the type with fp32 constants"
        return self._without.get(dtype.name, {}).get(operator_name(node))

    def _rows(self, node: ir.Node) -> list[tuple[int, int | None, dict[str, list[str]]]]:
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
        return self.kernels.get(domain + node.op_type, [])


@functools.cache
def table(name: str) -> TargetTable:
    """The shipped table called `name`."""
    text = importlib.resources.files("onnxamp.policy.targets").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return TargetTable(name, json.loads(text))


def _agrees(
    function: onnx.FunctionProto, node: ir.Node, signature: Signature, types: Mapping[str, ir.DataType]
) -> bool:
    """Whether the function that defines `node` is well typed with its variables bound to `types`, others as in the source."""
    kinds = {}
    for index, value in enumerate(node.inputs):
        formal = signature.input(index)
        if value is not None and formal is not None and (kind := types.get(formal.variable, value.dtype)) is not None:
            kinds[formal.name] = kind
    return types_agree(function, kinds)


def _serves(version: int, since: int, until: int | None) -> bool:
    return since <= version <= until if until is not None else version == since


def _copies(node: ir.Node) -> bool:
    """Whether a Dropout drops nothing, so that ONNX Runtime removes it."""
    mask = node.outputs[1:]
    return (len(node.inputs) < 3 or node.inputs[2] is None) and not any(
        value.uses() or value.is_graph_output() for value in mask
    )


def _name(dtype: ir.DataType) -> str:
    return _NAMES.get(dtype) or dtype.name.lower()


def _short(dtype: ir.DataType) -> str:
    return {"FLOAT16": "fp16", "BFLOAT16": "bf16"}.get(dtype.name, "fp32")


def _bound(node: ir.Node, signature: Signature) -> Iterator[tuple[str, str]]:
    for operands, formal in ((node.inputs, signature.input), (node.outputs, signature.output)):
        for index, value in enumerate(operands):
            described: Formal | None = formal(index)
            if value is not None and described is not None and value.dtype is not None:
                yield described.variable, _name(value.dtype)


def _aliases(signature: Signature) -> dict[str, str]:
    """Kernels name a type parameter after the type variable, or after the operand."""
    return {formal.name: formal.variable for formal in (*signature.outputs, *signature.inputs)}
