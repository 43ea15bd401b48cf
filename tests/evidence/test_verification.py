"""Verification: what passes, what fails, and where it says that a failure begins."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

import onnxamp
from onnxamp.cli import cli
from onnxamp.errors import DataError, ModelError, RuntimeMissingError, UnsupportedError, UsageError
from onnxamp.evidence import Tolerance, VerifyResult, verification, verify
from onnxamp.evidence.calibration import calibrate
from onnxamp.ort.session import SessionConfig
from onnxamp.ort.worker import Answer


def proto(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


REFERENCE = proto("""g (float[batch,4] x) => (float[batch,4] y)
    { [square] a = Mul(x, x)  [cube] b = Mul(a, x)  [root] c = Sqrt(b)  [out] y = Add(c, x) }""")

# The same in fp16 all the way, as an over-eager converter would write it.
LOW = proto("""g (float[batch,4] x) => (float[batch,4] y)
    { xl = Cast <to = 10> (x)  [square] a = Mul(xl, xl)  [cube] b = Mul(a, xl)  [root] c = Sqrt(b)  [out] z = Add(c, xl)
      y = Cast <to = 1> (z) }""")

SMALL = {"x": np.linspace(0.1, 2, 8, dtype=np.float32).reshape(2, 4)}
LARGE = {"x": np.array([[1, 2, 3, 45], [1, 1, 1, 1]], np.float32)}  # 45³ is beyond 65504, 45² is not


def check(
    reference: onnx.ModelProto, candidate: onnx.ModelProto, data: object, tolerance: object = None
) -> VerifyResult:
    return verify(reference, candidate, data, tolerance, check_file=False)  # type: ignore[arg-type]


def test_a_good_conversion_passes() -> None:
    result = verify(REFERENCE, LOW, SMALL)
    assert result.passed
    assert result.precision == "fp16"
    assert not result.problems
    assert result.divergence is None
    (output,) = result.outputs
    assert output.name == "y"
    assert output.worst.elements == 8
    assert 50 < output.worst.snr < 100
    assert result.samples == 1


def test_overflow_is_found_where_it_happens_though_the_cpu_hides_it() -> None:
    from onnxamp.ort.session import open_session, run

    hidden = run(open_session(LOW), LARGE)["y"]
    assert np.isfinite(hidden).all(), "ONNX Runtime itself shows no overflow here"
    low = onnx.ModelProto()
    low.CopyFrom(LOW)
    for key, text in {"precision": "fp16", "code": "AMP003", "evidence": '{"bytes": 7}'}.items():
        low.graph.node[2].metadata_props.add(key=f"onnxamp.{key}", value=text)
    result = check(REFERENCE, low, [SMALL, LARGE])
    assert not result.passed
    (output,) = result.outputs
    assert output.sample == 1
    assert output.worst.inf == 1
    assert output.missed == ("nonfinite 1 > 0",)
    found = result.divergence
    assert found is not None
    assert (found.node, found.op_type, found.value, found.kind) == ("cube", "Mul", "b", "non-finite")
    assert (found.precision, found.code, found.evidence) == ("fp16", "AMP003", {"bytes": 7})
    assert found.largest == 45**3


def test_rounding_is_found_where_it_begins() -> None:
    """Adding and taking away 2048 costs fp16 all digits behind the point; what comes later is not to blame."""
    text = "[first] a = Mul({x}, {x})  [up] b = Add(a, k)  [down] c = Sub(b, k)  [last] d = Mul(c, c)"
    reference = proto(f"g (float[8] x) => (float[8] d) <float k = {{2048}}> {{ {text.format(x='x')} }}")
    low = proto(f"""g (float[8] x) => (float[8] y) <float16 k = {{26624}}>
        {{ xl = Cast <to = 10> (x) {text.format(x="xl")} y = Cast <to = 1> (d) }}""")
    low.graph.output[0].name = low.graph.node[-1].output[0] = "d"
    low.graph.node[-1].input[0] = low.graph.node[-2].output[0] = "d16"
    result = check(reference, low, {"x": np.linspace(0.3, 0.9, 8, dtype=np.float32)})
    assert not result.passed
    assert result.divergence is not None
    assert (result.divergence.node, result.divergence.kind) == ("down", "diverges")
    assert result.divergence.snr < 20


def test_a_failure_on_another_branch_is_not_blamed() -> None:
    """Only what a failing output depends on is looked at."""
    reference = proto("""g (float[4] x) => (float[4] good, float[4] bad)
        { [early] e = Mul(x, x)  f = Mul(e, e)  good = Sign(f)  [late] l = Exp(x)  bad = Log(l) }""")
    low = proto("""g (float[4] x) => (float[4] good, float[4] bad)
        { xl = Cast <to = 10> (x)
          [early] e = Mul(xl, xl)  f = Mul(e, e)  g = Sign(f)  [late] l = Exp(xl)  b = Log(l)
          good = Cast <to = 1> (g)  bad = Cast <to = 1> (b) }""")
    result = check(reference, low, {"x": np.array([1, 2, 3, 20], np.float32)})
    assert [bool(output.missed) for output in result.outputs] == [False, True]
    assert result.divergence is not None
    assert result.divergence.node == "late"


def test_clamped_masks_are_not_blamed() -> None:
    """A mask of -3.4e38 that became half the lowest fp16 value is as good a mask; the node behind it is where it fails."""
    reference = proto("g (float[2,4] x) => (float[2,4] y) <float[4] m = {0, 0, -3.4e38, 0}> "
                      "{ [add] a = Add(x, m)  [soft] s = Softmax(a)  [bad] b = Mul(s, s)  [out] y = Sqrt(b) }")  # fmt: skip
    low = proto("g (float[2,4] x) => (float[2,4] y) <float16[4] m = {0, 0, 63487, 0}> "
                "{ xl = Cast <to = 10> (x)  [add] a = Add(xl, m)  [soft] s = Softmax(a)  [bad] b = Mul(s, s)"
                "  [out] z = Sqrt(b)  y = Cast <to = 1> (z) }")  # fmt: skip
    low.graph.initializer[0].int32_data[2] = np.array(-32752, np.float16).view(np.uint16)
    data = {"x": np.array([[0, -9, 1, -9], [1, -9, 1, 0]], np.float32)}
    assert check(reference, low, data).passed
    result = check(reference, low, data, {"snr": 100})
    assert result.divergence is not None
    assert result.divergence.node in ("soft", "bad", "out")
    assert result.divergence.snr > 20


def test_an_output_without_a_finite_element_never_passes_for_a_good_one(tmp_path: pathlib.Path) -> None:
    reference = proto("g (float[2,4] x) => (float[2,4] y, float[2,4] z) { y = Relu(x)  z = Mul(x, x) }")
    broken = proto("""g (float[2,4] x) => (float[2,4] y, float[2,4] z)
        { y = Relu(x)  zero = Constant<value_float = 0.0>()  d = Mul(x, zero)  z = Div(d, d) }""")
    result = check(reference, broken, SMALL, {"nonfinite": None})
    assert not result.passed
    z = result.outputs[1]
    assert z.missed == ("cosine nan < 0.99999", "snr nan < 60")
    paths = [str(tmp_path / name) for name in ("a.onnx", "b.onnx", "c.onnx", "data.npz")]
    onnx.save(reference, paths[0])
    onnx.save(broken, paths[1])
    onnx.save(reference, paths[2])
    np.savez(paths[3], **SMALL)
    arguments = ["verify", *paths[:3], "--data", paths[3], "--tolerance", "nonfinite=none"]
    told = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False, standalone_mode=False)
    assert told.return_value == 1
    worst = json.loads(told.output)["candidates"][0]["outputs"][1]["worst"]
    assert [worst[name] for name in ("cosine", "snr", "max_abs", "max_rel", "top1")] == ["nan"] * 4 + [0.0]
    row = next(line for line in CliRunner().invoke(cli, arguments).output.splitlines() if line.startswith(paths[1]))
    assert row.split()[1:7] == ["failed", "fp32", "nan", "nan", "nan", "8"]


def test_tolerance_decides() -> None:
    assert not check(REFERENCE, LOW, SMALL, {"snr": 120}).passed
    result = check(REFERENCE, LOW, SMALL, {"snr": 120})
    assert result.outputs[0].missed[0].startswith("snr ")
    assert result.divergence is not None
    assert result.divergence.kind == "lowest"
    assert check(REFERENCE, LOW, LARGE, Tolerance(nonfinite=None)).passed
    assert check(REFERENCE, LOW, SMALL, {"snr": None}).tolerance.cosine == 0.999
    with pytest.raises(UsageError, match="kosine"):
        check(REFERENCE, LOW, SMALL, {"kosine": 1.0})


def test_integers_and_ties() -> None:
    """The scores of class 2 and 3 differ by less than fp16 can hold: either index is right; a real change is not."""
    reference = proto("g (float[1,4] x) => (int64[1] i, int64[1,2] k) <int64[1] two = {2}> "
                      "{ s = Mul(x, x)  i = ArgMax <axis = 1, keepdims = 0> (s)  v, k = TopK(s, two) }")  # fmt: skip
    low = proto("g (float[1,4] x) => (int64[1] i, int64[1,2] k) <int64[1] two = {2}> "
                "{ xl = Cast <to = 10> (x)  s = Mul(xl, xl)  i = ArgMax <axis = 1, keepdims = 0> (s)"
                "  v, k = TopK(s, two) }")  # fmt: skip
    tie = {"x": np.array([[0.1, 0.2, 1.0001, 1.0002]], np.float32)}
    result = check(reference, low, tie)
    by_name = {output.name: output.worst for output in result.outputs}
    assert (by_name["i"].mismatches, by_name["i"].ties) == (1, 1)
    assert (by_name["k"].mismatches, by_name["k"].ties) == (2, 2)
    assert result.passed
    wrong = proto("g (float[1,4] x) => (int64[1] i, int64[1,2] k) <int64[1] two = {2}> "
                  "{ xl = Cast <to = 10> (x)  s = Neg(xl)  i = ArgMax <axis = 1, keepdims = 0> (s)"
                  "  v, k = TopK(s, two) }")  # fmt: skip
    assert not check(reference, wrong, {"x": np.array([[0.1, 0.2, 1.0, 2.0]], np.float32)}).passed


def test_what_follows_a_tie_is_said_to_come_in_another_order() -> None:
    text = """g (float[1,4] x, float[4,2] boxes) => (float[1,2,2] chosen) <int64[1] two = {2}>
        { %s  [top] v, k = TopK(s, two)  [pick] chosen = Gather(boxes, k) }"""
    reference = proto(text % "s = Mul(x, x)")
    low = proto(text % "xl = Cast <to = 10> (x)  sl = Mul(xl, xl)  s = Cast <to = 1> (sl)")
    boxes = np.arange(8, dtype=np.float32).reshape(4, 2)
    result = check(reference, low, {"x": np.array([[0.1, 0.2, 1.0001, 1.0002]], np.float32), "boxes": boxes})
    assert not result.passed
    assert result.notes == (
        "TopK 'top' chooses 2 indices otherwise, all where scores tie, and output 'chosen' follows it: the same results in another order "
        "are no defect of the conversion.",
    )
    apart = check(reference, low, {"x": np.array([[0.1, 0.2, 1.0, 2.0]], np.float32), "boxes": boxes})
    assert (apart.passed, apart.notes) == (True, ())


@pytest.mark.parametrize(
    ("second", "words"),
    [(0.0, ["Output 'y' of the reference is 0 everywhere"]), (1.0, [])],
)
def test_an_output_that_says_nothing_is_named(second: float, words: list[str]) -> None:
    model = proto("g (float[2,4] x) => (float[2,4] y, float[2,4] z) { y = Relu(x)  z = Cos(x) }")
    samples = [
        {"x": np.linspace(-2, -1, 8, dtype=np.float32).reshape(2, 4)},
        {"x": np.full((2, 4), second, np.float32)},
    ]
    notes = check(model, model, samples).notes
    assert [text[: len(want)] for text, want in zip(notes, words, strict=True)] == words


def test_the_file_itself_is_judged(tmp_path: pathlib.Path) -> None:
    """A file that only the emulation can run: a node before the Cast that it reads."""
    broken = onnx.ModelProto()
    broken.CopyFrom(LOW)
    node = onnx.NodeProto()
    node.CopyFrom(broken.graph.node[0])
    del broken.graph.node[0]
    broken.graph.node.append(node)
    path = tmp_path / "broken.onnx"
    onnx.save(broken, path)
    result = verify(REFERENCE, path, SMALL)
    assert not result.passed
    assert not result.outputs[0].missed
    assert "onnx.checker refuses" in result.problems[0]
    bf16 = proto("""g (float[batch,4] x) => (float[batch,4] y)
        { xl = Cast <to = 16> (x) a = Mul(xl, xl) b = Mul(a, xl) c = Sqrt(b) z = Add(c, xl) y = Cast <to = 1> (z) }""")
    result = verify(REFERENCE, bf16, SMALL)  # bf16 has no kernels on the CPU, which is no fault of the file
    assert result.passed
    assert result.precision == "bf16"
    assert "no kernel" in result.notes[0]


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_the_file_itself_runs_on_the_provider_asked_for(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of the emulation are opened on the CPU here whatever is asked: what the worker is told counts."""
    asked: list[SessionConfig] = []

    class Worker:
        def run(self, model: object, samples: object, config: SessionConfig | None = None) -> Answer:
            asked.append(config or SessionConfig())
            return Answer([{}])

    here = verification.open_session
    monkeypatch.setattr(
        verification, "open_session", lambda model, config, **more: here(model, config.on_cpu(), **more)
    )
    monkeypatch.setattr("onnxamp.ort.worker.shared", Worker)
    assert verify(REFERENCE, LOW, SMALL, provider=provider).passed
    assert asked == [SessionConfig(provider=provider, optimization="all")]


