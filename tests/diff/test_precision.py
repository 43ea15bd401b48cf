"""Casts, islands, constants and the order: records against what the graphs were made to hold."""

from __future__ import annotations

import itertools
import pathlib
import random

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxamp import diff
from onnxamp.comparison import constants, order
from onnxamp.comparison.numbers import Numbers
from onnxamp.comparison.text import island_rows

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def model(nodes, outputs=("y",), dims=("n", 8), half_outputs=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, dims)],
        [helper.make_tensor_value_info(n, HALF if n in half_outputs else FLOAT, dims) for n in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def cast(source: str, result: str, to: int, name: str = ""):
    return helper.make_node("Cast", [source], [result], name or f"cast_{result}", to=to)


def relu(source: str, result: str):
    return helper.make_node("Relu", [source], [result], f"relu_{result}")


PLAIN = model([relu("x", "y")])


@pytest.mark.parametrize(
    ("nodes", "reasons"),
    [
        ([cast("x", "l", HALF), relu("l", "m"), cast("m", "y", FLOAT)], {}),
        ([cast("x", "z", FLOAT), relu("z", "y")], {"cast_z": "it changes no type"}),
        ([cast("x", "z", HALF), relu("x", "y")], {"cast_z": "nothing reads it"}),
        (
            [cast("x", "l", HALF), cast("l", "z", FLOAT), relu("z", "y")],
            {"cast_z": "with cast_l it only rounds x"},
        ),
        (
            [cast("x", "l", HALF), relu("l", "r"), cast("r", "u", FLOAT), cast("u", "d", HALF), relu("d", "w"),
             cast("w", "y", FLOAT)],
            {"cast_d": "it undoes cast_u"},
        ),
        (
            [cast("x", "l", HALF), cast("x", "k", HALF), helper.make_node("Add", ["l", "k"], ["m"], "add"),
             cast("m", "y", FLOAT)],
            {"cast_k": "it repeats cast_l"},
        ),
    ],
)  # fmt: skip
def test_redundant_casts(nodes, reasons: dict[str, str]) -> None:
    result = diff(PLAIN, model(nodes))
    assert len(result.casts) == sum(n.op_type == "Cast" for n in nodes)
    assert {c.node.name: c.redundant for c in result.casts if c.redundant} == reasons


@pytest.mark.parametrize(
    ("dims", "text", "size", "assumed"),
    [
        ((4, 8), "[4,8]", 192, False),
        (("n", 8), "[n,8]", 48, True),
        ((2, "n"), "[2,n]", 768, True),
        (("n", "n"), "[n,n]", 6, True),
        ((), "[]", 6, False),
    ],
)
def test_bytes_of_casts(dims, text: str, size: int, assumed: bool) -> None:
    result = diff(
        model([relu("x", "y")], dims=dims),
        model([cast("x", "l", HALF), relu("l", "m"), cast("m", "y", FLOAT)], dims=dims),
    )
    down, up = result.casts
    assert (down.shape, down.bytes, down.assumed) == (text, size, assumed)
    assert (up.shape, up.bytes) == (text, size)
    assert (down.fan_out, up.fan_out, down.constant) == (1, 1, False)


def test_islands_are_connected_fp32_nodes_between_casts() -> None:
    nodes = [
        cast("x", "x16", HALF),
        relu("x16", "a"),
        cast("a", "a32", FLOAT),
        helper.make_node("Exp", ["a32"], ["e"], "exp"),
        helper.make_node("Log", ["e"], ["f"], "log"),
        helper.make_node("Neg", ["a32"], ["g"], "neg"),  # joined to the others by the Cast that they share
        cast("f", "f16", HALF),
        cast("g", "g16", HALF),
        helper.make_node("Add", ["f16", "g16"], ["b"], "add"),
        cast("b", "b32", FLOAT),
        helper.make_node("Tanh", ["b32"], ["y"], "tanh"),
    ]
    for node, code in zip(nodes[3:6], ("AMP101", "AMP101", "AMP116"), strict=True):
        node.metadata_props.add(key="onnxamp.code", value=code)
        node.metadata_props.add(key="onnxamp.precision", value="fp32")
    before = model(
        [
            relu("x", "a"),
            helper.make_node("Exp", ["a"], ["e"], "exp"),
            helper.make_node("Log", ["e"], ["f"], "log"),
            helper.make_node("Neg", ["a"], ["g"], "neg"),
            helper.make_node("Add", ["f", "g"], ["b"], "add"),
            helper.make_node("Tanh", ["b"], ["y"], "tanh"),
        ]
    )
    result = diff(before, model(nodes))
    assert result.others == 0
    first, second = result.islands
    assert [n.name for n in first.nodes] == ["exp", "log", "neg"]
    assert [n.name for n in first.entering] == ["cast_a32"]
    assert [n.name for n in first.leaving] == ["cast_f16", "cast_g16"]
    assert first.codes == (("AMP101", 2), ("AMP116", 1))
    assert first.bytes == 3 * 8 * 6
    assert [n.name for n in second.nodes] == ["tanh"]
    assert second.codes == (("", 1),)
    assert {i.change for i in result.mirrored().islands} == {"removed"}


@pytest.mark.parametrize(
    ("codes", "head"),
    [
        (("AMP006", "AMP101", "AMP006"), "soft"),
        (("AMP101", "AMP101", "AMP301"), "soft"),
        (("", "AMP004", "AMP301"), "last"),
        (("", "", ""), "soft"),
    ],
)
def test_an_island_is_headed_by_what_holds_it(codes: tuple[str, ...], head: str) -> None:
    nodes = [
        helper.make_node("Identity", ["x32"], ["i"], "weight"),
        helper.make_node("Exp", ["i"], ["e"], "soft"),
        helper.make_node("Neg", ["e"], ["n"], "last"),
    ]
    ends = [cast("x", "x16", HALF), relu("x16", "r"), cast("r", "x32", FLOAT)]
    nodes[2].output[0] = "y"
    before = model([relu("x", "x32"), *nodes])
    for node, code in zip(nodes, codes, strict=True):
        if code:
            node.metadata_props.add(key="onnxamp.code", value=code)
            node.metadata_props.add(key="onnxamp.precision", value="fp32")
    (found,) = diff(before, model([*ends, *nodes])).islands
    assert [node.name for node in found.nodes] == ["weight", "soft", "last"]
    assert found.head.name == head
    assert island_rows([found])[0][1].startswith(f"{head} (")


def test_a_round_trip_is_no_island() -> None:
    before = model([relu("x", "a"), relu("a", "y")])
    after = model([relu("x", "a"), cast("a", "l", HALF), cast("l", "z", FLOAT), relu("z", "y")])
    result = diff(before, after)
    assert len(result.casts) == 2
    assert not result.islands


BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (np.float32([1, 2]), np.float16([1, 2]), {}),
        (np.float32([0.1, 1]), np.float16([0.1, 1]), {"rounded": 1}),
        (np.float32([0.1, 1]), np.array([0.1, 1], BF16), {"rounded": 1}),
        (np.float32([1e6, -1e6]), np.float16([65504, -65504]), {"clamped": 2}),
        (np.float32([-np.inf, 1]), np.float16([-1e4, 1]), {"clamped": 1}),
        (np.float32([1e6, 1]), np.float16([np.inf, 1]), {"overflowed": 1}),
        (np.float32([1e-9, 1]), np.float16([0, 1]), {"flushed": 1}),
        (np.float32([1e-6, 1]), np.float16([0, 1]), {"flushed": 1}),
        (np.float32([3, 1]), np.float16([4, 1]), {"changed": 1}),
        (np.float32([np.nan, 1]), np.float16([np.nan, 1]), {}),
        (np.float32([np.nan, 1]), np.float16([0, 1]), {"changed": 1}),
        (np.float32([-0.0]), np.float16([0.0]), {"changed": 1}),
        (np.float32([-np.inf]), np.float32([-1e4]), {"clamped": 1}),
        (np.float32([-1e4]), np.float32([-np.inf]), {"overflowed": 1}),
        (np.float32([1e-9]), np.float32([0]), {"changed": 1}),
        (np.int64([1, 2, 3]), np.int64([1, 5, 6]), {"changed": 2}),
        (np.bool_([True]), np.bool_([False]), {"changed": 1}),
        (np.int64([1, 2]), np.int32([1, 2]), {}),
        (np.float64([0.1]), np.float32([0.1]), {"rounded": 1}),
    ],
)
def test_what_happened_to_values(before: np.ndarray, after: np.ndarray, expected: dict[str, int]) -> None:
    tensors = ir.tensor(before), ir.tensor(after)
    change = constants.compare(("c", tensors[0]), ("c", tensors[1]), (), "")
    if before.dtype == after.dtype and not expected:
        assert change is None
        return
    assert change is not None
    kinds = ("rounded", "clamped", "overflowed", "flushed", "changed")
    assert {kind: getattr(change, kind) for kind in kinds if getattr(change, kind)} == expected
    both = np.isfinite(before.astype(float)) & np.isfinite(after.astype(float))
    assert change.max_error == np.abs(before.astype(float) - after.astype(float))[both].max(initial=0)
    back = constants.compare(("c", tensors[1]), ("c", tensors[0]), (), "")
    assert back == change.mirrored()


