"""Calibration: streaming ranges against an in-memory reference, and planted faults that only the data show."""

from __future__ import annotations

import json
import pathlib
import tracemalloc

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

import onnxamp
from onnxamp.cli import cli
from onnxamp.dtypes import FP16
from onnxamp.errors import UsageError
from onnxamp.evidence.calibration import calibrate
from onnxamp.evidence.observe import Observed
from onnxamp.policy import codes

RNG = np.random.default_rng(0)


def proto(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


W = (RNG.standard_normal((16, 16)) / 4).astype(np.float32)
CHAIN = proto(
    """g (float[batch,16] x) => (float[batch,16] y)
    { [a] a = MatMul(x, w)  [b] b = Relu(a)  [c] c = MatMul(b, w)  [d] d = Add(c, x)  [e] y = Tanh(d) }""",
    w=W,
)


def batches(count: int, rows: int = 4) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((rows, 16)).astype(np.float32)} for _ in range(count)]


def test_streaming_ranges_equal_those_of_all_samples_in_memory() -> None:
    data = batches(25)
    found = {row.value: row for row in calibrate(CHAIN, iter(data)).values}
    x = np.concatenate([sample["x"] for sample in data])
    a = x @ W
    b = np.maximum(a, 0)
    d = b @ W + x
    for name, array in {"x": x, "a": a, "b": b, "d": d, "y": np.tanh(d)}.items():
        row, size = found[name], np.abs(array)
        assert row.count == array.size
        assert row.absmax == pytest.approx(size.max(), rel=1e-6)
        assert row.absmin == pytest.approx(size[size > 0].min(), rel=1e-2)
        assert row.zeros == pytest.approx(np.count_nonzero(array == 0), abs=0)
        assert not row.bad


def test_statistics_do_not_depend_on_how_samples_are_cut() -> None:
    array = np.concatenate([np.geomspace(1e-9, 1e6, 400), [0, -3.0, np.inf, np.nan]]).astype(np.float32)
    whole, parts = (Observed("v", "n", "Mul", backward=False, precision="fp32") for _ in range(2))
    whole.add(array, FP16, 0)
    for part in np.array_split(array, 7):
        parts.add(part, FP16, 0)
    assert whole == parts
    assert (whole.nan, whole.inf, whole.zeros) == (1, 1, 1)
    size = np.abs(array[np.isfinite(array)])
    with np.errstate(over="ignore"):
        half = size.astype(np.float16)
    assert whole.overflow == np.count_nonzero(np.isinf(half))
    assert whole.flushed == np.count_nonzero((half == 0) & (size > 0))


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    def peak(count: int) -> int:
        rng = np.random.default_rng(2)
        stream = ({"x": rng.standard_normal((256, 16)).astype(np.float32)} for _ in range(count))
        tracemalloc.start()
        calibrate(CHAIN, stream)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(2)
    assert peak(400) < peak(10) + 200_000  # 400 samples alone are 6.5 MB


# Each fault is in one value, on data only: ordinary inputs leave every value far inside the range.
def residual() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """A residual stream that grows as in T5: the sum overflows, no operand of it does."""
    model = proto(
        """g (float[2,16] x, float[2,16] r) => (float[2,16] y)
        { [q] q = MatMul(x, w)  [sum] s = Add(q, r)  [norm] n = LayerNormalization<axis = -1>(s, scale)  [o] y = MatMul(n, w) }""",
        w=W,
        scale=np.ones(16, np.float32),
    )
    calm = {"x": np.ones((2, 16), np.float32), "r": np.ones((2, 16), np.float32)}
    grown = {"x": calm["x"], "r": np.full((2, 16), 7000, np.float32)}
    q = np.abs(calm["x"] @ W).max()
    grown["x"] = (calm["x"] * (6000 / q)).astype(np.float32)
    return model, grown, "s", "sum"


def temperature() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """Logits times a temperature that is an input."""
    model = proto(
        """g (float[2,16] x, float[1] t) => (float[2,16] y)
        { [q] q = MatMul(x, w)  [scaled] s = Mul(q, t)  [p] y = Softmax<axis = -1>(s) }""",
        w=W,
    )
    return model, {"x": np.full((2, 16), 200, np.float32), "t": np.array([1000], np.float32)}, "s", "scaled"


