"""Runs graphs and drives bundles by hand, as docs/bundle.md says, without onnxamp's own trainer."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxamp.passes.emulate import emulate
from onnxamp.training.fragment import Fragment, graph, model
from onnxamp.training.manifest import REPORT

_NUMPY = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "bool": np.bool_,
}


def _session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _value(array: np.ndarray) -> onnxruntime.OrtValue:
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


@pytest.fixture
def prepare() -> Callable[..., Callable[..., list[np.ndarray]]]:
    """Builds and checks a graph with `define(op)`, which returns its outputs; gives a function that runs it."""

    def build(define: Callable[[Fragment], list[ir.Value]], opset: int = 17) -> Callable[..., list[np.ndarray]]:
        op = graph("test", opset)
        for index, value in enumerate(define(op)):
            op.output(value, f"result_{index}")
        proto = ir.to_proto(model(op))
        onnx.checker.check_model(proto, full_check=True)
        session = _session(proto)
        return lambda **feeds: session.run(None, {name: np.asarray(value) for name, value in feeds.items()})

    return build


@pytest.fixture
def evaluate(prepare) -> Callable[..., list[np.ndarray]]:
    """Builds a graph as `prepare` does and runs it once."""
    return lambda define, opset=17, **feeds: prepare(define, opset)(**feeds)


class Driver:
    """The protocol of docs/bundle.md in numpy: micro-batches, windows, state."""

    def __init__(self, bundle, accumulate: int = 1) -> None:
        self.bundle, self.manifest, self.accumulate = bundle, bundle.manifest, accumulate
        self._sessions = {}
        for name, built in bundle.graphs.items():
            low = name in ("grad", "eval") and self.manifest.level != "O0"
            proto = ir.to_proto(emulate(built) if low else built)
            onnx.checker.check_model(ir.to_proto(built), full_check=True)
            self._sessions[name] = _session(proto)
        self.arenas = {arena.name: np.zeros(arena.elements, _NUMPY[arena.dtype]) for arena in self.manifest.arenas}
        for key, value in bundle.state.items():
            self.view(key)[...] = value
        self.round()
        self.first, self.micro_steps, self.rows = True, 0, 0

    def view(self, key: str) -> np.ndarray:
        """A state tensor in its arena."""
        tensor = self.manifest.tensor(key)
        return self.arenas[tensor.arena][tensor.offset : tensor.offset + tensor.size].reshape(tensor.shape)

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all that a window changes."""
        kept = ("gradient", "window", "statistics_work", "low")
        return {t.key: self.view(t.key).copy() for t in self.manifest.tensors if t.arena not in kept}

    def round(self) -> None:
        """The low copies from the masters."""
        for tensor in self.manifest.tensors_in("low"):
            self.view(tensor.key)[...] = self.view(f"master/{tensor.name}").astype(self.arenas["low"].dtype)

    def eval(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One run of eval.onnx."""
        return self._run("eval", batch)

    def step(self, batch: dict[str, np.ndarray]) -> dict[str, float] | None:
        """One micro-batch; the report of the window if it ended."""
        divisor = self.view("scalars/seed_divisor")
        if divisor == 0:
            weight = self.eval(batch)["amp.weight_sum"]
            divisor[...] = 2.0 ** round(np.log2(weight)) if weight > 0 else 1.0
        self._store("grad", self._run("grad", batch))
        self.first, self.micro_steps, self.rows = (
            False,
            self.micro_steps + 1,
            self.rows + len(batch[self.manifest.rows]),
        )
        return self.flush() if self.micro_steps == self.accumulate else None

    def flush(self) -> dict[str, float]:
        """The end of a window."""
        given = self._run("reduce", {})
        self._store("reduce", given)
        results = {p.ref: given[p.name] for p in self.manifest.graphs["reduce"].outputs if p.kind == "result"}
        for segment in self.manifest.segments:
            self._store("update", self._run("update", results, segment), segment)
        self.round()
        self.first, self.micro_steps, self.rows = True, 0, 0
        return dict(zip(REPORT, results["report"].tolist(), strict=True))

    def _run(self, name, values, segment=None) -> dict[str, np.ndarray]:
        feeds = {}
        for port in self.manifest.graphs[name].inputs:
            match port.kind:
                case "data" | "labels":
                    value = values[port.name]
                case "weights":
                    value = values.get("weights", np.ones(1, np.float32))
                case "host":
                    counts = {"first": self.first, "row_offset": self.rows, "micro_step": self.micro_steps}
                    value = np.asarray(counts[port.ref])
                case "tensor":
                    value = self.view(port.ref)
                case "arena":
                    value = self.arenas[port.ref]
                case "slice":
                    value = self.arenas[port.ref][segment.start : segment.stop]
                case "segment":
                    value = np.asarray(segment.scalars[port.ref], np.float32)
                case _:
                    value = values[port.ref]
            feeds[port.name] = _value(np.asarray(value))
        names = [port.name for port in self.manifest.graphs[name].outputs if port.dtype != "bfloat16"]
        outputs = self._sessions[name].run_with_ort_values(names, feeds)
        return {key: value.numpy() for key, value in zip(names, outputs, strict=True)}

    def _store(self, name, outputs, segment=None) -> None:
        for port in self.manifest.graphs[name].outputs:
            if port.kind == "tensor":
                self.view(port.ref)[...] = outputs[port.name]
            elif port.kind == "arena":
                self.arenas[port.ref][...] = outputs[port.name]
            elif port.kind == "slice" and port.ref != "low":
                self.arenas[port.ref][segment.start : segment.stop] = outputs[port.name]


@pytest.fixture
def drive() -> type[Driver]:
    """The driver's class."""
    return Driver


@pytest.fixture
def export() -> Callable[..., onnx.ModelProto]:
    """A PyTorch module as ONNX, with a free first dimension of every input."""

    def run(module: torch.nn.Module, *inputs: torch.Tensor, train: bool = False, opset: int = 17, **options):
        names = [f"x{index}" for index in range(len(inputs))]
        file = io.BytesIO()
        mode = torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL
        axes = {name: {0: "batch"} for name in (*names, "y")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.train(train),
                inputs,
                file,
                opset_version=opset,
                dynamo=False,
                training=mode,
                do_constant_folding=not train,
                input_names=names,
                output_names=["y"],
                dynamic_axes=axes,
                **options,
            )
        return onnx.load_from_string(file.getvalue())

    return run
