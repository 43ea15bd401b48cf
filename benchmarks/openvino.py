"""Training steps on the OpenVINO provider, in FP32 and with its own bf16, against PyTorch, interleaved; and their loss curves.

    python benchmarks/openvino.py                  # writes benchmarks/results/openvino.md
    python benchmarks/openvino.py --model resnet --rounds 5 --no-write

Needs an environment of its own: `pip install 'onnxamp[openvino]' torch`. The graph is the FP32 one at every precision: OpenVINO chooses
by its precision hint where it computes in bf16, and the policy of onnxamp has no part in it. The hint does nothing on a
processor without AVX512_BF16 or AMX; the table says which it is.
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

sys.path.insert(0, str(Path(__file__).parent))
from train_models import export, make

REFERENCE = "PyTorch fp32"


def hint(precision: str) -> dict[str, str]:
    """Provider options with a precision hint."""
    return {"device_type": "CPU", "load_config": f'{{"CPU": {{"INFERENCE_PRECISION_HINT": "{precision}"}}}}'}


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


def onnxamp_step(model: str, threads: int, provider: str, options: dict[str, str]) -> Callable[[], float]:
    """The step of a trainer."""
    from onnxamp.trainer.trainer import Trainer
    from onnxamp.training import AdamW, build

    module, inputs, labels = make(model)
    with tempfile.TemporaryDirectory() as folder:
        export(module, inputs, Path(folder) / "model.onnx")
        bundle = build(Path(folder) / "model.onnx", loss="cross_entropy", optimizer=AdamW(lr=1e-3), level="O0")
    trainer = Trainer(bundle, provider, threads=threads, provider_options=options)
    batch = {**inputs, "labels": labels}
    return lambda: trainer.micro_step(batch).loss


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="*", default=["resnet", "gpt"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    threads = arguments.threads
    lines = ["| model | engine | step, ms | ratio to PyTorch fp32 | loss after 20 steps |", "|---|---|---|---|---|"]
    for model in arguments.model:
        steps = {
            REFERENCE: torch_step(model, threads, False),
            "PyTorch bf16 autocast": torch_step(model, threads, True),
            "CPU provider": onnxamp_step(model, threads, "cpu", {}),
            "OpenVINO f32": onnxamp_step(model, threads, "openvino", hint("f32")),
            "OpenVINO bf16": onnxamp_step(model, threads, "openvino", hint("bf16")),
        }
        losses = {name: [step() for _ in range(20)][-1] for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                took = []
                for _ in range(3):
                    start = time.perf_counter()
                    step()
                    took.append(1e3 * (time.perf_counter() - start))
                times[name].append(statistics.median(took))
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times[REFERENCE], strict=True))
            lines.append(f"| {model} | {name} | {statistics.median(values):.0f} | {ratio:.2f} | {losses[name]:.4f} |")
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
Made by `python benchmarks/openvino.py`: AdamW, FP32 graphs, {arguments.rounds} interleaved rounds of 3 steps, medians; load average
{os.getloadavg()[1]:.1f} (other programs ran where that is above {arguments.threads}: then only ratios mean something).

{chr(10).join(lines)}
"""
    target = Path(__file__).parent / "results" / "openvino.md"
    target.write_text(text, encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
