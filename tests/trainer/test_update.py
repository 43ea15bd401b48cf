"""The optimizer's pass as the CPU runs it against the plain graph of the bundle."""

import numpy as np
import pytest

from onnxamp.ort.session import SessionConfig
from onnxamp.trainer import update
from onnxamp.trainer.lowering import lower_update
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import SGD, AdamW, RMSprop

OPTIMIZERS = {
    "momentum": SGD(momentum=0.9),
    "nesterov": SGD(momentum=0.9, nesterov=True),
    "adamw": AdamW(),
    "rmsprop": RMSprop(momentum=0.5, centered=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_runtimes_own_operators_give_the_same_bits_in_place(bundle_maker, batches, optimizer, monkeypatch):
    def train():
        trainer = Trainer(bundle_maker(optimizer), "cpu", threads=1)
        for batch in batches[:4]:
            trainer.micro_step(batch)
        return trainer

    lowered = train()
    assert not lowered._programs.update.refusals
    graph = lower_update(lowered.bundle.graphs["update"], SessionConfig("cpu", threads=1)).graph
    assert "GatedAdd" in {node.op_type for node in graph}
    monkeypatch.setattr(update, "lower_update", lambda model, config: model)
    plain = train().parameters()
    for name, values in lowered.parameters().items():
        np.testing.assert_array_equal(values, plain[name])
