"""What a search of `convert --auto` chooses from: the plans of one model that differ from level O2 in the nodes that may be turned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.errors import UsageError
from onnxamp.model.traffic import Traffic
from onnxamp.model.units import TypeGraph
from onnxamp.passes.emulate import moves_data
from onnxamp.policy import codes
from onnxamp.policy.options import Options
from onnxamp.policy.plan import Plan, make_plan
from onnxamp.policy.raising import plan_at_best_opset
from onnxamp.policy.user import label

# Decisions that the search may turn: of the level, and of the numerical rules.
_RAISABLE = frozenset({codes.HEAVY, codes.CUT_LOW, codes.TIED})
LOWERABLE = frozenset(
    value for name, value in vars(codes).items() if name.isupper() and str(value).startswith("AMP1")
) - {codes.USER_ISLAND}


class Space:
    """The plans that a search chooses from, over one type graph. Nodes go by their labels.

    Attributes:
        options: Level O2, and what the user asked for.
        base: The plan of these.
        all_low: The plan of level O3: what may be 16-bit at all.
    """

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.options = options
        self.base = plan_at_best_opset(model, options)
        self.graph: TypeGraph = self.base.graph
        self.all_low = make_plan(self.graph, dataclasses.replace(options, level="O3"))
        self._traffic = Traffic(self.graph, dict(options.dim))
        self._position = {label(node): index for index, node in enumerate(self.graph.of)}

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names, each once, in the order of the graph."""
        return tuple(sorted(set(names), key=self._position.__getitem__))

    def options_of(self, raised: Iterable[str], lowered: Iterable[str]) -> Options:
        """The options with a policy entry for each node that is raised or lowered, in the order of the graph."""
        entries = [(name, "fp32") for name in raised] + [(name, "low") for name in lowered]
        entries.sort(key=lambda entry: self._position[entry[0]])
        return dataclasses.replace(self.options, policy=(*self.options.policy, *entries))

    def plan(self, raised: Iterable[str], lowered: Iterable[str]) -> Plan | None:
        """The plan for these; None if one of `lowered` is tied to a node that has to be fp32."""
        try:
            return make_plan(self.graph, self.options_of(raised, lowered))
        except UsageError:
            return None

    def lowest(self, raised: Iterable[str], free: Collection[str]) -> tuple[str, ...]:
        """Those of `free` that are 16-bit in the plan of least traffic in which no numerical rule holds for them."""
        plan = make_plan(self.graph, self.options_of(raised, ()), free=free)
        return self.ordered(
            label(node) for node, found in plan.nodes.items() if found.precision != "fp32" and label(node) in free
        )

    def share(self, plan: Plan) -> float:
        """16-bit share of what fp32 nodes of the source read and write, in elements."""
        counts = [(unit, count) for unit, count in self._traffic.of_unit.items() if BY_IR[unit.dtype].name == "fp32"]
        total = sum(count for _, count in counts)
        low = sum(count for unit, count in counts if plan.decisions[unit].precision != "fp32")
        return low / total if total else 0.0

    def raisable(self) -> list[str]:
        """Nodes that are 16-bit at O2 by the level and do more than move data."""
        return list(
            dict.fromkeys(
                label(node)
                for node, decision in self.base.nodes.items()
                if decision.precision != "fp32" and decision.code in _RAISABLE and not moves_data(node) and label(node)
            )
        )

    @functools.cached_property
    def lowerable(self) -> tuple[str, ...]:
        """Nodes that rules keep in fp32 and that could be 16-bit."""
        return self.ordered(
            label(node)
            for node, decision in self.base.nodes.items()
            if decision.code in LOWERABLE
            and decision.precision == "fp32"
            and self.all_low.nodes[node].precision != "fp32"
            and label(node)
        )

    def connected(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """`names` in groups of nodes that hang together."""
        members = {node for node in self.graph.of if label(node) in names}
        groups: list[tuple[str, ...]] = []
        done: set[ir.Node] = set()
        for start in self.graph.of:
            if start not in members or start in done:
                continue
            group, pending = {start}, [start]
            while pending:
                node = pending.pop()
                near = [value.producer() for value in node.inputs if value is not None]
                near += [user for value in node.outputs for user, _ in value.uses()]
                for other in near:
                    if other in members and other not in group:
                        group.add(other)
                        pending.append(other)
            done |= group
            groups.append(self.ordered(map(label, group)))
        return groups

    def rounded_weights(self) -> ir.Model:
        """The model with every constant rounded that some 16-bit unit of O2's plan reads; all types stay."""
        low = {
            read.value.name
            for unit, decision in self.base.decisions.items()
            if decision.precision != "fp32"
            for read in unit.reads
        }
        model = self.graph.model.clone()
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.name in low and value.dtype == ir.DataType.FLOAT and value.const_value is not None:
                    value.const_value = self._rounded(value.const_value)
            for node in graph:
                attribute = node.attributes.get("value") if node.op_type == "Constant" else None
                if attribute is None or node.outputs[0].name not in low or attribute.value.dtype != ir.DataType.FLOAT:
                    continue
                node.attributes["value"] = ir.AttrTensor("value", self._rounded(attribute.value))
        return model

    def _rounded(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        array = tensor.numpy()
        return ir.Tensor(array.astype(self.options.low.numpy).astype(array.dtype), name=tensor.name)