def outlier() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """A channel that a projection drives out of range in front of a LayerNormalization."""
    heavy = W.copy()
    heavy[:, 3] *= 500
    model = proto(
        """g (float[2,16] x) => (float[2,16] y)
        { [up] u = MatMul(x, h)  [norm] n = LayerNormalization<axis = -1>(u, scale)  [o] y = MatMul(n, w) }""",
        h=heavy,
        w=W,
        scale=np.ones(16, np.float32),
    )
    return model, {"x": np.sign(heavy[:, 3])[None].repeat(2, 0).astype(np.float32) * 60}, "u", "up"


def positions() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """Rotary angles: position times frequency, harmless up to short lengths."""
    model = proto(
        """g (float[1,8] p, float[8,16] x) => (float[8,16] y)
        { [t] t = Transpose<perm = [1, 0]>(p)  [angle] a = MatMul(t, f)  [cos] c = Cos(a)  [rot] r = Mul(x, c)  [o] y = MatMul(r, w) }""",
        f=np.geomspace(1, 1e-3, 16).astype(np.float32)[None],
        w=W,
    )
    long = np.linspace(0, 120_000, 8).astype(np.float32)[None]
    return model, {"p": long, "x": np.ones((8, 16), np.float32)}, "a", "angle"


def gated() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """A gated feed-forward layer: neither branch is large, their product is."""
    model = proto(
        """g (float[2,16] x) => (float[2,16] y)
        { [gate] g = MatMul(x, w)  [up] u = MatMul(x, v)  [product] p = Mul(g, u)  [norm] n = LayerNormalization<axis = -1>(p, scale)
          [down] y = MatMul(n, w) }""",
        w=W,
        v=W[::-1].copy(),
        scale=np.ones(16, np.float32),
    )
    x = np.full((2, 16), 1, np.float32)
    largest = np.abs((x @ W) * (x @ W[::-1])).max()
    return model, {"x": x * np.float32(np.sqrt(200_000 / largest))}, "p", "product"


def energy() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """The loudness of a long recording: a sum of many small numbers."""
    model = proto(
        """g (float[2,16,8192] x) => (float[2,16] y)
        { [rect] r = Abs(x)  [total] t = ReduceSum<keepdims = 0>(r, axes)  [log] l = Log(t)  [o] y = MatMul(l, w) }""",
        axes=np.array([2], np.int64),
        w=W,
    )
    return model, {"x": np.full((2, 16, 8192), 20, np.float32)}, "t", "total"


def quotient() -> tuple[onnx.ModelProto, dict[str, np.ndarray], str, str]:
    """A division by what is almost zero on the data."""
    model = proto(
        """g (float[2,16] x, float[2,16] d) => (float[2,16] y)
        { [q] q = MatMul(x, w)  [ratio] r = Div(q, d)  [bounded] b = Tanh(r)  [o] y = MatMul(b, w) }""",
        w=W,
    )
    calm = np.ones((2, 16), np.float32)
    return model, {"x": calm, "d": calm * np.float32(np.abs(calm @ W).max() / 150_000)}, "r", "ratio"


FAULTS = [residual, temperature, outlier, positions, gated, energy, quotient]


@pytest.mark.parametrize("fault", FAULTS)
def test_calibration_finds_the_node_that_overflows_on_the_data_only(fault) -> None:
    model, data, value, node = fault()
    calibration = calibrate(model, data)
    inputs = {item.name for item in model.graph.input}
    moved = {"t"} if fault is positions else set()
    assert {row.value for row in calibration.beyond} - inputs - moved == {value}
    assert not calibration.warnings()
    plain = {n.name: d for n, d in onnxamp.convert(model).plan.nodes.items()}
    result = onnxamp.convert(model, ranges=calibration.ranges)
    decision = {n.name: d for n, d in result.plan.nodes.items()}[node]
    assert (decision.precision, decision.code) == ("fp32", codes.RANGE)
    assert decision.evidence["value"] == value
    assert plain[node].code != codes.RANGE
    blamed = [d.evidence for d in result.plan.decisions.values() if d.code == codes.RANGE]
    assert {evidence["value"] for evidence in blamed if "value" in evidence} - inputs - moved == {value}
    assert onnxamp.verify(model, result.model, data, check_file=False).passed