def test_a_candidate_that_cannot_run_fails() -> None:
    shape = proto("g (float[batch,4] x) => (float[batch,M] y) <int64[1] k = {3}, int64[1] zero = {0}, int64[1] one = {1}> "
                  "{ xl = Cast <to = 10> (x)  s = Slice(xl, zero, k, one)  y = Cast <to = 1> (s) }")  # fmt: skip
    result = check(REFERENCE, shape, SMALL)
    assert not result.passed
    assert "its output 'y' does not fit" in result.problems[0]


def test_an_operator_of_another_library_is_named_with_its_file(tmp_path: pathlib.Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
    g (float[N,4] x) => (float[N,4] y) { h = Relu(x) y = acme.Weird(h) }"""
    path = tmp_path / "weird.onnx"
    onnx.save(parser.parse_model(text), path)
    for act in (lambda: verify(path, path), lambda: calibrate(path), lambda: calibrate(path, SMALL)):
        with pytest.raises(UnsupportedError, match=r"weird\.onnx cannot run.* acme\.Weird.*no --verify"):
            act()


def test_convert_finds_out_before_it_converts_that_inputs_cannot_be_made_up(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sequence.onnx"
    onnx.save(proto("g (seq(float[N,4]) s) => (float[M,4] y) { y = ConcatFromSequence <axis = 0> (s) }"), path)
    ran = CliRunner().invoke(cli, ["convert", str(path), "--verify"])
    assert isinstance(ran.exception, UnsupportedError)
    assert "onnxamp.verify from Python" in str(ran.exception)
    assert list(tmp_path.iterdir()) == [path]


MISMATCH = {
    "inputs": ("g (float[batch,4] z) => (float[batch,4] y) { y = Identity(z) }", "inputs"),
    "outputs": ("g (float[batch,4] x) => (float[batch,4] z) { z = Identity(x) }", "outputs"),
}


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_sample_is_made_up(count: int) -> None:
    with pytest.raises(UsageError, match="at least one"):
        verify(REFERENCE, LOW, count=count)
    with pytest.raises(UsageError, match="at least one"):
        calibrate(REFERENCE, count=count)


def test_a_file_of_any_name_holds_samples_that_are_counted(tmp_path: pathlib.Path) -> None:
    np.savez(tmp_path / "made up.npz", **SMALL)
    result = verify(REFERENCE, LOW, str(tmp_path / "made up.npz"), check_file=False)
    assert not result.made_up
    assert "1 sample (2 rows) from " in result.verdict()
    made = verify(REFERENCE, LOW, check_file=False)
    assert made.made_up
    assert "4 samples made up from names" in made.verdict()
    assert made.to_dict()["made_up"] is True


@pytest.mark.parametrize("case", MISMATCH)
def test_other_interfaces(case: str) -> None:
    text, word = MISMATCH[case]
    with pytest.raises(ModelError, match=word):
        check(REFERENCE, proto(text), SMALL)


def test_data_that_the_reference_cannot_run() -> None:
    reference = proto("g (float[A,B] x, float[C,D] z) => (float[E,F] y) { y = Add(x, z) }")
    with pytest.raises(DataError, match="--dim"):
        verify(reference, reference, dim={"A": 2, "C": 3})
    text = proto("g (string[2] x) => (string[2] y) { y = Identity(x) }")
    with pytest.raises(UnsupportedError, match="--data"):
        verify(text, text)


def test_sizes_that_the_reference_runs_with_are_looked_for() -> None:
    """A window of 400 must fit into what is made up: 64 does not, 512 does."""
    reference = proto(
        "g (float[batch,1,time] audio, float[8,1,400] w) => (float[batch,8,frames] y) { y = Conv(audio, w) }"
    )
    reference.graph.initializer.append(numpy_helper.from_array(np.ones((8, 1, 400), np.float32), "w"))
    result = verify(reference, reference, check_file=False)
    assert result.passed
    assert "time=512" in result.data


def test_what_the_machine_lacks_is_not_held_against_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider works in this process and not in the one that opens the file."""
    answer = Answer([], "The execution provider failed on the model: no device.", RuntimeMissingError.__name__)
    monkeypatch.setattr("onnxamp.ort.worker.Worker.run", lambda *arguments: answer)
    with pytest.raises(RuntimeMissingError, match="no device"):
        verify(REFERENCE, LOW, SMALL)


def test_low_interfaces_and_low_references() -> None:
    """The candidate's inputs may be 16-bit; a reference with 16-bit values is judged by its emulation too."""
    low = proto("""g (float16[batch,4] x) => (float16[batch,4] y)
        { [square] a = Mul(x, x)  [cube] b = Mul(a, x)  [root] c = Sqrt(b)  [out] y = Add(c, x) }""")
    assert check(REFERENCE, low, SMALL).passed
    same = check(low, low, SMALL)
    assert same.passed
    assert same.outputs[0].worst.exact


def test_result_as_json() -> None:
    result = check(REFERENCE, REFERENCE, SMALL)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text)["outputs"][0]["worst"]["snr"] == "inf"
    assert json.loads(text)["passed"] is True
    failed = json.loads(json.dumps(check(REFERENCE, LOW, LARGE).to_dict(), allow_nan=False))
    assert failed["divergence"]["node"] == "cube"


