"""What `print` shows of the objects that the Python interface gives: a line or a short table, never arrays or graphs."""

from __future__ import annotations

import numpy as np
import pytest

import onnxamp
from onnxamp.errors import UsageError
from onnxamp.evidence import verify
from onnxamp.training import build


@pytest.fixture(scope="module")
def bundle(place):
    return build(place / "mlp.onnx", loss="cross_entropy", optimizer="adamw", lora="rank=2,target=*", loss_scale=128.0)


@pytest.fixture(scope="module")
def trainer(bundle):
    return onnxamp.Trainer(bundle, "cpu", threads=1, accumulate=2)


def test_a_conversion(place, call):
    result = onnxamp.convert(place / "mlp.onnx")
    assert repr(result) == "<ConvertResult O2 fp16: 2 of 2 heavy nodes in 16 bits>"
    _, out, _ = call("convert", place / "mlp.onnx", "-o", place / "printed.onnx")
    shown = [line.split() for line in str(result.summary).splitlines()]
    assert shown[1] == ["heavy", "nodes", "2", "of", "2", "in", "16", "bits"]
    assert shown == [line.split() for line in out.splitlines()[1:]]
    data = {"image": np.ones((5, 64), np.float32)}
    found = verify(place / "mlp.onnx", result.model, data)
    assert str(found) == "PASSED: fp16 emulated strictly, 1 sample (5 rows) from the data given."
    assert repr(found) == f"<VerifyResult {found}>"
    strict = verify(place / "mlp.onnx", result.model, data, {"snr": 300.0})
    assert str(strict).splitlines()[1].startswith("output 'logits', sample 0: snr ")


def test_training(bundle, trainer):
    trained = (64 + 32 + 32 + 10) * 2
    assert repr(bundle).startswith(f"<Bundle O2 fp16: {trained:,} of {trained + 2410:,} parameters train; nodes: grad ")
    assert repr(bundle).endswith("; in memory>")
    batch = {"image": np.ones((4, 64), np.float32), "labels": np.zeros(4, np.int64)}
    assert repr(trainer.micro_step(batch)).endswith(", window open>")
    ended = repr(trainer.micro_step(batch))
    assert "window applied; loss " in ended
    assert ended.endswith(" over 8 rows>")
    history = trainer.fit(batch, batch_size=4)
    assert "losses" not in repr(history)


def test_metrics_by_name(trainer):
    data = {"image": np.ones((4, 64), np.float32), "labels": np.arange(4)}
    values = trainer.evaluate(data, metrics=["accuracy", "top5", lambda output, labels: 7.0])
    assert [*values][:3] == ["loss", "accuracy", "top5"]
    assert [*values.values()][3] == 7.0
    assert values["accuracy"] == 0.25  # equal rows, four labels
    for wrong, message in [
        ("accuracy", "as a list"),
        ([3], "not 3"),
        (["acuracy"], "did you mean 'accuracy'"),
        ([int], "not <class"),
    ]:
        with pytest.raises(UsageError, match=message):
            trainer.evaluate(data, metrics=wrong)
