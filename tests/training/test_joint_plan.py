"""The backward half fits the target: what it lacks in 16 bits is FP32 between Casts, and nothing is rounded only to be widened."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxamp.autodiff import backward
from onnxamp.dtypes import LOW
from onnxamp.model.signatures import signature
from onnxamp.model.types import infer
from onnxamp.policy.targets import table
from onnxamp.training.joint_plan import BACKWARD, JointPlan

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float16[N, 4] x, float16[4, 4] w, float[N, 4] seed) => (float[N, 4] y)
    { a = MatMul(x, w) b = Tanh(a) c = LeakyRelu(b) y = Cast<to = 1>(c) }"""
BODY = """<ir_version: 10, opset_import: ["" : 21]> g (float16[4] x, float16[3, 4] v, float[4] seed) => (float[4] y)
    { f = Scan<num_scan_inputs = 1, body = b (float16[4] s, float16[4] u) => (float16[4] after)
        { m = Mul(s, u) after = LeakyRelu(m) }>(x, v) y = Cast<to = 1>(f) }"""


def differentiated(text, names):
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer(model)
    graph = model.graph
    seed = next(value for value in graph.inputs if value.name == "seed")
    wrt = [value for value in graph.inputs if value.name in names]
    for value in backward(graph, {graph.outputs[0]: seed}, wrt).values():
        node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        result = node.outputs[0]
        result.name, result.type, result.shape = f"d{value.name}", ir.TensorType(ir.DataType.FLOAT), value.shape
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return model


def run(model, feeds):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def lacking(model, target):
    """Backward nodes on 16-bit values that the table has no row for."""
    found = []
    for graph in model.graphs():
        for node in graph:
            low = any(value is not None and value.dtype in LOW for value in (*node.inputs, *node.outputs))
            signed = signature(node.domain, node.op_type, model.opset_imports[node.domain])
            if low and BACKWARD in node.metadata_props and not table(target).supports(node, signed, {}):
                found.append(node.op_type)
    return found


@pytest.mark.parametrize(
    ("text", "names", "shapes"), [(TEXT, ("x", "w"), ((3, 4), (4, 4))), (BODY, ("x", "v"), ((4,), (3, 4)))]
)
def test_what_the_target_lacks_goes_up(text, names, shapes):
    target = "ort-cpu"  # has few fp16 kernels
    model = differentiated(text, names)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in zip(names, shapes, strict=True)}
    feeds["seed"] = rng.standard_normal((3, 4) if text is TEXT else (4,)).astype(np.float32)
    before = run(model, feeds)
    assert lacking(model, target)
    assert JointPlan(target)(model).modified
    assert not lacking(model, target)
    after = run(model, feeds)
    assert not JointPlan(target)(model).modified
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=4e-3, atol=4e-3)
    for graph in model.graphs():
        for node in graph:
            inner = node.op_type == "Cast" and not node.outputs[0].is_graph_output()
            source = node.inputs[0].producer() if inner else None
            if source is not None and source.op_type == "Cast" and BACKWARD in source.metadata_props:
                assert not (node.outputs[0].dtype == ir.DataType.FLOAT and source.inputs[0].dtype == ir.DataType.FLOAT)


def test_the_forward_half_stays():
    model = differentiated(TEXT, ("x", "w"))
    forward = [(node.op_type, node.outputs[0].dtype) for node in model.graph if BACKWARD not in node.metadata_props]
    JointPlan("ort-cpu")(model)
    assert [
        (node.op_type, node.outputs[0].dtype) for node in model.graph if BACKWARD not in node.metadata_props
    ] == forward
