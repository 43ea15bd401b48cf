"""The minimum cut against brute force, its scale, and its linear time, counted."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import onnx_ir as ir
import pytest

from onnxamp.model.traffic import Traffic
from onnxamp.model.units import TypeGraph, type_graph
from onnxamp.policy import cut
from onnxamp.policy.assign import Groups, minimum_cut
from onnxamp.policy.cut import INFINITE, Network, capacities
from onnxamp.policy.plan import Options, make_plan


def random_network(seed: int) -> tuple[Network, list[int], dict[tuple[int, int], int]]:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    network = Network()
    low = [rng.randint(-6, 6) for _ in range(count)]
    pairs: dict[tuple[int, int], int] = {}
    for cost in low:
        network.add(network.variable(), low=cost)
    for _ in range(rng.randint(0, 3 * count) if count > 1 else 0):
        u, v = rng.sample(range(count), 2)
        cost = rng.randint(0, 5) if rng.random() < 0.8 else INFINITE
        pairs[u, v] = min(pairs.get((u, v), 0) + cost, INFINITE)
        network.add_pair(u, v, cost)
    return network, low, pairs


def _flows(monkeypatch) -> list[int]:
    """How many variables reach the maximum flow, each time that it is asked."""
    found: list[int] = []
    flow = Network._flow
    monkeypatch.setattr(Network, "_flow", lambda self, core: found.append(len(core)) or flow(self, core))
    return found


@pytest.mark.parametrize("eliminate", [True, False], ids=["eliminated", "flow alone"])
def test_cheapest_labelling_with_most_fp32(monkeypatch, eliminate):
    if not eliminate:
        monkeypatch.setattr(Network, "_eliminate", lambda self: {})
    flows = _flows(monkeypatch)
    for seed in range(150):
        network, low, pairs = random_network(seed)
        labels = list(itertools.product((False, True), repeat=len(low)))
        table = np.array(labels)
        costs = [int(c) for c in table @ np.array(low)]
        for (u, v), cost in pairs.items():
            for i in np.nonzero(~table[:, u] & table[:, v])[0]:
                costs[i] += cost
        best = min(range(len(labels)), key=lambda i: (costs[i], sum(labels[i])))
        assert network.solve() == list(labels[best]), seed
    assert len(flows) > 40


def test_infinite_and_huge_costs_fit_into_int32():
    costs = [10**15, 3, INFINITE, 7 * 10**14]
    scaled = capacities(costs)
    assert scaled.dtype == np.int32
    assert scaled.min() > 0
    assert scaled[2] > scaled[0] + scaled[1] + scaled[3]
    assert 2 * int(scaled[2]) < 2**31
    assert scaled[0] / scaled[3] == pytest.approx(10 / 7, rel=1e-6)
    assert list(capacities([6, 9, 15])) == [2, 3, 5]


def test_scale_keeps_the_choice_where_int32_would_wrap(monkeypatch):
    monkeypatch.setattr(Network, "_eliminate", lambda self: {})
    for factor in (1, 2**20, 2**31, 2**45):
        network = Network()
        a, b, c = (network.variable() for _ in range(3))
        network.add(a, low=5 * factor)
        network.add(b, fp32=3 * factor)
        network.add(c, fp32=4 * factor)
        network.add_pair(a, b, 2 * factor)
        network.add_pair(a, c, 9 * factor)
        assert network.solve() == [True, True, True]


FLOAT = ir.TensorType(ir.DataType.FLOAT)


def value(name: str, size: int = 8) -> ir.Value:
    return ir.Value(name=name, type=FLOAT, shape=ir.Shape((1, size)))


def random_model(seed: int) -> ir.Model:
    """A random graph with up to 12 free units among fixed ones: constants, branches and nodes with two units among them."""
    rng = random.Random(seed)
    sizes = [1, 4, 8, 100]
    values = [value("x", rng.choice([8, -1]))]
    condition = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
    constants = [
        ir.Value(name=f"c{i}", const_value=ir.tensor(np.ones((1, size), np.float32))) for i, size in enumerate(sizes)
    ]
    nodes = []
    free = 0
    for i in range(rng.randint(6, 16)):
        kind = rng.choice(["Relu", "Add", "Max", "Neg", "MatMul", "Softmax", "CastLike", "If"])
        units = {"MatMul": 0, "Softmax": 0, "CastLike": 2, "If": 3}.get(kind, 1)
        if free + units > 12:
            continue
        free += units
        count = {"Add": 2, "Max": rng.randint(1, 3), "MatMul": 2, "CastLike": 2, "If": 2}.get(kind, 1)
        operands = [rng.choice(values[-4:]) for _ in range(count)]
        if kind in ("Add", "Max", "MatMul") and rng.random() < 0.4:
            operands[-1] = rng.choice(constants)
        output = value(f"v{i}", rng.choice(sizes))
        attributes = []
        if kind == "If":
            for branch, captured in zip(("then_branch", "else_branch"), operands, strict=True):
                inner = value(f"{branch}{i}", rng.choice(sizes))
                body = ir.Graph([], [inner], nodes=[ir.Node("", "Neg", [captured], outputs=[inner])], name=branch)
                attributes.append(ir.AttrGraph(branch, body))
            operands = [condition]
        nodes.append(ir.Node("", kind, operands, attributes, outputs=[output], name=f"n{i}"))
        values.append(output)
    outputs = [v for v in values[1:] if not v.uses()] or values[-1:]
    graph = ir.Graph(
        [values[0], condition], outputs, nodes=nodes, initializers=constants, opset_imports={"": 17}, name="g"
    )
    return ir.Model(graph, ir_version=9)


def test_plan_before_dissolving_has_least_traffic():
    """Oracle: the traffic model itself, over all labellings of the free units."""
    compared = 0
    for seed in range(60):
        graph = type_graph(random_model(seed))
        plan = make_plan(graph, Options(target="any"))
        dtypes = {
            unit: ir.DataType.FLOAT16 if d.precision == "fp16" else ir.DataType.FLOAT
            for unit, d in plan.decisions.items()
        }
        free = [unit for unit, d in plan.decisions.items() if d.code in ("AMP003", "AMP004", "AMP007")]
        assert len(free) <= 12
        model = Traffic(graph, {})
        least = min(
            model.bytes({**dtypes, **dict(zip(free, labels, strict=True))}.__getitem__)
            for labels in itertools.product((ir.DataType.FLOAT, ir.DataType.FLOAT16), repeat=len(free))
        )
        assert plan.traffic.cut == least > 0, seed
        assert plan.traffic.result <= plan.traffic.source or any(d.code == "AMP002" for d in plan.decisions.values())
        compared += 2 ** len(free) > 1
    assert compared > 50


def chain(count: int, operators: list[str]) -> ir.Model:
    """A chain whose every third node also reads an earlier value."""
    values = [value("x")]
    nodes = []
    for i in range(count):
        operator = operators[i % len(operators)]
        operands = [values[-1], values[max(0, len(values) - 3)]] if operator in ("Add", "MatMul") else [values[-1]]
        values.append(value(f"v{i}"))
        nodes.append(ir.Node("", operator, operands, outputs=[values[-1]], name=f"n{i}"))
    return ir.Model(ir.Graph(values[:1], values[-1:], nodes=nodes, opset_imports={"": 17}, name="g"), ir_version=9)


def fan(count: int) -> ir.Model:
    """One value with `count` readers of all kinds."""
    x, hub = value("x"), value("hub")
    nodes = [ir.Node("", "Relu", [x], outputs=[hub], name="hub")]
    outputs = []
    for i in range(count):
        middle, end = value(f"m{i}"), value(f"e{i}")
        operator = ("MatMul", "Exp", "Relu")[i % 3]
        nodes.append(
            ir.Node("", operator, [hub, hub] if operator == "MatMul" else [hub], outputs=[middle], name=f"n{i}")
        )
        nodes.append(ir.Node("", "Neg", [middle], outputs=[end], name=f"o{i}"))
        outputs.append(end)
    return ir.Model(ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 17}, name="g"), ir_version=9)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: chain(n, ["MatMul", "Relu", "Add", "Neg"]),
        lambda n: chain(n, ["Relu", "Abs", "Neg"]),
        lambda n: chain(n, ["Softmax", "Relu", "Add", "Neg", "Abs", "Sigmoid"]),
        fan,
    ],
    ids=["heavy", "free", "sensitive", "fan"],
)
def test_almost_nothing_is_left_for_the_flow(monkeypatch, make):
    """And four times the nodes take at most about four times the lines of the elimination."""
    networks: list[Network] = []
    monkeypatch.setattr("onnxamp.policy.assign.Network", lambda: networks.append(Network()) or networks[-1])
    flows = _flows(monkeypatch)
    small, large = (_elimination_lines(type_graph(make(count))) for count in (300, 1200))
    assert 0 < large <= 4.2 * small
    network = networks[-1]
    assert len(network.cost_low) > 500
    assert sum(flows) <= 0.02 * len(network.cost_low)


def _elimination_lines(graph: TypeGraph) -> int:
    """Lines that run in the elimination while a plan is made."""
    lines = 0
    watched = {Network._eliminate.__code__, Network._fold.__code__}

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: count if frame.f_code in watched else None)
    try:
        make_plan(graph, Options(target="any"))
    finally:
        sys.settrace(before)
    return lines


def test_ties_are_fp32():
    x, y = value("x"), value("y")
    node = ir.Node("", "Relu", [x], outputs=[y], name="r")
    graph = type_graph(ir.Model(ir.Graph([x], [y], nodes=[node], opset_imports={"": 17}, name="g"), ir_version=9))
    groups = Groups({u: i for i, u in enumerate(graph.units)}, [[u] for u in graph.units], {0: True, 2: False})
    traffic = Traffic(graph, {})
    # low saves 2 operands and moves the Cast behind the node: as many bytes; nothing is gained either way
    traffic.of_unit[graph.units[1]] = 0
    assert minimum_cut(graph, groups, traffic) == {0: True, 1: False, 2: False}


def test_lost_edges_are_noticed(monkeypatch):
    monkeypatch.setattr(Network, "_eliminate", lambda self: {})
    monkeypatch.setattr(cut, "capacities", lambda costs: np.zeros(len(costs), np.int32))
    network = Network()
    network.add(network.variable(), low=1)
    with pytest.raises(cut.InternalError, match="lost edges"):
        network.solve()
