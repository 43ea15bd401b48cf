"""Conversions: everything that a reader of the two files finds is reported, and nothing else."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxamp import convert, diff

_MODELS = pathlib.Path(__file__).parents[2] / "models"
# Not the conversions that README's command leaves there.
MODELS = sorted({*_MODELS.glob("*.onnx")} - {*_MODELS.glob("*.*.onnx")})
LOW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
FLOATS = {TensorProto.FLOAT, *LOW}


def graphs(graph: onnx.GraphProto):
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for graph in graphs(model.graph) for node in graph.node]


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def islands_of(model: onnx.ModelProto) -> list[list[str]]:
    """Connected fp32 nodes that touch a Cast of the conversion, by the notes in the file alone.

    Two are connected by a value that one writes and the other reads, or by a Cast to fp32 that both read.
    """
    fp32 = {n.output[0]: n for n in nodes(model) if metadata(n).get("onnxamp.precision") == "fp32"}
    casts = [n for n in nodes(model) if "onnxamp.cast" in metadata(n)]
    raised = {n.output[0] for n in casts if metadata(n)["onnxamp.cast"] == "fp32"}
    lowered = {n.input[0] for n in casts if metadata(n)["onnxamp.cast"] != "fp32"}
    links: dict[str, set[str]] = {key: set() for key in fp32}
    border = set()
    for key, node in fp32.items():
        near = {name for name in node.input if name in raised}
        border |= {key} if near or lowered & set(node.output) else set()
        for other, found in fp32.items():
            if set(found.output) & set(node.input) or near & set(found.input):
                links[key].add(other)
                links[other].add(key)
    left, regions = set(fp32), []
    while left:
        region, todo = set(), [left.pop()]
        while todo:
            key = todo.pop()
            region.add(key)
            todo += links[key] - region
        left -= region
        if region & border:
            regions.append(sorted(fp32[key].name or key for key in region))
    return regions


@pytest.mark.parametrize(("level", "dtype"), [("OD", "fp16"), ("O1", "bf16"), ("O2", "fp16"), ("O3", "fp16")])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_our_conversions(path: pathlib.Path, level: str, dtype: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "low.onnx"
    convert(path, level=level, dtype=dtype, target="any").save(target)
    result = diff(path, target)
    before, after = onnx.load(path), onnx.load(target)

    assert result.others == 0
    opsets = [opset.version for model in (before, after) for opset in model.opset_import if opset.domain == ""]
    assert [(r.before, r.after) for r in result.raised] == [tuple(map(str, opsets))] * (len(set(opsets)) > 1)
    inserted = [node for node in nodes(after) if "onnxamp.cast" in metadata(node)]
    assert sorted(c.node.name for c in result.casts) == sorted(node.name for node in inserted)
    assert all(c.change == "added" and c.source and c.target for c in result.casts)
    low = {node.name or node.output[0] for node in nodes(after) if metadata(node).get("onnxamp.precision") == dtype}
    assert low <= {r.node.name for r in result.retyped}
    assert low
    for retyped in result.retyped:
        assert retyped.decision is not None
        assert retyped.decision.code.startswith("AMP")
    islands = [sorted(n.name for n in island.nodes) for island in result.islands]
    assert sorted(islands) == sorted(islands_of(after))
    assert islands or level == "O3"
    kept = {name for names in islands for name in names}
    recorded = {node.name or node.output[0]: metadata(node).get("onnxamp.precision") for node in nodes(after)}
    assert all(recorded[name] == "fp32" for name in kept)
    assert all(code for island in result.islands for code, _ in island.codes)

    types = [{t.name: t.data_type for g in graphs(m.graph) for t in g.initializer} for m in (before, after)]
    changed = {name for name, kind in types[0].items() if types[1].get(name) != kind}
    assert changed <= {c.before for c in result.constants}
    assert {c.before for c in result.constants} <= set(types[0]) | {n.output[0] for n in nodes(before)}


@pytest.mark.parametrize("blocked", [[], ["Softmax", "LayerNormalization"], ["Add", "Relu"]], ids=str)
@pytest.mark.parametrize("path", [p for p in MODELS if p.stem != "loop"], ids=lambda path: path.stem)
def test_conversions_by_another_tool(path: pathlib.Path, blocked: list[str]) -> None:
    """ONNX Runtime's float16 tool: Casts, retyped nodes and constants as a count over the files gives them."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    before = onnx.load(path)
    after = float16.convert_float_to_float16(onnx.load(path), keep_io_types=True, op_block_list=blocked)
    result = diff(before, after)
    assert result.others == 0
    casts = [sum(n.op_type == "Cast" for n in nodes(m)) for m in (before, after)]
    assert len(result.casts) == casts[1] - casts[0] > 0
    touched = {r.node.op for r in result.retyped}
    assert not touched & set(blocked)
    assert {"MatMul", "Gemm", "Conv", "LSTM"} & touched
    halves = [t for t in after.graph.initializer if t.data_type == TensorProto.FLOAT16]
    assert {t.name for t in halves} <= {c.after for c in result.constants}


