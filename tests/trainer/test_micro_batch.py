"""The largest micro-batch on a device with memory of its own, which only a GPU has: here a trainer plays it."""

from __future__ import annotations

import numpy as np
import pytest

from onnxamp.errors import DataError
from onnxamp.ort.session import run_error
from onnxamp.trainer import micro_batch
from onnxamp.trainer.collective import SingleProcess
from onnxamp.trainer.trainer import Trainer

# What onnxruntime.capi's RuntimeException says when the arena of the CUDA provider is full.
FULL = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. Name:'dot' Status Message: "
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:359 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
    "Available memory of 1024 is smaller than requested bytes of 4096"
)


@pytest.mark.parametrize(
    ("said", "fits"), [(FULL, (3, 4)), ("Gather: index out of bounds", None)], ids=["full", "wrong"]
)
def test_sizes_that_do_not_fit_are_gone_through_and_data_that_are_wrong_end_it(said, fits, bundle, monkeypatch):
    tried = []

    class Small(Trainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.provider = "cuda"

        def micro_step(self, batch, rows=None):
            tried.append(len(batch["x"]))
            if tried[-1] > 3:
                raise run_error(RuntimeError(said))
            return super().micro_step(batch, rows)

    monkeypatch.setattr(micro_batch, "Trainer", Small)
    data = {"x": np.ones((16, 3), np.float32), "ids": np.arange(16), "labels": np.ones((16, 2), np.float32)}
    arguments = (bundle, "cpu", data, {}, 12, SingleProcess())
    if fits is None:
        with pytest.raises(DataError, match="out of bounds"):
            micro_batch.micro_batch(*arguments)
        assert tried == [12]
    else:
        assert micro_batch.micro_batch(*arguments) == fits
        assert tried == [12, 6, 4, 3]
