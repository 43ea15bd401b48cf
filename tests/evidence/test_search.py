"""The search for the lowest precision within a tolerance: what it finds, that it is reproducible, and that it can be interrupted."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from onnxruntime import InferenceSession

import onnxamp
from onnxamp.cli import cli
from onnxamp.commands._auto import remaining, verdict
from onnxamp.errors import DataError, UsageError
from onnxamp.evidence import Tolerance
from onnxamp.evidence.evaluation import Evaluator, Trial
from onnxamp.evidence.search import COSTLY, KEPT, MISSES, OVERFLOWS, UNSEEN, UNTRIED, SearchResult, search
from onnxamp.model import io
from onnxamp.ort.session import SessionConfig
from onnxamp.passes.emulate import emulate
from onnxamp.policy.file import policy_text
from onnxamp.policy.options import Options

RNG = np.random.default_rng(7)


def weights(rows: int, columns: int) -> np.ndarray:
    return (RNG.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)


def proto(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


# Five layers; the difference of [c] cancels all but a ten-thousandth of its operands, so that what feeds it must not be rounded.
CANCELS = proto(
    """g (float[8,32] x) => (float[8,32] y)
    { [l1] a = MatMul(x, w1)  [l2] b = MatMul(x, w2)  [c] c = Sub(a, b)  [l3] d = MatMul(c, w3)  [r] e = Relu(d)
      [l4] f = MatMul(e, w4)  [l5] y = MatMul(f, w5) }""",
    w1=(base := weights(32, 32)),
    w2=(base + 1e-4 * weights(32, 32)).astype(np.float32),
    w3=weights(32, 32) * 1000,
    w4=weights(32, 32),
    w5=weights(32, 32),
)
# Softmax and a LayerNormalization in the middle, harmless in 16 bits.
ISLANDS = proto(
    """g (float[8,32] x) => (float[8,32] y)
    { [l1] a = MatMul(x, w1)  [soft] b = Softmax<axis = -1>(a)  [l2] c = MatMul(b, w2)
      [norm] d = LayerNormalization<axis = -1>(c, scale)  [l3] y = MatMul(d, w3) }""",
    w1=weights(32, 32),
    w2=weights(32, 32),
    w3=weights(32, 32),
    scale=np.ones(32, np.float32),
)
DATA = [{"x": RNG.standard_normal((8, 32)).astype(np.float32)} for _ in range(3)]
FP16 = Options(level="O2", dtype="fp16")
BF16 = Options(level="O2", dtype="bf16")


def precisions(found: SearchResult) -> dict[str, str]:
    return {node.name or "": decision.precision for node, decision in found.result.plan.nodes.items()}


def test_the_few_nodes_that_spoil_it_are_raised() -> None:
    found = search(CANCELS, FP16, Tolerance(snr=45), DATA)
    assert found.trials[0].result.missed, "O2 alone must miss it, or the test shows nothing"
    assert found.feasible
    assert {"l1", "l2"} <= set(found.best.raised)
    assert precisions(found)["l4"] == precisions(found)["l5"] == "fp16"
    assert found.weights is not None
    assert found.weights.result.missed, "rounding the weights alone spoils the difference too"
    assert {item.node for item in found.ranking[:3]} & {"l1", "l2"}
    assert onnxamp.verify(CANCELS, found.result.model, DATA, {"snr": 45}, check_file=False).passed


def test_islands_are_lowered_as_far_as_the_tolerance_allows() -> None:
    found = search(ISLANDS, FP16, Tolerance(cosine=0.9999), DATA)
    assert found.feasible
    assert set(found.best.lowered) == {"soft", "norm"}
    assert found.best.share > found.trials[0].share
    assert found.best.traffic < found.trials[0].traffic
    assert found.weights is None
    strict = search(ISLANDS, FP16, Tolerance(snr=found.trials[0].result.worst.snr - 1e-6), DATA)
    assert strict.feasible
    assert strict.best.share <= found.best.share


def test_an_island_that_overflows_is_never_lowered() -> None:
    model = proto(
        """g (float[8,32] x) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [exp] b = Exp(a)  [log] c = Log(b)  [l2] y = MatMul(c, w2) }""",
        w1=weights(32, 32) * 4,
        w2=weights(32, 32),
    )
    data = {"x": 3 * DATA[0]["x"]}
    found = search(model, FP16, Tolerance(cosine=0.999), data)
    assert "exp" not in found.best.lowered
    assert {item.node: item.local for item in found.ranking}["exp"] == float("inf")


IN_A_LOOP = proto(
    """g (float[8,32] x, bool c, int64 n) => (float[8,32] y)
    { y = Loop<body = b (int64 i, bool go, float[8,32] s) => (bool more, float[8,32] o) {
        more = Identity(go)  [l1] a = MatMul(s, w1)  [l2] b = MatMul(s, w2)  [c] d = Sub(a, b)  [l3] e = MatMul(d, w3)
        o = If(c)<then_branch = yes () => (float[8,32] t) { [soft] q = Softmax<axis = -1>(e)  [m1] t = MatMul(q, w4) },
                  else_branch = no () => (float[8,32] f) { [lsm] r = LogSoftmax<axis = -1>(e)  [m2] f = MatMul(r, w4) }> }>(n, c, x) }""",
    w1=base,
    w2=(base + 1e-3 * weights(32, 32)).astype(np.float32),
    w3=weights(32, 32) * 1000,
    w4=weights(32, 32) * 4,
)
LOOP_DATA = [sample | {"c": np.array(True), "n": np.array(2)} for sample in DATA]


def test_nodes_inside_bodies_are_ranked_and_raised() -> None:
    found = search(IN_A_LOOP, FP16, Tolerance(snr=45), LOOP_DATA)
    assert found.trials[0].result.missed
    assert found.feasible
    assert {"l1", "l2"} <= set(found.best.raised)
    assert precisions(found)["l3"] == "fp16"
    scores = {item.node: item.score for item in found.ranking}
    assert min(scores["l1"], scores["l2"]) > 100 * scores["l3"] > 0
    assert {item.node for item in found.ranking if not item.seen} == {"lsm", "m2"}


def test_the_twin_in_a_loop_sees_every_iteration() -> None:
    """The local noise of a node in a body is that of all its results together, one after the other."""
    x, exact, noise = LOOP_DATA[0]["x"], 0.0, 0.0
    w1, w2, w3, w4 = (numpy_helper.to_array(tensor) for tensor in IN_A_LOOP.graph.initializer)
    state = x
    for _ in range(2):
        y = state @ w1
        twin = (state.astype(np.float16).astype(np.float32) @ w1.astype(np.float16).astype(np.float32)).astype(
            np.float16
        )
        exact, noise = exact + float(np.sum(y**2)), noise + float(np.sum((twin.astype(np.float32) - y) ** 2))
        e = (y - state @ w2) @ w3
        state = np.exp(e - e.max(-1, keepdims=True))
        state = state / state.sum(-1, keepdims=True) @ w4
    found = {item.node: item.local for item in search(IN_A_LOOP, FP16, Tolerance(), LOOP_DATA[:1], max_evals=1).ranking}
    assert found["l1"] == pytest.approx(noise / exact, rel=1e-2)


def test_an_island_that_no_sample_ran_is_not_lowered() -> None:
    found = search(IN_A_LOOP, FP16, Tolerance(cosine=0.5), LOOP_DATA)
    assert "soft" in found.best.lowered
    assert "lsm" not in found.best.lowered
    assert precisions(found)["lsm"] == "fp32"


def test_infeasible_is_said_with_the_figure() -> None:
    """A 16-bit interface rounds whatever the nodes do: nothing that the search may turn gives 100 dB."""
    found = search(ISLANDS, Options(level="O2", io="low"), Tolerance(snr=100), DATA)
    assert not found.feasible
    assert found.weights is not None
    assert found.weights.result.missed
    assert found.best.result.error <= min(trial.result.error for trial in found.trials)
    assert "infeasible" in verdict(found)
    assert f"rounding them alone gives {found.weights.result.missed[0]}" in verdict(found)


def test_raising_all_is_the_last_resort() -> None:
    found = search(CANCELS, BF16, Tolerance(snr=120), DATA)
    assert found.feasible
    assert found.best.share == 0


@pytest.mark.parametrize(("model", "tolerance"), [(CANCELS, Tolerance(snr=45)), (ISLANDS, Tolerance(cosine=0.9999))])
def test_the_policy_reproduces_the_model(model: onnx.ModelProto, tolerance: Tolerance, tmp_path: pathlib.Path) -> None:
    found = search(model, FP16, tolerance, DATA)
    assert found.policy
    path = tmp_path / "policy.toml"
    path.write_text(policy_text(found.policy, ["a comment"]), encoding="utf-8")
    again = onnxamp.convert(model, policy=path)
    assert io.to_proto(again.model).SerializeToString() == io.to_proto(found.result.model).SerializeToString()


def test_the_same_question_gives_the_same_answer() -> None:
    one, two = (search(CANCELS, FP16, Tolerance(snr=45), DATA) for _ in range(2))
    assert one.policy == two.policy
    assert one.trials == two.trials


# A bound that says nothing of noise: it takes several evaluations to meet it.
SEVERAL = Tolerance(max_rel=0.004)


def test_an_interrupted_search_goes_on_to_the_same_policy(tmp_path: pathlib.Path) -> None:
    whole = search(CANCELS, FP16, SEVERAL, DATA)
    stop = 3
    assert len(whole.trials) > stop
    journal = tmp_path / "search.jsonl"
    seen: list[Trial] = []

    def interrupt(trial: Trial) -> None:
        seen.append(trial)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(CANCELS, FP16, SEVERAL, DATA, journal=str(journal), on_trial=interrupt)
    lines = journal.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + stop
    # An answer in the journal that no evaluation would give shows that it is read.
    marked = json.loads(lines[1])
    marked["worst"]["max_abs"] = 1234.5
    journal.write_text("\n".join([lines[0], json.dumps(marked), *lines[2:], '{"policy": "cut o']), encoding="utf-8")
    resumed = search(CANCELS, FP16, SEVERAL, DATA, journal=str(journal))
    assert resumed.trials[0].result.worst.max_abs == 1234.5
    assert resumed.policy == whole.policy
    assert resumed.trials[1:] == whole.trials[1:]
    assert not journal.exists()


KILLED = """
import os, signal, sys
import numpy as np
from onnxamp.evidence import Tolerance
from onnxamp.evidence.search import search
from onnxamp.policy.options import Options
seen = []
def kill(trial):
    seen.append(trial)
    if len(seen) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