@pytest.mark.parametrize("fault", FAULTS)
def test_what_overflows_fp16_is_ordinary_in_bf16(fault) -> None:
    model, data, _, node = fault()
    calibration = calibrate(model, data, dtype="bf16")
    assert calibration.beyond == []
    result = onnxamp.convert(model, dtype="bf16", ranges=calibration.ranges)
    assert {n.name: d for n, d in result.plan.nodes.items()}[node].code != codes.RANGE


def test_beyond_bf16_is_found_too() -> None:
    model, data, value, node = temperature()
    data["t"] = np.array([1e36], np.float32)
    calibration = calibrate(model, data, dtype="bf16")
    assert value in {row.value for row in calibration.beyond}
    result = onnxamp.convert(model, dtype="bf16", ranges=calibration.ranges)
    assert {n.name: d for n, d in result.plan.nodes.items()}[node].code == codes.RANGE


# The temperature fault in a body; `[up]` overflows in fp16 on the data only, and what it makes never leaves the body.
BODIES = {
    "If": """y = If(c)<
        then_branch = yes () => (float[2,16] o) { [up] u = Mul(x, t)  [p] p = Softmax<axis = -1>(u)  [mm] o = MatMul(p, w) },
        else_branch = no () => (float[2,16] e) { [calm] e = MatMul(x, w) }>""",
    "Loop": """y = Loop<body = b (int64 i, bool go, float[2,16] s) => (bool more, float[2,16] o) {
        more = Identity(go)  [up] u = Mul(x, t)  [p] p = Softmax<axis = -1>(u)  [mm] m = MatMul(p, w)  [calm] o = Add(m, s) }>(n, c, x)""",
    "Scan": """[twice] xx = Concat<axis = 0>(x, x)  shape = Constant<value_ints = [2, 2, 16]>()  seq = Reshape(xx, shape)
        last, all = Scan<num_scan_inputs = 1, body = b (float[2,16] s, float[2,16] e) => (float[2,16] o, float[2,16] o2) {
        [up] u = Mul(e, t)  [p] p = Softmax<axis = -1>(u)  [mm] m = MatMul(p, w)  [calm] o = Add(m, s)  o2 = Identity(o) }>(x, seq)
        y = Identity(last)""",
    "If in Loop": """y = Loop<body = b (int64 i, bool go, float[2,16] s) => (bool more, float[2,16] o) {
        more = Identity(go)  zero = Constant<value_int = 0>()  first = Equal(i, zero)
        o = If(first)<
            then_branch = yes () => (float[2,16] a) { [up] u = Mul(x, t)  [p] p = Softmax<axis = -1>(u)  [mm] a = MatMul(p, w) },
            else_branch = no () => (float[2,16] e) { [calm] e = MatMul(s, w) }> }>(n, c, x)""",
}


