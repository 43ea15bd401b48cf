"""A judge of written files for the tests and the benchmarks: it uses onnx, numpy and ONNX Runtime only, nothing of onnxamp.

Strict rounding, errors, Casts, heavy nodes, 16-bit regions without purpose; the traffic of a file is counted in `counter`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, inliner, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

LOW = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
FLOATS = LOW | {TensorProto.FLOAT}
_HEAVY = "MatMul Gemm Conv ConvTranspose DeformConv Einsum Attention LSTM GRU RNN FusedMatMul FusedConv FusedGemm"
_EXACT = """Reshape Transpose Slice Gather GatherND GatherElements Concat Split Identity Squeeze Unsqueeze Expand Tile Flatten Pad
    MaxPool Relu Where Neg Abs Max Min Constant ConstantOfShape If Loop Scan DepthToSpace SpaceToDepth Clip SequenceAt SplitToSequence"""
HEAVY = frozenset(_HEAVY.split())
EXACT = frozenset(_EXACT.split())  # results are elements of the operands, so that nothing rounds
Types = Mapping[str, int]


def valid(model: onnx.ModelProto | str) -> bool:
    """Whether onnx.checker accepts a model or file, shapes included."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # what the checker raises has no common class
        return False
    return True


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with functions inlined and types on all values."""
    return onnx.shape_inference.infer_shapes(
        inliner.inline_local_functions(model) if model.functions else model, data_prop=True
    )


def element(kind: onnx.TypeProto) -> int:
    """The element type of a tensor; -1 for sequences and optionals."""
    return int(kind.tensor_type.elem_type) if kind.HasField("tensor_type") else -1


def scopes(
    graph: onnx.GraphProto, outer: collections.ChainMap[str, int] | None = None
) -> Iterator[tuple[onnx.GraphProto, Types]]:
    """Each graph with the types of the values that it sees."""
    seen = (outer or collections.ChainMap()).new_child()
    for value in (*graph.input, *graph.output, *graph.value_info):
        seen[value.name] = element(value.type)
    for tensor in graph.initializer:
        seen[tensor.name] = tensor.data_type
    for node in graph.node:  # operators that inference does not know: the type of the first 16-bit operand
        for output in filter(None, node.output):
            if not seen.get(output):
                seen[output] = next((seen[name] for name in node.input if seen.get(name) in LOW), 0)
    yield graph, seen
    for node in graph.node:
        for body in bodies(node):
            yield from scopes(body, seen)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def defined(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph gives to values."""
    names = [value.name for value in (*graph.input, *graph.initializer)]
    return {*names, *(name for node in graph.node for name in node.output if name)}


def resolved(
    graph: onnx.GraphProto, path: str = "", outer: collections.ChainMap[str, str] | None = None
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """For each graph, in the order of `scopes`, its place and the visible names with the place of the graph that defines them.

    Bodies beside each other may use one name for two values.
    """
    names = (outer or collections.ChainMap()).new_child({name: path + name for name in defined(graph)})
    yield path, names
    for node in graph.node:
        for index, body in enumerate(bodies(node)):
            yield from resolved(body, _place(path, node, index), names)


def _place(path: str, node: onnx.NodeProto, index: int) -> str:
    return f"{path}{next(filter(None, node.output))}.{index}/"


def strict(model: onnx.ModelProto) -> onnx.ModelProto:
    """An fp32 model that rounds wherever `model` holds a 16-bit value."""
    model = inferred(model)
    for graph, seen in reversed(list(scopes(model.graph))):  # bodies first: replacing nodes copies them
        for value in (*graph.input, *graph.output):
            kind = value.type
            while not kind.HasField("tensor_type") and (case := kind.WhichOneof("value")) in (
                "sequence_type",
                "optional_type",
            ):
                kind = getattr(kind, case).elem_type
            if kind.tensor_type.elem_type in LOW:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        for tensor in graph.initializer:
            widen(tensor)
        nodes = []
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    widen(attribute.t)
                elif attribute.name in ("dtype", "output_dtype", "output_datatype") and attribute.i in LOW:
                    attribute.i = TensorProto.FLOAT
            casts = []
            for index, output in enumerate(node.output):
                low = seen.get(output) if output else None
                if low not in LOW or (node.op_type in EXACT and node.op_type != "Cast"):
                    continue
                raw, rounded = f"{output}.raw", f"{output}.rounded"
                node.output[index] = raw
                if node.op_type == "Cast":  # already the rounding
                    casts.append(helper.make_node("Cast", [raw], [output], to=TensorProto.FLOAT))
                else:
                    casts.append(helper.make_node("Cast", [raw], [rounded], to=low))
                    casts.append(helper.make_node("Cast", [rounded], [output], to=TensorProto.FLOAT))
            nodes += [node, *casts]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)
    return model


