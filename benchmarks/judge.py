"""A judge of conversions that shares no code with onnxamp: strict rounding, error figures, Casts and traffic of the written file."""

from __future__ import annotations

import collections
import math

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, inliner, numpy_helper

LOW = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
# Operators that move or select values: they cannot round.
EXACT = {
    "Reshape",
    "Transpose",
    "Slice",
    "Gather",
    "GatherND",
    "GatherElements",
    "Concat",
    "Split",
    "Identity",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Tile",
    "Flatten",
    "Pad",
    "MaxPool",
    "Relu",
    "Where",
    "Neg",
    "Abs",
    "Max",
    "Min",
    "Constant",
    "ConstantOfShape",
    "If",
    "Loop",
    "Scan",
    "DepthToSpace",
    "SpaceToDepth",
    "Clip",
    "SequenceAt",
    "SplitToSequence",
}
SEQUENCE = -1
HEAVY = {
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "LSTM",
    "GRU",
    "RNN",
    "FusedMatMul",
    "FusedConv",
    "Einsum",
    "Attention",
}


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with functions inlined and types inferred."""
    return onnx.shape_inference.infer_shapes(inliner.inline_local_functions(model) if model.functions else model)


def scopes(graph, outer=None):
    """Each graph with the types of the values that it sees, outer scopes included."""
    types = (outer or collections.ChainMap()).new_child()
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.HasField("tensor_type")
        types[value.name] = value.type.tensor_type.elem_type if tensor else SEQUENCE
    for tensor in graph.initializer:
        types[tensor.name] = tensor.data_type
    for node in graph.node:  # operators that inference does not know: the type of the first 16-bit input
        for output in filter(None, node.output):
            if not types.get(output):
                types[output] = next((types[i] for i in node.input if types.get(i) in LOW), 0)
    yield graph, types
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from scopes(inner, types)


def widen(tensor) -> None:
    if tensor.data_type in LOW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def strict(model: onnx.ModelProto) -> onnx.ModelProto:
    """An FP32 model that rounds wherever `model` holds a 16-bit value, with FP32 arithmetic inside each operator."""
    model = inferred(model)
    for graph, types in reversed(list(scopes(model.graph))):  # bodies first: replacing nodes copies them
        for value in (*graph.input, *graph.output):
            kind = value.type
            while not kind.HasField("tensor_type") and (inner := kind.WhichOneof("value")) in (
                "sequence_type",
                "optional_type",
            ):
                kind = getattr(kind, inner).elem_type
            if kind.tensor_type.elem_type in LOW:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        for tensor in graph.initializer:
            widen(tensor)
        nodes = []
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    widen(attribute.t)
                elif attribute.name in ("dtype", "output_dtype") and attribute.i in LOW:
                    attribute.i = TensorProto.FLOAT
            casts = []
            for i, output in enumerate(node.output):
                low = types.get(output) if output else None
                if low not in LOW or (node.op_type in EXACT and node.op_type != "Cast"):
                    continue
                raw, rounded = f"{output}.raw", f"{output}.rounded"
                node.output[i] = raw
                if node.op_type == "Cast":
                    casts.append(helper.make_node("Cast", [raw], [output], to=TensorProto.FLOAT))
                else:
                    casts.append(helper.make_node("Cast", [raw], [rounded], to=low))
                    casts.append(helper.make_node("Cast", [rounded], [output], to=TensorProto.FLOAT))
            nodes += [node, *casts]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(nodes)
    return model


def run(model: onnx.ModelProto | str, feeds: dict, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL) -> dict:
    """Outputs by name, on ONNX Runtime's CPU provider."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    source = model if isinstance(model, str) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    wanted = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    types = {i.name: i.type for i in session.get_inputs()}
    feeds = {k: v.astype(wanted.get(types[k], v.dtype)) for k, v in feeds.items() if k in types}
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def figures(expected: dict, got: dict) -> dict:
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
    count, kinds = 0, {1, 10, 16}
    for graph, types in scopes(inferred(model).graph):
        for node in graph.node:
            count += node.op_type == "Cast" and types.get(node.input[0]) in kinds and types.get(node.output[0]) in kinds
    return count


def heavy(model: onnx.ModelProto) -> tuple[int, int]:
    """Heavy nodes that compute in 16 bits, and all heavy nodes that are not between Q and DQ."""
    kinds = []
    for graph, types in scopes(inferred(model).graph):
        quantized = {o for n in graph.node if n.op_type == "DequantizeLinear" for o in n.output}
        for node in graph.node:
            if node.op_type in HEAVY and not quantized.issuperset(node.input[:2]):
                kinds.append(types.get(next(filter(None, node.output))))
    kinds = [kind in LOW for kind in kinds if kind in LOW or kind in (TensorProto.FLOAT, 0, None)]
    return sum(kinds), len(kinds)


def sizes(model: onnx.ModelProto, dims: dict[str, int]) -> dict[str, int]:
    """Elements of each value that the file gives a shape; a dimension without size counts 1 in front and 64 elsewhere."""
    found: dict[str, int] = {}

    def visit(graph) -> None:
        for tensor in graph.initializer:
            found[tensor.name] = math.prod(tensor.dims)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.name in found or not value.type.HasField("tensor_type"):
                continue
            kind = value.type.tensor_type
            if not kind.HasField("shape"):
                found[value.name] = 64
                continue
            found[value.name] = math.prod(
                d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param or "?", 1 if axis == 0 else 64)
                for axis, d in enumerate(kind.shape.dim)
            )
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    visit(inner)

    visit(model.graph)
    return found


def traffic(model: onnx.ModelProto, elements: dict[str, int]) -> int:
    """Bytes read and written by one run: each node reads its inputs whole and writes its outputs, bodies count once.

    Shape and Size read nothing, Constant writes nothing. `elements` gives sizes by name; a Cast's result has the size of its operand.
    """
    width = {
        TensorProto.FLOAT: 4,
        TensorProto.FLOAT16: 2,
        TensorProto.BFLOAT16: 2,
        TensorProto.DOUBLE: 8,
        TensorProto.BOOL: 1,
    }
    width |= {
        TensorProto.INT64: 8,
        TensorProto.UINT64: 8,
        TensorProto.INT32: 4,
        TensorProto.UINT32: 4,
        TensorProto.INT16: 2,
    }
    width |= {TensorProto.UINT16: 2, TensorProto.INT8: 1, TensorProto.UINT8: 1}
    elements = dict(elements)
    total = 0
    for graph, types in scopes(inferred(model).graph):
        for node in graph.node:
            if node.op_type == "Constant":
                tensor = next((a.t for a in node.attribute if a.name == "value"), None)
                if tensor is not None:
                    elements.setdefault(node.output[0], math.prod(tensor.dims))
                continue
            if node.op_type in ("Cast", "Identity"):
                elements.setdefault(node.output[0], elements.get(node.input[0], 64))
            reads = () if node.op_type in ("Shape", "Size") else node.input
            for name in filter(None, (*reads, *node.output)):
                total += elements.get(name, 64) * width.get(types.get(name), 8)
    return total
