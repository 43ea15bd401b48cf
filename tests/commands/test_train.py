"""`onnxamp train` and what belongs to a run: export, predict, diagnose, resume, and everything that can go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

import onnxamp
from onnxamp import cli
from onnxamp.ort.session import open_session
from onnxamp.ort.session import run as run_session
from onnxamp.passes.emulate import emulate
from onnxamp.trainer.tracking import read_metrics
from onnxamp.training import build

MODELS = Path(__file__).parents[2] / "models"
TRAIN, TEST = MODELS / "digits_train.npz", MODELS / "digits_test.npz"


def mlp(path: Path, scale: float = 1.0) -> Path:
    """64 → 32 → 10 over flat digits; `scale` is a planted factor and its inverse around the hidden values."""
    rng = np.random.default_rng(0)
    weights = {
        "fc1.weight": rng.normal(0, 0.18, (32, 64)),
        "fc1.bias": np.zeros(32),
        "MatMul_7": rng.normal(0, 0.25, (32, 10)),
        "fc2.bias": np.full(10, 0.01),
        "up": np.array(scale),
        "down": np.array(1 / scale),
    }
    nodes = [
        helper.make_node("Gemm", ["image", "fc1.weight", "fc1.bias"], ["h"], name="fc1", transB=1),
        helper.make_node("Relu", ["h"], ["a"], name="act"),
        helper.make_node("Mul", ["a", "up"], ["big"], name="planted"),
        helper.make_node("Mul", ["big", "down"], ["b"], name="back"),
        helper.make_node("MatMul", ["b", "MatMul_7"], ["m"], name="fc2"),
        helper.make_node("Add", ["m", "fc2.bias"], ["logits"], name="fc2_bias"),
    ]
    if scale == 1.0:
        nodes = [nodes[0], nodes[1], helper.make_node("MatMul", ["a", "MatMul_7"], ["m"], name="fc2"), nodes[5]]
        del weights["up"], weights["down"]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def flat(source: Path, path: Path, rows: int | None = None, **changes: np.ndarray) -> Path:
    data = dict(np.load(source))
    columns = {"image": data["image"].reshape(len(data["image"]), -1)[:rows], "labels": data["labels"][:rows]}
    np.savez(path, **{**columns, **changes})
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    mlp(folder / "mlp.onnx")
    flat(TRAIN, folder / "train.npz")
    flat(TEST, folder / "test.npz")
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onnxamp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def options(place: Path, run: Path, **changes: object) -> list[object]:
    given = {
        "data": place / "train.npz",
        "val": place / "test.npz",
        "loss": "cross_entropy",
        "lr": 3e-3,
        "epochs": 2,
        "batch-size": 64,
        "level": "O0",
        "metric": "accuracy",
        "threads": 1,
        "provider": "cpu",
        "output": run,
        **changes,
    }
    flags = [
        [f"--{name}"] if value is True else [f"--{name}", value] for name, value in given.items() if value is not None
    ]
    return ["train", place / "mlp.onnx", *(part for flag in flags for part in flag)]


@pytest.fixture(scope="module")
def original(place):
    """The framework's state dict of the MLP."""
    model = onnx.load(place / "mlp.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    state = {
        "fc1.weight": values["fc1.weight"],
        "fc1.bias": values["fc1.bias"],
        "fc2.weight": np.ascontiguousarray(values["MatMul_7"].T),
        "fc2.bias": values["fc2.bias"],
    }
    save_file(state, place / "original.safetensors")
    return place / "original.safetensors"


@pytest.fixture(scope="module")
def run(place, original):
    """A finished run at O2 fp16."""
    folder = place / "run"
    arguments = options(place, folder, level="O2", epochs=6, accumulate=2, ema=0.9, like=original, tensorboard=True)
    done = subprocess.run(
        [sys.executable, "-m", "onnxamp", *map(str, arguments), "--json"], capture_output=True, check=True
    )
    return folder, json.loads(done.stdout), done.stderr.decode()


def last(folder: Path) -> dict[str, np.ndarray]:
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1])


