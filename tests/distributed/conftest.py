"""A small model with Dropout, one with BatchNormalization, and ranks that are threads of this process."""

from __future__ import annotations

import importlib.util
import pathlib
import threading

import numpy as np
import onnx
import pytest

from onnxamp.errors import RankLostError
from onnxamp.trainer.trainer import Trainer

MLP = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n,6] x) => (float[n,3] y) {
    training = Constant<value_int=1>()
    flag = Cast<to=9>(training)
    ratio = Constant<value = float {0.3}>()
    a = Gemm<transB=1>(x, w0, b0)
    t = Tanh(a)
    d, mask = Dropout<seed=3>(t, ratio, flag)
    y = Gemm<transB=1>(d, w1, b1)
}"""
NORM = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n,6] x) => (float[n,3] y) {
    a = Gemm<transB=1>(x, w0, b0)
    h = BatchNormalization<epsilon=1e-5, momentum=0.9>(a, gamma, beta, mean, var)
    y = Gemm<transB=1>(h, w1, b1)
}"""


def _model(text: str) -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    shapes = {"w0": (16, 6), "b0": (16,), "w1": (3, 16), "b1": (3,)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) * 0.4 for name, shape in shapes.items()}
    if "BatchNorm" in text:
        weights |= {"gamma": np.ones(16, np.float32), "beta": np.zeros(16, np.float32) + 0.1}
        weights |= {"mean": np.zeros(16, np.float32), "var": np.ones(16, np.float32) * 2}
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    return proto


@pytest.fixture(scope="session")
def mlp() -> onnx.ModelProto:
    """Two layers with Dropout between them."""
    return _model(MLP)


@pytest.fixture(scope="session")
def normed() -> onnx.ModelProto:
    """Two layers with BatchNormalization between them."""
    return _model(NORM)


@pytest.fixture
def rows():
    """`rows(n)`: n rows to train on."""

    def make(count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(count)
        return {"x": rng.standard_normal((count, 6), np.float32), "labels": rng.integers(0, 3, count)}

    return make


@pytest.fixture(scope="session")
def processes():
    """The module `benchmarks/distributed.py`, which runs the command in several processes and kills one of them."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "distributed.py"
    spec = importlib.util.spec_from_file_location("distributed_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Group:
    """What the ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = threading.Barrier(size, timeout=60)
        self.slots: list = [None] * size


class ThreadRank:
    """A collective whose ranks are threads; it counts its operations."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank = self.local_rank = rank
        self.world_size = self.local_world_size = group.size
        self.group = group
        self.reduced = self.received = 0

    def _exchange(self, value):
        try:
            self.group.slots[self.rank] = value
            self.group.meeting.wait()
            values = list(self.group.slots)
            self.group.meeting.wait()
        except threading.BrokenBarrierError as problem:
            raise RankLostError("a thread is gone") from problem
        return values

    def all_reduce(self, memory, means=0):
        self.reduced += 1
        values = memory.read()
        total = np.sum(self._exchange(values), axis=0, dtype=np.float32)
        if means:
            total[-means:] /= self.world_size
        memory.write(total)

    def broadcast(self, memory):
        self.received += memory.nbytes
        memory.write(self._exchange(memory.read())[0])

    def barrier(self):
        self._exchange(None)


@pytest.fixture
def ranks():
    """`ranks(bundle, size, work)`: `work(trainer)` on every rank of `size`; results by rank, or the first error."""

    def run(bundle, size, work, accumulate=1):
        group, results, errors = Group(size), [None] * size, []

        def one(rank):
            try:
                trainer = Trainer(bundle, "cpu", accumulate, threads=1, collective=ThreadRank(rank, group))
                results[rank] = work(trainer)
            except BaseException as problem:
                errors.append(problem)
                group.meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    return run