def test_many_samples_give_the_worst() -> None:
    feeds = [{"x": np.full((1, 4), v, np.float32)} for v in (0.5, 0.33, 1.0, 0.7)]
    result = check(REFERENCE, LOW, feeds)
    single = [check(REFERENCE, LOW, [feed]).outputs[0].worst for feed in feeds]
    assert result.samples == 4
    assert result.outputs[0].worst.snr == min(one.snr for one in single)
    assert result.outputs[0].sample == int(np.argmin([one.snr for one in single]))


def test_conversions_verify(tmp_path: pathlib.Path) -> None:
    """Our own conversion, from a file with synthesized inputs."""
    rng = np.random.default_rng(0)
    source = proto("g (float[batch,16] x) => (float[batch,8] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }")
    for name, shape in (("w", (16, 32)), ("v", (32, 8))):
        tensor = rng.standard_normal(shape).astype(np.float32) / 4
        source.graph.initializer.append(numpy_helper.from_array(tensor, name))
    onnx.save(source, tmp_path / "m.onnx")
    result = onnxamp.convert(tmp_path / "m.onnx")
    result.save(tmp_path / "low.onnx")
    found = verify(tmp_path / "m.onnx", tmp_path / "low.onnx")
    assert found.passed
    assert found.precision == "fp16"
    assert "made up" in found.data
    assert "batch=1" in found.data
    assert verify(ir.load(tmp_path / "m.onnx"), result.model, check_file=False).passed