def test_a_run_leaves_everything_behind(run):
    folder, result, log = run
    assert result["reason"] == "done"
    assert result["values"]["accuracy"] > 0.85
    assert result["steps"] == 6 * 12
    assert {path.name for path in folder.iterdir()} == {
        ".onnxamp-run", "bundle", "checkpoints", "config.toml", "metrics.jsonl", "model.onnx", "report.html", "tensorboard",
    }  # fmt: skip
    assert len(list((folder / "checkpoints").glob("step-*"))) == 2
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    entries = list(read_metrics(folder / "metrics.jsonl"))
    assert [entry["window"] for entry in entries if entry["kind"] == "window"] == list(range(1, 73))
    assert len([entry for entry in entries if entry["kind"] == "evaluation"]) == 6
    page = (folder / "report.html").read_text()
    for text in ("Loss scale", "Gradient norm", "Throughput", "Memory", "Learning rate", "accuracy"):
        assert text in page
    lines = log.splitlines()
    assert lines[0] == "2,410 parameters  O2 fp16  heavy nodes 2 of 2 in 16 bits  on cpu"
    assert next(line for line in lines[1:] if not line.startswith("note: ")).startswith("epoch 1/6  step 12  loss ")
    assert lines[-2].startswith(f"model   {folder}/model.onnx  (best val_loss ")


def test_export_and_predict(run, place, call):
    folder, _, _ = run
    code, out, _ = call("export", folder, "-o", place / "fp32.onnx")
    assert (code, out.split(",")[0]) == (0, f"{place}/fp32.onnx: FP32")
    source, exported = onnx.load(place / "mlp.onnx").graph, onnx.load(place / "fp32.onnx").graph
    assert [(n.name, n.op_type) for n in exported.node] == [(n.name, n.op_type) for n in source.node]
    assert [t.name for t in exported.initializer] == [t.name for t in source.initializer]
    assert call("export", folder, "-o", place / "fp16.onnx", "--level", "O2")[0] == 0
    assert call("export", folder, "-o", place / "ema.onnx", "--weights", "ema", "--checkpoint", "last")[0] == 0
    assert call("export", folder, "-o", place / "int8.onnx", "--int8", "--data", place / "train.npz")[0] == 0
    labels = np.load(place / "test.npz")["labels"]
    accuracy = {}
    for name in ("fp32", "fp16", "ema", "int8"):
        code, out, err = call(
            "predict", place / f"{name}.onnx", "--data", place / "test.npz", "-o", place / "p.npz", "--force"
        )
        assert (code, out, err) == (0, f"{place}/p.npz: logits [360, 10]\n", "not used: labels\n")
        accuracy[name] = (np.load(place / "p.npz")["logits"].argmax(1) == labels).mean()
    assert accuracy["fp32"] > 0.85
    assert accuracy["fp16"] == pytest.approx(accuracy["fp32"], abs=0.01)
    assert accuracy["int8"] >= accuracy["fp32"] - 0.02
    call("predict", folder, "--data", place / "test.npz", "-o", place / "r.npz")
    call("predict", place / "fp32.onnx", "--data", place / "test.npz", "-o", place / "p.npz", "--force")
    np.testing.assert_array_equal(np.load(place / "r.npz")["logits"], np.load(place / "p.npz")["logits"])


def test_export_opens_no_session(run, place, call, monkeypatch):
    """It only reads files: no provider, no proof, no remark on the machine that trained."""
    folder, _, _ = run

    def forbidden(*_, **__):
        raise AssertionError("a session")

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", forbidden)
    code, _, err = call("export", folder, "-o", place / "read.onnx", "--checkpoint", "last", "--weights", "ema")
    assert (code, err) == (0, "")


def test_framework_names_come_back(run, place, call):
    folder, _, _ = run
    code, out, _ = call("export", folder, "--state-dict", place / "tuned.safetensors", "-o", place / "s.onnx")
    assert code == 0
    assert "4 tensors trained" in out
    tuned = load_file(place / "tuned.safetensors")
    values = {t.name: numpy_helper.to_array(t) for t in onnx.load(place / "s.onnx").graph.initializer}
    np.testing.assert_array_equal(tuned["fc2.weight"], values["MatMul_7"].T)
    np.testing.assert_array_equal(tuned["fc1.weight"], values["fc1.weight"])
    assert not np.array_equal(tuned["fc1.weight"], load_file(place / "original.safetensors")["fc1.weight"])


def test_the_saved_configuration_replays_the_run(run, place, call):
    folder, _, _ = run
    code, _, err = call("train", "--config", folder / "config.toml", "-o", place / "again", "--epochs", 6)
    assert code == 0, err
    first, second = last(folder), last(place / "again")
    assert first.keys() == second.keys()
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)
    assert (folder / "config.toml").read_text() == (place / "again/config.toml").read_text()


