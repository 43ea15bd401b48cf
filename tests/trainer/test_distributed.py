"""Two processes that train together give what one process gives on all the data."""

import itertools
import os
import socket
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from onnxamp import training
from onnxamp.errors import RankLostError, RuntimeMissingError
from onnxamp.ort.values import Buffer
from onnxamp.trainer.arenas import FLOAT
from onnxamp.trainer.callbacks import EarlyStopping
from onnxamp.trainer.distributed import TorchCollective
from onnxamp.trainer.trainer import Trainer

# Seven micro-batches of different sizes: rank r takes those with index ≡ r (mod 2), so rank 1 has one fewer in the end.
WORKER = """
    import sys
    import numpy as np
    from onnxamp.trainer.callbacks import EarlyStopping
    from onnxamp.trainer.distributed import TorchCollective
    from onnxamp.trainer.trainer import Trainer

    collective = TorchCollective("gloo")
    folder = sys.argv[1]
    trainer = Trainer(folder + "/bundle", "cpu", 2, threads=1, collective=collective)
    data = np.load(folder + "/data.npz")
    edges = data["edges"]
    for index in range(collective.rank, len(edges) - 1, 2):
        rows = slice(edges[index], edges[index + 1])
        trainer.micro_step({"x": data["x"][rows], "labels": data["labels"][rows]})
    last = trainer.flush()
    assert (last is None) == (collective.rank == 0)
    loss = trainer.evaluate({"x": data["x"], "labels": data["labels"]})["loss"]
    np.savez(folder + f"/rank{collective.rank}.npz", loss=loss, step=trainer.step, **trainer.parameters())
    fitted = Trainer(folder + "/bundle", "cpu", 2, threads=1, collective=collective)
    rows = {"x": data["x"], "labels": data["labels"]}
    stopping = EarlyStopping("accuracy", 2, better="higher")
    history = fitted.fit(
        rows, epochs=4, batch_size=4, val=rows, eval_every=1, metrics=["accuracy"], callbacks=[stopping]
    )
    assert history.reason.startswith("accuracy has not become better"), history
    np.savez(folder + f"/fit{collective.rank}.npz", windows=history.windows, **history.values, **fitted.parameters())
"""


def test_two_processes_are_one(exporter, tmp_path):
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    model = exporter(module.train(), {"x": np.zeros((2, 5), np.float32)})
    bundle = training.build(model, loss="cross_entropy", optimizer=training.AdamW(lr=0.01), level="O0")
    bundle.save(tmp_path / "bundle")
    rng = np.random.default_rng(0)
    edges = np.cumsum([0, 4, 6, 3, 8, 5, 2, 7])
    data = {"x": rng.standard_normal((35, 5), np.float32), "labels": rng.integers(0, 3, 35)}
    np.savez(tmp_path / "data.npz", edges=edges, **data)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    workers = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path)]
        workers.append(subprocess.Popen(command, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True))
    for worker in workers:
        _, problem = worker.communicate(timeout=120)
        assert worker.returncode == 0, problem

    alone = Trainer(bundle, "cpu", 4, threads=1)
    for start, stop in itertools.pairwise(edges):
        alone.micro_step({name: value[start:stop] for name, value in data.items()})
    alone.flush()
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    for name, value in alone.parameters().items():
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
        np.testing.assert_allclose(ranks[0][name], value, rtol=1e-5, atol=1e-6)
    assert ranks[0]["step"] == alone.step == 2
    assert ranks[0]["loss"] == pytest.approx(alone.evaluate(data)["loss"], rel=1e-5)

    # `fit` deals the rows out: the two ranks take together what one process takes in micro-batches of twice the size.
    one = Trainer(bundle, "cpu", 2, threads=1)
    stopping = EarlyStopping("accuracy", 2, better="higher")
    history = one.fit(data, epochs=4, batch_size=8, val=data, eval_every=1, metrics=["accuracy"], callbacks=[stopping])
    ranks = [np.load(tmp_path / f"fit{rank}.npz") for rank in range(2)]
    for name, value in one.parameters().items():
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
        np.testing.assert_allclose(ranks[0][name], value, rtol=1e-5, atol=1e-6)
    for rank in ranks:
        assert (rank["windows"], rank["accuracy"]) == (history.windows, history.values["accuracy"])
        assert rank["val_loss"] == pytest.approx(history.values["val_loss"], rel=1e-5)


def test_without_a_launcher_there_is_one_sentence(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeMissingError, match="start the program with `torchrun"):
        TorchCollective("gloo")


GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4242"
SILENT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"
)
UNEVEN = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("RuntimeError", GONE, True),
        ("RuntimeError", SILENT, True),
        ("DistBackendError", f"{NCCL}remote process exited or there was a network error, ncclRemoteError", True),
        ("DistNetworkError", "The client socket has failed to connect", True),
        ("RuntimeError", UNEVEN, False),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", False),
        (
            "DistBackendError",
            f"{NCCL}unhandled cuda error, ncclUnhandledCudaError: Call to CUDA function failed",
            False,
        ),
        ("DistBackendError", f"{NCCL}invalid usage, ncclInvalidUsage: Duplicate GPU detected", False),
    ],
)
def test_only_a_lost_connection_is_a_lost_rank(kind, text, lost):
    import torch
    import torch.distributed as distributed

    error = getattr(distributed, kind, None) or getattr(torch, kind, RuntimeError)

    def fail(*_):
        raise error(text)

    collective = object.__new__(TorchCollective)
    collective._torch, collective._store = torch, None
    collective._distributed = types.SimpleNamespace(
        DistError=distributed.DistError,
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
        all_reduce=fail,
        broadcast=fail,
        barrier=fail,
    )
    memory = Buffer(8).view(0, (2,), FLOAT)
    expected, says = (
        (RankLostError, "One of the 2 processes has ended") if lost else (RuntimeMissingError, "failed on rank 0")
    )
    for work in (lambda: collective.all_reduce(memory), lambda: collective.broadcast(memory), collective.barrier):
        with pytest.raises(expected, match=says):
            work()