def test_evidence_needs_no_runtime_to_import() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; import onnxamp.evidence, onnxamp.ort.session, onnxamp.ort.doctor"
    subprocess.run([sys.executable, "-c", code], check=True)
    code += "; from onnxamp.ort.session import open_session; open_session(b'')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "RuntimeMissingError" in done.stderr
    assert "onnxamp[cpu]" in done.stderr


def test_several_candidates_in_one_table_and_page(tmp_path: pathlib.Path) -> None:
    from click.testing import CliRunner

    from onnxamp.cli import cli

    onnx.save(REFERENCE, tmp_path / "r.onnx")
    onnx.save(LOW, tmp_path / "low.onnx")
    onnx.save(REFERENCE, tmp_path / "same.onnx")
    np.savez(tmp_path / "d.npz", **LARGE)
    arguments = ["verify", *(str(tmp_path / name) for name in ("r.onnx", "same.onnx", "low.onnx"))]
    arguments += ["--data", str(tmp_path / "d.npz")]
    ran = CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert ran.return_value == 1
    rows = [line for line in ran.stdout.splitlines() if "same.onnx" in line or "low.onnx" in line]
    assert ["passed" in rows[0], "failed" in rows[1]] == [True, True]
    assert "'cube'" in ran.stdout
    page = tmp_path / "p.html"
    ran = CliRunner().invoke(cli, [*arguments, "--json", "--report", str(page)], standalone_mode=False)
    found = json.loads(ran.stdout)
    assert [part["passed"] for part in found["candidates"]] == [True, False]
    text = page.read_text(encoding="utf-8")
    assert "2 candidates against r.onnx" in text
    assert "low.onnx: Outputs" in text