def test_a_finished_run_goes_on_only_with_more_epochs(run, place, call):
    folder, _, _ = run
    code, out, _ = call("train", "--resume", "-o", folder)
    assert code == 0
    assert "nothing left to do" in out
    code, _, err = call("train", "--resume", "-o", folder, "--lr", 0.5)
    assert (code, err) == (
        2,
        f"Error: --lr is fixed in a run that goes on; begin a new one with `--init-from {folder} -o OTHER`.\n",
    )
    code, _, err = call(*options(place, folder))
    assert code == 2
    assert "holds a run: give --resume to go on, --force to replace it" in err


def test_starting_from_another_run(run, place, call):
    folder, _, _ = run
    arguments = options(place, place / "further", epochs=None, steps=1, lr=1e-9, **{"init-from": folder})
    code, out, err = call("train", *arguments[2:], "--json")
    assert code == 0, err
    assert json.loads(out)["values"]["accuracy"] > 0.85


def test_a_bundle_trains_with_what_it_was_built_with(place, original, call):
    bundle = place / "bundle"
    code, _, err = call(
        "build", place / "mlp.onnx", "-o", bundle, "--loss", "cross_entropy", "--level", "O0", "--like", original
    )
    assert code == 0, err
    arguments = ["train", bundle, "--data", place / "train.npz", "--threads", 1]
    code, _, err = call(*arguments, "-o", place / "bundled", "--lr", 3)
    assert (code, err) == (2, f"Error: The bundle {bundle} has its own --lr: build another one for this value.\n")
    assert call(*arguments, "-o", place / "bundled")[0] == 0
    assert call("export", place / "bundled", "--state-dict", place / "b.safetensors")[0] == 0
    assert call("train", "--config", place / "bundled/config.toml", "-o", place / "bundled2")[0] == 0
    first, second = last(place / "bundled"), last(place / "bundled2")
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)


def test_the_head_for_other_classes(place, call):
    labels = np.load(place / "train.npz")["labels"] % 3
    data = flat(TRAIN, place / "three.npz", labels=labels)
    arguments = options(
        place, place / "three", data=data, val=data, frozen="*", trainable="MatMul_7", **{"replace-head": "logits:3"}
    )
    code, out, err = call(*arguments)
    assert code == 0, err
    assert out.startswith("96 parameters")
    model = {t.name: numpy_helper.to_array(t) for t in onnx.load(place / "three/model.onnx").graph.initializer}
    assert model["MatMul_7"].shape == (32, 3)
    code, _, err = call("replace-head", place / "mlp.onnx", "--units", 3, "-o", place / "head.onnx")
    assert code == 0, err
    assert call("replace-head", place / "mlp.onnx", "--units", 3, "-o", place / "head.onnx")[0] == 2


def test_global_batch_and_early_stop(place, call):
    arguments = options(
        place,
        place / "global",
        epochs=30,
        lr=1.0,
        patience=1,
        **{"batch-size": None, "global-batch": 256, "early-stop": "accuracy"},
    )
    code, out, err = call(*arguments, "--json")
    assert code == 0, err
    assert "window of 256 rows in 1 micro-batches of 256" in err
    result = json.loads(out)
    assert "accuracy has not become better than" in result["reason"]
    assert result["best"]["metric"] == "accuracy"
    assert result["windows"] == 6 * result["epochs"]


