"""Everything about CUDA that needs a GPU, in one run: equality with the emulated CPU runs, speed, memory, copies.

    python benchmarks/gpu.py                       # writes benchmarks/results/cuda.md
    python benchmarks/gpu.py --model resnet --rounds 5 --no-write

Needs `onnxamp[gpu]` and PyTorch with CUDA on a machine with an NVIDIA GPU; elsewhere it says so and ends with exit code 5. Models
are those of `benchmarks/train_models.py`: engines take turns within a round, medians of ratios. It is not called `cuda.py`: from this
folder that would stand in the way of the package `cuda`, which PyTorch imports.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from train_models import export, make

from onnxamp.errors import AmpError
from onnxamp.ort import cuda

LOW = [(level, dtype) for level in ("OD", "O1", "O2", "O3") for dtype in ("fp16", "bf16")]
TRAINED = [("O0", "fp16"), ("O1", "fp16"), ("O2", "fp16"), ("O2", "bf16")]


def bundle(model: str, level: str, dtype: str):
    """The training graphs of a benchmark model."""
    import torch

    from onnxamp.training import AdamW, build

    torch.manual_seed(0)
    module, inputs, labels = make(model)
    with tempfile.TemporaryDirectory() as folder:
        export(module, inputs, Path(folder) / "model.onnx")
        path = Path(folder) / "model.onnx"
        built = build(path, loss="cross_entropy", optimizer=AdamW(lr=1e-3), level=level, dtype=dtype)
    return built, {**inputs, "labels": labels}


def curves(model: str, steps: int) -> list[str]:
    """Loss curves on CUDA against the emulated CPU run."""
    from onnxamp import Trainer

    lines = [
        "| level | first loss, CPU / CUDA | last loss | largest relative difference | skipped |",
        "|---|---|---|---|---|",
    ]
    for level, dtype in TRAINED:
        built, batch = bundle(model, level, dtype)
        found: dict[str, list[float]] = {}
        skipped: dict[str, int] = {}
        for provider in ("cpu", "cuda"):
            trainer = Trainer(built, provider)
            results = [trainer.micro_step(batch) for _ in range(steps)]
            found[provider] = [result.loss for result in results]
            skipped[provider] = sum(result.skipped for result in results)
        ours, theirs = np.array(found["cuda"]), np.array(found["cpu"])
        apart = float(np.max(np.abs(ours - theirs) / np.abs(theirs)))
        lines.append(
            f"| {level} {dtype} | {theirs[0]:.5f} / {ours[0]:.5f} | {theirs[-1]:.5f} / {ours[-1]:.5f} | {apart:.1e} | "
            f"{skipped['cpu']} / {skipped['cuda']} |"
        )
    return lines


def inference(model: str, rounds: int) -> list[str]:
    """Time of one run of the converted models, batch on the device."""
    import onnxamp
    from onnxamp.ort.binding import Binding
    from onnxamp.ort.session import SessionConfig, open_session
    from onnxamp.ort.values import Buffer, element_type

    module, inputs, _ = make(model)
    runs: dict[str, Callable[[], None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        export(module, inputs, Path(folder) / "model.onnx")
        for level, dtype in [("O0", "fp16"), *LOW]:
            converted = onnxamp.convert(Path(folder) / "model.onnx", level=level, dtype=dtype).model
            stream = cuda.Stream()
            options = {"user_compute_stream": str(stream.pointer)}
            session = open_session(converted, SessionConfig("cuda", provider_options=options))
            binding = Binding(session, stream)
            for name, values in inputs.items():
                view = Buffer(values.nbytes, "cuda").view(0, values.shape, element_type(values.dtype))
                view.write(values)
                binding.input(name, view)
            for output in session.get_outputs():
                binding._binding.bind_output(output.name, "cuda")

            def once(binding=binding, stream=stream) -> None:
                binding.run()
                stream.synchronize()

            runs[f"{level} {dtype}" if level != "O0" else "O0"] = once
    times = interleaved(runs, rounds)
    return [
        "| level | ms | ratio to O0 |",
        "|---|---|---|",
        *(f"| {name} | {ms:.3f} | {ratio:.2f} |" for name, (ms, ratio) in ratios(times, "O0").items()),
    ]


def torch_step(model: str, amp: str, compiled: bool) -> Callable[[], None]:
    """PyTorch's step on CUDA: fp32, or autocast with a GradScaler where the type is fp16."""
    import torch

    torch.manual_seed(0)
    module, inputs, labels = make(model)
    module = module.cuda().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=amp == "fp16")
    forward = torch.compile(module) if compiled else module
    tensors, targets = (
        [torch.from_numpy(v).cuda() for v in inputs.values()],
        torch.from_numpy(labels).cuda().reshape(-1),
    )
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[amp]

    def step() -> None:
        with torch.autocast("cuda", dtype, enabled=amp != "fp32"):
            loss = torch.nn.functional.cross_entropy(forward(*tensors).reshape(len(targets), -1), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step


def training(model: str, rounds: int) -> list[str]:
    """Time of a training step, memory of the device, copies and synchronizations."""
    from onnxamp import Trainer
    from onnxamp.ort.values import transfers

    steps: dict[str, Callable[[], None]] = {}
    extra: dict[str, str] = {}
    for level, dtype in TRAINED:
        built, batch = bundle(model, level, dtype)
        free = cuda.driver().memory()[0]
        trainer = Trainer(built, "cuda")
        stream = trainer._arenas.stream
        assert stream is not None
        name = f"onnxamp {level}" + (f" {dtype}" if level != "O0" else "")

        def once(trainer=trainer, batch=batch, stream=stream) -> None:
            trainer.micro_step(batch)
            stream.synchronize()

        for _ in range(3):
            once()
        before = transfers.reads + transfers.writes
        for _ in range(10):
            trainer.micro_step(batch)
        copies = (transfers.reads + transfers.writes - before) / 10
        start = time.perf_counter()
        for _ in range(10):
            trainer.micro_step(batch)
        queued = time.perf_counter() - start
        stream.synchronize()
        waited = time.perf_counter() - start - queued
        report = trainer.memory_report()
        extra[name] = (
            f"{(free - report['free']) / 2**20:.0f} MiB, of which state {report['state'] / 2**20:.0f} | {copies:.1f} | "
            f"{100 * waited / (queued + waited):.0f}%"
        )
        steps[name] = once
    for amp in ("fp32", "fp16", "bf16"):
        for compiled in (False, True):
            steps[f"PyTorch {amp}" + (" compiled" if compiled else "")] = torch_step(model, amp, compiled)
    times = interleaved(steps, rounds)
    return [
        "| engine | ms | ratio to PyTorch fp32 | memory | host copies of state in a step | of ten steps, time after the last was queued |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {ms:.3f} | {ratio:.2f} | {extra.get(name, '| |')} |"
            for name, (ms, ratio) in ratios(times, "PyTorch fp32").items()
        ),
    ]