def attention(mask: np.ndarray, half: bool, rename: str = "") -> onnx.ModelProto:
    """A masked Softmax as exporters write it, in fp32 or as a converter rewrites it, with other node names if asked."""
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    made = [
        helper.make_node("Cast", ["x"], ["x_low"], "x_cast", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["x_low" if half else "x", "w"], ["s"], rename + "scores"),
        helper.make_node("Where", ["keep", "s", "mask"], ["m"], rename + "masked"),
        helper.make_node("Softmax", ["m"], ["y_low" if half else "y"], rename + "softmax"),
        helper.make_node("Cast", ["y_low"], ["y"], "y_cast", to=TensorProto.FLOAT),
    ]
    weights = np.arange(16).reshape(4, 4) / 8
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    graph = helper.make_graph(
        made if half else made[1:4],
        "attention",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, ["n", 4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(weights.astype(dtype), "w"), numpy_helper.from_array(mask.astype(dtype), "mask")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("rename", ["", "n_"])
def test_a_mask_turned_from_infinity_into_a_number(rename: str) -> None:
    before = attention(np.array([-np.inf], np.float32), half=False)
    after = attention(np.array([-10000.0], np.float32), half=True, rename=rename)
    result = diff(before, after)
    (mask,) = [c for c in result.constants if c.altered]
    assert (mask.before, mask.clamped, mask.uses) == ("mask", 1, ("masked[2]",))
    assert {r.node.op for r in result.retyped} == {"MatMul", "Where", "Softmax"}
    assert [(c.source, c.target, c.tensor) for c in result.casts] == [("fp32", "fp16", "x"), ("fp16", "fp32", "y")]
    assert [r.after for r in result.renamed] == (
        [rename + "masked", rename + "scores", rename + "softmax"] if rename else []
    )
    assert result.others == len(result.renamed)
    assert not result.islands


def test_an_inlined_function_is_one_difference() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["b"], "square"), helper.make_node("Relu", ["b"], ["c"], "cut")]
    function = helper.make_function("local", "Square", ["a"], ["c"], body, [helper.make_opsetid("", 17)])
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    calls = [
        helper.make_node("Square", ["x"], ["t"], "call", domain="local"),
        helper.make_node("Exp", ["t"], ["y"], "exp"),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    model = helper.make_model(
        helper.make_graph(calls, "g", info[:1], info[1:]), opset_imports=opsets, functions=[function], ir_version=9
    )
    flat = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Mul", ["x", "x"], ["b"], "square"),
                helper.make_node("Relu", ["b"], ["t"], "cut"),
                helper.make_node("Exp", ["t"], ["y"], "exp"),
            ],
            "g",
            info[:1],
            info[1:],
        ),
        opset_imports=opsets,
        ir_version=9,
    )
    result = diff(model, flat)
    assert [(m.what, m.before, m.after) for m in result.model] == [("function local::Square", "2 nodes", "inlined")]
    assert not result.nodes
    assert result.matched == 3
    gone = onnx.ModelProto.FromString(model.SerializeToString())
    del gone.graph.node[0]
    gone.graph.node[0].input[0] = "x"
    del gone.functions[:]
    result = diff(model, gone)
    assert [(n.change, n.node.name) for n in result.nodes] == [("removed", "call")]
    assert [m.what for m in result.model] == ["function local::Square"]


# What onnxconverter-common 1.16 makes of BEFORE, as text: float16.convert_float_to_float16(..., keep_io_types=True), with and without
# op_block_list=["Softmax"]. It clips -1e9 to -1e4.
BEFORE = """<ir_version: 9, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y)
    <float[4] w = {1.0, 2.0, 3.0, 4.0}, float[4] mask = {0.0, 0.0, 0.0, -1e9}>
    { [scores] s = Mul(x, w)  [masked] m = Add(s, mask)  [soft] p = Softmax(m)  [last] y = Mul(p, w) }"""
LOWERED = """<ir_version: 9, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y)
    <float16[4] w = {15360, 16384, 16896, 17408}, float16[4] mask = {0, 0, 0, 61666}>
    { [x_cast_to_scores] x_cast_to_scores = Cast <to: int = 10> (x)
      [scores] s = Mul(x_cast_to_scores, w)  [masked] m = Add(s, mask)  [soft] p = Softmax(m)
      [last] last_cast_to_y = Mul(p, w)
      [last_cast_to_y] y = Cast <to: int = 1> (last_cast_to_y) }"""
BLOCKED = """<ir_version: 9, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y)
    <float16[4] w = {15360, 16384, 16896, 17408}, float16[4] mask = {0, 0, 0, 61666}>
    { [x_cast_to_scores] x_cast_to_scores = Cast <to: int = 10> (x)
      [scores] s = Mul(x_cast_to_scores, w)  [masked] m = Add(s, mask)
      [soft_input_cast0] soft_input_cast_0 = Cast <to: int = 1> (m)
      [soft] soft_output_cast_0 = Softmax(soft_input_cast_0)
      [soft_output_cast0] p = Cast <to: int = 10> (soft_output_cast_0)
      [last] last_cast_to_y = Mul(p, w)
      [last_cast_to_y] y = Cast <to: int = 1> (last_cast_to_y) }"""


@pytest.mark.parametrize(("after", "island"), [(LOWERED, []), (BLOCKED, ["soft"])], ids=["all", "without Softmax"])
def test_conversions_by_onnxconverter_common(after: str, island: list[str]) -> None:
    result = diff(onnx.parser.parse_model(BEFORE), onnx.parser.parse_model(after))
    assert result.others == 0
    names = ["scores", "masked", "soft", "last"]
    assert sorted(r.node.name for r in result.retyped) == sorted(set(names) - set(island))
    assert [[n.name for n in found.nodes] for found in result.islands] == ([island] if island else [])
    assert len(result.casts) == after.count("Cast <")
    assert {c.before for c in result.constants} == {"w", "mask"}
    assert {c.before: c.clamped for c in result.constants if c.altered} == {"mask": 1}
