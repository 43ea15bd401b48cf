"""What a conversion did, in numbers: kept in the model's metadata, and printed as a table."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnxamp.dtypes import BY_NAME, FP32
from onnxamp.errors import ModelError
from onnxamp.model.constants import constant_bytes
from onnxamp.model.metadata import noted
from onnxamp.model.signatures import standard_opset
from onnxamp.model.units import all_nodes
from onnxamp.passes.constants import float_constants
from onnxamp.policy import pages
from onnxamp.policy.operators import Kind, operator
from onnxamp.policy.plan import Plan

_ANONYMOUS = re.compile(r"_d\d+")  # dimensions without a name, as shape inference calls them


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion did, in numbers.

    Attributes:
        nodes: Nodes that compute with floats, by precision.
        heavy: Heavy nodes (MatMul, Conv, ...) in 16 bits, and all of them.
        casts: Casts added, by direction: ``low`` and ``fp32``.
        islands: fp32 nodes by the code of their reason, most frequent first.
        weights: Bytes of float constants before and after.
        changed: Constants whose values changed beyond rounding: name and change.
        traffic: Modelled bytes of one run: the source, the cut before low regions without purpose are dissolved, the result.
        dims: Sizes that the traffic model took for named dimensions.
        opset: Version of ai.onnx before and after; raised only where a decision needs it.
    """

    nodes: dict[str, int]
    heavy: tuple[int, int]
    casts: dict[str, int]
    islands: dict[str, int]
    weights: tuple[int, int]
    changed: dict[str, dict[str, object]]
    traffic: dict[str, int]
    dims: dict[str, int]
    opset: tuple[int, int]

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    def rows(self) -> list[tuple[str, str]]:
        """The table that ends a conversion: names and what stands behind them."""
        from onnxamp.console import size  # imports rich, which nothing else here needs

        before, after = self.weights
        traffic = self.traffic
        dissolved = ""
        if size(traffic["cut"]) != size(traffic["result"]):
            dissolved = f" ({size(traffic['cut'])} before 16-bit regions without heavy nodes were dissolved)"
        rows = [
            ("nodes", ", ".join(f"{count} {kind}" for kind, count in self.nodes.items()) or "none with floats"),
            ("heavy nodes", f"{self.heavy[0]} of {self.heavy[1]} in 16 bits"),
            ("Casts added", f"{self.casts['low']} to 16 bits, {self.casts['fp32']} to fp32"),
            ("weights", f"{size(before)} → {size(after)}"),
            ("traffic", f"{size(traffic['source'])} → {size(traffic['result'])} a run, modelled{dissolved}"),
        ]
        if self.opset[0] != self.opset[1]:
            rows.append(("opset", f"{self.opset[0]} → {self.opset[1]}, in which more nodes may be 16-bit"))
        if self.dims:
            rows.append(("assumed sizes", ", ".join(f"{name}={count}" for name, count in self.dims.items())))
        for index, (code, count) in enumerate(self.islands.items()):
            rows.append(("fp32 because" if index == 0 else "", f"{code} ({count}) {pages.title(code)}"))
        for index, (name, change) in enumerate(self.changed.items()):
            rows.append(("constants changed" if index == 0 else "", f"{name}: {change_text(change)}"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)

    @classmethod
    def of(cls, model: ir.Model) -> Summary:
        """The summary that a conversion left in the metadata of `model`.

        Raises:
            ModelError: It is missing or was changed into something else.
        """
        fields = noted(model.metadata_props, "summary", "the model")
        counts = {
            "nodes": (),
            "casts": ("low", "fp32"),
            "islands": (),
            "traffic": ("source", "cut", "result"),
            "dims": (),
        }
        pairs, changed = ("heavy", "weights", "opset"), fields.get("changed")
        whole = (
            set(fields) == {field.name for field in dataclasses.fields(cls)}
            and all(_are_counts(fields[name], keys) for name, keys in counts.items())
            and all(isinstance(fields[name], list) and len(fields[name]) == 2 for name in pairs)
            and all(isinstance(count, int) for name in pairs for count in fields[name])
            and isinstance(changed, dict)
            and all(isinstance(change, dict) for change in changed.values())
            and all(isinstance(fact, int | float) for change in changed.values() for fact in change.values())
        )
        if not whole:
            raise ModelError(
                "The metadata onnxamp.summary of the model is not what a conversion writes: convert the original model."
            )
        return cls(**{**fields, **{name: tuple(fields[name]) for name in pairs}})


def change_text(change: Mapping[str, object]) -> str:
    """What happened to a constant, in words."""
    if {"clamped", "elements", "extreme"} <= set(change):
        noun = "element" if change["elements"] == 1 else "elements"
        return f"{change['elements']} {noun} clamped to ±{change['clamped']:g}, before up to {change['extreme']:.4g}"
    return ", ".join(f"{key} {value}" for key, value in change.items())


def _are_counts(table: object, keys: Iterable[str]) -> bool:
    """Whether this is a mapping to integers that has `keys`."""
    return (
        isinstance(table, dict) and set(keys) <= set(table) and all(isinstance(count, int) for count in table.values())
    )


def summarize(model: ir.Model, plan: Plan, before: int, opset: int) -> Summary:
    """What the conversion of a model to `plan` did; `before` and `opset` are bytes of its float constants and its opset as it came."""
    nodes = collections.Counter(decision.precision for decision in plan.nodes.values())
    heavy = [decision.precision for node, decision in plan.nodes.items() if operator(node).kind is Kind.HEAVY]
    islands = collections.Counter(decision.code for decision in plan.nodes.values() if decision.precision == FP32.name)
    casts = collections.Counter(node.metadata_props.get("onnxamp.cast") for node in all_nodes(model.graph))
    changed: dict[str, dict[str, object]] = {
        value.name or "": {"clamped": clamp.limit, "elements": clamp.elements, "extreme": clamp.extreme}
        for value, clamp in plan.clamped.items()
    }
    return Summary(
        nodes={name: nodes[name] for name in BY_NAME if nodes[name]},
        heavy=(sum(precision != FP32.name for precision in heavy), len(heavy)),
        casts={direction: casts[direction] for direction in ("low", "fp32")},
        islands=dict(sorted(islands.items(), key=lambda item: (-item[1], item[0]))),
        weights=(before, sum(map(constant_bytes, float_constants(model.graph)))),
        changed=changed,
        traffic=dataclasses.asdict(plan.traffic),
        dims={name: size for name, size in plan.dims.items() if not _ANONYMOUS.fullmatch(name)},
        opset=(opset, standard_opset(model)),
    )
