"""Random edits of real models, each with one smallest explanation, are reported exactly: none missed, none extra."""

from __future__ import annotations

import collections
import pathlib
import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp import diff
from onnxamp.comparison import GraphDiff

MODELS = pathlib.Path(__file__).parents[2] / "models"
LIGHT = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"
SOURCES = {
    **{path.stem: path for path in sorted({*MODELS.glob("*.onnx")} - {*MODELS.glob("*.*.onnx")})},
    **{name: LIGHT / f"{name}.onnx" for name in ("light_resnet50", "light_squeezenet")},
}
LISTS = ("retyped", "casts", "constants", "nodes", "renamed", "moved", "edited", "model")
SHAPE_KEEPING = {
    "Relu",
    "Softmax",
    "LayerNormalization",
    "Tanh",
    "Sigmoid",
    "BatchNormalization",
    "LRN",
    "Dropout",
    "Sqrt",
    "Identity",
    "Erf",
}
Fact = tuple[str, ...]


class Editor:
    """A model under edit. Every edit returns what a diff must say about it; none touches what another has touched."""

    def __init__(self, source: pathlib.Path, seed: int) -> None:
        self.model = onnx.shape_inference.infer_shapes(onnx.load(source))
        if self.model.ir_version < 4:  # initializers become no inputs, so that edits may rename them
            names = {t.name for t in self.model.graph.initializer}
            keep = [v for v in self.model.graph.input if v.name not in names]
            del self.model.graph.input[:]
            self.model.graph.input.extend(keep)
            self.model.ir_version = 4
        for k, node in enumerate(self.model.graph.node):
            node.name = node.name or f"n{k}"
        self.before = onnx.ModelProto.FromString(self.model.SerializeToString())
        self.random = random.Random(seed)
        self.touched: set[str] = set()
        self.graphs = list(_graphs(self.model.graph, ""))
        self.types = {
            v.name: v.type.tensor_type.elem_type for g, _ in self.graphs for v in (*g.value_info, *g.input, *g.output)
        }
        self.types |= {t.name: t.data_type for g, _ in self.graphs for t in g.initializer}

    def apply(self, kind: str) -> set[Fact] | None:
        return getattr(self, kind)()

    def pick(
        self, wanted: Callable[[onnx.NodeProto], bool], body: bool | None = None
    ) -> tuple[onnx.GraphProto, str, onnx.NodeProto] | None:
        """A random untouched node; it and its neighbours are touched from now on."""
        found = [
            (graph, path, node)
            for graph, path in self.graphs
            if body is None or bool(path) == body
            for node in graph.node
            if node.op_type not in ("Constant", "Cast")
            and wanted(node)
            and not self.touched & {*node.input, *node.output}
        ]
        if not found:
            return None
        graph, path, node = self.random.choice(found)
        self.touched |= {*node.input, *node.output}
        return graph, path, node

    def rename_node(self, body: bool | None = None) -> set[Fact] | None:
        if (found := self.pick(lambda n: bool(n.name) and not _has_body(n), body)) is None:
            return None
        _, path, node = found
        old, node.name = node.name, node.name + "_renamed"
        return {("renamed", "node", path, old, node.name)}

    def rename_value(self, body: bool | None = None) -> set[Fact] | None:
        outputs = {v.name for g, _ in self.graphs for v in g.output}
        if (found := self.pick(lambda n: n.output[0] not in outputs, body)) is None:
            return None
        _, path, node = found
        old, new = node.output[0], node.output[0] + "_renamed"
        for graph, _ in self.graphs:
            for other in graph.node:
                other.input[:] = [new if name == old else name for name in other.input]
                other.output[:] = [new if name == old else name for name in other.output]
            for value in graph.value_info:
                value.name = new if value.name == old else value.name
        self.types[new] = self.types.get(old, 0)
        self.touched.add(new)
        return {("renamed", "value", path, old, new)}

    def move(self) -> set[Fact] | None:
        graph = self.model.graph
        nodes = list(graph.node)
        made = ("_inserted", "_down", "_upward")  # nodes that only one model has pin no order
        rows = [n for n in nodes if n.op_type != "Constant" and not n.name.endswith(made)]
        place = {n.output[0]: k for k, n in enumerate(nodes)}
        choices = []
        for k, node in enumerate(nodes):
            if node.op_type in ("Constant", "Cast") or self.touched & {*node.input, *node.output} or _has_body(node):
                continue
            readers = [j for j, other in enumerate(nodes) if set(node.output) & set(_reads(other))]
            last = min(readers, default=len(nodes)) - 1
            first = max((place[name] for name in node.input if name in place), default=-1) + 1
            for target in {first, last}:
                passed = [n for n in nodes[min(k, target) : max(k, target) + 1] if n in rows and n is not node]
                if len(passed) >= 2:
                    choices.append((k, target))
        if not choices or "moved" in self.touched:
            return None
        k, target = self.random.choice(choices)
        node = nodes.pop(k)
        nodes.insert(target, node)
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        self.graphs = list(_graphs(graph, ""))
        self.touched |= {*node.input, *node.output, "moved"}
        return {("moved", "", node.name)}

    def change_constant(self) -> set[Fact] | None:
        found = [
            t for t in self.model.graph.initializer if t.data_type == TensorProto.FLOAT and t.name not in self.touched
        ]
        if not found:
            return None
        tensor = self.random.choice(found)
        values = numpy_helper.to_array(tensor).copy()
        if not values.size:
            return None
        at = self.random.randrange(values.size)
        values.reshape(-1)[at] = values.reshape(-1)[at] / 2 + 1.5
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        self.touched.add(tensor.name)
        return {("constants", tensor.name, "1 changed")}

    def delete(self, body: bool | None = None) -> set[Fact] | None:
        outputs = {v.name for g, _ in self.graphs for v in g.output}
        found = self.pick(
            lambda n: (
                n.op_type in SHAPE_KEEPING
                and n.output[0] not in outputs
                and not n.name.endswith(("_renamed", "_inserted"))
            ),
            body,
        )
        if found is None:
            return None
        graph, path, node = found
        index = list(graph.node).index(node)
        old, new, name, op = node.output[0], node.input[0], node.name, node.op_type
        for other_graph, _ in self.graphs:
            for other in other_graph.node:
                other.input[:] = [new if value == old else value for value in other.input]
        del graph.node[index]
        return {("nodes", "removed", path, name, op)}

    def insert(self, body: bool | None = None) -> set[Fact] | None:
        outputs = {v.name for g, _ in self.graphs for v in g.output}
        found = self.pick(
            lambda n: n.output[0] not in outputs and self.types.get(n.output[0]) == TensorProto.FLOAT, body
        )
        if found is None:
            return None
        graph, path, node = found
        value = node.output[0]
        new = helper.make_node("Abs", [value], [value + "_inserted"], value + "_inserted")
        self._behind(graph, node, [new], value, new.output[0])
        return {("nodes", "added", path, new.name, "Abs")}

    def insert_casts(self, body: bool | None = None) -> set[Fact] | None:
        outputs = {v.name for g, _ in self.graphs for v in g.output}
        found = self.pick(
            lambda n: n.output[0] not in outputs and self.types.get(n.output[0]) == TensorProto.FLOAT, body
        )
        if found is None:
            return None
        graph, path, node = found
        value = node.output[0]
        down = helper.make_node("Cast", [value], [value + "_low"], value + "_down", to=TensorProto.FLOAT16)
        up = helper.make_node("Cast", [value + "_low"], [value + "_up"], value + "_upward", to=TensorProto.FLOAT)
        self._behind(graph, node, [down, up], value, value + "_up")
        self.types[value + "_low"] = TensorProto.FLOAT16
        return {("casts", "added", path, down.name, "fp32", "fp16"), ("casts", "added", path, up.name, "fp16", "fp32")}

    def retype(self, body: bool | None = None) -> set[Fact] | None:
        outputs = {v.name for g, _ in self.graphs for v in g.output}
        found = self.pick(
            lambda n: (
                n.op_type in ("Relu", "Softmax", "Tanh", "Sigmoid", "Sqrt")
                and n.output[0] not in outputs
                and self.types.get(n.output[0]) == TensorProto.FLOAT
            ),
            body,
        )
        if found is None:
            return None
        graph, path, node = found
        source, result = node.input[0], node.output[0]
        down = helper.make_node("Cast", [source], [result + "_in"], result + "_down", to=TensorProto.FLOAT16)
        up = helper.make_node("Cast", [result], [result + "_up"], result + "_upward", to=TensorProto.FLOAT)
        self._behind(graph, node, [up], result, result + "_up")
        node = next(n for n in graph.node if n.output[0] == result)
        node.input[0] = result + "_in"
        graph.node.insert(list(graph.node).index(node), down)
        for value in graph.value_info:
            if value.name == result:
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
        return {
            ("retyped", path, node.name, "fp32", "fp16"),
            ("casts", "added", path, down.name, "fp32", "fp16"),
            ("casts", "added", path, up.name, "fp16", "fp32"),
        }

    def change_attribute(self, body: bool | None = None) -> set[Fact] | None:
        if (found := self.pick(lambda n: any(a.type == onnx.AttributeProto.FLOAT for a in n.attribute), body)) is None:
            return None
        _, path, node = found
        attribute = next(a for a in node.attribute if a.type == onnx.AttributeProto.FLOAT)
        attribute.f = attribute.f * 2 + 1
        return {("edited", path, node.name, f"attribute {attribute.name}")}

    def rename_input(self) -> set[Fact] | None:
        graph = self.model.graph
        value = graph.input[0]
        if value.name in self.touched:
            return None
        old, value.name = value.name, value.name + "_renamed"
        for each, _ in self.graphs:
            for node in each.node:
                node.input[:] = [value.name if name == old else name for name in node.input]
        self.touched |= {old, value.name}
        return {("renamed", "input", "", old, value.name)}

    def _behind(
        self, graph: onnx.GraphProto, node: onnx.NodeProto, new: list[onnx.NodeProto], old: str, result: str
    ) -> None:
        """Insert nodes behind a node; its readers read `result` instead of `old`."""
        for each, _ in self.graphs:
            for other in each.node:
                other.input[:] = [result if name == old else name for name in other.input]
        at = list(graph.node).index(node) + 1
        for k, made in enumerate(new):
            graph.node.insert(at + k, made)
        self.touched |= {result}
        self.types[result] = TensorProto.FLOAT