def widen(tensor: onnx.TensorProto) -> None:
    """Make a 16-bit tensor fp32, which is exact."""
    if tensor.data_type in LOW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def adapted(feeds: Mapping[str, object], kinds: Mapping[str, int]) -> dict[str, object]:
    """Feeds in the float types that the inputs have now."""

    def one(array: object, kind: int) -> object:
        if isinstance(array, list):
            return [one(item, kind) for item in array]
        if isinstance(array, np.ndarray) and array.dtype in (np.float16, np.float32) and kind in FLOATS:
            with np.errstate(over="ignore"):
                return array.astype(helper.tensor_dtype_to_np_dtype(kind))
        return array

    return {name: one(feeds[name], kind) for name, kind in kinds.items() if name in feeds}


def run(
    model: onnx.ModelProto | str,
    feeds: Mapping[str, object],
    level: onnxruntime.GraphOptimizationLevel = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
) -> dict[str, object]:
    """Outputs by name of ONNX Runtime's CPU provider, nothing optimized unless `level` says so; `model` may be a path."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    if isinstance(model, str):
        model = onnx.load(model, load_external_data=False)
    kinds = {value.name: leaf(value.type) for value in model.graph.input}
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, adapted(feeds, kinds)), strict=True))


def leaf(kind: onnx.TypeProto) -> int:
    """The element type of a tensor, or of the tensors in a sequence or optional."""
    while (case := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, case).elem_type
    return int(kind.tensor_type.elem_type)


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, object]) -> dict[str, object]:
    """Outputs of ONNX Runtime, or of onnx's evaluator for the few operators whose newest version ONNX Runtime lacks."""
    try:
        return run(model, feeds)
    except NotImplemented:
        session = ReferenceEvaluator(model)
        kinds = {value.name: leaf(value.type) for value in model.graph.input}
        return dict(zip(session.output_names, session.run(None, adapted(feeds, kinds)), strict=True))


def error(expected: Mapping[str, object], got: Mapping[str, object]) -> float:
    """Largest difference as a share of the largest expected value; inf for NaN, Inf, another shape or integers that differ."""
    return max((_error(want, got[name]) for name, want in expected.items()), default=0.0)


def _error(want: object, have: object) -> float:
    if isinstance(want, list):
        assert isinstance(have, list)
        return max((_error(a, b) for a, b in zip(want, have, strict=True)), default=0.0)
    if want is None:
        return 0.0 if have is None else math.inf
    want, have = np.asarray(want), np.asarray(have)
    if have.shape != want.shape or (have.dtype.kind == "f") != (want.dtype.kind == "f"):
        return math.inf
    if want.dtype.kind != "f":
        return math.inf if (want != have).any() else 0.0
    finite = np.isfinite(want)
    if (np.isfinite(have) != finite).any():
        return math.inf
    scale = max(float(np.abs(want[finite]).max(initial=0)), 1e-6)
    return float(np.abs(want[finite] - have[finite].astype(want.dtype)).max(initial=0)) / scale


def figures(expected: Mapping, got: Mapping) -> dict[str, float]:
    """Worst cosine and SNR (dB) over the float outputs, new non-finite values, and mismatches of the integer outputs."""
    cosine, snr, nonfinite, mismatches = 1.0, math.inf, 0, 0
    for name, want in expected.items():
        have = got[name]
        if isinstance(want, list):  # sequences
            part = figures(dict(enumerate(want)), dict(enumerate(have)))
            cosine, snr = min(cosine, part["cosine"]), min(snr, part["snr"])
            nonfinite, mismatches = nonfinite + part["nonfinite"], mismatches + part["mismatches"]
            continue
        if not isinstance(want, np.ndarray) or want.dtype.kind not in "f":
            same = np.shape(want) == np.shape(have)
            mismatches += int(np.sum(np.asarray(want) != np.asarray(have))) if same else max(np.size(want), 1)
            continue
        a, b = want.astype(np.float64).ravel(), np.asarray(have).astype(np.float64).ravel()
        if a.shape != b.shape:
            return {"cosine": math.nan, "snr": -math.inf, "nonfinite": a.size, "mismatches": 0}
        finite = np.isfinite(a)
        nonfinite += int((~np.isfinite(b[finite])).sum() + np.isfinite(b[~finite]).sum())
        a, b = a[finite], np.nan_to_num(b[finite], nan=0.0, posinf=0.0, neginf=0.0)
        power, noise = float(a @ a), float((a - b) @ (a - b))
        if power == 0:
            cosine, snr = (cosine, snr) if noise == 0 else (min(cosine, 0.0), -math.inf)
        else:
            norm = math.sqrt(power * float(b @ b))
            cosine = min(cosine, float(a @ b) / norm if norm else 0.0)
            snr = min(snr, 10 * math.log10(power / noise) if noise else math.inf)
    return {"cosine": cosine, "snr": snr, "nonfinite": nonfinite, "mismatches": mismatches}


