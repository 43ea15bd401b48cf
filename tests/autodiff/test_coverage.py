"""The generated page of operators says what the table of rules says."""

from __future__ import annotations

from onnxamp import autodiff  # noqa: F401  (registers the rules)
from onnxamp.autodiff.coverage import page
from onnxamp.autodiff.registry import RULES, ZERO_GRADIENT


def test_page():
    text = page()
    assert "| MatMul | all floats |  |" in text
    assert "| OneHot | values | indices, depth |" in text
    assert "| Resize | X |  |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 == sum(domain in ("", "com.microsoft") for domain, _ in RULES) == 167
    assert not set(RULES) & ZERO_GRADIENT
