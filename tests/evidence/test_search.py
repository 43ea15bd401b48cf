"""The search for the lowest precision within a tolerance: what it finds, and that it is reproducible."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxamp
from onnxamp.commands._auto_asked import asked
from onnxamp.commands._auto_page import page_of
from onnxamp.commands._auto_words import remaining, verdict
from onnxamp.errors import UsageError
from onnxamp.evidence import Tolerance
from onnxamp.evidence.search import COSTLY, KEPT, MISSES, OVERFLOWS, UNSEEN, UNTRIED, SearchResult, search
from onnxamp.model import io
from onnxamp.policy.file import policy_text
from onnxamp.policy.options import Options

Samples = list[dict[str, np.ndarray]]
FP16 = Options(level="O2", dtype="fp16")
BF16 = Options(level="O2", dtype="bf16")
RNG = np.random.default_rng(7)


def weights(rows: int, columns: int) -> np.ndarray:
    return (RNG.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)


def proto(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def precisions(found: SearchResult) -> dict[str, str]:
    return {node.name or "": decision.precision for node, decision in found.result.plan.nodes.items()}


def test_the_few_nodes_that_spoil_it_are_raised(cancels: onnx.ModelProto, samples: Samples) -> None:
    found = search(cancels, FP16, Tolerance(snr=45), samples)
    assert found.trials[0].result.missed, "O2 alone must miss it, or the test shows nothing"
    assert found.feasible
    assert {"l1", "l2"} <= set(found.best.raised)
    assert precisions(found)["l4"] == precisions(found)["l5"] == "fp16"
    assert found.weights is not None
    assert found.weights.result.missed, "rounding the weights alone spoils the difference too"
    assert {item.node for item in found.ranking[:3]} & {"l1", "l2"}
    assert onnxamp.verify(cancels, found.result.model, samples, {"snr": 45}, check_file=False).passed


def test_islands_are_lowered_as_far_as_the_tolerance_allows(islands: onnx.ModelProto, samples: Samples) -> None:
    found = search(islands, FP16, Tolerance(cosine=0.9999), samples)
    assert found.feasible
    assert set(found.best.lowered) == {"soft", "norm"}
    assert found.best.share > found.trials[0].share
    assert found.best.traffic < found.trials[0].traffic
    assert found.weights is None
    strict = search(islands, FP16, Tolerance(snr=found.trials[0].result.worst.snr - 1e-6), samples)
    assert strict.feasible
    assert strict.best.share <= found.best.share


def test_an_island_that_overflows_is_never_lowered(samples: Samples) -> None:
    model = proto(
        """g (float[8,32] x) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [exp] b = Exp(a)  [log] c = Log(b)  [l2] y = MatMul(c, w2) }""",
        w1=weights(32, 32) * 4,
        w2=weights(32, 32),
    )
    data = {"x": 3 * samples[0]["x"]}
    found = search(model, FP16, Tolerance(cosine=0.999), data)
    assert "exp" not in found.best.lowered
    assert {item.node: item.local for item in found.ranking}["exp"] == float("inf")


def test_nodes_inside_bodies_are_ranked_and_raised(in_a_loop: onnx.ModelProto, loop_samples: Samples) -> None:
    found = search(in_a_loop, FP16, Tolerance(snr=45), loop_samples)
    assert found.trials[0].result.missed
    assert found.feasible
    assert {"l1", "l2"} <= set(found.best.raised)
    assert precisions(found)["l3"] == "fp16"
    scores = {item.node: item.score for item in found.ranking}
    assert min(scores["l1"], scores["l2"]) > 100 * scores["l3"] > 0
    assert {item.node for item in found.ranking if not item.seen} == {"lsm", "m2"}


def test_the_twin_in_a_loop_sees_every_iteration(in_a_loop: onnx.ModelProto, loop_samples: Samples) -> None:
    """The local noise of a node in a body is that of all its results together, one after the other."""
    x, exact, noise = loop_samples[0]["x"], 0.0, 0.0
    w1, w2, w3, w4 = (numpy_helper.to_array(tensor) for tensor in in_a_loop.graph.initializer)
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
    found = {
        item.node: item.local for item in search(in_a_loop, FP16, Tolerance(), loop_samples[:1], max_evals=1).ranking
    }
    assert found["l1"] == pytest.approx(noise / exact, rel=1e-2)


def test_an_island_that_no_sample_ran_is_not_lowered(in_a_loop: onnx.ModelProto, loop_samples: Samples) -> None:
    found = search(in_a_loop, FP16, Tolerance(cosine=0.5), loop_samples)
    assert "soft" in found.best.lowered
    assert "lsm" not in found.best.lowered
    assert precisions(found)["lsm"] == "fp32"


def test_the_constant_of_a_mask_is_clamped_wherever_it_is_rounded(samples: Samples) -> None:
    # 1 - m times -1e9, as exporters write attention masks: in fp16 without the clamp, 0 times infinity is NaN.
    model = proto(
        """g (float[8,32] x, float[8,32] m) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [flip] f = Sub(one, m)  [mask] n = Mul(f, far)  [add] s = Add(a, n)
          [soft] p = Softmax<axis = -1>(s)  [l2] y = MatMul(p, w2) }""",
        w1=weights(32, 32),
        w2=weights(32, 32),
        one=np.float32(1),
        far=np.float32(-1e9),
    )
    mask = (np.arange(32) < 20).astype(np.float32)[None].repeat(8, 0)
    found = search(model, Options(), Tolerance(cosine=1 - 1e-9), [sample | {"m": mask} for sample in samples])
    assert found.weights is not None
    assert found.weights.result.worst.nonfinite == 0
    assert found.weights.result.worst.cosine > 0.999999
    ranking = {item.node: item for item in found.ranking}
    assert ranking["mask"].local < 1e-6
    assert "mask" not in found.best.raised


def test_infeasible_is_said_with_the_figure(islands: onnx.ModelProto, samples: Samples) -> None:
    """A 16-bit interface rounds whatever the nodes do: nothing that the search may turn gives 100 dB."""
    found = search(islands, Options(level="O2", io="low"), Tolerance(snr=100), samples)
    assert not found.feasible
    assert found.weights is not None
    assert found.weights.result.missed
    assert found.best.result.error <= min(trial.result.error for trial in found.trials)
    assert "infeasible" in verdict(found)
    assert f"rounding them alone gives {found.weights.result.missed[0]}" in verdict(found)


def test_raising_all_is_the_last_resort(cancels: onnx.ModelProto, samples: Samples) -> None:
    found = search(cancels, BF16, Tolerance(snr=120), samples)
    assert found.feasible
    assert found.best.share == 0


@pytest.mark.parametrize(
    ("model", "tolerance"), [("cancels", Tolerance(snr=45)), ("islands", Tolerance(cosine=0.9999))]
)
def test_the_policy_reproduces_the_model(
    samples: Samples, request: pytest.FixtureRequest, model: str, tolerance: Tolerance, tmp_path: pathlib.Path
) -> None:
    source = request.getfixturevalue(model)
    found = search(source, FP16, tolerance, samples)
    assert found.policy
    path = tmp_path / "policy.toml"
    path.write_text(policy_text(found.policy, ["a comment"]), encoding="utf-8")
    again = onnxamp.convert(source, policy=path)
    assert io.to_proto(again.model).SerializeToString() == io.to_proto(found.result.model).SerializeToString()


def test_the_same_question_gives_the_same_answer(cancels: onnx.ModelProto, samples: Samples) -> None:
    one, two = (search(cancels, FP16, Tolerance(snr=45), samples) for _ in range(2))
    assert one.policy == two.policy
    assert one.trials == two.trials


def test_why_nodes_stay_fp32_is_said(
    islands: onnx.ModelProto, in_a_loop: onnx.ModelProto, samples: Samples, loop_samples: Samples
) -> None:
    """One island overflows on the data, one is in a branch that is not taken, one costs more in Casts than it saves."""
    model = proto(
        """g (float[8,32] x) => (float[8,32] y)
        { [l1] a = MatMul(x, w1)  [exp] b = Exp(a)  [log] c = Log(b)  [l2] y = MatMul(c, w2) }""",
        w1=weights(32, 32) * 4,
        w2=weights(32, 32),
    )
    found = search(model, FP16, Tolerance(cosine=0.999), {"x": 3 * samples[0]["x"]})
    assert found.remaining == {OVERFLOWS: 2}
    assert remaining(found) == f"2 nodes {OVERFLOWS}"
    assert search(in_a_loop, FP16, Tolerance(cosine=0.5), loop_samples).remaining[UNSEEN] == 1
    costly = proto(
        """g (float[8,32] x) => (float[8,32] y, float[8,32] z)
        { [exp] z = Exp(x)  [l1] y = MatMul(x, w1) }""",
        w1=weights(32, 32),
    )
    assert search(costly, FP16, Tolerance(cosine=0.9), samples).remaining == {COSTLY: 1}
    strict = search(islands, FP16, Tolerance(cosine=0.9999), samples, max_evals=1)
    assert strict.remaining == {UNTRIED: 2}
    assert search(islands, Options(keep=("norm",)), Tolerance(cosine=0.9999), samples).remaining == {KEPT: 1}


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


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_evaluations_than_allowed(cancels: onnx.ModelProto, samples: Samples, limit: int) -> None:
    assert len(search(cancels, FP16, Tolerance(snr=45), samples, max_evals=limit).trials) <= limit


def test_a_measure_of_the_users(islands: onnx.ModelProto, samples: Samples) -> None:
    def agreement(outputs: object) -> float:
        assert len(outputs) == len(samples)  # type: ignore[arg-type]
        return float(np.mean([np.isfinite(out["y"]).all() for out in outputs]))  # type: ignore[attr-defined]

    found = search(islands, FP16, Tolerance(), samples, score=agreement, least=1.0)
    assert found.feasible
    assert found.best.result.score == 1.0
    scores = iter([0.75])  # of the model itself
    found = search(
        islands, FP16, Tolerance(), samples, score=lambda outputs: next(scores, 0.25), least=0.5, max_evals=4
    )
    assert not found.feasible
    assert found.best.result.missed == ("score 0.25 < 0.5",)


def test_a_cheaper_part_of_few_raised_nodes_is_found(samples: Samples) -> None:
    """A measure need not go with noise: this one is met with all three in fp32, with l3 alone, and with nothing between."""
    constants = {name: weights(256, 32) for name in ("w1", "w2", "w3")}
    constants["w1"][128:], constants["w3"][128:] = -0.99 * constants["w1"][:128], -0.9 * constants["w3"][:128]
    model = proto(
        """g (float[4,256] x) => (float[4,32] a, float[4,32] b, float[4,32] c)
        { [l1] a = MatMul(x, w1)  [l2] b = MatMul(x, w2)  [l3] c = MatMul(x, w3) }""",
        **constants,
    )
    half = RNG.standard_normal((4, 128)).astype(np.float32)
    x = np.concatenate([half, half], axis=1)
    exact = {name: x @ constants[f"w{number}"] for number, name in enumerate("abc", 1)}

    def score(outputs: list[dict[str, np.ndarray]]) -> float:
        a, b, c = (bool(np.abs(outputs[0][name] - exact[name]).max() < 1e-5) for name in "abc")
        return float(c and a == b)

    found = search(model, FP16, Tolerance(), [{"x": x}], score=score, least=1.0)  # type: ignore[arg-type]
    assert any(trial.passed and len(trial.raised) == 3 for trial in found.trials)
    assert found.best.raised == ("l3",)


def test_a_score_that_the_model_itself_does_not_reach_is_not_searched_for(
    islands: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path
) -> None:
    asked = []

    def score(outputs: object) -> float:
        asked.append(outputs)
        return 0.4999999999

    with pytest.raises(UsageError, match=r"itself, in fp32, has score 0\.4999999999, less than the 0\.5 asked for"):
        search(islands, FP16, Tolerance(), samples, score=score, least=0.5, journal=str(tmp_path / "j.jsonl"))
    assert len(asked) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("measure", "bound"), [("max_rel", 0.01), ("top1", 0.9), ("kl", 1e-3), ("cosine", 0.999)])
def test_every_measure_is_searched_by(islands: onnx.ModelProto, samples: Samples, measure: str, bound: float) -> None:
    found = search(islands, BF16 if measure == "cosine" else FP16, Tolerance().replaced({measure: bound}), samples)
    assert found.feasible
    value = getattr(found.best.result.worst, measure)
    assert value >= bound if measure in ("cosine", "top1") else value <= bound


def test_what_the_user_decided_is_left_alone(islands: onnx.ModelProto, samples: Samples) -> None:
    found = search(islands, Options(level="O2", keep=("norm", "l1")), Tolerance(cosine=0.9999), samples)
    assert precisions(found)["norm"] == precisions(found)["l1"] == "fp32"
    with pytest.raises(UsageError, match="level O2"):
        search(islands, Options(level="O3"), Tolerance(cosine=0.9), samples)


def test_outputs_that_say_nothing_are_named(islands: onnx.ModelProto) -> None:
    found = search(islands, FP16, Tolerance(cosine=0.99), [{"x": np.zeros((8, 32), np.float32)}] * 2, max_evals=1)
    assert not any("says little" in text for text in found.notes)
    flat = proto("g (float[8,32] x) => (float[8,4] y) { [l] a = MatMul(x, w)  [r] y = Relu(a) }", w=weights(32, 4))
    (note,) = search(flat, FP16, Tolerance(cosine=0.99), [{"x": np.zeros((8, 32), np.float32)}], max_evals=1).notes
    assert "Output 'y' of the reference is 0 everywhere" in note


def test_nothing_is_ranked_where_nothing_can_be_chosen() -> None:
    flat = proto("g (float[8,32] x) => (float[8,4] y) { [l] a = MatMul(x, w)  [r] y = Relu(a) }", w=weights(32, 4))
    found = search(flat, FP16, Tolerance(cosine=0.99), [{"x": weights(8, 32)}])
    assert (found.feasible, len(found.trials), found.ranking) == (True, 1, ())
    assert "Sensitivity" not in page_of("m.onnx", found, asked(["cosine=0.99"]))
    assert search(flat, FP16, Tolerance(max_rel=1e-9), [{"x": weights(8, 32)}]).ranking


def test_made_up_samples_are_named_as_such(islands: onnx.ModelProto) -> None:
    found = search(islands, FP16, Tolerance(cosine=0.999))
    assert "made up" in found.data
    assert any("made up" in note for note in found.notes)
