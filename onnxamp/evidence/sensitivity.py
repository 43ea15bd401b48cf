"""Which nodes rounding hurts: one instrumented run, and how far the noise of each node reaches the outputs.

For a node with exact result y and 16-bit twin y' (see `onnxamp.passes.probe`) the local noise is ``Σ (y' - y)² / Σ y²``. Noise travels
to the outputs along the graph; the gain of a step is the relative noise of a result per relative noise of an operand, to first order:

* sum, difference, concatenation, selection: ``mean x² / mean y²``, the operand's share of the power (more than 1 where terms cancel);
* exponential, softmax, sine, cosine, angle: ``mean x²``, since an absolute error becomes a relative one;
* logarithm: ``1 / mean y²``; power k: ``k²``; square root: 1/4; bounded activations: 1/4;
* everything else (products, convolutions, normalizations, moves): 1.

The effect of a node is the sum over all paths of the product of gains, its score local noise times effect. It ranks; it proves nothing: the
search tests what it suggests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxamp.evidence.inputs import Sample
from onnxamp.model.units import bodies
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import moves_data
from onnxamp.passes.probe import Reading, probe
from onnxamp.policy.plan import Plan
from onnxamp.policy.user import label

_SUMS = frozenset(["Add", "Sub", "Sum", "Mean", "Concat", "Where", "ScatterND", "ScatterElements", "Gemm"])
_ANGLES = frozenset(["Exp", "Softmax", "LogSoftmax", "Sin", "Cos", "Softplus"])
_BOUNDED = frozenset(["Sqrt", "Sigmoid", "Tanh", "HardSigmoid", "Erf", "Softsign"])
_MOST = 1e12  # a gain beyond this says no more than that


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What rounding does to one node.

    Attributes:
        node: Its name, or its first result's.
        op_type: Its operator.
        local: Noise-to-signal ratio of its result, the worst of all samples; infinite where the 16-bit result overflows.
        effect: Relative noise at the outputs per relative noise of its result.
        seen: Whether it ran on the samples at all: a branch may not be taken.
    """

    node: str
    op_type: str
    local: float
    effect: float
    seen: bool = True

    @property
    def score(self) -> float:
        """Expected noise-to-signal ratio at the outputs."""
        return self.local * self.effect if self.local else 0.0


def sensitivities(plan: Plan, samples: Iterable[Sample], config: SessionConfig) -> dict[str, Sensitivity]:
    """The sensitivity of every node that gets a twin and does more than move data, by name.

    Args:
        plan: Of level O3: what is 16-bit in it is what may be.
        samples: Feeds in the model's types.
        config: Session options.

    Raises:
        AmpError: The instrumented model does not run.
    """
    model, readings = probe(plan)
    session = open_session(model, dataclasses.replace(config, optimization="basic"))
    power, noise, seen = _measure(session, readings, samples)
    gains = effects(plan.graph.model, power)
    result: dict[str, Sensitivity] = {}
    for reading in readings:
        if reading.noise and not moves_data(reading.node):
            name = label(reading.node)
            value = reading.value
            found = Sensitivity(name, reading.node.op_type, noise[value], gains[value], value in seen)
            if name not in result or found.score > result[name].score:
                result[name] = found
    return result


def _measure(
    session: object, readings: list[Reading], samples: Iterable[Sample]
) -> tuple[dict[ir.Value, float], dict[ir.Value, float], set[ir.Value]]:
    """Mean square of each value over the samples, the worst noise-to-signal ratio of each result with a twin, and what had elements."""
    total: dict[ir.Value, float] = collections.defaultdict(float)
    count: dict[ir.Value, float] = collections.defaultdict(float)
    worst: dict[ir.Value, float] = collections.defaultdict(float)
    for sample in samples:
        found = run(session, sample)
        for reading in readings:
            signal = float(found[reading.signal])
            total[reading.value] += signal if math.isfinite(signal) else 0.0
            count[reading.value] += float(found[reading.size])
            if reading.noise:
                ratio = _ratio(float(found[reading.noise]), signal)
                worst[reading.value] = max(worst[reading.value], ratio)
    return {value: total[value] / max(1.0, count[value]) for value in total}, worst, {v for v in count if count[v]}


def _ratio(noise: float, signal: float) -> float:
    if not math.isfinite(noise):
        return math.inf
    if noise == 0:
        return 0.0
    return noise / signal if signal else math.inf


def effects(model: ir.Model, power: dict[ir.Value, float]) -> dict[ir.Value, float]:
    """For each value, relative noise at the outputs per relative noise of it.

    Noise of a body's output is noise of the node's result, noise of the node's operand noise of the body's input. What a Loop or Scan
    carries from one iteration to the next counts once.

    Args:
        model: The model.
        power: Mean square of values, as measured.
    """
    effect: dict[ir.Value, float] = collections.defaultdict(float)
    for value in model.graph.outputs:
        effect[value] = 1.0
    _spread(model.graph, effect, power)
    return effect


def _spread(graph: ir.Graph, effect: dict[ir.Value, float], power: dict[ir.Value, float]) -> None:
    """From the results of the nodes of a graph to what they read."""
    for node in reversed(list(graph)):
        reach = max((effect[value] for value in node.outputs if value in effect), default=0.0)
        if not reach:
            continue
        if (inner := list(bodies(node))) and node.op_type in ("If", "Loop", "Scan"):
            for body in inner:
                _spread_body(node, body, effect, power)
            continue
        read = {value for value in node.inputs if value is not None}
        for body in inner:
            read.update(value for each in body.all_nodes() for value in each.inputs if value is not None)
        result = next((power[value] for value in node.outputs if power.get(value)), 0.0)
        for value in read:
            effect[value] = min(_MOST, effect[value] + reach * _gain(node, power.get(value, 0.0), result))


def _spread_body(node: ir.Node, body: ir.Graph, effect: dict[ir.Value, float], power: dict[ir.Value, float]) -> None:
    """Through a body, from the node's results to its operands and to what the body reads from outside."""
    skipped = 1 if node.op_type == "Loop" else 0  # the condition, which is no result
    for inner, outer in zip(body.outputs[skipped:], node.outputs, strict=False):
        effect[inner] += effect[outer]
    _spread(body, effect, power)
    given = 2 if node.op_type == "Loop" else 0  # the number of iterations and the condition
    for inner, operand in zip(body.inputs[given:], node.inputs[given:], strict=False):
        if operand is not None:
            effect[operand] = min(_MOST, effect[operand] + effect[inner])


def _gain(node: ir.Node, operand: float, result: float) -> float:
    """Relative noise of the result per relative noise of an operand, from their mean squares (0 where unknown)."""
    op = node.op_type
    if op in _SUMS:
        return min(_MOST, operand / result) if operand and result else 1.0
    if op in _ANGLES:
        return min(_MOST, operand) if operand else 1.0
    if op in _BOUNDED:
        return 0.25
    if op == "Log":
        return min(_MOST, 1 / result) if result else 1.0
    if op == "Pow":
        exponent = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        return (
            float(np.square(np.asarray(exponent.numpy(), np.float64)).max(initial=0.0)) if exponent is not None else 1.0
        )
    return 1.0