def test_poisoned_rows_are_skipped_and_named(place, call):
    image = np.load(place / "train.npz")["image"].copy()
    image[[100, 300]] = np.nan
    poisoned = flat(TRAIN, place / "poisoned.npz", image=image)
    arguments = options(place, place / "poisoned", level="O2", data=poisoned)
    code, out, _ = call(*arguments)
    assert code == 0
    skipped = [line for line in out.splitlines() if "skipped:" in line]
    assert len(skipped) == 4
    assert "'image' holds 64 NaN" in skipped[0]
    assert "; scale 65536 → 32768" in skipped[0]
    parameters = [value for key, value in last(place / "poisoned").items() if key.startswith("master/")]
    assert all(np.isfinite(value).all() for value in parameters)
    code, out, _ = call("diagnose", place / "poisoned", "--data", poisoned, "--rows", 32, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["data"] == [{"column": "image", "rows": [100, 300], "nan": True}]
    assert found["levels"][0]["first"]["nan"] > 0


@pytest.mark.parametrize("flag", ["resume", "force"])
@pytest.mark.parametrize("config", [False, True])
def test_files_that_are_no_runs_are_left_alone(place, call, tmp_path, flag, config):
    """A folder of a user's own, with names that a run has too: nothing in it may change."""
    mlp(tmp_path / "model.onnx")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/manifest.json").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("mine")
    if config:
        (tmp_path / "config.toml").write_text("lr = 0.5\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = options(place, tmp_path, lr=None, **{flag: True})
    code, _, err = call("train", tmp_path / "model.onnx", *arguments[2:])
    assert code == 2
    assert "is not empty and no run" in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_is_replaced_only_by_what_does_not_come_from_it(place, call, tmp_path):
    folder = tmp_path / "run"
    quick = {"val": None, "metric": None, "epochs": None, "steps": 1}
    assert call(*options(place, folder, **quick))[0] == 0
    (folder / "notes.txt").write_text("mine")
    model = (folder / "model.onnx").read_bytes()
    for source in (folder / "model.onnx", folder / "bundle"):
        unbuilt = {"loss": None, "lr": None, "level": None} if source.is_dir() else {}
        code, _, err = call("train", source, *options(place, folder, force=True, **quick, **unbuilt)[2:])
        assert (code, err) == (
            2, f"Error: {source} is in the run that would be replaced: name another folder for the new one.\n"
        )  # fmt: skip
    code, _, err = call(*options(place, folder, force=True, **{**quick, "init-from": folder}))
    assert code == 2
    assert "in the run that would be replaced" in err
    assert (folder / "model.onnx").read_bytes() == model
    assert call(*options(place, folder, force=True, **{**quick, "steps": 2}))[0] == 0
    assert (folder / "model.onnx").read_bytes() != model
    assert (folder / "notes.txt").read_text() == "mine"


BAD_CALLS = [
    ({"data": None}, 2, "nothing to train on"),
    ({"loss": "cross_entropi"}, 2, "cross_entropy"),
    ({"metric": "acuracy"}, 2, "did you mean 'accuracy'"),
    ({"val": None}, 2, "--metric needs data to evaluate on"),
    ({"early-stop": "f1"}, 2, "There is no 'f1' to watch; there are val_loss, accuracy"),
    ({"output": None}, 2, "Where should the run go"),
    ({"data": "nowhere.npz"}, 3, "no data at nowhere.npz"),
    ({"column": "image=pixels"}, 3, "'pixels' is missing"),
    ({"column": "image"}, 2, "--column takes NAME=VALUE"),
    ({"global-batch": 64}, 2, "give one or the others"),
    ({"replace-head": "x"}, 2, "[OUTPUT:]UNITS"),
]


@pytest.mark.parametrize(("change", "code", "message"), BAD_CALLS, ids=[next(iter(c[0])) for c in BAD_CALLS])
def test_wrong_options_end_in_one_sentence_and_write_nothing(place, call, change, code, message):
    got, _, err = call(*options(place, place / "bad", **change))
    assert (got, err.splitlines()[0][:7]) == (code, "Error: ")
    assert message in err
    assert not (place / "bad").exists()


def test_labels_out_of_range(place, call):
    labels = np.load(place / "train.npz")["labels"].copy()
    labels[7] = 10
    code, _, err = call(*options(place, place / "labels", data=flat(TRAIN, place / "labels.npz", labels=labels)))
    assert code == 3
    assert "has the label 10" in err
    assert "labels are 0 to 9" in err


def test_a_wrong_column_shows_what_was_expected_and_found(place, call):
    np.savez(place / "wrong.npz", pixels=np.zeros((5, 64), np.float32), labels=np.zeros(5, np.int64))
    code, _, err = call(*options(place, place / "wrong", data=place / "wrong.npz"))
    assert code == 3
    assert "expected: image float32[batch, 64], labels int64[batch]" in err
    assert "found:    pixels float32[rows, 64], labels int64[rows]" in err
    assert "--column image=pixels" in err


def test_a_diverging_learning_rate_ends_with_its_name(place, call):
    arguments = options(place, place / "diverged", optimizer="sgd", lr=1e30, epochs=40)
    code, _, err = call(*arguments)
    assert code == 1
    assert "lower the learning rate" in err
    assert "Loss" in (place / "diverged/report.html").read_text()


def test_unknown_keys_of_a_file(place, call):
    (place / "run.toml").write_text("epoch = 3\n")
    code, _, err = call("train", place / "mlp.onnx", "--config", place / "run.toml", "-o", place / "bad")
    assert (code, err) == (2, f"Error: Unknown key 'epoch' in {place}/run.toml; did you mean 'epochs'?\n")


def test_diagnose_names_the_planted_node(place, call):
    mlp(place / "planted.onnx", scale=1e6)
    arguments = ["diagnose", place / "planted.onnx", "--data", place / "train.npz", "--levels", "O0,O3"]
    code, out, _ = call(*arguments)
    assert code == 1
    assert out.splitlines()[0] == "O0: every value is finite and fits its type"
    assert out.splitlines()[1].startswith("O3 fp16: first in Mul 'planted' (forward, fp16): ")
    assert "beyond fp16" in out.splitlines()[1]
    code, out, _ = call(*arguments, "--loss", "cross_entropy", "--json", "--report", place / "d.html")
    assert code == 1
    levels = {level["level"]: level for level in json.loads(out)["levels"]}
    assert levels["O3"]["first"]["node"] == "planted"
    assert not levels["O3"]["first"]["backward"]
    assert levels["O0"]["first"] is None
    assert any(value["backward"] for value in levels["O0"]["values"])
    assert "planted" in (place / "d.html").read_text()


def _start(place: Path, folder: Path, **changes: object) -> subprocess.Popen[str]:
    arguments = options(place, folder, level="O2", epochs=4, resume=True, **{"save-every": 2, **changes})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "onnxamp", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _windows(folder: Path) -> int:
    return sum(1 for _ in read_metrics(folder / "metrics.jsonl"))


@pytest.fixture(scope="module")
def undisturbed(place):
    process = _start(place, place / "whole")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return last(place / "whole")


def test_a_run_that_is_killed_four_times_ends_with_the_same_bits(place, undisturbed):
    folder = place / "killed"
    rng = np.random.default_rng(5)
    for kill in range(4):
        process = _start(place, folder)
        until = _windows(folder) + int(rng.integers(1, 25)) if kill else 0
        deadline = time.monotonic() + 60
        while _windows(folder) <= until and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.05)))
        process.kill()
        process.communicate()
    process = _start(place, folder)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    ended = last(folder)
    assert undisturbed.keys() == ended.keys()
    assert [key for key in ended if ended[key].tobytes() != undisturbed[key].tobytes()] == []
    assert not list((folder / "checkpoints").glob(".*"))


