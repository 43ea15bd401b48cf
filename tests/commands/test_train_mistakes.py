"""`onnxamp train` on wrong options, data and folders: one sentence, and nothing of the user's is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

TRAIN = Path(__file__).parents[2] / "models/digits_train.npz"


@pytest.mark.parametrize("flag", ["resume", "force"])
@pytest.mark.parametrize("config", [False, True])
def test_files_that_are_no_runs_are_left_alone(place, call, tmp_path, flag, config, mlp, options):
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


def test_a_run_is_replaced_only_by_what_does_not_come_from_it(place, call, tmp_path, options):
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
    ({"val-split": 0.5}, 2, "--val and --val-split both say what to evaluate on"),
    ({"output": None}, 2, "Where should the run go"),
    ({"data": "nowhere.npz"}, 3, "no data at nowhere.npz"),
    ({"column": "image=pixels"}, 3, "'pixels' is missing"),
    ({"column": "image"}, 2, "--column takes NAME=VALUE"),
    ({"global-batch": 64}, 2, "give one or the others"),
    ({"replace-head": "x"}, 2, "[OUTPUT:]UNITS"),
]


@pytest.mark.parametrize(("change", "code", "message"), BAD_CALLS, ids=[next(iter(c[0])) for c in BAD_CALLS])
def test_wrong_options_end_in_one_sentence_and_write_nothing(place, call, change, code, message, options):
    got, _, err = call(*options(place, place / "bad", **change))
    assert (got, err.splitlines()[0][:7]) == (code, "Error: ")
    assert message in err
    assert not (place / "bad").exists()


def test_labels_out_of_range(place, call, flat, options):
    labels = np.load(place / "train.npz")["labels"].copy()
    labels[7] = 10
    code, _, err = call(*options(place, place / "labels", data=flat(TRAIN, place / "labels.npz", labels=labels)))
    assert code == 3
    assert f"Row 7 of {place}/labels.npz: " in err
    assert "has the label 10" in err
    assert "labels are 0 to 9" in err


def test_a_wrong_column_shows_what_was_expected_and_found(place, call, options):
    np.savez(place / "wrong.npz", pixels=np.zeros((5, 64), np.float32), labels=np.zeros(5, np.int64))
    code, _, err = call(*options(place, place / "wrong", data=place / "wrong.npz"))
    assert code == 3
    assert "expected: image float32[batch, 64], labels int64[batch]" in err
    assert "found:    pixels float32[rows, 64], labels int64[rows]" in err
    assert "--column image=pixels" in err


def test_a_diverging_learning_rate_ends_with_its_name(place, call, options):
    arguments = options(place, place / "diverged", optimizer="sgd", lr=1e30, epochs=40)
    code, _, err = call(*arguments)
    assert code == 1
    assert "lower the learning rate" in err
    assert "Loss" in (place / "diverged/report.html").read_text()


def test_unknown_keys_of_a_file(place, call):
    (place / "run.toml").write_text("epoch = 3\n")
    code, _, err = call("train", place / "mlp.onnx", "--config", place / "run.toml", "-o", place / "bad")
    assert (code, err) == (2, f"Error: Unknown key 'epoch' in {place}/run.toml; did you mean 'epochs'?\n")


@pytest.mark.parametrize("begun", [False, True])
def test_going_on_without_a_run(call, tmp_path, begun):
    """No run at all, and one that was interrupted before it could go on."""
    if begun:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/.onnxamp-run").write_text("onnxamp-run/1\n")
    code, _, err = call("train", "--resume", "-o", tmp_path / "run")
    assert code == 2
    assert err.startswith(f"Error: There is no run in {tmp_path}/run to go on with")
    assert ("beginning was not finished" in err) == begun


FIXED = {
    "batch size": ({"batch-size": 16}, {}, "batches of exactly 8 rows: take batch size 8, not 16"),
    "rows": ({}, {"train": 37}, "37 rows of {}/train.npz do not divide into them; leave 5 out"),
    "rows to evaluate on": ({}, {"val": 23}, "23 rows of {}/val.npz do not divide into them; leave 7 out"),
}


@pytest.mark.parametrize(("change", "rows", "message"), FIXED.values(), ids=FIXED)
def test_a_fixed_batch_that_does_not_divide_the_rows_is_found_first(
    place, call, flat, options, tmp_path, change, rows, message
):
    model = onnx.load(place / "mlp.onnx")
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, tmp_path / "mlp.onnx")
    rows = {"train": 40, "val": 24, **rows}
    data = {name: flat(TRAIN, tmp_path / f"{name}.npz", count) for name, count in rows.items()}
    change = {"data": data["train"], "val": data["val"], "batch-size": 8, **change}
    code, _, err = call(*options(tmp_path, tmp_path / "bad", **change))
    assert code == 3
    assert message.format(tmp_path) in " ".join(err.split())
    assert not (tmp_path / "bad").exists()


def test_a_fixed_batch_is_predicted_only_if_it_divides_the_rows(place, call, flat, tmp_path):
    model = onnx.load(place / "mlp.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, tmp_path / "mlp.onnx")
    data = flat(TRAIN, tmp_path / "data.npz", 37)
    for size in (8, 64):
        code, _, err = call(
            "predict", tmp_path / "mlp.onnx", "--data", data, "--batch-size", size, "-o", tmp_path / "p.npz"
        )
        assert code == 3
        assert "do not divide into them; leave 5 out" in err


def test_a_row_of_the_data_to_evaluate_on_is_named(place, call, tmp_path, options, flat, caplog):
    """By its number in the file, as one of the training data: a wrong label ends the run, NaN is said."""
    test = np.load(place / "test.npz")
    labels, image = test["labels"].copy(), test["image"].copy()
    labels[70], image[[3, 5], 0] = 10, np.nan
    quick = {"epochs": None, "steps": 1, "lr": None}
    wrong = flat(place / "test.npz", tmp_path / "wrong.npz", labels=labels)
    code, _, err = call(*options(place, tmp_path / "a", val=wrong, **quick))
    assert (code, f"Error: Row 70 of {wrong}: The input 'labels' has the label 10 at [6]" in err) == (3, True)
    bad = flat(place / "test.npz", tmp_path / "bad.npz", image=image)
    code, out, _ = call(*options(place, tmp_path / "b", val=bad, **quick))
    assert (code, "val_loss nan" in out) == (0, True)
    said = f"he input 'image' holds 2 NaN in rows 3 and 5 of {bad}: what is computed from them is not finite either."
    assert [record.getMessage() for record in caplog.records] == [f"T{said}"]
    code, _, err = call("predict", tmp_path / "b", "--data", bad, "--metric", "accuracy")
    assert (code, err) == (0, f"t{said.removesuffix('.')}\n")
