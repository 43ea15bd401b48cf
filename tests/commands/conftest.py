"""Runs on a small model of the digits, and how commands are called on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

from onnxamp import cli

MODELS = Path(__file__).parents[2] / "models"
TRAIN, TEST = MODELS / "digits_train.npz", MODELS / "digits_test.npz"


@pytest.fixture(scope="session")
def mlp():
    def write(path: Path, scale: float = 1.0) -> Path:
        """64 → 32 → 10 over flat digits; `scale` is a planted factor and its inverse around the hidden values."""
        rng = np.random.default_rng(0)
        weights = {
            "fc1.weight": rng.normal(0, 0.18, (32, 64)),
            "fc1.bias": np.zeros(32),
            "MatMul_7": rng.normal(0, 0.25, (32, 10)),
            "fc2.bias": np.full(10, 0.01),
            "up": np.array(scale),
            "down": np.array(1 / scale),
        }
        nodes = [
            helper.make_node("Gemm", ["image", "fc1.weight", "fc1.bias"], ["h"], name="fc1", transB=1),
            helper.make_node("Relu", ["h"], ["a"], name="act"),
            helper.make_node("Mul", ["a", "up"], ["big"], name="planted"),
            helper.make_node("Mul", ["big", "down"], ["b"], name="back"),
            helper.make_node("MatMul", ["b", "MatMul_7"], ["m"], name="fc2"),
            helper.make_node("Add", ["m", "fc2.bias"], ["logits"], name="fc2_bias"),
        ]
        if scale == 1.0:
            nodes = [nodes[0], nodes[1], helper.make_node("MatMul", ["a", "MatMul_7"], ["m"], name="fc2"), nodes[5]]
            del weights["up"], weights["down"]
        graph = helper.make_graph(
            nodes,
            "mlp",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
            [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return path

    return write


@pytest.fixture(scope="session")
def flat():
    def write(source: Path, path: Path, rows: int | None = None, **changes: np.ndarray) -> Path:
        data = dict(np.load(source))
        columns = {"image": data["image"].reshape(len(data["image"]), -1)[:rows], "labels": data["labels"][:rows]}
        np.savez(path, **{**columns, **changes})
        return path

    return write


@pytest.fixture(scope="session")
def place(tmp_path_factory, mlp, flat):
    folder = tmp_path_factory.mktemp("train")
    mlp(folder / "mlp.onnx")
    flat(TRAIN, folder / "train.npz")
    flat(TEST, folder / "test.npz")
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onnxamp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def options():
    def given_with(place: Path, run: Path, **changes: object) -> list[object]:
        given = {
            "data": place / "train.npz",
            "val": place / "test.npz",
            "loss": "cross_entropy",
            "lr": 3e-3,
            "epochs": 2,
            "batch-size": 64,
            "level": "O0",
            "metric": "accuracy",
            "threads": 1,
            "provider": "cpu",
            "output": run,
            **changes,
        }
        flags = [
            [f"--{name}"] if value is True else [f"--{name}", value]
            for name, value in given.items()
            if value is not None
        ]
        return ["train", place / "mlp.onnx", *(part for flag in flags for part in flag)]

    return given_with


@pytest.fixture(scope="session")
def original(place):
    """The framework's state dict of the MLP."""
    model = onnx.load(place / "mlp.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    state = {
        "fc1.weight": values["fc1.weight"],
        "fc1.bias": values["fc1.bias"],
        "fc2.weight": np.ascontiguousarray(values["MatMul_7"].T),
        "fc2.bias": values["fc2.bias"],
    }
    save_file(state, place / "original.safetensors")
    return place / "original.safetensors"


@pytest.fixture(scope="session")
def run(place, original, options):
    """A finished run at O2 fp16."""
    folder = place / "run"
    arguments = options(place, folder, level="O2", epochs=6, accumulate=2, ema=0.9, like=original, tensorboard=True)
    done = subprocess.run(
        [sys.executable, "-m", "onnxamp", *map(str, arguments), "--json"], capture_output=True, check=True
    )
    return folder, json.loads(done.stdout), done.stderr.decode()


@pytest.fixture(scope="session")
def last():
    def read(folder: Path) -> dict[str, np.ndarray]:
        return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1])

    return read
