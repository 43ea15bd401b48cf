"""What a search of `convert --auto` chooses from: the plans of one model that differ from level O2 in the nodes that may be turned."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.errors import UsageError
from onnxamp.model.tensors import ConvertedTensor
from onnxamp.model.traffic import Traffic
from onnxamp.model.units import TypeGraph
from onnxamp.passes.emulate import moves_data
from onnxamp.policy import codes
from onnxamp.policy.operators import Kind, operator
from onnxamp.policy.options import Options
from onnxamp.policy.plan import Plan, make_plan
from onnxamp.policy.raising import plan_at_best_opset
from onnxamp.policy.user import label

# Decisions that the search may turn: of the level, and of the numerical rules.
_RAISABLE = frozenset({codes.HEAVY, codes.CUT_LOW, codes.TIED})
LOWERABLE = frozenset(
    value for name, value in vars(codes).items() if name.isupper() and str(value).startswith("AMP1")
) - {codes.USER_ISLAND}
# In traffic of the node: what 16 bits are worth to a heavy node beside its own bytes.
_HEAVY_BONUS = 3


class Space:
    """The plans that a search chooses from, over one type graph. Nodes go by their labels.

    Attributes:
        options: Level O2, and what the user asked for.
        base: The plan of these.
        all_low: The plan of level O3: what may be 16-bit at all.
        elements: What all nodes read and write.
    """

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.options = options
        self.base = plan_at_best_opset(model, options)
        self.graph: TypeGraph = self.base.graph
        self.all_low = make_plan(self.graph, dataclasses.replace(options, level="O3"))
        self._traffic = Traffic(self.graph, dict(options.dim))
        self._position = {label(node): index for index, node in enumerate(self.graph.of)}
        self._heavy = {label(node) for node in self.graph.of if operator(node).kind is Kind.HEAVY}
        self._plans: dict[tuple[tuple[str, ...], tuple[str, ...]], Plan | None] = {}
        self.elements = 1 + sum(self._traffic.of_unit.values())
        self._decisive = 2 * (1 + _HEAVY_BONUS) * self.elements

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names, each once, in the order of the graph."""
        return tuple(sorted(set(names), key=self._position.__getitem__))

    def options_of(self, raised: Iterable[str], lowered: Iterable[str]) -> Options:
        """The options with a policy entry for each node that is raised or lowered, in the order of the graph."""
        entries = [(name, "fp32") for name in raised] + [(name, "low") for name in lowered]
        entries.sort(key=lambda entry: self._position[entry[0]])
        return dataclasses.replace(self.options, policy=(*self.options.policy, *entries))

    def plan(self, raised: tuple[str, ...], lowered: tuple[str, ...]) -> Plan | None:
        """The plan for these; None if one of `lowered` is tied to a node that has to be fp32."""
        if (raised, lowered) not in self._plans:
            try:
                self._plans[raised, lowered] = make_plan(self.graph, self.options_of(raised, lowered))
            except UsageError:
                self._plans[raised, lowered] = None
        return self._plans[raised, lowered]

    def cheapest(self, noise: Mapping[str, float], weight: float) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
        """What to raise, what to lower, and what of both is 16-bit then, for the least of traffic and noise together.

        Minimum of ``traffic + weight · Σ noise of 16-bit nodes``, where a heavy node in fp32 counts as its traffic thrice more, as much as
        Casts around it can cost: 16 bits speed up what it computes, too. One minimum cut finds it.

        Args:
            noise: What each node that may be turned would add in 16 bits; the others stay as they are.
            weight: Elements of traffic that a unit of noise is worth; infinite where no noise is worth any.
        """
        prices = {}
        for node, units in self.graph.of.items():
            if (name := label(node)) not in noise:
                continue
            value = sum(self._traffic.of_unit[unit] for unit in units)
            bonus = _HEAVY_BONUS * value if operator(node).kind is Kind.HEAVY else 0
            added = weight * noise[name] if weight and noise[name] else 0.0
            most = self._decisive if math.isinf(weight) or not added < self._decisive else round(added)
            prices[name] = most - bonus
        plan = make_plan(self.graph, self.options, prices=prices)
        low = {
            name for node, found in plan.nodes.items() if found.precision != "fp32" and (name := label(node)) in noise
        }
        lowered = self.ordered(name for name in self.lowerable if name in low)
        high = [name for name in self.raisable if name in noise and name not in low]
        # What the cut leaves in fp32 anyway needs no entry.
        heavy = self.ordered(name for name in high if name in self._heavy)
        rest = self.plan(heavy, lowered)
        left = {label(node) for node, found in rest.nodes.items() if found.precision != "fp32"} if rest else set(high)
        return self.ordered([*heavy, *(name for name in high if name in left)]), lowered, low

    def share(self, plan: Plan) -> float:
        """16-bit share of what fp32 nodes of the source read and write, in elements."""
        counts = [(unit, count) for unit, count in self._traffic.of_unit.items() if BY_IR[unit.dtype].name == "fp32"]
        total = sum(count for _, count in counts)
        low = sum(count for unit, count in counts if plan.decisions[unit].precision != "fp32")
        return low / total if total else 0.0

    @functools.cached_property
    def raisable(self) -> tuple[str, ...]:
        """Nodes that are 16-bit at O2 by the level and do more than move data."""
        return self.ordered(
            label(node)
            for node, decision in self.base.nodes.items()
            if decision.precision != "fp32" and decision.code in _RAISABLE and not moves_data(node) and label(node)
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

    def rounded_weights(self) -> ir.Model:
        """The model with every constant as O2's 16-bit units read it, rounded and those of masks clamped; all types stay."""
        low = {
            read.value.name
            for unit, decision in self.base.decisions.items()
            if decision.precision != "fp32"
            for read in unit.reads
        }
        limits = {value.name: clamp.limit for value, clamp in self.base.clamped.items()}
        model = self.graph.model.clone()
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.name in low and value.dtype == ir.DataType.FLOAT and value.const_value is not None:
                    value.const_value = self._rounded(value.const_value, limits.get(value.name))
            for node in graph:
                attribute = node.attributes.get("value") if node.op_type == "Constant" else None
                if attribute is None or node.outputs[0].name not in low or attribute.value.dtype != ir.DataType.FLOAT:
                    continue
                limit = limits.get(node.outputs[0].name)
                node.attributes["value"] = ir.AttrTensor("value", self._rounded(attribute.value, limit))
        return model

    def _rounded(self, tensor: ir.TensorProtocol, limit: float | None) -> ir.TensorProtocol:
        low = ConvertedTensor(tensor, self.options.low, limit).numpy()
        return ir.Tensor(low.astype(np.float32), name=tensor.name)
