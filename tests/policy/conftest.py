"""Plans of models written as ONNX text."""

from __future__ import annotations

from collections.abc import Callable

import onnx.parser
import onnx_ir as ir
import pytest

from onnxamp.model.types import infer
from onnxamp.model.units import TypeGraph, type_graph
from onnxamp.policy.plan import Options, Plan, make_plan
from onnxamp.policy.user import label

Codes = dict[str, tuple[str, str]]


def _graph(text: str, opset: int = 17, ir_version: int = 9) -> TypeGraph:
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    model = ir.from_proto(onnx.parser.parse_model(header + text))
    infer(model)
    return type_graph(model)


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., TypeGraph]:
    """The type graph of a graph in ONNX text."""
    return _graph


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """The plan of a graph in ONNX text; keywords are those of Options, and `opset`."""

    def plan(text: str, opset: int = 17, ranges: dict[str, float] | None = None, **options: object) -> Plan:
        return make_plan(_graph(text, opset), Options(**options), ranges)  # type: ignore[arg-type]

    return plan


@pytest.fixture(scope="session")
def codes_of(plan_of: Callable[..., Plan]) -> Callable[..., Codes]:
    """(precision, code) of every node, by the name of the node or of its first output."""

    def codes(text: str, **options: object) -> Codes:
        plan = plan_of(text, **options)
        return {label(node): (decision.precision, decision.code) for node, decision in plan.nodes.items()}

    return codes
