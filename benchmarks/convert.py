"""`onnxamp convert` beside the other tools: whole processes, in turn, each result judged by one judge.

    python benchmarks/convert.py FOLDER... --peers PYTHON [--autocast PYTHON] [--inputs NPZ_FOLDER] [--rounds 3] --log LOG.jsonl
    python benchmarks/convert.py --table LOG.jsonl > benchmarks/results/convert.md

FOLDER holds models; `--chain N` adds a chain of N nodes, `--large FOLDER` what benchmarks/large_model.py wrote. `--peers` is a Python with
onnxconverter-common and ONNX Runtime, `--autocast` one with nvidia-modelopt. Seconds (wall, processor) and peak memory are those of the
whole process, start-up included, the median of the rounds. Strict: every 16-bit result is rounded, FP32 inside an operator
(benchmarks/judge.py); traffic: bytes of one run that benchmarks/counter.py finds in the written file.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx

TOOLS = ("onnxamp", "onnxconverter-common", "onnxruntime", "autocast")
LARGE = 1 << 30
# What the table shows of each tool.
COLUMNS: list[tuple[str, Callable[[dict], str]]] = [
    ("CPU s", lambda row: f"{row['cpu']:.1f}"),
    ("peak MiB", lambda row: f"{row['peak']:.0f}"),
    ("size", lambda row: f"{row['bytes'] / row['source']:.2f}"),
    ("Casts", lambda row: str(row.get("casts", ""))),
    ("traffic", lambda row: f"{row['traffic']:.2f}" if "traffic" in row else ""),
    ("valid", lambda row: "yes" if row["valid"] else "no"),
    ("SNR dB, strict", lambda row: ("not finite" if row["nonfinite"] else f"{row['snr']:.0f}") if "snr" in row else ""),
]


def command(tool: str, source: pathlib.Path, out: pathlib.Path, options: argparse.Namespace) -> list[str]:
    """What converts `source` with a tool; empty if there is no environment for it."""
    if tool == "onnxamp":
        return [sys.executable, "-m", "onnxamp", "convert", str(source), "-o", str(out), "--force"]
    python = options.autocast if tool == "autocast" else options.peers
    peers = str(pathlib.Path(__file__).with_name("peers.py"))
    return [python, "-W", "ignore", peers, "--tool", tool, str(source), str(out)] if python else []


def timed(arguments: list[str], limit: float) -> dict:
    """Run a process to its end: seconds, and peak memory in MiB as the system counts it."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
        while True:
            found, status, usage = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            if time.perf_counter() - start > limit:
                process.kill()
            time.sleep(0.005)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        last = (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    row = {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss / 1024}
    if process.returncode:
        row["error"] = f"stopped after {limit:.0f} s" if process.returncode == -9 else last[:160]
    return row


def judged(source: str, out: str, inputs: str) -> dict:
    """What the result is worth: size, validity, Casts, strict error, traffic. Runs in a process of its own."""
    import counter
    import judge

    row: dict = {"bytes": sum(f.stat().st_size for f in pathlib.Path(out).parent.iterdir())}
    row["valid"] = judge.valid(out)
    if row["bytes"] > LARGE / 2:
        row["casts"] = judge.casts(onnx.load(out, load_external_data=False))
        return row
    original, candidate = onnx.load(source), onnx.load(out)
    try:
        row["casts"] = judge.casts(candidate)
        with np.load(inputs) as arrays:
            names = [value.name for value in original.graph.input]
            feeds = {(key if key in names else names[int(key)]): arrays[key] for key in arrays.files}
        row |= judge.figures(judge.run(original, feeds), judge.run(judge.strict(candidate), feeds))
        flat = onnx.inliner.inline_local_functions(original) if original.functions else original
        shapes = counter.observe(flat, feeds)
        row["traffic"] = counter.moved_bytes(candidate, flat, shapes) / counter.moved_bytes(flat, flat, shapes)
    except Exception as problem:
        row["unjudged"] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:100]}"
    return row


