"""Convert small models of public architectures: validity, strict error, share of heavy nodes, Casts.

    python benchmarks/zoo.py [NAME...] [--levels O2] [--dtypes fp16,bf16] [--dynamo] [--opset 17] [--limit 90] [--rows JSONL] [--out MD]

Needs torch 2.13, onnxscript, transformers, timm and torchvision (benchmarks/zoo_models.py makes the models; nothing is downloaded). Each
model is exported with free axes, in a process of its own that ends after `--limit` seconds, and judged on two seeded samples by
`onnxamp.verify` under strict emulation, with its default bounds; the fp16 file is also checked and run as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def one(name: str, options: argparse.Namespace) -> None:
    """Print a line of JSON for each level and type of one model."""
    import zoo_models

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                zoo = zoo_models.MODELS[name]()
                zoo_models.export(zoo, path, dynamo=options.dynamo, opset=options.opset, free=True)
        except Exception as problem:  # the exporter raises what it likes
            print(json.dumps({"model": name, "not_exported": f"{type(problem).__name__}: {problem}"[:200]}))
            return
        for level in options.levels.split(","):
            for dtype in options.dtypes.split(","):
                row = {"model": name, "level": level, "dtype": dtype} | judged(path, zoo.sample, level, dtype)
                print(json.dumps(row), flush=True)


def judged(path: str, sample: Callable[[int], dict[str, Any]], level: str, dtype: str) -> dict:
    """What the conversion is worth."""
    import onnx

    import onnxamp
    from onnxamp.errors import AmpError

    graph = onnx.load(path, load_external_data=False).graph
    names = {value.name for value in graph.input}
    feeds = [{k: v.numpy() for k, v in sample(seed).items() if k in names} for seed in (0, 1)]
    out = f"{path}.{level}.{dtype}.onnx"
    try:
        start = time.process_time()
        result = onnxamp.convert(path, level=level, dtype=dtype)
        seconds = time.process_time() - start
        result.save(out)
        found = onnxamp.verify(path, out, feeds, check_file=dtype == "fp16")
    except AmpError as problem:
        return {"refused": str(problem)[:200]}
    worst = [output.worst for output in found.outputs]
    missed = [f"{output.name}: {'; '.join(output.missed)}" for output in found.outputs if output.missed]
    return {
        "nodes": len(graph.node),
        "heavy": result.summary.heavy,
        "casts": sum(result.summary.casts.values()),
        "traffic": result.summary.traffic["result"] / max(1, result.summary.traffic["source"]),
        "cosine": min(each.cosine for each in worst),
        "snr": min(each.snr for each in worst),
        "seconds": seconds,
        "verdict": "; ".join([*missed, *found.problems])[:160] or "ok",
    }


def table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | nodes | level | verdict | heavy low | Casts | traffic | cosine | SNR dB | s |",
        "|" + "---|" * 10,
    ]
    for r in rows:
        if "nodes" not in r:
            why = r.get("refused") or r.get("not_exported") or r.get("ended")
            lines.append(f"| {r['model']} | | {r.get('level', '')} {r.get('dtype', '')} | {why} | | | | | | |")
            continue
        lines.append(
            f"| {r['model']} | {r['nodes']} | {r['level']} {r['dtype']} | {r['verdict']} | {r['heavy'][0]}/{r['heavy'][1]} | "
            f"{r['casts']} | {r['traffic']:.2f} | {r['cosine']:.6f} | {r['snr']:.1f} | {r['seconds']:.1f} |"
        )
    judged = [r for r in rows if "nodes" in r]
    lines += ["", f"{sum(r['verdict'] == 'ok' for r in judged)} of {len(judged)} conversions ok."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--levels", default="O2")
    parser.add_argument("--dtypes", default="fp16,bf16")
    parser.add_argument(
        "--dynamo", action="store_true", help="PyTorch's exporter on torch.export instead of TorchScript"
    )
    parser.add_argument("--opset", type=int, default=17)
    parser.add_argument("--limit", type=float, default=90)
    parser.add_argument("--rows", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        one(options.names[0], options)
        return
    import zoo_models

    rows: list[dict] = []
    for name in options.names or zoo_models.MODELS:
        given = [argument for argument in sys.argv[1:] if argument not in options.names]
        command = [sys.executable, "-W", "ignore", __file__, name, "--one", *given]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
            text, ended = done.stdout, f"ended with code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as problem:
            text, ended = (problem.stdout or b"").decode(), f"stopped after {options.limit:g} s"
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        rows += found + ([{"model": name, "ended": ended}] if ended else [])
        print(table(rows[-len(found) :]) if found else f"{name}: {ended}", flush=True)
        if options.rows:
            options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if options.out:
            options.out.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
