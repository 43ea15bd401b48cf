"""`onnxamp train`: what a run leaves behind, and what it starts from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from onnxamp.trainer.tracking import read_metrics

TRAIN = Path(__file__).parents[2] / "models/digits_train.npz"


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


def test_the_saved_configuration_replays_the_run(run, place, call, last):
    folder, _, _ = run
    code, _, err = call("train", "--config", folder / "config.toml", "-o", place / "again", "--epochs", 6)
    assert code == 0, err
    first, second = last(folder), last(place / "again")
    assert first.keys() == second.keys()
    assert all(first[key].tobytes() == second[key].tobytes() for key in first)
    assert (folder / "config.toml").read_text() == (place / "again/config.toml").read_text()


def test_starting_from_another_run(run, place, call, options):
    folder, _, _ = run
    arguments = options(place, place / "further", epochs=None, steps=1, lr=1e-9, **{"init-from": folder})
    code, out, err = call("train", *arguments[2:], "--json")
    assert code == 0, err
    assert json.loads(out)["values"]["accuracy"] > 0.85


def test_a_bundle_trains_with_what_it_was_built_with(place, original, call, last):
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


def test_the_head_for_other_classes(place, original, call, flat, options):
    labels = np.load(place / "train.npz")["labels"] % 3
    data = flat(TRAIN, place / "three.npz", labels=labels)
    arguments = options(
        place, place / "three", data=data, val=data, like=original, frozen="*", trainable="MatMul_7",
        **{"replace-head": "logits:3"},
    )  # fmt: skip
    code, out, err = call(*arguments)
    assert code == 0, err
    assert call("export", place / "three", "--state-dict", place / "three.safetensors")[0] == 0
    old, new = load_file(original), load_file(place / "three.safetensors")
    assert new["fc2.weight"].shape == (3, old["fc2.weight"].shape[1])
    assert new["fc2.bias"].shape == (3,)
    assert (new["fc1.weight"] == old["fc1.weight"]).all()
    assert out.startswith("96 of 2,179 parameters train")
    model = {t.name: numpy_helper.to_array(t) for t in onnx.load(place / "three/model.onnx").graph.initializer}
    assert model["MatMul_7"].shape == (32, 3)
    code, _, err = call("replace-head", place / "mlp.onnx", "--units", 3, "-o", place / "head.onnx")
    assert code == 0, err
    assert call("replace-head", place / "mlp.onnx", "--units", 3, "-o", place / "head.onnx")[0] == 2


def test_a_part_of_the_data_is_held_out(place, call, options):
    """The same rows in a run that goes on; they are not trained on."""
    rows = len(np.load(place / "train.npz")["labels"])
    given = {"val": None, "val-split": 0.25, "epochs": 1}
    code, out, err = call(*options(place, place / "split", **given), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["rows"] == rows - round(0.25 * rows)
    assert 0 < result["values"]["accuracy"] <= 1
    code, out, err = call("train", "--resume", "-o", place / "split", "--epochs", 2, "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == rows - round(0.25 * rows)
    code, _, err = call("train", "--resume", "-o", place / "split", "--val-split", 0.5)
    assert (code, "--val-split is fixed in a run that goes on" in err) == (2, True)


def test_global_batch_and_early_stop(place, call, options):
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


def test_advice_of_convert_stays_out_of_training(call, tmp_path):
    """Casts around products between softmaxes move more bytes than 16 bits save: convert says so, and names its own options."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), f"w{k}") for k in range(3)]
    nodes = []
    for k in range(3):
        nodes += [
            helper.make_node("Softmax", [f"h{k}"], [f"s{k}"], name=f"soft{k}"),
            helper.make_node("MatMul", [f"s{k}", f"w{k}"], [f"h{k + 1}"], name=f"fc{k}"),
        ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("h0", "h3")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    _, out, _ = call("convert", tmp_path / "m.onnx", "--dim", "batch=4096")
    assert "--io low" in out
    code, out, _ = call("build", tmp_path / "m.onnx", "--loss", "mse", "--dim", "batch=4096", "-o", tmp_path / "bundle")
    assert code == 0
    assert "--io" not in out
    assert "traffic" not in out
