"""TOML reading and writing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onnxamp import config
from onnxamp.errors import UsageError

VALUES = {
    "model": Path("a b/m.onnx"),
    "steps": 10,
    "lr": 1e-3,
    "tiny": 1e-30,
    "big": 1e16,
    "inf": math.inf,
    "nested": True,
    "off": False,
    "metric": ["accuracy", "top5"],
    "betas": (0.9, 0.999),
    "text": 'quote " backslash \\ tab \t newline \n é \x7f \x01',
    "odd key!": 1,
    "": 2,
    "empty": [],
    "columns": {"input.1": "x", "labels": "y"},
    "groups": {"head": {"lr_factor": 10.0}, "none": {}},
}


def test_round_trip(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(config.write({**VALUES, "absent": None}), encoding="utf-8")
    wanted = {**VALUES, "model": "a b/m.onnx", "betas": [0.9, 0.999]}
    assert config.read(path) == wanted
    assert type(config.read(path)["big"]) is float


def test_what_has_no_place_in_toml():
    with pytest.raises(TypeError, match="set"):
        config.write({"a": [set()]})


@pytest.mark.parametrize(
    ("content", "message"), [(None, "Cannot read"), (b"a = ", "not valid TOML"), (b"a = '\xff'", "not valid TOML")]
)
def test_files_that_do_not_read(tmp_path, content, message):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        config.read(path)


def test_unknown_names_offer_the_nearest():
    config.check_names(["lr"], ["lr", "epochs"], "run.toml")
    with pytest.raises(UsageError, match=r"Unknown key 'epoch' in run.toml; did you mean 'epochs'\?"):
        config.check_names(["epoch"], ["lr", "epochs"], "run.toml")
    with pytest.raises(UsageError, match=r"valid are epochs, lr\."):
        config.check_names(["zzz"], ["lr", "epochs"], "run.toml")