def test_large_constants_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000).astype(np.float32)
    y = x.astype(np.float16)
    y[::100] += 1
    whole = constants.compare(("c", ir.tensor(x)), ("c", ir.tensor(y)), (), "")
    monkeypatch.setattr(constants, "_BLOCK", 7)
    assert constants.compare(("c", ir.tensor(x)), ("c", ir.tensor(y)), (), "") == whole
    assert whole is not None
    assert whole.changed == 10


def test_moves_are_as_few_as_brute_force_finds() -> None:
    rng = random.Random(0)
    checked = 0
    for _ in range(200):
        size = rng.randrange(1, 8)
        new = rng.sample(range(size), size)
        pairs = [(old, at, f"k{old}") for old, at in enumerate(new)]
        moved = order.moved(pairs)
        longest = next(
            count
            for count in range(size, 0, -1)
            if any(list(c) == sorted(c) for c in itertools.combinations(new, count))
        )
        assert len(moved) == size - longest
        rest = [at for old, at, _ in pairs if (old, at, f"k{old}") not in moved]
        assert rest == sorted(rest)
        inverse = order.moved([(at, old, key) for old, at, key in pairs])
        assert {key for _, _, key in inverse} == {key for _, _, key in moved}
        checked += len(moved) > 0
    assert checked > 100