def made_up(path: pathlib.Path, folder: str) -> str:
    """One sample as `onnxamp verify` makes it up, in a file."""
    from onnxamp.evidence.synthesis import synthesize
    from onnxamp.model.preparation import prepared

    file = os.path.join(folder, "made-up.npz")
    np.savez(file, **synthesize(prepared(path), 1)[0][0])
    return file


def measure(source: pathlib.Path, options: argparse.Namespace, log: pathlib.Path) -> None:
    """All tools on one model, in turn."""
    large = source.with_suffix(".data").exists()
    tools = [tool for tool in TOOLS if command(tool, source, source, options)]
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        given = pathlib.Path(options.inputs, f"{source.stem}.npz")
        inputs = "" if large else str(given) if given.exists() else made_up(source, scratch)
        runs: dict[str, list[dict]] = {tool: [] for tool in tools}
        for number in range(options.rounds):
            for tool in tools:
                if number and "error" in runs[tool][-1]:
                    continue
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    out = pathlib.Path(folder, "out.onnx")
                    row = timed(command(tool, source, out, options), options.limit)
                    if number == 0 and "error" not in row:
                        judge = [sys.executable, "-W", "ignore", __file__, "--judge", str(source), str(out), inputs]
                        done = subprocess.run(judge, capture_output=True, text=True, check=False)
                        lines = done.stdout.splitlines()
                        row |= json.loads(lines[-1]) if lines else {"unjudged": f"exit {done.returncode}"}
                runs[tool].append(row)
        size = source.stat().st_size + (source.with_suffix(".data").stat().st_size if large else 0)
        for tool, rows in runs.items():
            row = rows[0] | {key: statistics.median(r[key] for r in rows) for key in ("wall", "cpu", "peak")}
            row |= {"model": source.stem, "tool": tool, "source": size, "rounds": len(rows)}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def table(log: pathlib.Path) -> str:
    """The results in Markdown: a row a model with the figures of the tools in turn, and their sum."""
    found: dict[str, dict[str, dict]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["model"], {})[row["tool"]] = row
    tools = [tool for tool in TOOLS if any(tool in rows for rows in found.values())]
    lines = ["| model | " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for model, rows in found.items():
        cells = [" / ".join(_cell(rows.get(tool), figure) for tool in tools) for _, figure in COLUMNS]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| tool | models | converted | valid | runs, cosine > 0.999 strict | CPU time: ours / theirs | peak: ours / theirs |",
    ]
    lines.append("|---" * 7 + "|")
    for tool in tools:
        mine = {model: rows[tool] for model, rows in found.items() if tool in rows}
        good = {model: row for model, row in mine.items() if "error" not in row}
        close = sum(row.get("cosine", 0) > 0.999 and not row["nonfinite"] for row in good.values())
        ratios = [
            _ratios([found[model]["onnxamp"][key] / row[key] for model, row in good.items()]) for key in ("cpu", "peak")
        ]
        counts = [len(mine), len(good), sum(row["valid"] for row in good.values()), close]
        lines.append("| " + " | ".join(map(str, [tool, *counts, *ratios])) + " |")
    return "\n".join(lines)


def _cell(row: dict | None, figure: Callable[[dict], str]) -> str:
    """A figure of one tool; a dash where there is none."""
    return "-" if row is None or "error" in row else figure(row) or "-"


def _ratios(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--autocast", default="")
    parser.add_argument("--inputs", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900)
    parser.add_argument("--chain", type=int, nargs="*", default=[])
    parser.add_argument("--large", type=pathlib.Path)
    parser.add_argument("--scratch", help="folder for what is written; large models need 4 GB")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("convert.jsonl"))
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--judge", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
    elif options.judge:
        print(json.dumps(judged(*options.judge)))
    else:
        with tempfile.TemporaryDirectory() as made:
            sources = [path for folder in options.folders for path in sorted(folder.glob("*.onnx"))]
            for size in options.chain:
                from convert_speed import chain

                sources.append(pathlib.Path(made, f"chain_{size}.onnx"))
                onnx.save(chain(size, ["MatMul", "Add", "Relu", "Softmax"]), sources[-1])
            sources += sorted(options.large.glob("*.onnx")) if options.large else []
            for source in sources:
                measure(source, options, options.log)


if __name__ == "__main__":
    main()
