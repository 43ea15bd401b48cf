"""`onnxamp diagnose`: the rows and the node where numbers go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

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
    assert "'image' holds 64 NaN" in skipped[0]
    assert "; scale 65536 → 32768" in skipped[0]
    parameters = [value for key, value in last(place / "poisoned").items() if key.startswith("master/")]
    assert all(np.isfinite(value).all() for value in parameters)
    code, out, _ = call("diagnose", place / "poisoned", "--data", poisoned, "--rows", 32, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["data"] == [{"column": "image", "rows": [100, 300], "nan": True}]
    assert found["levels"][0]["first"]["nan"] > 0


def test_diagnose_names_the_planted_node(place, call, mlp):
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
