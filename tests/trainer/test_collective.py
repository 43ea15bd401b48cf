"""What ranks tell each other, with ranks that are imagined."""

from __future__ import annotations

import types

import pytest

from onnxamp.trainer.collective import SingleProcess, texts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("data:3 NaN", "data:3 NaN"),
        ("é" * 256, "é" * 256),  # 512 bytes, all that travel
        ("x" * 513, "x" * 509 + "…"),
        ("é" * 300, "é" * 254 + "…"),  # no half of a letter
    ],
    ids=["nothing", "short", "fits", "long", "long letters"],
)
def test_a_text_that_is_cut_says_so(text, told):
    assert texts(SingleProcess(), text, types.SimpleNamespace(device="cpu", device_id=0)) == (told,)