search(sys.argv[1], Options(), Tolerance(max_rel=0.004), sys.argv[2], journal=sys.argv[4], on_trial=kill)
"""


def test_a_killed_search_goes_on_to_the_same_policy(tmp_path: pathlib.Path) -> None:
    model, data, journal = (str(tmp_path / name) for name in ("m.onnx", "d.npz", "search.jsonl"))
    onnx.save(CANCELS, model)
    np.savez(data, x=np.stack([sample["x"] for sample in DATA]))
    whole = search(model, FP16, SEVERAL, data)
    for stop in (2, 4):  # the second starts from what the first left
        killed = subprocess.run([sys.executable, "-c", KILLED, model, data, str(stop), journal], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(pathlib.Path(journal).read_text(encoding="utf-8").splitlines()) == 1 + stop
    resumed = search(model, FP16, SEVERAL, data, journal=journal)
    assert (resumed.policy, resumed.trials) == (whole.policy, whole.trials)


def test_why_nodes_stay_fp32_is_said() -> None:
    """One island overflows on the data, one is in a branch that is not taken, one costs more in Casts than it saves."""
    model = proto(
        """g (float[8,32] x) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [exp] b = Exp(a)  [log] c = Log(b)  [l2] y = MatMul(c, w2) }""",
        w1=weights(32, 32) * 4,
        w2=weights(32, 32),
    )
    found = search(model, FP16, Tolerance(cosine=0.999), {"x": 3 * DATA[0]["x"]})
    assert found.remaining == {OVERFLOWS: 2}
    assert remaining(found) == f"2 nodes that {OVERFLOWS}"
    assert search(IN_A_LOOP, FP16, Tolerance(cosine=0.5), LOOP_DATA).remaining[UNSEEN] == 1
    costly = proto(
        """g (float[8,32] x) => (float[8,32] y, float[8,32] z)
        { [exp] z = Exp(x)  [l1] y = MatMul(x, w1) }""",
        w1=weights(32, 32),
    )
    assert search(costly, FP16, Tolerance(cosine=0.9), DATA).remaining == {COSTLY: 1}
    strict = search(ISLANDS, FP16, Tolerance(cosine=0.9999), DATA, max_evals=1)
    assert strict.remaining == {UNTRIED: 2}
    assert search(ISLANDS, Options(keep=("norm",)), Tolerance(cosine=0.9999), DATA).remaining == {KEPT: 1}


def test_part_of_an_island_is_lowered_where_the_whole_misses() -> None:
    """Of two sensitive nodes that hang together, one difference of large numbers must stay fp32."""
    model = proto(
        """g (float[64,64] x) => (float[64,64] y)
        { [l1] a = MatMul(x, w1)  [s1] b = Softmax<axis = -1>(a)  [s2] c = Softmax<axis = -1>(b)  [sub] d = Sub(c, m)
          [up] e = Mul(d, k)  [l2] y = MatMul(e, w2) }""",
        w1=weights(64, 64),
        w2=weights(64, 64),
        m=np.array(1 / 64, np.float32),
        k=np.array(1000, np.float32),
    )
    data = [{"x": RNG.standard_normal((64, 64)).astype(np.float32)}]
    found = search(model, Options(keep=("sub",)), Tolerance(snr=45), data)
    assert found.feasible
    assert found.best.lowered == ("s1",)
    assert found.remaining[MISSES] == 1


def test_a_journal_of_another_question_is_not_believed(tmp_path: pathlib.Path) -> None:
    journal = tmp_path / "search.jsonl"

    def interrupt(trial: Trial) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(CANCELS, FP16, Tolerance(snr=45), DATA, journal=str(journal), on_trial=interrupt)
    text = journal.read_text(encoding="utf-8").replace('"max_abs": ', '"max_abs": 1234')
    journal.write_text(text, encoding="utf-8")
    found = search(CANCELS, FP16, Tolerance(snr=45), DATA[:2], journal=str(journal))
    assert found.trials[0].result.worst.max_abs < 1234


def digest(model: onnx.ModelProto, *data: dict[str, object]) -> str:
    config = SessionConfig(provider="cpu")
    return Evaluator(model, Tolerance(), list(data), None, 0.0, None, 4, 0, config).digest


def words(*texts: str) -> np.ndarray:
    """Strings that no other array holds."""
    return np.array(["".join(list(text)) for text in texts], object)


PICKED = proto("g (seq(float[N]) s, int64 i) => (float[N] y) { y = SequenceAt(s, i) }")
HANDED = proto("g (string[N] t, float[N] x) => (string[N] u, float[N] y) { u = Identity(t)  y = Relu(x) }")
# The classes with their scores: a list of maps.
SCORED = parser.parse_model(
    """<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 3]> g (float[N,2] x) => (seq(map(string, float)) y)
    { y = ai.onnx.ml.ZipMap <classlabels_strings = ["first one", "the other"]> (x) }"""
)
ONE, TWO = (np.full(2, value, np.float32) for value in (1, 2))
FIRST, LAST = np.array(0), np.array(1)
QUESTIONS = {
    "an element that is not picked": (PICKED, {"s": [ONE, TWO], "i": FIRST}, {"s": [ONE, ONE], "i": FIRST}),
    "the length of a sequence": (PICKED, {"s": [ONE, TWO], "i": FIRST}, {"s": [ONE, TWO, TWO], "i": FIRST}),
    "the index": (PICKED, {"s": [ONE, ONE], "i": FIRST}, {"s": [ONE, ONE], "i": LAST}),
    "strings": (HANDED, {"t": words("cat", "dog"), "x": ONE}, {"t": words("cat", "cow"), "x": ONE}),
    "where strings end": (HANDED, {"t": words("ab", "c"), "x": ONE}, {"t": words("a", "bc"), "x": ONE}),
    "a map": (SCORED, {"x": np.stack([ONE, TWO])}, {"x": np.stack([TWO, TWO])}),
    "a shape": (SCORED, {"x": np.stack([ONE])}, {"x": np.stack([ONE, ONE])}),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_a_search_knows_its_question_again_and_no_other(case: str) -> None:
    model, sample, other = QUESTIONS[case]
    again = {
        name: words(*value) if isinstance(value, np.ndarray) and value.dtype == object else value
        for name, value in sample.items()
    }
    assert digest(model, sample) == digest(model, again)
    assert digest(model, sample) != digest(model, other)


def test_a_search_knows_its_model_and_version_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives the same bits is another one all the same: its nodes have other names, or its weights other places."""
    first = digest(CANCELS, *DATA)
    renamed, unused = onnx.ModelProto(), onnx.ModelProto()
    for copy in (renamed, unused):
        copy.CopyFrom(CANCELS)
    renamed.graph.node[0].name = "other"
    unused.graph.initializer.append(numpy_helper.from_array(np.zeros(400, np.float32), "spare"))
    spare = digest(unused, *DATA)
    unused.graph.initializer[-1].raw_data = np.ones(400, np.float32).tobytes()
    assert len({first, digest(renamed, *DATA), spare, digest(unused, *DATA)}) == 4
    copy = onnx.ModelProto()
    copy.CopyFrom(CANCELS)
    path = tmp_path / "m.onnx"
    onnx.save(copy, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert digest(onnx.load(path), *DATA) == digest(str(path), *DATA) == first  # type: ignore[arg-type]  # a path is a model
    monkeypatch.setattr("onnxamp.evidence.evaluation.__version__", "0.0.0")
    assert digest(CANCELS, *DATA) != first


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_evaluations_than_allowed(limit: int) -> None:
    assert len(search(CANCELS, FP16, Tolerance(snr=45), DATA, max_evals=limit).trials) <= limit


def test_a_measure_of_the_users() -> None:
    def agreement(outputs: object) -> float:
        assert len(outputs) == len(DATA)  # type: ignore[arg-type]
        return float(np.mean([np.isfinite(out["y"]).all() for out in outputs]))  # type: ignore[attr-defined]

    found = search(ISLANDS, FP16, Tolerance(), DATA, score=agreement, least=1.0)
    assert found.feasible
    assert found.best.result.score == 1.0
    refused = search(ISLANDS, FP16, Tolerance(), DATA, score=lambda outputs: 0.25, least=0.5, max_evals=4)
    assert not refused.feasible
    assert refused.best.result.missed == ("score 0.25 < 0.5",)


@pytest.mark.parametrize(("measure", "bound"), [("max_rel", 0.01), ("top1", 0.9), ("kl", 1e-3), ("cosine", 0.999)])
def test_every_measure_is_searched_by(measure: str, bound: float) -> None:
    found = search(ISLANDS, BF16 if measure == "cosine" else FP16, Tolerance().replaced({measure: bound}), DATA)
    assert found.feasible
    value = getattr(found.best.result.worst, measure)
    assert value >= bound if measure in ("cosine", "top1") else value <= bound


def test_what_the_user_decided_is_left_alone() -> None:
    found = search(ISLANDS, Options(level="O2", keep=("norm", "l1")), Tolerance(cosine=0.9999), DATA)
    assert precisions(found)["norm"] == precisions(found)["l1"] == "fp32"
    with pytest.raises(UsageError, match="level O2"):
        search(ISLANDS, Options(level="O3"), Tolerance(cosine=0.9), DATA)


def test_made_up_samples_are_named_as_such() -> None:
    found = search(ISLANDS, FP16, Tolerance(cosine=0.999))
    assert "made up" in found.data
    assert any("made up" in note for note in found.notes)


def test_the_command(tmp_path: pathlib.Path) -> None:
    onnx.save(ISLANDS, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=DATA[0]["x"])
    arguments = [
        "convert",
        str(tmp_path / "m.onnx"),
        "--auto",
        "--tolerance",
        "cosine=0.9999",
        "--data",
        str(tmp_path / "d.npz"),
    ]
    ran = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)["auto"]
    assert found["feasible"]
    assert set(found["lowered"]) == {"soft", "norm"}
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"m.onnx", "d.npz", "m.auto.fp16.onnx", "m.auto.fp16.policy.toml", "m.auto.fp16.auto.html"}
    page = (tmp_path / "m.auto.fp16.auto.html").read_text(encoding="utf-8")
    assert "lower 2 nodes" in page
    again = [*arguments[:2], "--policy", str(tmp_path / "m.auto.fp16.policy.toml"), "-o", str(tmp_path / "again.onnx")]
    assert CliRunner().invoke(cli, again, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.auto.fp16.onnx").read_bytes()


METRIC = """
import numpy as np
def agreement(outputs):
    return np.mean([np.isfinite(out["y"]).mean() for out in outputs])
def broken(outputs):
    return outputs[0]["nothing"]
"""


def test_a_metric_of_the_users_on_the_command_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(ISLANDS, "m.onnx")
    np.savez("d.npz", x=DATA[0]["x"])
    pathlib.Path("my_metric.py").write_text(METRIC)

    def ran(function: str, *tolerance: str) -> bool:
        arguments = [
            "convert",
            "m.onnx",
            "--auto",
            "--data",
            "d.npz",
            "--force",
            "--json",
            "--metric",
            f"my_metric:{function}",
        ]
        result = CliRunner().invoke(cli, [*arguments, *tolerance, "--max-evals", "3"], catch_exceptions=False)
        found = json.loads(result.stdout)["auto"]
        assert found["trials"][0]["score"] == 1.0
        return bool(found["feasible"])

    assert ran("agreement", "--tolerance", "metric=1,cosine=0.999")
    assert not ran("agreement", "--tolerance", "metric=1.5")
    with pytest.raises(DataError, match="KeyError"):
        ran("broken", "--tolerance", "metric=0.5")
    with pytest.raises(UsageError, match=r"metric=0\.91"):
        ran("agreement")
    with pytest.raises(UsageError, match="no attribute 'absent'"):
        ran("absent", "--tolerance", "metric=0.5")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--auto"], "--tolerance"),
        (["--tolerance", "cosine=0.9"], "--auto"),
        (["--auto", "--tolerance", "speed=3"], "speed"),
        (["--auto", "--tolerance", "cosine=0.9", "--plan-only"], "--plan-only"),
        (["--data", "x.npz"], "--data"),
        (["--auto", "--tolerance", "metric=0.9"], "--metric"),
        (["--metric", "a:b"], "--auto"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], words: str, tmp_path: pathlib.Path) -> None:
    onnx.save(ISLANDS, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(cli, ["convert", str(tmp_path / "m.onnx"), *options], catch_exceptions=False)


def test_memory_that_runs_out_is_no_verdict_on_a_candidate(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it written to the journal, which a search with more memory would believe."""
    journal = tmp_path / "search.jsonl"

    def fail(*arguments: object) -> None:
        raise MemoryError

    def without_memory(candidate: ir.Model) -> ir.Model:
        monkeypatch.setattr(InferenceSession, "run", fail)
        return emulate(candidate)

    monkeypatch.setattr("onnxamp.evidence.evaluation.emulate", without_memory)
    with pytest.raises(MemoryError):
        search(CANCELS, FP16, Tolerance(snr=45), DATA, journal=str(journal))
    assert not journal.exists()