def _has_body(node: onnx.NodeProto) -> bool:
    return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)


def _reads(node: onnx.NodeProto) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names += _reads(inner)
    return names


def _graphs(graph: onnx.GraphProto, path: str):
    yield graph, path
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = f"{node.name or node.output[0]}/{attribute.name}"
                yield from _graphs(attribute.g, f"{path}/{inner}" if path else inner)


def facts(result: GraphDiff) -> set[Fact]:
    """What a diff says, in the form in which the edits tell it."""
    found: set[Fact] = set()
    for r in result.retyped:
        found.add(("retyped", r.node.scope, r.node.name, r.before, r.after))
    for c in result.casts:
        found.add(("casts", c.change, c.node.scope, c.node.name, c.source, c.target))
    for c in result.constants:
        found.add(("constants", c.before, f"{c.changed} changed" if c.before == c.after else c.after))
    for n in result.nodes:
        found.add(("nodes", n.change, n.node.scope, n.node.name, n.node.op))
    for r in result.renamed:
        found.add(("renamed", r.kind, r.scope, r.before, r.after))
    for m in result.moved:
        found.add(("moved", m.node.scope, m.node.name))
    for e in result.edited:
        found.add(("edited", e.node.scope, e.node.name, e.what))
    for m in result.model:
        found.add(("model", m.what, m.before, m.after))
    return found


