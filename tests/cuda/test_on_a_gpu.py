"""On a machine with an NVIDIA GPU: what was proved on the CPU by emulation holds there. Elsewhere everything here is skipped."""

import pathlib

import numpy as np
import pytest

import onnxamp
from onnxamp import training
from onnxamp.errors import AmpError
from onnxamp.evidence.sampling import choose
from onnxamp.model import io
from onnxamp.ort import cuda, doctor
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.ort.values import transfers
from onnxamp.passes.emulate import emulate

MODELS = pathlib.Path(__file__).parents[2] / "models"


def _gpus() -> int:
    try:
        return len(cuda.driver().gpus())
    except AmpError:
        return 0


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not _gpus(), reason="no NVIDIA GPU: nothing of CUDA was run"),
]
LOW = [(level, dtype) for level in ("OD", "O1", "O2", "O3") for dtype in ("fp16", "bf16")]


def bundle(level: str, dtype: str):
    return training.build(
        MODELS / "cnn.onnx", loss="cross_entropy", optimizer=training.AdamW(lr=1e-3), level=level, dtype=dtype
    )


@pytest.fixture(scope="module")
def digits():
    return dict(np.load(MODELS / "digits_train.npz"))


@pytest.mark.parametrize(("level", "dtype"), [("O0", "fp16"), *LOW])
def test_training_follows_the_emulated_run(digits, level, dtype):
    found, expected = (
        onnxamp.Trainer(bundle(level, dtype), provider, accumulate=2).fit(digits, steps=30, batch_size=32)
        for provider in ("cuda", "cpu")
    )
    assert found.skipped == expected.skipped
    tolerance = 1e-3 if level == "O0" else 0.05
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance, atol=tolerance)


def test_a_window_copies_nothing_and_two_buffers_give_the_same_bits(digits):
    batch = {name: value[:64] for name, value in digits.items()}
    results = []
    for in_place in (True, False):
        trainer = onnxamp.Trainer(bundle("O2", "fp16"), "cuda", accumulate=2, in_place=in_place)
        for _ in range(4):
            trainer.micro_step(batch)
        before = transfers.reads, transfers.writes
        for _ in range(4):
            trainer.micro_step(batch)
        assert (transfers.reads, transfers.writes) == before
        results.append(trainer.parameters())
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value, err_msg=name)


def test_a_checkpoint_crosses_devices(digits, tmp_path):
    saved = bundle("O2", "fp16").save(tmp_path / "bundle")
    trainer = onnxamp.Trainer(saved, "cuda")
    trainer.fit(digits, steps=5, batch_size=64)
    trainer.save(tmp_path / "state.safetensors")
    there = onnxamp.Trainer.load(tmp_path / "state.safetensors", "cpu")
    for name, value in trainer.parameters().items():
        np.testing.assert_array_equal(there.parameters()[name], value, err_msg=name)


@pytest.mark.parametrize("model", ["cnn", "gpt", "lstm"])
@pytest.mark.parametrize(("level", "dtype"), LOW)
def test_converted_models_give_what_the_emulation_gives(model, level, dtype):
    converted = onnxamp.convert(MODELS / f"{model}.onnx", level=level, dtype=dtype).model
    emulated = open_session(emulate(converted), SessionConfig("cpu"))
    session = open_session(converted, SessionConfig("cuda"))
    samples = choose(io.load(MODELS / f"{model}.onnx"), emulated, None, count=3).samples
    assert len(samples) == 3
    for sample in samples:
        found, expected = run(session, sample), run(emulated, sample)
        for name, value in expected.items():
            want, got = np.float32(value), np.float32(found[name])
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < (5e-3 if dtype == "fp16" else 5e-2), (name, error)


def test_the_doctor_sees_the_gpu():
    found = doctor.diagnose()
    assert found.healthy, found.findings
    assert "compute capability" in found.cuda["gpu 0"]
    assert doctor.kernels("cuda")
