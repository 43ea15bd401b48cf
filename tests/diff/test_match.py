"""What pairs with what, where names do not tell."""

from __future__ import annotations

import pathlib
import random

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp import diff

_MODELS = pathlib.Path(__file__).parents[2] / "models"
# Not the conversions that README's command leaves there.
MODELS = sorted({*_MODELS.glob("*.onnx")} - {*_MODELS.glob("*.*.onnx")})


def chain(nodes: list[onnx.NodeProto], initializers=(), inputs=("x",), outputs=("y",)) -> onnx.ModelProto:
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in (*inputs, *outputs)}
    graph = helper.make_graph(nodes, "g", [values[n] for n in inputs], [values[n] for n in outputs], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def rename_all(model: onnx.ModelProto, seed: int, shapes: bool = True) -> onnx.ModelProto:
    """Every node, inner value and initializer under a drawn name; the interface keeps its own."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    rng = random.Random(seed)
    fixed = {v.name for v in (*model.graph.input, *model.graph.output)} | {""}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        if name in fixed:
            return name
        return names.setdefault(name, f"v{rng.getrandbits(60)}")

    def graph(g: onnx.GraphProto) -> None:
        for value in (*g.input, *g.output, *g.value_info, *g.initializer):
            value.name = new(value.name)
        for node in g.node:
            node.name = f"n{rng.getrandbits(60)}"
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    graph(attribute.g)

    graph(model.graph)
    return model


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_structure_alone_pairs_every_node(path: pathlib.Path) -> None:
    model = onnx.load(path)
    result = diff(model, rename_all(model, 1))
    assert result.matched == result.before.nodes + result.before.casts
    assert result.others == len(result.renamed) > 0
    assert not (result.retyped)
    assert not (result.casts)
    assert not (result.islands)
    assert not (result.constants)


def test_exchanged_names_are_two_renames() -> None:
    def model(first: str, second: str) -> onnx.ModelProto:
        return chain(
            [
                helper.make_node("Relu", ["x"], ["a"], first),
                helper.make_node("Exp", ["a"], ["b"], "exp"),
                helper.make_node("Relu", ["b"], ["c"], second),
                helper.make_node("Tanh", ["c"], ["y"], "tanh"),
            ]
        )

    result = diff(model("r1", "r2"), model("r2", "r1"))
    assert [(r.before, r.after) for r in result.renamed] == [("r1", "r2"), ("r2", "r1")]
    assert result.others == 2


def test_equal_branches_without_names_pair_by_order() -> None:
    nodes = [helper.make_node("Relu", ["x"], [f"a{k}"]) for k in range(3)]
    nodes += [helper.make_node("Exp", [f"a{k}"], [f"b{k}"]) for k in range(3)]
    nodes.append(helper.make_node("Sum", [f"b{k}" for k in range(3)], ["y"]))
    result = diff(chain(nodes), rename_all(chain(nodes), 3))
    assert result.matched == 7
    assert not (result.nodes)
    assert not (result.edited)
    assert not (result.moved)


def test_a_replaced_operator() -> None:
    def model(op: str) -> onnx.ModelProto:
        return chain([helper.make_node(op, ["x"], ["a"], "act"), helper.make_node("Exp", ["a"], ["y"], "exp")])

    result = diff(model("Relu"), model("Tanh"))
    assert [(e.what, e.before, e.after) for e in result.edited] == [("operator", "Relu", "Tanh")]
    assert result.others == 1


def test_a_rewired_operand() -> None:
    def model(source: str) -> onnx.ModelProto:
        return chain(
            [
                helper.make_node("Relu", ["x"], ["a"], "relu"),
                helper.make_node("Exp", ["x"], ["b"], "exp"),
                helper.make_node("Add", ["a", source], ["y"], "add"),
                helper.make_node("Neg", ["b"], ["z"], "neg"),
            ],
            outputs=("y", "z"),
        )

    result = diff(model("b"), model("x"))
    assert [(e.node.name, e.what, e.before, e.after) for e in result.edited] == [("add", "input 1", "b", "x")]
    assert result.others == 1


def test_a_deep_chain_and_a_wide_fan() -> None:
    deep = [helper.make_node("Relu", [f"v{k}" if k else "x"], [f"v{k + 1}"], f"r{k}") for k in range(3000)]
    deep.append(helper.make_node("Identity", ["v3000"], ["y"], "last"))
    wide = [helper.make_node("Exp", ["x"], [f"v{k}"], f"e{k}") for k in range(3000)]
    wide.append(helper.make_node("Sum", [f"v{k}" for k in range(3000)], ["y"], "sum"))
    for nodes in (deep, wide):
        model = chain(nodes)
        result = diff(model, rename_all(model, 5))
        assert result.matched == 3001
        assert result.others == len(result.renamed)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 18), "opset ai.onnx"),
        (lambda m: setattr(m, "producer_name", "other"), "producer_name"),
        (lambda m: m.metadata_props.add(key="k", value="v"), "metadata k"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "batch"), "input x"),
        (lambda m: m.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])), "input z"),
        (lambda m: setattr(m.graph, "name", "h"), "graph name"),
        (lambda m: m.graph.node[0].metadata_props.add(key="k", value="v"), "metadata k"),
        (lambda m: setattr(m.graph.node[0], "doc_string", "d"), "doc_string"),
    ],
)
def test_what_is_around_the_nodes(edit, what: str) -> None:
    model = chain([helper.make_node("Relu", ["x"], ["y"], "relu")])
    other = onnx.ModelProto.FromString(model.SerializeToString())
    edit(other)
    result = diff(model, other)
    assert [item.what for item in (*result.model, *result.edited)] == [what]
    assert result.others == 1


def test_onnxamps_own_metadata_are_no_difference() -> None:
    model = chain([helper.make_node("Relu", ["x"], ["y"], "relu")])
    other = onnx.ModelProto.FromString(model.SerializeToString())
    other.metadata_props.add(key="onnxamp.level", value="O0")
    other.graph.node[0].metadata_props.add(key="onnxamp.code", value="AMP001")
    assert diff(model, other).empty


def test_unused_constants() -> None:
    tensor = numpy_helper.from_array(
        numpy_helper.to_array(helper.make_tensor("c", TensorProto.FLOAT, [2], [1, 2])), "c"
    )
    relu = [helper.make_node("Relu", ["x"], ["y"], "relu")]
    result = diff(chain(relu), chain(relu, [tensor]))
    assert [(c.before, c.after) for c in result.constants] == [("", "c")]
    assert result.mirrored().constants[0].before == "c"


def numbered(model: onnx.ModelProto) -> onnx.ModelProto:
    """All nodes and inner values called by their number, as older exporters do."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    kept = {v.name for v in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {}
    for k, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{k}"
        for name in node.output:
            if name and name not in kept:
                names[name] = f"{9000 + len(names)}"

    def rename(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rename(attribute.g)
        for value in (*graph.value_info, *graph.output):
            value.name = names.get(value.name, value.name)

    rename(model.graph)
    return model


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_one_more_node_shifts_all_numbers(path: pathlib.Path) -> None:
    """Names that both models have, for other things, do not mislead."""
    base = onnx.load(path)
    outputs = {v.name for v in base.graph.output}
    tried = 0
    for at in range(1, len(base.graph.node) - 1, max(1, len(base.graph.node) // 4)):
        edited = onnx.ModelProto.FromString(base.SerializeToString())
        node = edited.graph.node[at]
        if node.op_type in ("Constant", "If") or node.output[0] in outputs:
            continue
        for other in edited.graph.node:
            other.input[:] = ["inserted" if name == node.output[0] else name for name in other.input]
        edited.graph.node.insert(at + 1, helper.make_node("Identity", [node.output[0]], ["inserted"], "inserted"))
        result = diff(numbered(base), numbered(edited))
        assert [(n.change, n.node.op) for n in result.nodes] == [("added", "Identity")]
        assert result.others == 1 + len(result.renamed)
        assert not (result.casts)
        assert not (result.constants)
        tried += 1
    assert tried >= 2