def interleaved(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each run in each round, in turns."""
    for run in runs.values():
        for _ in range(5):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            took = []
            for _ in range(10):
                start = time.perf_counter()
                run()
                took.append(1e3 * (time.perf_counter() - start))
            times[name].append(statistics.median(took))
    return times


def ratios(times: dict[str, list[float]], reference: str) -> dict[str, tuple[float, float]]:
    """Median and median ratio to the reference."""
    return {
        name: (
            statistics.median(values),
            statistics.median(a / b for a, b in zip(values, times[reference], strict=True)),
        )
        for name, values in times.items()
    }


def main() -> int:
    """Run everything and record it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", default=["gpt", "resnet", "mlp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="steps of the loss curves")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    try:
        gpus = cuda.driver().gpus()
        cuda.driver().enter(0)
    except AmpError as problem:
        print(f"{problem} Nothing was measured.")
        return 5
    import onnxruntime
    import torch

    parts = [
        "# CUDA",
        f"{datetime.date.today()}, {gpus[0].name} (compute capability {'.'.join(map(str, gpus[0].capability))}, "
        f"{gpus[0].memory / 2**30:.0f} GiB), ONNX Runtime {onnxruntime.__version__}, PyTorch {torch.__version__}. Made by "
        "`python benchmarks/gpu.py`; models as in `train.md`; in turns within a round, medians.",
    ]
    for model in arguments.model:
        for title, lines in (
            (f"{model}: loss curves against the emulated CPU run", curves(model, arguments.steps)),
            (f"{model}: inference", inference(model, arguments.rounds)),
            (f"{model}: training step", training(model, arguments.rounds)),
        ):
            parts += [f"## {title}", "\n".join(lines)]
            print(f"{title}\n" + "\n".join(lines), flush=True)
    if not arguments.no_write:
        target = Path(__file__).parent / "results" / "cuda.md"
        target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
