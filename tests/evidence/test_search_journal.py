"""A search that is interrupted goes on, and believes the journal of no other question."""

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
from onnx import numpy_helper, parser
from onnxruntime import InferenceSession

from onnxamp.commands._auto import run
from onnxamp.commands._auto_asked import asked
from onnxamp.evidence import Tolerance
from onnxamp.evidence.evaluation import Evaluator, Trial
from onnxamp.evidence.search import search
from onnxamp.ort.session import SessionConfig
from onnxamp.passes.emulate import emulate
from onnxamp.policy.options import Options

Samples = list[dict[str, np.ndarray]]
FP16 = Options(level="O2", dtype="fp16")
# A bound that says nothing of noise: it takes several evaluations to meet it.
SEVERAL = Tolerance(max_rel=0.004)


def proto(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def test_an_interrupted_search_goes_on_to_the_same_policy(
    cancels: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path
) -> None:
    whole = search(cancels, FP16, SEVERAL, samples)
    stop = 3
    assert len(whole.trials) > stop
    journal = tmp_path / "search.jsonl"
    seen: list[Trial] = []

    def interrupt(trial: Trial) -> None:
        seen.append(trial)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(cancels, FP16, SEVERAL, samples, journal=str(journal), on_trial=interrupt)
    lines = journal.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + stop
    # An answer in the journal that no evaluation would give shows that it is read.
    marked = json.loads(lines[1])
    marked["worst"]["max_abs"] = 1234.5
    journal.write_text("\n".join([lines[0], json.dumps(marked), *lines[2:], '{"policy": "cut o']), encoding="utf-8")
    resumed = search(cancels, FP16, SEVERAL, samples, journal=str(journal))
    assert resumed.trials[0].result.worst.max_abs == 1234.5
    assert resumed.policy == whole.policy
    assert resumed.trials[1:] == whole.trials[1:]
    assert f"{stop} of its evaluations were there already" in resumed.notes[-1]
    assert not any("there already" in note for note in whole.notes)
    assert not journal.exists()


def test_an_interrupted_command_names_what_it_kept(
    cancels: onnx.ModelProto,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object, journal: str, **options: object) -> None:
        pathlib.Path(journal).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxamp.evidence.search.search", interrupted)
    wanted = asked(["cosine=0.999"])
    with pytest.raises(KeyboardInterrupt):
        run("m.onnx", str(tmp_path / "out.onnx"), FP16, wanted, None, 30, {})
    assert "out.search.jsonl keeps the evaluations so far" in capsys.readouterr().err


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


def test_a_killed_search_goes_on_to_the_same_policy(
    cancels: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path
) -> None:
    model, data, journal = (str(tmp_path / name) for name in ("m.onnx", "d.npz", "search.jsonl"))
    onnx.save(cancels, model)
    np.savez(data, x=np.stack([sample["x"] for sample in samples]))
    whole = search(model, FP16, SEVERAL, data)
    for stop in (2, 4):  # the second starts from what the first left
        killed = subprocess.run([sys.executable, "-c", KILLED, model, data, str(stop), journal], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(pathlib.Path(journal).read_text(encoding="utf-8").splitlines()) == 1 + stop
    resumed = search(model, FP16, SEVERAL, data, journal=journal)
    assert (resumed.policy, resumed.trials) == (whole.policy, whole.trials)


def test_a_journal_of_another_question_is_not_believed(
    cancels: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path
) -> None:
    journal = tmp_path / "search.jsonl"

    def interrupt(trial: Trial) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(cancels, FP16, Tolerance(snr=45), samples, journal=str(journal), on_trial=interrupt)
    text = journal.read_text(encoding="utf-8").replace('"max_abs": ', '"max_abs": 1234')
    journal.write_text(text, encoding="utf-8")
    found = search(cancels, FP16, Tolerance(snr=45), samples[:2], journal=str(journal))
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


def test_a_search_knows_its_model_and_version_again(
    cancels: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that gives the same bits is another one all the same: its nodes have other names, or its weights other places."""
    first = digest(cancels, *samples)
    renamed, unused = onnx.ModelProto(), onnx.ModelProto()
    for copy in (renamed, unused):
        copy.CopyFrom(cancels)
    renamed.graph.node[0].name = "other"
    unused.graph.initializer.append(numpy_helper.from_array(np.zeros(400, np.float32), "spare"))
    spare = digest(unused, *samples)
    unused.graph.initializer[-1].raw_data = np.ones(400, np.float32).tobytes()
    assert len({first, digest(renamed, *samples), spare, digest(unused, *samples)}) == 4
    copy = onnx.ModelProto()
    copy.CopyFrom(cancels)
    path = tmp_path / "m.onnx"
    onnx.save(copy, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert digest(onnx.load(path), *samples) == digest(str(path), *samples) == first  # type: ignore[arg-type]  # a path is a model
    monkeypatch.setattr("onnxamp.evidence.evaluation.__version__", "0.0.0")
    assert digest(cancels, *samples) != first


@pytest.mark.parametrize(
    "problem", [MemoryError, RuntimeError("Failed to allocate memory for requested buffer of size 4")]
)
def test_memory_that_runs_out_is_no_verdict_on_a_candidate(
    problem: type[Exception] | Exception,
    cancels: onnx.ModelProto,
    samples: Samples,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is it written to the journal, which a search with more memory would believe."""
    journal = tmp_path / "search.jsonl"

    def fail(*arguments: object) -> None:
        raise problem

    def without_memory(candidate: ir.Model) -> ir.Model:
        monkeypatch.setattr(InferenceSession, "run", fail)
        return emulate(candidate)

    monkeypatch.setattr("onnxamp.evidence.evaluation.emulate", without_memory)
    with pytest.raises(MemoryError):
        search(cancels, FP16, Tolerance(snr=45), samples, journal=str(journal))
    assert not journal.exists()