def test_numbers_find_the_node_that_goes_wrong() -> None:
    """A weight changed in the middle: equal before it, and the first divergence at its reader."""

    def chain(factor: float):
        nodes = [
            relu("x", "a"),
            helper.make_node("Mul", ["a", "w"], ["b"], "scale"),
            helper.make_node("Neg", ["b"], ["y"], "neg"),
        ]
        made = model(nodes)
        made.graph.initializer.append(helper.make_tensor("w", FLOAT, [8], [factor] * 8))
        return made

    from onnxamp.comparison.compare import Comparison
    from onnxamp.comparison.measure import measured

    comparison = Comparison(chain(1.0), chain(3.0))
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    numbers = measured(comparison, comparison.result(), {"x": x}).numbers
    assert isinstance(numbers, Numbers)
    assert numbers.first_divergence == "b"
    by_name = {v.name: v for v in numbers.values}
    assert by_name["a"].snr is None
    assert by_name["b"].max_error == 30
    assert by_name["b"].scale == 15
    assert by_name["b"].snr == pytest.approx(10 * np.log10(1 / 4))
    same = Comparison(chain(1.0), chain(1.0))
    assert measured(same, same.result(), None).numbers.first_divergence == ""


def test_a_value_that_is_zero_in_the_first_model_has_no_ratio_and_diverges() -> None:
    from onnxamp.comparison.compare import Comparison
    from onnxamp.comparison.measure import measured
    from onnxamp.comparison.text import to_text

    def shifted(by: float):
        made = model([relu("x", "a"), helper.make_node("Add", ["a", "w"], ["b"], "shift"), relu("b", "y")])
        made.graph.initializer.append(helper.make_tensor("w", FLOAT, [8], [by] * 8))
        return made

    x = {"x": -np.ones((2, 8), np.float32)}
    comparison = Comparison(shifted(0.0), shifted(1e-20))
    result = measured(comparison, comparison.result(), x)
    assert result.numbers is not None
    found = {value.name: (value.snr, value.decibels, value.ratio) for value in result.numbers.values}
    assert found["a"] == (None, np.inf, "equal")
    assert found["b"] == found["y"] == (None, -np.inf, "no signal")
    assert result.numbers.first_divergence == "b"
    assert "no signal" in to_text(result)
    small = Comparison(shifted(1e-38), shifted(1e38))  # the ratio that it is, however low
    numbers = measured(small, small.result(), x).numbers
    assert numbers is not None
    assert {value.name: value.snr for value in numbers.values}["b"] == pytest.approx(-1520, abs=1e-3)


def test_data_that_are_given_need_no_session_to_try_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxamp.comparison import measure
    from onnxamp.comparison.compare import Comparison

    monkeypatch.delattr(measure, "open_session")
    comparison = Comparison(model([relu("x", "y")]), model([relu("x", "y")]))
    assert measure.measured(comparison, comparison.result(), {"x": np.ones((2, 8), np.float32)}).numbers is not None


