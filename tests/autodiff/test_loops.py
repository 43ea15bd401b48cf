"""Loop, Scan and If, nested and with captured values: gradients against central differences in float64."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from onnxamp.autodiff import gradient_model
from onnxamp.errors import UnsupportedError
from onnxamp.model.incremental import IncrementalInference

MODELS = pathlib.Path(__file__).parents[2] / "models"
TRUE = "c = Constant<value = bool {1}>()"
TAIL = "z = Mul(f, f) y = ReduceSum<keepdims=0>(z)"
COUNTED = f"""{TRUE}
    f = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d)
        {{ co = Identity(ci) t = MatMul(a, w) d = Tanh(t) }}>(m, c, s) {TAIL}"""
CASES = {
    "loop": ("double[2] s, double[2,2] w, int64 m", COUNTED, "s w", {"m": 3}),
    "loop without a step": ("double[2] s, double[2,2] w, int64 m", COUNTED, "s", {"m": 0}),
    "loop without a condition": (
        "double[2] s, double[2,2] w, int64 m", COUNTED.replace("(m, c, s)", "(m, , s)"), "s w", {"m": 3}
    ),
    "loop without a condition in a loop without one": (
        "double[2] s, double[2] w, int64 m",
        """f, q = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d, double[2] e)
            { co = Identity(ci) e = Sin(a)
               d = Loop<body = bb (int64 j, bool cj, double[2] aa) => (bool cp, double[2] dd)
                   { cp = Identity(cj) p = Add(aa, e) dd = Mul(p, w) }>(m, , a) }>(m, , s)
        r = ReduceSum<keepdims=0>(q) z = ReduceSum<keepdims=0>(f) y = Mul(r, z)""",
        "s w",
        {"m": 2},
    ),
    "loop with a constant count": ("double[2] s, double[2,2] w", f"m = Constant<value = int64 {{3}}>() {COUNTED}", "s w", {}),
    "loop with stacked outputs": (
        "double[2] s, double[2,2] w, int64 m",
        f"""{TRUE} f, q = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d, double[2] e)
            {{ co = Identity(ci) t = MatMul(a, w) d = Tanh(t) e = Mul(d, a) }}>(m, c, s)
        p = Sin(q) r = ReduceSum<keepdims=0>(p) z = ReduceSum<keepdims=0>(f) y = Add(r, z)""",
        "s w",
        {"m": 4},
    ),
    "loop without a state": (
        "double[5, 2] x, int64 m",
        f"""{TRUE} f = Loop<body = b (int64 i, bool ci) => (bool co, double[2] e)
            {{ co = Identity(ci) r = Gather(x, i) e = Mul(r, r) }}>(m, c) {TAIL}""",
        "x",
        {"m": 3},
    ),
    "the same value as state and output": (
        "double[2] s, double[2] w, int64 m",
        f"""{TRUE} f, q = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d, double[2] e)
            {{ co = Identity(ci) d = Mul(a, w) e = Identity(d) }}>(m, c, s)
        r = ReduceSum<keepdims=0>(q) z = ReduceSum<keepdims=0>(f) y = Mul(r, z)""",
        "s w",
        {"m": 3},
    ),
    "while": (
        "double[2] s, double[2] w",
        f"""{TRUE} limit = Constant<value = double {{9.0}}>() zero = Constant<value = int64 {{0}}>()
        f, n = Loop<body = b (int64 i, bool ci, double[2] a, int64 k) => (bool co, double[2] d, int64 after)
            {{ after = Add(k, i) d = Mul(a, w) t = Mul(d, d) q = ReduceSum<keepdims=0>(t) co = Less(q, limit) }}>(, c, s, zero)
        {TAIL}""",
        "s w",
        {},
    ),
    "scan": (
        "double[2] s, double[3,2] x, double[2,2] w",
        """f, q = Scan<num_scan_inputs=1, body = b (double[2] a, double[2] v) => (double[2] d, double[2] e)
            { t = MatMul(a, w) u = Add(t, v) d = Tanh(u) e = Mul(d, v) }>(s, x)
        p = Mul(q, x) r = ReduceSum<keepdims=0>(p) z = ReduceSum<keepdims=0>(f) y = Mul(r, z)""",
        "s x w",
        {},
    ),
    "scan along other axes, backwards": (
        "double[2] s, double[2,3] x, double[3,2] v",
        """f, q = Scan<num_scan_inputs=2, scan_input_axes=[1, 0], scan_input_directions=[1, 0], scan_output_axes=[1],
            scan_output_directions=[1], body = b (double[2] a, double[2] u, double[2] w) => (double[2] d, double[2] e)
            { t = Mul(a, w) d = Add(t, u) g = Sin(d) e = Mul(g, w) }>(s, x, v)
        p = Mul(q, x) r = ReduceSum<keepdims=0>(p) z = ReduceSum<keepdims=0>(f) y = Mul(r, z)""",
        "s x v",
        {},
    ),
    "loop in scan": (
        "double[2] s, double[3,2] x, double[2] w, int64 m",
        f"""f = Scan<num_scan_inputs=1, body = b (double[2] a, double[2] v) => (double[2] d)
            {{ {TRUE} h = Mul(v, w)
               d = Loop<body = bb (int64 i, bool ci, double[2] aa) => (bool co, double[2] dd)
                   {{ co = Identity(ci) p = Add(aa, h) q = Sin(p) dd = Mul(q, w) }}>(m, c, a) }}>(s, x) {TAIL}""",
        "s x w",
        {"m": 3},
    ),
    "if in loop": (
        "double[2] s, double[2] w, int64 m",
        f"""{TRUE} one = Constant<value = int64 {{1}}>()
        f = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d)
            {{ co = Identity(ci) odd = Equal(i, one)
               d = If (odd) <then_branch = t () => (double[2] e) {{ e = Mul(a, w) }},
                             else_branch = n () => (double[2] o) {{ p = Add(a, w) o = Sin(p) }}> }}>(m, c, s) {TAIL}""",
        "s w",
        {"m": 3},
    ),
    "a state that nothing reaches": (
        "double[2] s, double[2] w, int64 m",
        f"""{TRUE} k = Constant<value = double[2] {{1.0, 2.0}}>()
        f, h = Loop<body = b (int64 i, bool ci, double[2] a, double[2] e) => (bool co, double[2] d, double[2] o)
            {{ co = Identity(ci) d = Mul(a, w) r = Floor(e) o = Add(r, k) }}>(m, c, s, k) {TAIL}""",
        "s w",
        {"m": 2},
    ),
}  # fmt: skip


def session(model):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def parse(signature, nodes, opset=18):
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({signature}) => (double y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("name", CASES)
def test_gradient(name):
    signature, nodes, wrt, given = CASES[name]
    model = parse(signature, nodes)
    rng = np.random.default_rng(len(name))
    feeds = {key: np.asarray(value, np.int64) for key, value in given.items()}
    for value in model.graph.input:
        if value.name not in feeds:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            feeds[value.name] = 1.0 + 0.5 * rng.standard_normal(shape)
    if name == "while":
        feeds["w"] = np.asarray([1.5, 1.7])
    final = ir.to_proto(gradient_model(model, "y", wrt.split()))
    onnx.checker.check_model(final, full_check=True)
    run = session(final)
    got = dict(zip([value.name for value in run.get_outputs()], run.run(None, feeds), strict=True))
    forward = session(model)
    for key in wrt.split():
        expected = np.zeros_like(feeds[key])
        for index in np.ndindex(expected.shape):
            ends = []
            for sign in (1, -1):
                moved = feeds[key].copy()
                moved[index] += sign * 1e-6
                ends.append(forward.run(["y"], {**feeds, key: moved})[0])
            expected[index] = (ends[0] - ends[1]) / 2e-6
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(got[f"grad/{key}"], expected, rtol=1e-6, atol=1e-7, err_msg=key)


def test_a_loop_that_inference_cannot_follow_keeps_the_type_of_its_source(monkeypatch):
    """Not that of its first operand, a count, which has no gradient."""
    infer = IncrementalInference.infer
    monkeypatch.setattr(IncrementalInference, "infer", lambda self, node: node.op_type == "Loop" or infer(self, node))
    test_gradient("loop in scan")


def test_a_growing_state_is_refused():
    nodes = f"""{TRUE} f = Loop<body = b (int64 i, bool ci, a) => (bool co, d)
        {{ co = Identity(ci) d = Concat<axis=0>(a, s) }}>(m, c, s) {TAIL}"""
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (double[2] s, int64 m) => (double y) {{ {nodes} }}'
    with pytest.raises(UnsupportedError, match="changes its shape"):
        gradient_model(onnx.parser.parse_model(text), "y", ["s"])


def test_random_bodies_are_refused():
    nodes = f"""{TRUE} f = Loop<body = b (int64 i, bool ci, double[2] a) => (bool co, double[2] d)
        {{ co = Identity(ci) r = RandomNormalLike(a) d = Mul(a, r) }}>(m, c, s) {TAIL}"""
    with pytest.raises(UnsupportedError, match="random"):
        gradient_model(parse("double[2] s, int64 m", nodes), "y", ["s"])


@pytest.mark.parametrize(("steps", "whiten"), [(5, True), (0, True), (3, False)])
def test_scripted_model(steps, whiten):
    """An exported If with a data-dependent Loop inside, against PyTorch's autograd in float64."""
    model = onnx.load(MODELS / "loop.onnx")
    target = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(target, "target"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "target"], ["product"]))
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["product"], ["loss"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights = {name: torch.tensor(array).double() for name, array in held.items() if name.startswith(("first", "last"))}
    x = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    run = session(ir.to_proto(gradient_model(model, "loss", list(weights))))
    feeds = {"x": x, "steps": np.asarray(steps), "whiten": np.asarray(whiten)}
    got = dict(zip([value.name for value in run.get_outputs()], run.run(None, feeds), strict=True))
    for tensor in weights.values():
        tensor.requires_grad_()
    h = torch.tanh(torch.tensor(x).double() @ weights["first.weight"].T + weights["first.bias"])
    if whiten:
        centred = h - h.mean(0, keepdim=True)
        covariance = centred.T @ centred / 16 + 0.1 * torch.eye(8).double()
        trace = covariance.diagonal().sum()
        p = torch.eye(8).double()
        for _ in range(steps):
            p = 1.5 * p - 0.5 * (p @ p @ p @ (covariance / trace))
        h = centred @ p / trace.sqrt()
    ((h @ weights["last.weight"].T + weights["last.bias"]) * torch.tensor(target)).sum().backward()
    assert len(weights) == 4
    for name, tensor in weights.items():
        error = np.linalg.norm(got[f"grad/{name}"] - tensor.grad.numpy()) / tensor.grad.norm().item()
        assert error < 1e-5, name
