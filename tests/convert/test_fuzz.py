"""Mutated models: some hundred of those that `benchmarks/fuzz.py` makes by the thousand."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_mutated_models_end_in_a_valid_model_or_one_sentence() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "fuzz.py")]
    command += [str(ROOT / "tests" / "convert" / "cases"), "--count", "400", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", done.stdout)}
    assert sum(counts.values()) == 400
    assert min(counts["valid"], counts["refused"]) > 60, "both ends must be exercised"
