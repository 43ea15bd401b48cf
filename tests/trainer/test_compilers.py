"""A provider that compiles graphs shows nothing of their order: its outputs never go over their inputs."""

import numpy as np

from onnxamp.trainer import program
from onnxamp.trainer.trainer import Trainer


def test_buffers_take_turns_and_the_results_are_the_same(bundle, batches, monkeypatch):
    expected = Trainer(bundle, "cpu", 3, threads=1)
    monkeypatch.setattr(program, "COMPILERS", frozenset({"cpu"}))
    compiled = Trainer(bundle, "cpu", 3, threads=1)
    assert not expected.refusals
    assert set(compiled.refusals.values()) == {"cpu compiles the graph, and its order cannot be seen"}
    assert compiled.state_bytes > expected.state_bytes
    for batch in batches:
        assert compiled.micro_step(batch).loss == expected.micro_step(batch).loss
    for name, value in expected.parameters().items():
        np.testing.assert_array_equal(compiled.parameters()[name], value)
