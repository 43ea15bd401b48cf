"""Raise models to the last opset of the table, and compare what they compute, and what is kept, with the source.

    python benchmarks/opset.py FOLDER... [--inputs NPZ_FOLDER]

Both run on ONNX Runtime's CPU provider without optimizations, on the given inputs, else on made-up ones. Kept means: all names of nodes and
values, the metadata of model, graph and nodes, the functions' names, nodes of other domains byte for byte. Prints a table. The node tests
of onnx are raised and run by `tests/model/test_opset.py`.
"""

from __future__ import annotations

import argparse
import os
import pathlib

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import judge
import numpy as np
import onnx

from onnxamp.errors import AmpError
from onnxamp.evidence.synthesis import synthesize
from onnxamp.model import io, types
from onnxamp.model.opset import HIGHEST, raise_opset
from onnxamp.model.preparation import prepared
from onnxamp.model.units import all_values


def samples(path: pathlib.Path, source: onnx.ModelProto, inputs: pathlib.Path | None) -> list[dict[str, object]]:
    """The sets of inputs in `inputs`, or one that is made up."""
    files = sorted(inputs.glob(f"{path.stem}*.npz")) if inputs else []
    names = [value.name for value in source.graph.input]
    found = []
    for file in files:
        if file.stem.split("@")[0] == path.stem:
            with np.load(file) as arrays:
                found.append({(key if key in names else names[int(key)]): arrays[key] for key in arrays.files})
    return found or synthesize(prepared(path), 1)[0]


def facts(model: onnx.ModelProto) -> dict[str, set]:
    """What raising must keep, of all graphs together."""
    graphs = [graph for graph, _ in judge.scopes(model.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    contrib = [node for node in nodes if node.domain not in ("", "ai.onnx")]
    return {
        "names": {name for node in nodes for name in (node.name, *node.output)},
        "metadata": {(item.key, item.value) for holder in (model, *graphs, *nodes) for item in holder.metadata_props},
        "nodes of other domains": {node.SerializeToString(deterministic=True) for node in contrib},
        "functions": {(function.domain, function.name) for function in model.functions},
    }


def row(path: pathlib.Path, inputs: pathlib.Path | None) -> str:
    """One model in the table."""
    source = onnx.load(path)
    before = next((entry.version for entry in source.opset_import if entry.domain in ("", "ai.onnx")), 1)
    head = f"| {path.stem} | {before}"
    if before >= HIGHEST:
        return f"{head} | {before} | not raised | | |"
    model = io.load(path)
    declared = {value: value.shape for value in all_values(model.graph)}
    types.infer(model)
    try:
        raise_opset(model, HIGHEST)
    except AmpError as problem:
        return f"{head} | {before} | refused: {str(problem).replace('|', '/')} | | |"
    types.infer(model)
    if wrong := types.contradiction(model):  # where a conversion leaves the model at its opset
        return f"{head} | {before} | refused: {wrong.replace('|', '/')} | | |"
    for value, shape in declared.items():  # as in a conversion: what was inferred is not written
        value.shape = shape
    later = io.to_proto(model)
    if judge.valid(source) and not judge.valid(later):
        return f"{head} | {HIGHEST} | not valid | | |"
    worst, same = 0.0, True
    for feeds in samples(path, source, inputs):
        one, other = judge.run(source, feeds), judge.run(later, feeds)
        worst = max(worst, judge.error(one, other))
        same &= all(np.array_equal(np.asarray(one[name]), np.asarray(other[name])) for name in one)
    result = "the same bits" if same else f"within {worst:.1e} of the largest value"
    after = facts(later)
    lost = [what for what, found in facts(source).items() if found - after[what]]
    extra = len(later.graph.node) - len(source.graph.node)
    return f"| {path.stem} | {before} | {HIGHEST} | {result} | {extra} | {', '.join(lost) or 'nothing'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--inputs", type=pathlib.Path)
    options = parser.parse_args()
    print("| model | opset | raised to | results | nodes added | lost |", "|" + "---|" * 6, sep="\n")
    for folder in options.folders:
        for path in sorted(folder.glob("*.onnx")):
            try:
                print(row(path, options.inputs), flush=True)
            except Exception as problem:  # a model that ONNX Runtime does not run
                print(
                    f"| {path.stem} | | | {type(problem).__name__}: {' '.join(str(problem).split())[:120]} | | |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