def test_numbers_round_where_the_second_model_holds_16_bits() -> None:
    """Overflow in fp16 shows, although ONNX Runtime's CPU provider would hide it."""
    before = model(
        [helper.make_node("Mul", ["x", "x"], ["a"], "square"), helper.make_node("Sqrt", ["a"], ["y"], "root")]
    )
    after = model(
        [
            cast("x", "x16", HALF),
            helper.make_node("Mul", ["x16", "x16"], ["a"], "square"),
            helper.make_node("Sqrt", ["a"], ["r"], "root"),
            cast("r", "y", FLOAT),
        ]
    )
    from onnxamp.comparison.compare import Comparison
    from onnxamp.comparison.measure import measured

    comparison = Comparison(before, after)
    numbers = measured(comparison, comparison.result(), {"x": np.full((1, 8), 1000, np.float32)}).numbers
    assert numbers is not None
    assert numbers.first_divergence == "a"
    assert {v.name: (v.nonfinite, v.ratio) for v in numbers.values} == {"a": (8, "not finite"), "y": (8, "not finite")}


def test_inputs_are_made_up_until_the_model_runs(tmp_path: pathlib.Path) -> None:
    """As for verify: sizes of free dimensions are tried until the graph accepts one."""
    from onnxamp import convert, verify
    from onnxamp.comparison.compare import Comparison
    from onnxamp.comparison.measure import measured
    from onnxamp.model.dimensions import ALTERNATIVES

    size = ALTERNATIVES[0]
    text = f"""<ir_version: 9, opset_import: ["": 17]> g (float[n, m] x) => (float[n, k] y)
        {{ s = Constant <value_ints: ints = [-1, {size}]> ()  r = Reshape(x, s)  y = MatMul(r, w) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((size, 4), np.float32), "w"))
    onnx.save(model, tmp_path / "a.onnx")
    convert(tmp_path / "a.onnx").save(tmp_path / "b.onnx")
    comparison = Comparison(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert measured(comparison, comparison.result(), "synthetic").numbers is not None
    assert verify(tmp_path / "a.onnx", tmp_path / "b.onnx").passed


@pytest.mark.parametrize("kinds", [(HALF, HALF), (HALF, FLOAT)], ids=["to fp16", "kept fp32"])
def test_a_cast_of_the_source_is_retyped_with_its_neighbours(kinds: tuple[int, int]) -> None:
    """Exporters leave Casts that change no type; a conversion gives such a Cast other types, and it is the same Cast."""
    before = model([relu("x", "a"), cast("a", "b", FLOAT), helper.make_node("Exp", ["b"], ["y"], "exp")])
    made = [cast("x", "x16", HALF), relu("x16", "a"), cast("a", "b", kinds[1])]
    made.append(helper.make_node("Exp", ["b"], ["y" if kinds[1] == FLOAT else "y16"], "exp"))
    if kinds[1] == HALF:
        made.append(cast("y16", "y", FLOAT))
    result = diff(before, model(made))
    (own,) = [r for r in result.retyped if r.node.op == "Cast"]
    assert (own.node.name, own.slots[0]) == (own.counterpart.name, ("input 0", "fp32", "fp16"))
    assert [c.change for c in result.casts] == ["added"] * (len(made) - 3)
    assert result.others == 0
    assert diff(model(made), before) == result.mirrored()


def test_types_are_inferred_whatever_the_file_declares() -> None:
    """Converters leave declarations of inner values as they were: types follow from the nodes."""
    before = model([relu("x", "a"), helper.make_node("Exp", ["a"], ["y"], "exp")])
    after = model(
        [cast("x", "l", HALF), relu("l", "a"), helper.make_node("Exp", ["a"], ["h"], "exp"), cast("h", "y", FLOAT)]
    )
    stale = [helper.make_tensor_value_info(name, FLOAT, ["n", 8]) for name in ("l", "a", "h")]
    after.graph.value_info.extend(stale)
    result = diff(before, after)
    assert {r.node.op for r in result.retyped} == {"Relu", "Exp"}
    assert [(c.source, c.target) for c in result.casts] == [("fp32", "fp16"), ("fp16", "fp32")]


def test_a_mirror_lists_in_the_order_of_the_diff() -> None:
    """Casts and nodes that came and went at once: the mirror image is the diff of the swapped models, order included."""
    before = model([cast("x", "u", FLOAT), relu("u", "b"), helper.make_node("Exp", ["b"], ["y"], "exp")])
    after = model(
        [
            cast("x", "h", HALF),
            cast("h", "a", HALF),
            relu("a", "b"),
            cast("b", "w", FLOAT),
            helper.make_node("Tanh", ["w"], ["y"], "tanh"),
        ]
    )
    there, back = diff(before, after), diff(after, before)
    assert {c.change for c in there.casts} == {n.change for n in there.nodes} == {"added", "removed"}
    assert there.mirrored().to_json() == back.to_json()
