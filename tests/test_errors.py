"""Parts of the sentences that errors are."""

import pytest

from onnxamp.errors import few


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_few_names_and_how_many_more(names: list[str], text: str) -> None:
    assert few(names, 2) == text
