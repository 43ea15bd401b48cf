"""The documentation claims of CUDA only what was measured or placed, and says which."""

import pathlib
import re

from onnxamp.policy import pages

ROOT = pathlib.Path(__file__).parents[1]
# What a page may say of CUDA without claiming anything that runs there: how to install, and where to read on.
NO_CLAIM = ("On a GPU machine install", "python -m pytest -m cuda", "# On a GPU", "Several GPUs:")


def sentences(text: str) -> list[str]:
    """Sentences and table rows of a Markdown page, without code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", text)
    parts = re.split(r"\n\s*\n|\n(?=[|#]|\s*[*-] )", text)
    return [s for part in parts for s in re.split(r"(?<=[.!?])\s+", " ".join(part.split())) if s]


def claims(text: str) -> list[str]:
    found = [s for s in sentences(text) if re.search(r"\b(CUDA|GPUs?|NCCL|cuDNN)\b", s)]
    return [s for s in found if not s.startswith(NO_CLAIM)]


def test_every_sentence_on_cuda_says_measured_or_placed():
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files} | {
        c: pages.page(c) for c in pages.entries()
    }
    found = {name: claims(text) for name, text in texts.items()}
    assert sum(map(len, found.values())) >= 12
    assert not [name for name in ("gpu.md", "providers.md", "distributed.md", "AMP301") if not found[name]]
    silent = [(name, s) for name, part in found.items() for s in part if not re.search(r"\b(measured|placed)\b", s)]
    assert not silent
