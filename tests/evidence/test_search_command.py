"""`convert --auto` and its options."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxamp.cli import cli
from onnxamp.errors import DataError, UsageError

Samples = list[dict[str, np.ndarray]]


def test_the_command(islands: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path) -> None:
    onnx.save(islands, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=samples[0]["x"])
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


def test_a_metric_of_the_users_on_the_command_line(
    islands: onnx.ModelProto, samples: Samples, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(islands, "m.onnx")
    np.savez("d.npz", x=samples[0]["x"])
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
    with pytest.raises(UsageError, match=r"score 1, less than the 1\.5"):
        ran("agreement", "--tolerance", "metric=1.5")
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
def test_options_that_do_not_go_together(
    islands: onnx.ModelProto, options: list[str], words: str, tmp_path: pathlib.Path
) -> None:
    onnx.save(islands, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(cli, ["convert", str(tmp_path / "m.onnx"), *options], catch_exceptions=False)