def nested(kind: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = proto(f"g (float[2,16] x, float[1] t, bool c, int64 n) => (float[2,16] y) {{ {BODIES[kind]} }}", w=W)
    onnx.checker.check_model(model, full_check=True)
    x = np.full((2, 16), 200, np.float32)
    return model, {"x": x, "t": np.array([1000], np.float32), "c": np.array(True), "n": np.array(3)}


@pytest.mark.parametrize("kind", BODIES)
def test_calibration_finds_the_node_inside_a_body(kind: str) -> None:
    model, data = nested(kind)
    calibration = calibrate(model, data)
    (row,) = calibration.beyond
    assert (row.value, row.node, row.op) == ("u", "up", "Mul")
    assert row.absmax == 200_000
    assert row.count == {"If": 32, "Loop": 96, "Scan": 64, "If in Loop": 32}[kind]
    result = onnxamp.convert(model, ranges=calibration.ranges)
    decision = {n.name: d for n, d in result.plan.nodes.items()}["up"]
    assert (decision.precision, decision.code, decision.evidence["value"]) == ("fp32", codes.RANGE, "u")
    assert onnxamp.verify(model, result.model, data, check_file=False).passed
    calm = calibrate(model, data | {"t": np.array([1], np.float32)})
    assert calm.beyond == []
    assert {row.value for row in calm.values} >= {"u", "p"}


def test_a_body_that_never_runs_has_no_ranges() -> None:
    model, data = nested("Loop")
    names = {row.value for row in calibrate(model, data | {"n": np.array(0)}).values}
    assert names == {"x", "t", "y"}
    model, data = nested("If")
    names = {row.value for row in calibrate(model, data | {"c": np.array(False)}).values}
    assert names == {"x", "t", "y", "e"}


def test_a_body_that_cannot_be_measured_is_named() -> None:
    model, data = nested("If")
    model.opset_import[0].version = 10
    del model.graph.node[:]
    model.graph.MergeFrom(
        parser.parse_graph("""g () => () { y = If(c)<
        then_branch = yes () => (float[2,16] o) { [up] u = Mul(x, t)  o = Tanh(u) },
        else_branch = no () => (float[2,16] e) { [calm] e = MatMul(x, w) }> }""")
    )
    (warning,) = calibrate(model, data).warnings()
    assert "If 'y'" in warning


def test_ranges_inside_a_body_equal_those_of_the_values_in_memory() -> None:
    model, data = nested("If in Loop")
    rng = np.random.default_rng(3)
    samples = [data | {"x": rng.standard_normal((2, 16)).astype(np.float32)} for _ in range(5)]
    found = {row.value: row for row in calibrate(model, samples).values}
    exact: dict[str, list[np.ndarray]] = {"u": [], "a": [], "e": []}
    for sample in samples:
        u = sample["x"] * sample["t"]
        weights = np.exp(u - u.max(-1, keepdims=True))
        a = weights / weights.sum(-1, keepdims=True) @ W
        for name, array in (("u", u), ("a", a), ("e", a @ W), ("e", a @ W @ W)):
            exact[name].append(array)
    for name, arrays in exact.items():
        assert found[name].absmax == pytest.approx(max(np.abs(array).max() for array in arrays), rel=1e-5)
        assert found[name].count == sum(array.size for array in arrays)


def test_nan_and_infinities_inside_a_body_are_said() -> None:
    model = proto(
        """g (float[2,16] x, bool c) => (float[2,16] y) { y = If(c)<
        then_branch = yes () => (float[2,16] o) { [root] r = Sqrt(x)  [zero] z = Sub(r, r)  [over] o = Div(x, z) },
        else_branch = no () => (float[2,16] e) { [calm] e = Identity(x) }> }"""
    )
    x = np.ones((2, 16), np.float32)
    x[0, 0] = -1
    calibration = calibrate(model, {"x": x, "c": np.array(True)})
    found = {row.value: (row.count, row.nan, row.inf, row.absmax) for row in calibration.values}
    assert found["r"] == (32, 1, 0, 1.0)
    assert found["o"] == (32, 1, 31, 0.0)
    assert calibration.warnings()


def test_a_function_is_seen_where_it_is_called() -> None:
    model, data, _, _ = temperature()
    graph = model.graph
    call = onnx.helper.make_node("Scaled", ["q", "t"], ["s"], domain="local", name="call")
    function = onnx.helper.make_function(
        "local", "Scaled", ["a", "b"], ["r"], [onnx.helper.make_node("Mul", ["a", "b"], ["r"], name="up")],
        [onnx.helper.make_opsetid("", 20)],
    )  # fmt: skip
    graph.node[1].CopyFrom(call)
    model.functions.append(function)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    calibration = calibrate(model, data)
    assert [row.value for row in calibration.beyond] == ["s"]
    result = onnxamp.convert(model, ranges=calibration.ranges)
    decisions = {n.outputs[0].name: d for n, d in result.plan.nodes.items()}
    assert (decisions["s"].precision, decisions["s"].code) == ("fp32", codes.RANGE)


@pytest.mark.parametrize("fault", FAULTS)
def test_without_data_a_fault_is_warned_of(fault) -> None:
    model, _, _, node = fault()
    calibration = calibrate(model)
    (warning,) = calibration.warnings()
    assert "a value that grows only on real data is not seen" in warning
    result = onnxamp.convert(model, ranges=calibration.ranges)
    assert {n.name: d for n, d in result.plan.nodes.items()}[node].code != codes.RANGE


def test_the_faults_are_real() -> None:
    """Without calibration some of them spoil the outputs; of the others a rule knows the operator, or LayerNormalization, cosine or tanh
    hides what breaks."""
    failed = []
    for fault in FAULTS:
        model, data, _, _ = fault()
        failed.append(not onnxamp.verify(model, onnxamp.convert(model).model, data, check_file=False).passed)
    assert sum(failed) >= 2, failed


def test_without_data_the_report_warns_and_no_rule_is_lifted() -> None:
    made_up = calibrate(CHAIN)
    assert made_up.made_up
    assert made_up.ranges == {}
    (warning,) = made_up.warnings()
    assert "made up" in warning


def test_data_well_inside_the_range_lift_what_is_fp32_for_fear_of_it() -> None:
    model = proto(
        """g (float[2,16] x) => (float[2,16] y)
        { [a] a = MatMul(x, w)  [sq] s = Mul(a, a)  [add] b = Add(s, x)  [o] y = MatMul(b, w) }""",
        w=W,
    )
    data = {"x": np.ones((2, 16), np.float32)}
    feared = {n.name: d.precision for n, d in onnxamp.convert(model).plan.nodes.items()}
    lifted = {
        n.name: d.precision for n, d in onnxamp.convert(model, ranges=calibrate(model, data).ranges).plan.nodes.items()
    }
    assert feared["sq"] == feared["add"] == "fp32"
    assert lifted["sq"] == lifted["add"] == "fp16"


def test_a_mask_is_no_range() -> None:
    model = proto(
        """g (float[2,16] x, bool[2,16] m) => (float[2,16] y)
        { [a] a = MatMul(x, w)  [mask] s = Where(m, a, low)  [p] q = Softmax<axis = -1>(s)  [o] y = MatMul(q, w) }""",
        w=W,
        low=np.array(-1e9, np.float32),
    )
    data = {"x": np.ones((2, 16), np.float32), "m": np.arange(32).reshape(2, 16) % 3 > 0}
    result = onnxamp.convert(model, ranges=calibrate(model, data).ranges)
    assert not any(decision.code == codes.RANGE for decision in result.plan.decisions.values())


def test_not_finite_in_the_reference_is_said() -> None:
    model = proto("g (float[2,16] x) => (float[2,16] y) { [root] y = Sqrt(x) }")
    (warning,) = calibrate(model, {"x": np.full((2, 16), -1, np.float32)}).warnings()
    assert "32 NaN" in warning
    assert "'root'" in warning


@pytest.mark.parametrize(("headroom", "kept"), [(1.0, "fp16"), (4.0, "fp32"), (8.0, "fp32")])
def test_the_headroom_says_how_near_to_the_limit_is_too_near(headroom: float, kept: str) -> None:
    model, data, _, _ = temperature()
    data["t"] = np.array([100], np.float32)  # 20,000 and a little, a third of the largest number
    calibration = calibrate(model, data, headroom=headroom)
    assert bool(calibration.beyond) == (kept == "fp32")
    result = onnxamp.convert(model, ranges=calibration.ranges, headroom=headroom)
    decision = {n.name: d for n, d in result.plan.nodes.items()}["scaled"]
    assert decision.precision == kept
    assert decision.code != codes.RANGE or decision.evidence["limit"] == 65504 / headroom
    with pytest.raises(UsageError, match="headroom"):
        onnxamp.convert(model, headroom=0.5)


def test_the_command(tmp_path: pathlib.Path) -> None:
    model, data, value, _ = temperature()
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **data)
    arguments = ["convert", str(tmp_path / "m.onnx"), "--calibrate", str(tmp_path / "d.npz"), "--json"]
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)["calibration"]
    assert (found["samples"], found["made_up"], [row["value"] for row in found["beyond"]]) == (1, False, [value])
    arguments[3:] = ["made-up", "--force"]
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    assert "made up" in ran.output
    ran = CliRunner().invoke(
        cli, [*arguments[:2], "--calibrate", str(tmp_path / "d.npz"), "--headroom", "2", "--force", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["calibration"]["limit"] == 32752
    with pytest.raises(UsageError, match="--calibrate"):
        CliRunner().invoke(cli, [*arguments[:2], "--headroom", "2"], catch_exceptions=False)
