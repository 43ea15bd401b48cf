"""The character GPT of `models/` goes on training on the text of the licence, by the command."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def main() -> float:
    """Perplexity on text that was not trained on."""
    known = dict(np.load(ROOT / "models/text.npz"))
    length = known["ids"].shape[1]
    text = (ROOT / "LICENSE").read_bytes()
    letters = np.minimum(np.frombuffer(text, np.uint8), 127).astype(np.int64)
    starts = np.arange(0, len(letters) - length - 1, 16)
    ids = np.stack([letters[start : start + length] for start in starts])
    labels = np.stack([letters[start + 1 : start + length + 1] for start in starts])
    columns = {"ids": ids, "mask": np.ones_like(ids), "labels": labels}
    cut = int(0.9 * len(ids))
    np.savez("gpt_train.npz", **{name: value[:cut] for name, value in columns.items()})
    np.savez("gpt_test.npz", **{name: value[cut + 4 :] for name, value in columns.items()})
    command = ["train", str(ROOT / "models/gpt.onnx"), "--data", "gpt_train.npz", "--val", "gpt_test.npz", "--force"]
    command += [
        "--loss",
        "cross_entropy",
        "--lr",
        "1e-3",
        "--schedule",
        "cosine",
        "--warmup",
        "10",
        "--clip-norm",
        "1",
        "--epochs",
        "3",
        "--batch-size",
        "8",
    ]
    command += ["--accumulate", "2", "--level", "O2", "--metric", "perplexity", "-o", "gpt_run", "--json"]
    done = subprocess.run([sys.executable, "-m", "onnxamp", *command], stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    print(result["values"])
    return float(result["values"]["perplexity"])


if __name__ == "__main__":
    assert main() < 5
