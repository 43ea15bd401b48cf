"""`convert --auto` on a folder of models, beside onnxconverter-common's auto_mixed_precision.

    python benchmarks/auto.py FOLDER --inputs NPZ_FOLDER [--dtypes fp16,bf16] [--only TEXT,...] [--limit SECONDS]
        [--cosine X | --allclose RTOL,ATOL] [--peer PYTHON [--strict]] --log LOG.jsonl
    python benchmarks/auto.py --table LOG.jsonl               # prints the tables of benchmarks/results/auto.md

Tolerance: cosine 0.9999 in fp16, 0.999 in bf16, on the first input of each model (`MODEL.npz`; made up where there is none). Ours is judged
under strict emulation, the peer as it judges itself: by ONNX Runtime's CPU provider, which hides overflow and leaves out roundings; with
`--strict` by strict emulation too. `--peer` is a Python that has onnxconverter-common, and onnxamp for `--strict`. A model that is in the
log already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx

COSINE = {"fp16": 0.9999, "bf16": 0.999}


def ours(path: str, inputs: str, dtype: str, options: argparse.Namespace) -> dict:
    """Search, and what was found."""
    from onnxamp.evidence import Tolerance
    from onnxamp.evidence.search import search
    from onnxamp.policy.options import Options

    if not inputs:
        inputs = os.path.join(tempfile.mkdtemp(), "made-up.npz")
        np.savez(inputs, **made_up(path))
    if options.allclose:
        reference = outputs(path, inputs)
        asked = {"tolerance": Tolerance(integers=None), "least": 1.0,
                 "score": lambda found: float(accepts(options, dtype, reference, list(found[0].values())))}  # fmt: skip
    else:
        asked = {"tolerance": Tolerance(cosine=options.cosine or COSINE[dtype])}
    start, processor = time.perf_counter(), time.process_time()
    found = search(path, Options(dtype=dtype), data=inputs, **asked)
    first, best = found.trials[0], found.best
    row = {
        "seconds": time.perf_counter() - start,
        "processor": time.process_time() - processor,
        "feasible": found.feasible,
        "share": [first.share, best.share],
        "traffic": [first.traffic, best.traffic],
        "cosine": [first.result.worst.cosine, best.result.worst.cosine],
        "evaluations": len(found.trials) + (found.weights is not None),
        "raised": len(best.raised),
        "lowered": len(best.lowered),
        "weights": None if found.weights is None else found.weights.result.worst.cosine,
        "remaining": found.remaining,
        "islands": dict(found.result.summary.islands),
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "out.onnx")
        found.result.save(out)
        row |= judged(path, out, inputs)
    return row


def accepts(options: argparse.Namespace, dtype: str, reference: list, candidate: list) -> bool:
    """Whether outputs are within the tolerance."""
    if options.allclose:
        rtol, atol = map(float, options.allclose.split(","))
        return all(np.allclose(a, b, rtol, atol) for a, b in zip(reference, candidate, strict=True))
    return all(cosine(a, b) >= (options.cosine or COSINE[dtype]) for a, b in zip(reference, candidate, strict=True))


def judged(reference: str, path: str, inputs: str) -> dict:
    """Of a result, whoever made it: nodes in 16 bits, modelled bytes of one run, worst strictly emulated cosine, and whether it runs."""
    from onnxamp import verify
    from onnxamp.model.preparation import prepared
    from onnxamp.model.traffic import Traffic
    from onnxamp.model.units import type_graph

    found = verify(reference, path, inputs)
    moved = Traffic(type_graph(prepared(path)), {}).bytes(lambda unit: unit.dtype)
    strict = min((output.worst.cosine if not output.worst.nonfinite else 0.0 for output in found.outputs), default=1.0)
    return {"low": low_nodes(path), "bytes": moved, "strict": strict, "problems": list(found.problems)}


def feeds_of(model: onnx.ModelProto, inputs: str) -> dict:
    """The arrays of a file by input name; keys may be positions."""
    names = [value.name for value in model.graph.input]
    with np.load(inputs) as arrays:
        return {(key if key in names else names[int(key)]): arrays[key] for key in arrays.files}


def outputs(path: str, inputs: str) -> list:
    """What a model gives."""
    from onnxamp.evidence.inputs import model_inputs, samples
    from onnxamp.model import io as models
    from onnxamp.ort.session import SessionConfig, open_session, run

    model = models.load(path)
    return list(
        run(open_session(model, SessionConfig(provider="cpu")), next(samples(inputs, model_inputs(model)))).values()
    )


def made_up(path: str) -> dict:
    """One sample as `onnxamp verify` makes it up."""
    from onnxamp.evidence.synthesis import synthesize
    from onnxamp.model.preparation import prepared

    return synthesize(prepared(path), 1)[0][0]


def peer(path: str, inputs: str, out: str, options: argparse.Namespace) -> dict:
    """The same with auto_mixed_precision; its evaluations are the sessions that it runs to the end."""
    from onnxconverter_common import auto_mixed_precision

    model = onnx.load(path)
    feeds = feeds_of(model, inputs)
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{index}"
    count = 0

    def good(reference: list, candidate: list) -> bool:
        nonlocal count
        count += 1
        return accepts(options, "fp16", reference, candidate)

    if options.strict:
        plain = auto_mixed_precision.get_tensor_values_using_ort
        auto_mixed_precision.get_tensor_values_using_ort = lambda candidate, sample, wanted=None, settings=None: (
            emulated(candidate, sample) if wanted is None else plain(candidate, sample, wanted, settings)
        )

    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {options.limit:.0f} s and {count - 1} evaluations")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, options.limit)
    start, processor = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        found = auto_mixed_precision.auto_convert_mixed_precision(model, feeds, good, keep_io_types=True)
    row = {"seconds": time.perf_counter() - start, "processor": time.process_time() - processor}
    signal.setitimer(signal.ITIMER_REAL, 0)
    row["evaluations"] = count - 1  # the first compares the reference with itself
    onnx.save(found, out)
    return row


def emulated(model: onnx.ModelProto, feeds: dict) -> list:
    """The outputs of a model under strict emulation."""
    from onnxamp.ort.session import SessionConfig, open_session, run
    from onnxamp.passes.emulate import emulate

    return list(run(open_session(emulate(model), SessionConfig(provider="cpu")), feeds).values())


def cosine(a: object, b: object) -> float:
    """Of two outputs; 1 or 0 for what is no float."""
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype.kind != "f":
        return float(np.array_equal(x, y))
    x, y = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    if not np.isfinite(y).all():
        return 0.0
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float(np.array_equal(x, y))


def low_nodes(path: str) -> list[int]:
    """Nodes with a 16-bit result, Casts and Constants left out, and all nodes with a float result."""
    import judge

    low = total = 0
    for graph, seen in judge.scopes(judge.inferred(onnx.load(path)).graph):
        for node in graph.node:
            kinds = {seen.get(name) for name in node.output if name}
            if node.op_type not in ("Cast", "Constant") and kinds & judge.FLOATS:
                low, total = low + bool(kinds & judge.LOW), total + 1
    return [low, total]


def in_process(python: str, what: str, path: str, inputs: str, dtype: str, options: argparse.Namespace) -> dict:
    """Run one of the two in a process of its own, which may fail or take too long."""
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "out.onnx")
        command = [python, "-W", "ignore", __file__, "--what", what, "--dtypes", dtype, "--inputs", inputs, path]
        command += [
            "--out",
            out,
            "--limit",
            str(options.limit),
            *(["--cosine", str(options.cosine)] if options.cosine is not None else []),
        ]
        command += [*(["--allclose", options.allclose] if options.allclose else []), *["--strict"] * options.strict]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.limit + 60)
            row = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {options.limit:.0f} s"}
        except (IndexError, ValueError):
            last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            return {"error": " ".join(last.split())[:160]}
        return row if what == "ours" else row | judged(path, out, inputs)


def run(options: argparse.Namespace) -> None:
    log = pathlib.Path(options.log)
    done = {(r["model"], r["what"], r["dtype"]) for r in rows(log)} if log.exists() else set()
    for path in sorted(pathlib.Path(options.folder).glob("*.onnx"), key=lambda path: path.stat().st_size):
        if not any(part in path.stem for part in options.only.split(",")):
            continue
        inputs = pathlib.Path(options.inputs, f"{path.stem}.npz")
        data = str(inputs) if inputs.exists() else ""
        if not data and options.peer:
            data = os.path.join(tempfile.mkdtemp(), f"{path.stem}.npz")
            np.savez(data, **made_up(str(path)))
        jobs = [("ours", dtype, sys.executable) for dtype in options.dtypes.split(",")]
        jobs += [("peer", "fp16", options.peer)] if options.peer else []
        for what, dtype, python in jobs:
            if (path.stem, what, dtype) in done:
                continue
            row = in_process(python, what, str(path), data, dtype, options)
            row |= {"model": path.stem, "what": what, "dtype": dtype}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def rows(log: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def table(log: pathlib.Path) -> str:
    """The two tables in Markdown: ours, and beside the peer."""
    found = rows(log)
    lines = [
        "| model | dtype | O2 share | O2 cosine | share found | cosine found | bytes found / O2 | evaluations | raised | lowered | "
        "CPU s | nodes that stay fp32 |",
        "|" + "---|" * 12,
    ]
    for row in sorted((r for r in found if r["what"] == "ours"), key=lambda r: (r["dtype"] != "fp16", r["model"])):
        head = f"| {row['model']} | {row['dtype']} |"
        if "error" in row:
            lines.append(f"{head} {row['error']} |" + " |" * 9)
            continue
        verdict = "" if row["weights"] is None else f" (rounding O2's weights alone: {row['weights']:.6f})"
        verdict += "" if row["feasible"] else " infeasible"
        why = ", ".join(f"{count} {reason}" for reason, count in row.get("remaining", {}).items())
        lines.append(
            f"{head} {row['share'][0]:.3f} | {row['cosine'][0]:.6f} | {row['share'][1]:.3f} | "
            f"{row['cosine'][1]:.6f}{verdict} | {row['traffic'][1] / row['traffic'][0]:.3f} | {row['evaluations']} | {row['raised']} | "
            f"{row['lowered']} | {row['processor']:.1f} | {why} |"
        )
    lines += [
        "",
        "| model | nodes in 16 bits: ours | peer's | evaluations: ours | peer's | CPU s: ours | peer's | "
        "bytes, peer's / ours | strict cosine: ours | peer's |",
        "|" + "---|" * 10,
    ]
    mine = {row["model"]: row for row in found if row["what"] == "ours" and row["dtype"] == "fp16"}
    for row in sorted((r for r in found if r["what"] == "peer"), key=lambda r: r["model"]):
        own = mine[row["model"]]
        if "error" in own:
            lines.append(f"| {row['model']} | {own['error']} |" + " |" * 8)
            continue
        left, cells = "{}/{}".format(*own["low"]), [row.get("error", "")] + [""] * 4
        if "error" not in row:
            ratio = f"{row['bytes'] / own['bytes']:.3f}"
            low = "{}/{}".format(*row["low"]) + " (does not run)" * bool(row["problems"])
            cells = [low, str(row["evaluations"]), f"{row['processor']:.1f}", ratio, f"{row['strict']:.8f}"]
        lines.append(
            f"| {row['model']} | {left} | {cells[0]} | {own['evaluations']} | {cells[1]} | "
            f"{own['processor']:.1f} | {cells[2]} | {cells[3]} | {own['strict']:.8f} | {cells[4]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="models")
    parser.add_argument("--inputs", default="")
    parser.add_argument("--dtypes", default="fp16")
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--cosine", type=float, help="another tolerance than those above")
    parser.add_argument("--allclose", default="", metavar="RTOL,ATOL", help="numpy.allclose as the tolerance")
    parser.add_argument("--peer", default="")
    parser.add_argument("--strict", action="store_true", help="judge the peer's candidates by strict emulation")
    parser.add_argument("--limit", type=float, default=900)
    parser.add_argument("--log", default="auto.jsonl")
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--what", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
    elif options.what == "ours":
        print(json.dumps(ours(options.folder, options.inputs, options.dtypes, options)))
    elif options.what == "peer":
        print(json.dumps(peer(options.folder, options.inputs, options.out, options)))
    else:
        run(options)


if __name__ == "__main__":
    main()
