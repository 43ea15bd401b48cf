"""Training steps on the OpenVINO provider, in FP32 and with its bf16 hint, against PyTorch, interleaved; and their loss curves.

    python benchmarks/openvino.py                  # writes benchmarks/results/openvino.md
    python benchmarks/openvino.py --model resnet --rounds 5 --no-write

Needs an environment of its own: `pip install 'onnxamp[openvino]' torch onnxscript`. The graph is the FP32 one at every precision: OpenVINO
chooses by its precision hint where it computes in bf16, and the policy of onnxamp has no part in it. The hint does nothing on a
processor without AVX512_BF16 or AMX; the table says which it is. `--threads 1 --clock cpu` measures on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import datetime
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

REFERENCE = "PyTorch fp32"
CURVE = 20
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


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", default=["resnet", "gpt"])
    parser.add_argument("--rounds", type=int, default=15, help=f"how many of the last of {CURVE} steps are timed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a machine that is not idle"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    threads, now = arguments.threads, CLOCKS[arguments.clock]
    lines = ["| model | engine | step, ms | ratio to PyTorch fp32 | last loss | apart |", "|---|---|---|---|---|---|"]
    for model in arguments.model:
        steps = {
            REFERENCE: torch_step(model, threads, False),
            "PyTorch bf16 autocast": torch_step(model, threads, True),
            "CPU provider": onnxamp_step(model, threads, "cpu"),
            "OpenVINO f32": onnxamp_step(model, threads, "openvino", hint("f32", threads)),
            "OpenVINO bf16": onnxamp_step(model, threads, "openvino", hint("bf16", threads)),
            "OpenVINO f32, fixed batch": onnxamp_step(model, threads, "openvino", hint("f32", threads), fixed=True),
            "OpenVINO bf16, fixed batch": onnxamp_step(model, threads, "openvino", hint("bf16", threads), fixed=True),
        }
        curves: dict[str, list[float]] = {name: [] for name in steps}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(CURVE):  # the first steps compile and warm up; the last ones are the rounds
            for name, step in steps.items():
                start = now()
                curves[name].append(step())
                times[name].append(1e3 * (now() - start))
        exact = np.array(curves[REFERENCE])
        for name, values in times.items():
            measured = list(zip(values, times[REFERENCE], strict=True))[-arguments.rounds :]
            ratio = statistics.median(a / b for a, b in measured)
            step = statistics.median(a for a, _ in measured)
            apart = float(np.max(np.abs(np.array(curves[name]) - exact) / exact))
            lines.append(f"| {model} | {name} | {step:.0f} | {ratio:.2f} | {curves[name][-1]:.5f} | {apart:.1e} |")
            print(lines[-1], flush=True)
    if not arguments.no_write:
        write(lines, arguments)


def write(lines: list[str], arguments: argparse.Namespace) -> None:
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

{datetime.date.today()}, {name} ({", ".join(units)}), {arguments.threads} threads, onnxruntime-openvino {onnxruntime.__version__},
PyTorch {torch.__version__}.{real}
Made by `python benchmarks/openvino.py`: AdamW, FP32 graphs, {CURVE} steps on one batch, the engines in turns at each step;
{arguments.clock} time, medians of the last {arguments.rounds} steps. Load average {os.getloadavg()[1]:.1f}: where that
is above {arguments.threads}, other programs ran, and only ratios mean something. `apart`: largest relative
difference of a loss from PyTorch's in FP32.

{chr(10).join(lines)}
"""
    target = Path(__file__).parent / "results" / "openvino.md"
    target.write_text(text, encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