EDITS = ["rename_node", "rename_value", "move", "change_constant", "delete", "insert", "insert_casts", "retype",
         "change_attribute", "rename_input"]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_edits_are_reported_exactly(source: str) -> None:
    """Every kind alone, then three together; the mirror image each time."""
    done: collections.Counter[str] = collections.Counter()
    small = SOURCES[source].parent == MODELS
    for seed, kinds in enumerate([[kind] for kind in EDITS if small] + [None] * (5 if small else 3)):
        editor = Editor(SOURCES[source], seed)
        chosen = kinds or editor.random.sample(EDITS, 3)
        expected: set[Fact] = set()
        for kind in chosen:
            told = editor.apply(kind)
            if told is not None:
                expected |= told
                done[kind] += 1
        result = diff(editor.before, editor.model)
        assert facts(result) == expected, (chosen, seed)
        assert len(result.casts) == sum(fact[0] == "casts" for fact in expected)
        assert_mirrored(diff(editor.model, editor.before), result)
    assert sum(done.values()) >= (15 if small else 8)
    assert len(done) >= (7 if small else 5)


def test_edits_in_bodies_are_reported_with_their_place() -> None:
    done = 0
    for kind in ("rename_node", "rename_value", "delete", "insert", "insert_casts", "change_attribute", "retype"):
        for seed in range(3):
            editor = Editor(SOURCES["loop"], seed)
            expected = getattr(editor, kind)(body=True)
            if expected is None:
                continue
            result = diff(editor.before, editor.model)
            assert facts(result) == expected, (kind, seed)
            assert all("/" in fact[1] + fact[2] for fact in expected)
            done += 1
    assert done >= 12


@pytest.mark.parametrize("source", SOURCES)
def test_equal_models_differ_in_nothing(source: str) -> None:
    model = onnx.load(SOURCES[source])
    result = diff(SOURCES[source], model)
    assert result.empty
    assert result.matched == result.before.nodes + result.before.casts > 0


def assert_mirrored(back: GraphDiff, there: GraphDiff) -> None:
    """`back` holds the mirror images of `there`, in any order."""
    image = there.mirrored()
    for name in (*LISTS, "islands"):
        assert sorted(map(repr, getattr(back, name))) == sorted(map(repr, getattr(image, name))), name
    assert back.before == image.before
    assert back.after == image.after
    assert np.array_equal(back.matched, image.matched)
