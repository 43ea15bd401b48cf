"""Check what `diff` says of other tools' conversions against a reading of the two files by names alone.

    python benchmarks/peers.py FOLDER OUT            # in an environment of its own: makes the conversions
    python benchmarks/diff_peers.py FOLDER OUT       # FOLDER/<model>.onnx against OUT/<model>.<tool>.onnx

The reading knows nothing of onnxamp. Nodes are the same if operator and name are, in the same graph; what is left over was
removed, added or renamed. A new order is explained by as many moves as lie outside a longest increasing subsequence. Types are
those of ONNX's shape inference; nodes for which it finds none are left out, and so are the types of files that contradict themselves
(marked *). Prints a row per pair, and exits with 1 if a diff tells what the files do not show, or leaves out what they do.
"""

import argparse
import bisect
import collections
import os
import pathlib
import sys
import warnings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnx
from onnx import TensorProto

import onnxamp

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
SHAPE_ONLY = {"Shape", "Size"}  # they look at no elements
Scopes = dict[str, list[onnx.NodeProto]]


def scopes(model: onnx.ModelProto) -> Scopes:
    """Nodes of every graph and function, without Constants, by the path that `diff` gives it."""
    found: Scopes = {}

    def enter(path: str, nodes) -> None:
        found[path] = [node for node in nodes if node.op_type != "Constant"]
        for node in found[path]:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    inner = f"{node.name or node.output[0]}/{attribute.name}"
                    enter(f"{path}/{inner}" if path else inner, attribute.g.node)

    enter("", model.graph.node)
    for function in model.functions:
        enter("::".join(filter(None, (function.domain, function.name))), function.node)
    return found


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of the values of all graphs, as far as ONNX infers them."""
    found: dict[str, int] = {}

    def enter(graph: onnx.GraphProto) -> None:
        found.update((v.name, v.type.tensor_type.elem_type) for v in (*graph.value_info, *graph.input, *graph.output))
        found.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    enter(attribute.g)

    enter(onnx.shape_inference.infer_shapes(bare(model)).graph)
    return found


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without declarations of inner values: a converter may have left some that are no longer true."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    del copy.graph.value_info[:]
    return copy


def contradicts_itself(model: onnx.ModelProto) -> bool:
    """Whether a value has two types: one that its node gives it, another that a reader or a body's interface needs."""
    try:
        onnx.shape_inference.infer_shapes(bare(model), strict_mode=True)
    except onnx.shape_inference.InferenceError as problem:
        return "elem type" in str(problem) or "different types" in str(problem) or "inconsistent" in str(problem)
    return False


def moves(order: list[int]) -> int:
    """How many elements lie outside a longest increasing subsequence."""
    tails: list[int] = []
    for place in order:
        k = bisect.bisect_left(tails, place)
        tails[k : k + 1] = [place]
    return len(order) - len(tails)


def read(before: onnx.ModelProto, after: onnx.ModelProto, said: onnxamp.GraphDiff) -> dict[str, set | int]:
    """What the files show, in the terms of `told`. `said` only tells which of the names left over belong together."""
    one, other = scopes(before), scopes(after)
    types = value_types(before), value_types(after)
    new_names = {(r.scope, r.before): r.after for r in said.renamed if r.kind == "node"}
    typed = not contradicts_itself(after)
    shown: dict[str, set | int] = collections.defaultdict(set)
    shown["moved"] = 0
    for path in {*one, *other}:

        def key(node: onnx.NodeProto, path: str = path) -> tuple[str, str, str]:
            domain = "" if node.domain == "ai.onnx" else node.domain
            return (path, "::".join(filter(None, (domain, node.op_type))), node.name or node.output[0])

        theirs = {key(node): (k, node) for k, node in enumerate(other.get(path, []))}
        order, left = [], set(theirs)
        for node in one.get(path, []):
            wanted = (*key(node)[:2], new_names.get((path, node.name), node.name or node.output[0]))
            if wanted not in left:
                shown["removed"].add(key(node))
                continue
            left.discard(wanted)
            place, counterpart = theirs[wanted]
            order.append(place)
            if wanted != key(node) and key(node) not in theirs:
                shown["renamed"].add((path, node.name, counterpart.name))
            pairs = [
                *zip(node.input, counterpart.input, strict=False),
                *zip(node.output, counterpart.output, strict=False),
            ]
            kinds = [(types[0].get(x), types[1].get(y)) for x, y in pairs if x and y]
            if not typed or any(not x or not y for x, y in kinds):
                shown["unknown"].add(key(node))
            elif node.op_type not in SHAPE_ONLY and any(x != y and {x, y} <= FLOATS for x, y in kinds):
                shown["retyped"].add(key(node))
        shown["added"] |= left
        shown["moved"] += moves(order)
    for kind in ("input", "output"):
        for x, y in zip(getattr(before.graph, kind), getattr(after.graph, kind), strict=False):
            if x.type != y.type:
                shown["interface"].add(f"{kind} {x.name}")
    return shown


def told(said: onnxamp.GraphDiff) -> dict[str, set | int]:
    """What the diff says."""
    found: dict[str, set | int] = collections.defaultdict(set)
    for change in (*said.casts, *said.nodes):
        found[change.change].add((change.node.scope, change.node.op, change.node.name))
    found["renamed"] = {(r.scope, r.before, r.after) for r in said.renamed if r.kind == "node"}
    found["retyped"] = {(r.node.scope, r.node.op, r.node.name) for r in said.retyped}
    found["moved"] = len(said.moved)
    found["interface"] = {change.what for change in said.model}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("converted", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds = ("retyped", "added", "removed", "renamed", "moved", "interface")
    print("| model | tool |", " | ".join(kinds), "| everything else |\n|---|---|" + "---|" * (len(kinds) + 1))
    pairs, wrong = 0, 0
    for path in sorted(options.folder.glob("*.onnx")):
        for target in sorted(options.converted.glob(f"{path.stem}.*.onnx")):
            said = onnxamp.diff(path, target)
            shown, told_of = read(onnx.load(path), onnx.load(target), said), told(said)
            cells = []
            for kind in kinds:
                have, want = told_of[kind], shown[kind]
                count = have if isinstance(have, int) else len(have)
                mark = ""
                if kind == "retyped":
                    mark = "" if have == want else " *"
                    have -= shown["unknown"]
                cells.append(
                    f"{count}{mark}"
                    if have == want
                    else f"{count} told, {want if isinstance(want, int) else len(want)} shown"
                )
                if have != want:
                    wrong += 1
                    differ = sorted(have ^ want)[:3] if isinstance(have, set) and isinstance(want, set) else []
                    print(f"{target.name}: {kind}: {differ}", file=sys.stderr)
            pairs += 1
            tool = target.name.removeprefix(path.stem + ".").removesuffix(".onnx")
            print(f"| {path.stem} | {tool} | {' | '.join(cells)} | {said.others} |", flush=True)
    print(f"\n{pairs} pairs, {wrong} kinds of difference where diff and files disagree")
    return int(bool(wrong) or not pairs)


if __name__ == "__main__":
    sys.exit(main())
