"""One engine of benchmarks/train.py with one model, in a process of its own.

    python benchmarks/train_engines.py ENGINE MODEL THREADS FOLDER

It makes the first steps, writes `@ BYTES` (the peak of a step above what the process held before), and then for each line
`CLOCK SECONDS` on its standard input makes steps for that long and writes `@ MILLISECONDS`, the median of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import train_models

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP = 3


def onnxamp(model: str, threads: int, folder: Path) -> Callable[[], object]:
    """A training step of onnxamp at O0."""
    from onnxamp.trainer.trainer import Trainer
    from onnxamp.training import AdamW, CrossEntropy, build

    module, inputs, labels = train_models.make(model)
    train_models.export(module, inputs, folder / "model.onnx")
    bundle = build(folder / "model.onnx", loss=CrossEntropy(), optimizer=AdamW(lr=1e-3), level="O0")
    trainer = Trainer(bundle, "cpu", threads=threads)
    batch = {**inputs, "labels": labels}
    return lambda: trainer.micro_step(batch).loss


def pytorch(model: str, threads: int, *, fused: bool = False, bf16: bool = False) -> Callable[[], object]:
    """A training step of eager PyTorch."""
    import torch

    torch.set_num_threads(threads)
    module, inputs, labels = train_models.make(model)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True if fused else None)
    tensors, targets = [torch.from_numpy(value) for value in inputs.values()], torch.from_numpy(labels).reshape(-1)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)

    def step() -> float:
        with autocast:
            logits = module(*tensors)
            loss = torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ort_training(model: str, threads: int, folder: Path) -> Callable[[], object]:
    """A training step of onnxruntime-training's on-device API, with its fused gradient and optimizer kernels."""
    import onnx
    import onnxruntime
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    module, inputs, labels = train_models.make(model)
    names = {name for name, _ in module.named_parameters()}
    train_models.export(module, inputs, folder / "model.onnx")
    source = onnx.load(folder / "model.onnx")
    graph = source.graph
    for node in graph.node:
        if node.op_type == "LayerNormalization":  # its gradient builder needs the optional outputs
            node.output.extend(f"{node.output[0]}_{what}" for what in ("mean", "deviation"))
    if labels.ndim > 1:  # its loss takes rows of logits only
        for node in graph.node:
            for position, name in enumerate(node.output):
                if name == "logits":
                    node.output[position] = "logits_3d"
        shape = onnx.numpy_helper.from_array(np.array([-1, train_models.VOCABULARY]), "rows")
        graph.initializer.append(shape)
        graph.node.append(onnx.helper.make_node("Reshape", ["logits_3d", "rows"], ["logits"]))
        graph.output[0].type.tensor_type.ClearField("shape")
        source = onnx.shape_inference.infer_shapes(source)
    trained = [tensor.name for tensor in source.graph.initializer if tensor.name in names]
    frozen = [tensor.name for tensor in source.graph.initializer if tensor.name not in trained]
    artifacts.generate_artifacts(
        source,
        requires_grad=trained,
        frozen_params=frozen,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    runner = Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), runner)
    feeds = (*inputs.values(), labels.reshape(-1).astype(np.int64))

    def step() -> object:
        loss = runner(*feeds)
        optimizer.step()
        runner.lazy_reset_grad()
        return loss

    return step


def update(engine: str, layout: str, threads: int, folder: Path) -> Callable[[], object]:
    """The optimizer alone: AdamW on ten million parameters."""
    import torch

    shapes = train_models.layouts()[layout]
    torch.manual_seed(0)
    if engine == "onnxamp":
        from onnxamp.trainer.trainer import Trainer
        from onnxamp.training import AdamW, build

        inputs = {"x": np.ones((1, 1), np.float32)}
        train_models.export(train_models.Scaled(shapes), inputs, folder / "model.onnx")
        bundle = build(folder / "model.onnx", loss="mse", optimizer=AdamW(lr=1e-3), level="O0", trainable="*")
        trainer = Trainer(bundle, "cpu", threads=threads)
        trainer.micro_step({**inputs, "labels": np.ones((1, 1), np.float32)})
        return trainer._programs.update.run
    torch.set_num_threads(threads)
    parameters = [torch.nn.Parameter(torch.rand(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    return torch.optim.AdamW(parameters, fused=True if "fused" in engine else None).step


def stepper(engine: str, model: str, threads: int, folder: Path) -> Callable[[], object]:
    """A function that makes one step of `model` with `engine`."""
    engine, _, variant = engine.partition(" + ")
    if model.startswith("update, "):
        return update(engine, model.removeprefix("update, "), threads, folder)
    model += "+dropout" if variant else ""
    if engine == "onnxamp":
        return onnxamp(model, threads, folder)
    if engine == "onnxruntime-training":
        return ort_training(model, threads, folder)
    return pytorch(model, threads, fused="fused" in engine, bf16="bf16" in engine)


def _status(field: str) -> int:
    """KiB of a field of the process's status (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def _give_back() -> None:
    """Return to the system what export and build have freed: the step would fill it again without a word (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    engine, model, threads, folder = sys.argv[1:]
    step = stepper(engine, model, int(threads), Path(folder))
    _give_back()
    before = _status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    for done in range(WARM_UP):
        start = time.perf_counter()
        step()
        if done and time.perf_counter() - start > 2:  # not after the first: it has no moments yet
            break
    print("@", (_status("VmHWM") - before) / 1024, flush=True)
    for line in sys.stdin:
        clock, seconds = line.split()
        now, took = CLOCKS[clock], []
        end = time.perf_counter() + float(seconds)
        while not took or time.perf_counter() < end:
            start = now()
            step()
            took.append(now() - start)
        print("@", 1e3 * statistics.median(took), flush=True)


if __name__ == "__main__":
    main()
