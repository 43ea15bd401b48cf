"""Training steps on the OpenVINO provider, in FP32 and with its bf16 hint, against PyTorch, interleaved; and their loss curves.

    python benchmarks/openvino.py                  # writes benchmarks/results/openvino.md
    python benchmarks/openvino.py --model resnet --engine "OpenVINO f32" --no-write

Needs an environment of its own: `pip install 'onnxamp[openvino]' torch onnxscript`. The graph is the FP32 one at every precision: OpenVINO
chooses by its precision hint where it computes in bf16, and the policy of onnxamp has no part in it. The hint does nothing on a
processor without AVX512_BF16 or AMX; the table says which it is. `--threads 1 --clock cpu` measures on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parent))
from train_models import export, make

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def hint(precision: str, threads: int) -> dict[str, str]:
    """Provider options with a precision hint."""
    properties = f'"INFERENCE_PRECISION_HINT": "{precision}", "INFERENCE_NUM_THREADS": "{threads}"'
    return {"device_type": "CPU", "load_config": f'{{"CPU": {{{properties}}}}}'}


def torch_step(model: str, threads: int, bf16: bool) -> Callable[[], float]:
    """PyTorch's step."""
    import torch

    torch.set_num_threads(threads)
    module, inputs, labels = make(model)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    tensors, targets = [torch.from_numpy(value) for value in inputs.values()], torch.from_numpy(labels).reshape(-1)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = module(*tensors)
            loss = torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def onnxamp_step(
    model: str, threads: int, provider: str, options: dict[str, str] | None = None, *, fixed: bool = False
) -> Callable[[], float]:
    """The step of a trainer; `fixed`: of a model whose batch size is in the file."""
    from onnxamp.trainer.trainer import Trainer
    from onnxamp.training import AdamW, build

    module, inputs, labels = make(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(module, inputs, path)
        if fixed:
            proto = onnx.load(path)
            for value in proto.graph.input:
                value.type.tensor_type.shape.dim[0].dim_value = len(inputs[value.name])
            for value in (*proto.graph.output, *proto.graph.value_info):
                value.type.tensor_type.ClearField("shape")
            onnx.save(proto, path)
        bundle = build(path, loss="cross_entropy", optimizer=AdamW(lr=1e-3), level="O0")
    trainer = Trainer(bundle, provider, threads=threads, provider_options=options or {})
    batch = {**inputs, "labels": labels}
    return lambda: trainer.micro_step(batch).loss


def engines(model: str, threads: int) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes the step of each engine."""
    ours = functools.partial(onnxamp_step, model, threads)
    return {
        "PyTorch bf16 autocast": lambda: torch_step(model, threads, True),
        "CPU provider": lambda: ours("cpu"),
        "OpenVINO f32": lambda: ours("openvino", hint("f32", threads)),
        "OpenVINO bf16": lambda: ours("openvino", hint("bf16", threads)),
        "OpenVINO f32, fixed batch": lambda: ours("openvino", hint("f32", threads), fixed=True),
        "OpenVINO bf16, fixed batch": lambda: ours("openvino", hint("bf16", threads), fixed=True),
    }


def row(model: str, engine: str, times: list[list[float]], curves: list[list[float]]) -> str:
    """A line of the table from times in ms and losses of the engine and of PyTorch; the first two steps, which compile, are not timed."""
    timed = list(zip(*times, strict=True))
    timed = timed[2:] or timed[1:]
    ours, theirs = (statistics.median(column) for column in zip(*timed, strict=True))
    ratio = statistics.median(a / b for a, b in timed)
    found, exact = map(np.array, curves)
    apart = float(np.max(np.abs(found - exact) / exact))
    return f"| {model} | {engine} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} | {len(found)} | {found[-1]:.5f} | {apart:.1e} |"


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", default=["resnet", "gpt"])
    parser.add_argument("--engine", nargs="*", help="names as in the table; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a machine that is not idle"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    now = CLOCKS[arguments.clock]
    lines = []
    for model in arguments.model:
        makers = engines(model, arguments.threads)
        for engine in arguments.engine or makers:
            steps = [makers[engine](), torch_step(model, arguments.threads, False)]
            times, curves = ([[], []] for _ in range(2))
            for _ in range(arguments.steps):
                for index, step in enumerate(steps):
                    start = now()
                    curves[index].append(step())
                    times[index].append(1e3 * (now() - start))
            lines.append(row(model, engine, times, curves))
            print(lines[-1], flush=True)
    if not arguments.no_write:
        write(lines, arguments.threads, arguments.clock)


def write(lines: list[str], threads: int, clock: str) -> None:
    """Write the results file."""
    import onnxruntime
    import torch

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next(iter(re.findall(r"model name\s*: (.+)", cpu)), "unknown processor")
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", cpu)]
    real = (
        "" if {"avx512_bf16", "amx_bf16"} & set(units) else " **It has no bf16 units: OpenVINO leaves the hint aside.**"
    )
    text = f"""# Training steps on the OpenVINO provider

{datetime.date.today()}, {name} ({", ".join(units)}), threads: {threads}, onnxruntime-openvino {onnxruntime.__version__},
PyTorch {torch.__version__}.{real}
Made by `python benchmarks/openvino.py`: AdamW, FP32 graphs, one batch. Each engine has a run in which it and PyTorch in FP32 take turns at
each step; {clock} time, medians of all but the first steps. Load average {os.getloadavg()[1]:.1f}: where that is above the
number of threads, other programs ran, and only ratios mean something. `apart`: largest relative difference of a loss
from PyTorch's in FP32.

| model | engine | step, ms | PyTorch fp32, ms | ratio | steps | last loss | apart |
|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""
    target = Path(__file__).parent / "results" / "openvino.md"
    target.write_text(text, encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
