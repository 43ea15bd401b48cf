"""An example runs as it is written and reaches what it states; the longer ones are run by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_scripts_assert_what_the_table_states():
    stated = re.findall(
        r"^\| `(\w+\.py)` .*\b(above|below) ([\d.]+)", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert len(stated) == 5  # adapter.py compares two results with each other
    for name, side, number in stated:
        assert re.search(
            rf"assert .* {'>' if side == 'above' else '<'} {re.escape(number)}$",
            (EXAMPLES / name).read_text(),
            re.MULTILINE,
        )


@pytest.mark.parametrize("name", ["regression", "keras_regression"])
def test_the_regressions(tmp_path, name):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("after: ")


def test_the_adapter(tmp_path):
    """Within a point of full fine-tuning, for a fifth of what trains."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "adapter.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "'adapter bytes': 19636" in done.stdout
