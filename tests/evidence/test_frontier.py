"""The plans that a search looks at: each is the best of all plans for its weight of noise against traffic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from onnx import numpy_helper, parser

from onnxamp.evidence.frontier import Frontier
from onnxamp.evidence.space import Space
from onnxamp.model import io
from onnxamp.model.preparation import prepared
from onnxamp.model.traffic import Traffic
from onnxamp.policy.options import Options
from onnxamp.policy.user import label

RNG = np.random.default_rng(11)
NOISE = {"l1": 3e-7, "l2": 1e-7, "l3": 5e-7, "soft": 2e-7, "norm": 8e-7, "add": 1e-7}


@pytest.fixture(scope="module")
def space() -> Space:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[8,32] x) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [soft] b = Softmax<axis = -1>(a)  [l2] c = MatMul(b, w2)  [add] s = Add(c, a)
          [norm] d = LayerNormalization<axis = -1>(s, scale)  [l3] y = MatMul(d, w3) }"""
    )
    for name in ("w1", "w2", "w3"):
        weights = RNG.standard_normal((32, 32)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(32, np.float32), "scale"))
    return Space(prepared(io.load(model)), Options())


def cost(space: Space, raised: tuple[str, ...], lowered: tuple[str, ...], weight: float) -> float:
    """Bytes of a plan, those that noise is worth, and thrice its own bytes again for a heavy node in fp32."""
    plan = space.plan(raised, lowered)
    assert plan is not None
    of_unit = Traffic(space.graph, {}).of_unit
    low = {label(node) for node, found in plan.nodes.items() if found.precision != "fp32"}
    heavy = [node for node in space.graph.of if node.op_type == "MatMul" and label(node) not in low]
    kept = 3 * sum(of_unit[unit] for node in heavy for unit in space.graph.of[node])
    return plan.traffic.result + 2 * (weight * sum(NOISE[name] for name in low & NOISE.keys()) + kept)


@pytest.mark.parametrize("weight", [0.0, 1e8, 1e9, 3e9, 1e10, 3e10, 1e11, 1e13])
def test_no_plan_is_cheaper(space: Space, weight: float) -> None:
    assert set(space.raisable) | set(space.lowerable) == NOISE.keys()
    found = cost(space, *space.cheapest(NOISE, weight)[:2], weight)
    subsets = [
        list(itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1)))
        for names in (space.raisable, space.lowerable)
    ]
    costs = [cost(space, raised, lowered, weight) for raised, lowered in itertools.product(*subsets)]
    assert len(costs) == 64
    assert found <= min(costs) + 2 * len(NOISE)  # prices are rounded to elements


def test_more_weight_leaves_less_noise(space: Space) -> None:
    frontier = Frontier(space, NOISE)
    points = [frontier.at(weight) for weight in (0.0, *np.geomspace(1e7, 1e13, 25), math.inf)]
    assert points[0].raised == ()
    assert set(points[-1].raised) >= {"l1", "l2", "l3"}
    assert points[-1].noise == 0
    assert all(after.noise <= before.noise + 1e-15 for before, after in itertools.pairwise(points))
    between = frontier.between(points[0], points[-1], points[0].noise / 2)
    assert between is not None
    assert 0 < between.noise <= points[0].noise / 2


def test_a_price_frees_a_node_from_level_and_rules_only(space: Space) -> None:
    kept = Space(space.graph.model, Options(keep=("soft", "l2")))
    raised, lowered, low = kept.cheapest(NOISE, 0.0)
    assert raised == ()
    assert {"soft", "l2"}.isdisjoint({*lowered, *low})