def casts(model: onnx.ModelProto) -> int:
    """Number of Casts between float types in all graphs."""
    count = 0
    for graph, seen in scopes(inferred(model).graph):
        for node in graph.node:
            count += node.op_type == "Cast" and {seen.get(node.input[0]), seen.get(node.output[0])} <= FLOATS
    return count


def interface(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Inputs and outputs as a caller sees them: below IR 4 every initializer is listed as an input but is a constant."""
    constants = {tensor.name for tensor in model.graph.initializer} if model.ir_version < 4 else set()
    return [*(value for value in model.graph.input if value.name not in constants), *model.graph.output]


def heavy(model: onnx.ModelProto) -> tuple[int, int]:
    """Heavy nodes that compute in 16 bits, and all that compute with floats or an unknown type; those between Q and DQ do not count."""
    low = total = 0
    for graph, seen in scopes(inferred(model).graph):
        quantized = {output for node in graph.node if node.op_type == "DequantizeLinear" for output in node.output}
        for node in graph.node:
            if node.op_type in HEAVY and not quantized.issuperset(node.input[:2]):
                kind = seen.get(next(filter(None, node.output)), 0)
                low, total = low + (kind in LOW), total + (kind in FLOATS or not kind)
    return low, total


def purposeless(model: onnx.ModelProto, source: onnx.ModelProto) -> list[list[str]]:
    """The regions of 16-bit nodes that hold no heavy node and touch no 16-bit value of the source or interface.

    Nodes belong to one region if a 16-bit value goes from one to the other; what control flow hands through goes on behind it. Casts of
    onnxamp are the borders.
    """
    model, source = inferred(model), inferred(source)
    kept = {value.name for value in (*model.graph.input, *model.graph.output) if element(value.type) in LOW}
    for (graph, seen), (_, own) in zip(scopes(source.graph), resolved(source.graph), strict=True):
        kept |= {own[name] for name in defined(graph) if seen.get(name) in LOW}
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    members: dict[str, str] = {}
    forced: list[str] = list(kept)
    counter = 0
    places = dict(resolved(model.graph))
    for (graph, seen), (path, own) in zip(scopes(model.graph), places.items(), strict=True):
        constants = {tensor.name for tensor in graph.initializer}
        constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
        for node in graph.node:
            if node.op_type == "Constant" or any(entry.key == "onnxamp.cast" for entry in node.metadata_props):
                continue
            counter += 1
            key = f"#{counter} {node.op_type} {node.name}"
            low_in = [own[name] for name in node.input if seen.get(name) in LOW and name not in constants]
            low_out = [own[name] for name in node.output if seen.get(name) in LOW]
            if node.op_type in ("If", "Loop", "Scan"):
                for index, body in enumerate(bodies(node)):
                    inside = places[_place(path, node, index)]
                    offset = 1 if node.op_type == "Loop" else 0
                    for inner, outer in zip(list(body.output)[offset:], node.output, strict=False):
                        parent[find(inside[inner.name])] = find(own.get(outer, ""))
                    for inner, name in zip(body.input, node.input, strict=False):
                        parent[find(inside[inner.name])] = find(own.get(name, ""))
                continue
            if not low_in and not low_out:
                continue
            for name in (*low_in, *low_out):
                parent[find(key)] = find(name)
            if low_out or low_in:
                members[key] = key
            if node.op_type in HEAVY and (low_out or low_in):
                forced.append(key)
    good = {find(name) for name in forced}
    regions: dict[str, list[str]] = collections.defaultdict(list)
    for key in members:
        if find(key) not in good:
            regions[find(key)].append(key)
    return list(regions.values())


def zeros(model: onnx.ModelProto) -> dict[str, object]:
    """Feeds of zeros for a model of static shapes."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: np.zeros(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim],
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.input
        if value.name not in constants
    }
