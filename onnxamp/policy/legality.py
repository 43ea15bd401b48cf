"""What the ONNX schemas and the target allow, node by node.

The units of one node are decided together: a schema or kernel may want the same type for all of them (BatchNormalization on CUDA), may
take any mixture (Pow), or may take only some in 16 bits. So a node has *choices*: the sets of its units that may be 16-bit together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import onnx.defs
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.model.signatures import Signature, operator_name, signature, standard_opset
from onnxamp.model.units import Read, TypeGraph, Unit
from onnxamp.policy import codes
from onnxamp.policy.decision import Decision
from onnxamp.policy.operators import SHAPE_OPERANDS
from onnxamp.policy.targets import TargetTable

_FIXED = {
    "unknown operator": codes.UNKNOWN_OPERATOR,
    "untyped": codes.UNTYPED,
    "sequence": codes.SEQUENCE,
    "literal": codes.LITERAL,
    "overridable": codes.OVERRIDABLE,
}
QUANTIZATION = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
# Numbers that are parameters of an operator rather than data, by position: where weights are cast, they stay constants.
_SETTINGS = {"Pad": (2,), "Clip": (1, 2)}
# Results whose type an attribute sets (stash_type), not the operands.
_STASHED = {("LayerNormalization", "U")}
# The width or the tensors of an attribute say what the operands are.
_ATTRIBUTE_TYPED = frozenset({"BitCast", "ai.onnx.ml.TreeEnsemble"})


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a node may be.

    Attributes:
        units: The units that are open, primary first.
        blocked: Why each of the other units keeps its type.
        allowed: The sets of open units that may be 16-bit together, the empty set among them; None if any may, as in control flow.
    """

    units: tuple[Unit, ...]
    blocked: dict[Unit, Decision]
    allowed: frozenset[frozenset[Unit]] | None


def interface_decision(unit: Unit, dtype: str) -> Decision:
    """The decision of a graph input or output that the interface sets to `dtype`."""
    code = codes.OVERRIDABLE if unit.fixed == "overridable" else codes.INTERFACE
    return Decision(dtype, code, {})


def castable(model: ir.Model, low: FloatType) -> bool:
    """Whether the model's Cast operator knows the 16-bit type; without it the type cannot meet fp32."""
    cast = signature("", "Cast", standard_opset(model))
    return cast is not None and cast.allows("T2", low.ir)


def choices(node: ir.Node, graph: TypeGraph, low: FloatType, target: TargetTable) -> Choices:
    """The choices of `node`; units that were 16-bit in the source are not open."""
    blocked: dict[Unit, Decision] = {}
    open_units: list[Unit] = []
    signed = graph.signatures[node]
    for unit in graph.of[node]:
        if decision := _blocked(node, unit, signed, low):
            late = decision.code == codes.OPSET and not _has_later_kernel(node, graph.of[node], unit, low, target)
            blocked[unit] = _no_kernel(node, signed, low, target) if late else decision
        else:
            open_units.append(unit)
    allowed: set[frozenset[Unit]] | None = None
    if signed is not None and graph.operators[node] in CONTROL_FLOW:  # each output and state has a type of its own
        reachable = {u for u in open_units if target.supports(node, signed, {"V": low.ir})}
    else:
        allowed = {frozenset[Unit]()}
        for count in range(1, len(open_units) + 1 if signed is not None else 1):
            for subset in itertools.combinations(open_units, count):
                types = {unit.variable: low.ir if unit in subset else ir.DataType.FLOAT for unit in open_units}
                if signed is not None and target.supports(node, signed, types):
                    allowed.add(frozenset(subset))
        reachable = set().union(*allowed)
    for unit in [u for u in open_units if u not in reachable]:
        open_units.remove(unit)
        blocked[unit] = _no_kernel(node, signed, low, target)
    return Choices(tuple(open_units), blocked, frozenset(allowed) if allowed is not None else None)


def _blocked(node: ir.Node, unit: Unit, signed: Signature | None, low: FloatType) -> Decision | None:
    if unit.dtype != ir.DataType.FLOAT:
        return Decision.of_source(unit)
    if unit.fixed is not None:
        return Decision("fp32", _FIXED.get(unit.fixed, codes.UNTYPED), {"operator": operator_name(node)})
    assert signed is not None
    operator = operator_name(node)
    if operator in QUANTIZATION:
        return Decision("fp32", codes.QUANTIZATION, {"operator": operator})
    if (places := SHAPE_OPERANDS.get(operator)) and not unit.writes and unit.reads[0].index in places:
        formal = signed.input(unit.reads[0].index)
        return Decision("fp32", codes.SHAPE_OPERAND, {"operand": formal.name if formal is not None else ""})
    variable = schema_variable(node, unit)
    if (operator, variable) in _STASHED or operator in _ATTRIBUTE_TYPED:
        return Decision("fp32", codes.LITERAL, {"operator": operator})
    if not signed.allows(variable, low.ir):
        opset = opset_that_allows(node.domain, node.op_type, variable, low.ir)
        evidence: dict[str, object] = {"operator": operator, "since": signed.since}
        if opset is not None and opset > signed.since:
            return Decision("fp32", codes.OPSET, {**evidence, "opset": opset})
        return Decision("fp32", codes.SCHEMA, evidence)
    return None


def _has_later_kernel(node: ir.Node, units: tuple[Unit, ...], unit: Unit, low: FloatType, target: TargetTable) -> bool:
    """Whether the target computes the unit in 16 bits, alone or with the others, in the opset that first allows it."""
    opset = opset_that_allows(node.domain, node.op_type, schema_variable(node, unit), low.ir)
    later = signature(node.domain, node.op_type, opset) if opset is not None else None
    if later is None:
        return False
    alone = {schema_variable(node, unit): low.ir}
    together = {schema_variable(node, other): low.ir for other in units if other.dtype == ir.DataType.FLOAT}
    return target.supports(node, later, alone) or target.supports(node, later, together)


def _no_kernel(node: ir.Node, signed: Signature | None, low: FloatType, target: TargetTable) -> Decision:
    evidence: dict[str, object] = {"operator": operator_name(node), "target": target.name, "runtime": target.runtime}
    if reason := target.reason(node, signed, low):
        evidence["reason"] = reason
    return Decision("fp32", codes.NO_KERNEL, evidence)


def schema_variable(node: ir.Node, unit: Unit) -> str:
    """The type variable in the operator's schema; control flow calls all of its own `V`."""
    return "V" if operator_name(node) in CONTROL_FLOW else unit.variable


def is_setting(read: Read) -> bool:
    """Whether the operand says how large, where, or between which bounds: shape inference and gradients want its number."""
    if not isinstance(read.site, ir.Node):
        return False
    name = operator_name(read.site)
    return read.index in SHAPE_OPERANDS.get(name, ()) or read.index in _SETTINGS.get(name, ())


@functools.cache
def opset_that_allows(domain: str, op_type: str, variable: str, dtype: ir.DataType) -> int | None:
    """The first opset of `domain` in which `variable` may have `dtype`, or None."""
    for opset in range(1, onnx.defs.onnx_opset_version() + 1):
        signed = signature(domain, op_type, opset)
        if signed is not None and variable in signed.types and signed.allows(variable, dtype):
            return signed.since
    return None
