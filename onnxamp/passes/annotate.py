"""Write the decisions into the model's metadata, and read what another conversion wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import onnx_ir as ir

import onnxamp
from onnxamp.dtypes import BY_IR
from onnxamp.errors import UsageError
from onnxamp.model.metadata import noted
from onnxamp.model.units import type_graph
from onnxamp.policy import codes
from onnxamp.policy.plan import Decision, Options, Plan

_PREFIX = "onnxamp."


class AnnotatePass(ir.passes.InPlacePass):
    """Note on every node what was decided and why, and on the model what was asked for.

    1. Nodes that compute with floats: ``onnxamp.precision``, ``onnxamp.code``; ``onnxamp.evidence`` (JSON) unless it is empty;
       ``onnxamp.operands`` (JSON, precision by type variable) unless all are the node's.
    2. The model: ``onnxamp.version``, ``onnxamp.level``, ``onnxamp.dtype``, ``onnxamp.target``, ``onnxamp.options`` (canonical JSON),
       and if ranges were given ``onnxamp.ranges`` (their SHA-256).
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for node, decision in self.plan.nodes.items():
            notes = {"precision": decision.precision, "code": decision.code}
            if decision.evidence:
                notes["evidence"] = json.dumps(decision.evidence, sort_keys=True)
            if set(decision.operands.values()) != {decision.precision}:
                notes["operands"] = json.dumps(decision.operands, sort_keys=True)
            node.metadata_props.update({_PREFIX + key: text for key, text in notes.items()})
        options = self.plan.options
        notes = {
            "version": onnxamp.__version__,
            "level": options.level,
            "dtype": options.dtype,
            "target": options.target,
            "options": options.to_json(),
        }
        if self.plan.ranges:
            notes["ranges"] = _fingerprint(self.plan.ranges)
        model.metadata_props.update({_PREFIX + key: text for key, text in notes.items()})
        return ir.passes.PassResult(model, modified=True)


def converted_with(model: ir.Model) -> str | None:
    """The options, as canonical JSON, with which onnxamp made `model`; None if it did not."""
    return model.metadata_props.get(_PREFIX + "options")


def refuse_other_options(model: ir.Model, options: Options, ranges: Mapping[str, float] | None = None) -> None:
    """Refuse to convert a converted model in another way.

    Raises:
        UsageError: It was made with other options or other ranges.
    """
    made = converted_with(model)
    if made is not None and made != options.to_json():
        level, dtype = model.metadata_props.get(_PREFIX + "level"), model.metadata_props.get(_PREFIX + "dtype")
        raise UsageError(
            f"The model was already converted by onnxamp, with level {level}, {dtype} and other options than these; "
            "convert the original, or go on from this file with --to fp32, fp16 or bf16 (in Python onnxamp.widen)."
        )
    if made is not None and model.metadata_props.get(_PREFIX + "ranges") != (_fingerprint(ranges) if ranges else None):
        raise UsageError(
            "The model was already converted by onnxamp, with other calibrated ranges than now; "
            "convert the original, or go on from this file with --to fp32, fp16 or bf16 (in Python onnxamp.widen)."
        )


def _fingerprint(ranges: Mapping[str, float]) -> str:
    text = json.dumps({name: float(size) for name, size in ranges.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def recorded_plan(model: ir.Model, options: Options) -> Plan:
    """The plan that a converted model carries; what onnxamp added counts as decided by the source."""
    graph = type_graph(model)
    decisions = {}
    for unit in graph.units:
        precision = BY_IR[unit.dtype].name
        notes = unit.node.metadata_props if unit.node is not None else {_PREFIX + "code": codes.INTERFACE}
        evidence = noted(notes, "evidence", f"node {unit.node.name!r}" if unit.node is not None else "the model")
        decisions[unit] = Decision(precision, notes.get(_PREFIX + "code", codes.SOURCE), evidence)
    return Plan(graph, options, decisions)