def test_ctrl_c_saves_and_says_how_to_go_on(place, undisturbed):
    folder = place / "stopped"
    process = _start(place, folder, **{"save-every": 1000})
    while _windows(folder) < 5 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130, out
    assert out.splitlines()[-1] == f"Interrupted and saved. Go on with:  onnxamp train --resume -o {folder}"
    assert not (folder / "model.onnx").exists()
    process = _start(place, folder, **{"save-every": 1000})
    out, _ = process.communicate()
    assert process.returncode == 0, out
    ended = last(folder)
    assert [key for key in ended if ended[key].tobytes() != undisturbed[key].tobytes()] == []


def test_a_full_disk_leaves_the_checkpoints_before(place, call, monkeypatch):
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = call(*options(place, place / "full", **{"save-every": 2}))
    assert code == 5
    assert "the disk is full; what was saved before is intact" in err
    monkeypatch.undo()
    assert last(place / "full")


@pytest.mark.parametrize(("level", "dtype"), [("O0", "fp16"), ("O2", "fp16"), ("O2", "bf16")])
def test_an_export_gives_what_evaluation_at_its_level_gives(place, level, dtype):
    model = place / "mlp.onnx"
    data = dict(np.load(place / "train.npz"))
    trainer = onnxamp.Trainer(build(model, loss="cross_entropy", optimizer="adamw", level=level, dtype=dtype), "cpu")
    trainer.fit(data, epochs=1, batch_size=64)
    exported = emulate(trainer.inference_model(level, dtype))
    assert not [name for node in exported.graph for name in node.metadata_props if name == "onnxamp.backward"]
    (logits,) = run_session(open_session(exported), {"image": data["image"]}).values()
    tolerance = 1e-5 if level == "O0" else 2 * (2**-10 if dtype == "fp16" else 2**-7)
    wanted = trainer.predict({"image": data["image"]})["logits"]
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
    assert trainer.evaluate(data)["loss"] == pytest.approx(trainer.evaluate(data, level=level)["loss"], rel=tolerance)
    loss = trainer.evaluate(data, level=level)["loss"]
    picked = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(data["labels"]))
    assert float(picked) == pytest.approx(loss, rel=tolerance)
