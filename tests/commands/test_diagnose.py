"""`onnxamp diagnose`: the rows and the node where numbers go wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

TRAIN = Path(__file__).parents[2] / "models/digits_train.npz"


def test_poisoned_rows_are_skipped_and_named(place, call, flat, options, last):
    image = np.load(place / "train.npz")["image"].copy()
    image[[100, 300]] = np.nan
    poisoned = flat(TRAIN, place / "poisoned.npz", image=image)
    arguments = options(place, place / "poisoned", level="O2", data=poisoned)
    code, out, _ = call(*arguments)
    assert code == 0
    skipped = [line for line in out.splitlines() if "skipped:" in line]
    assert len(skipped) == 4
    named = [re.search(rf"'image' holds 64 NaN in row (\d+) of {re.escape(str(poisoned))};", line) for line in skipped]
    assert sorted(int(found[1]) for found in named if found) == [100, 100, 300, 300]
    assert "; scale 65536 → 32768" in skipped[0]
    parameters = [value for key, value in last(place / "poisoned").items() if key.startswith("master/")]
    assert all(np.isfinite(value).all() for value in parameters)
    code, out, _ = call("diagnose", place / "poisoned", "--data", poisoned, "--rows", 32, "--json")
    assert code == 1
    found = json.loads(out)
    where = f"rows 100 and 300 of {poisoned}"
    assert found["data"] == [{"column": "image", "rows": [100, 300], "where": where, "nan": True}]
    assert found["levels"][0]["first"]["nan"] > 0


def test_infinities_are_not_called_nan(place, call, flat, mlp):
    image = np.load(place / "train.npz")["image"].copy()
    image[5], image[7] = np.nan, np.inf
    poisoned = flat(TRAIN, place / "both.npz", image=image)
    mlp(place / "m.onnx", scale=1.0)
    code, out, _ = call("diagnose", place / "m.onnx", "--data", poisoned, "--levels", "O0", "--rows", 8)
    assert code == 1
    assert out.splitlines()[:2] == [
        f"data  image: NaN in row 5 of {poisoned}",
        f"data  image: Inf in row 7 of {poisoned}",
    ]


def test_diagnose_names_the_planted_node(place, call, mlp):
    mlp(place / "planted.onnx", scale=6e4)
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
    page = (place / "d.html").read_text()
    assert "planted" in page
    assert re.search(r'<td class="n" data-v="143\d+\.\d+">143,\d+</td>', page)  # one that never breaks across lines


@pytest.mark.parametrize(("rows", "batch"), [(8, 32), (8, 4), (9, 4), (1, 32)])
@pytest.mark.parametrize("levels", ["O0,O2", "O2"])
def test_exactly_the_rows_asked_for_and_the_input_by_name(place, call, flat, rows, batch, levels):
    """NaN that comes in by the data is the input's, at each level, and the bad row is looked at among others."""
    image = dict(np.load(place / "train.npz"))["image"][:50].copy()
    image[40, 3] = np.nan
    data = flat(TRAIN, place / f"one_bad{rows}.npz", 50, image=image)
    arguments = [
        "diagnose",
        place / "mlp.onnx",
        "--data",
        data,
        "--rows",
        rows,
        "--batch-size",
        batch,
        "--levels",
        levels,
    ]
    code, out, _ = call(*arguments, "--loss", "cross_entropy", "--json")
    assert code == 1
    found = json.loads(out)
    for level in found["levels"]:
        assert (level["first"]["node"], level["first"]["op"], level["first"]["nan"]) == ("image", "input", 1)
        assert level["values"][0]["count"] == rows * 64
        assert not {value["node"] for value in level["values"]} & {"image/fp16", "Cast"}
    _, out, _ = call(*arguments)
    assert out.splitlines()[1].endswith(
        f"first in input 'image' (forward, fp32): 1 NaN of {rows * 64} elements in 'image'"
    )
    assert "O0 fp16" not in out


def test_batches_are_those_of_the_run(run, place, call):
    folder, _, _ = run  # micro-batches of 64 rows
    code, out, _ = call("diagnose", folder, "--data", place / "train.npz", "--rows", 64, "--json")
    assert code == 0
    counts = {value["value"]: value["count"] for value in json.loads(out)["levels"][0]["values"]}
    assert 64 * 10 in counts.values()


def test_an_input_that_only_another_output_needs(call, tmp_path):
    """The bundle of each level takes what the run took."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[batch,4] x, float[batch,3] extra) => (float[batch,3] y, float[batch,3] z)
        { y = MatMul(x, w)  z = Add(y, extra) }""")
    rng = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(4, 3)).astype(np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    x, extra = (rng.normal(size=(8, size)).astype(np.float32) for size in (4, 3))
    np.savez(tmp_path / "d.npz", x=x, extra=extra, labels=rng.integers(0, 3, 8))
    data = ["--data", tmp_path / "d.npz"]
    choices = ["--loss", "cross_entropy", "--output-name", "y", "--level", "O0", "--epochs", 1, "--provider", "cpu"]
    assert call("train", tmp_path / "m.onnx", *data, *choices, "-o", tmp_path / "run")[0] == 0
    code, out, err = call("diagnose", tmp_path / "run", *data, "--levels", "O0,O2")
    assert code == 0, err
    assert out.splitlines()[:2] == [f"{level}: every value is finite and fits its type" for level in ("O0", "O2 fp16")]
