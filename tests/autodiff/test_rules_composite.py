"""Gradient rules of Einsum, Resize, operators defined by functions, recurrent operators and losses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from operator_case import case, ints

from onnxamp.autodiff import gradient_model

EINSUMS = [
    case("Einsum", (2, 3), (3, 4), equation="ij,jk->ik"),
    case("Einsum", (2, 5, 3), (2, 4, 3), equation="bqd,bkd->bqk"),
    case("Einsum", (2, 3), (4,), equation="ij,k->i"),
    case("Einsum", (2, 3), equation="ij->ji"),
    case("Einsum", (2, 3), equation="ij->j"),
    case("Einsum", (2, 3), (3, 2), equation="ij,ji"),
    case("Einsum", (2, 4, 3), (2, 3, 5), equation="...ij,...jk->...ik"),
    case("Einsum", (2, 3), (3, 4), (4, 2), equation="ij,jk,kl->il"),
]
RESIZES = [
    case("Resize", (1, 2, 3, 4), None, np.asarray([1, 1, 2, 3], np.float32), mode="nearest",
         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    case("Resize", (1, 2, 3, 4), None, np.asarray([1, 1, 2, 2], np.float32), mode="nearest"),
    case("Resize", (1, 2, 3, 4), None, np.asarray([1, 1, 2, 1.5], np.float32), mode="linear", symbolic="batch"),
    case("Resize", (1, 2, 4, 4), None, None, ints(3, 7), axes=[2, 3], mode="linear", symbolic="batch",
         coordinate_transformation_mode="align_corners"),
    case("Resize", (1, 2, 4, 5), None, None, ints(6, 8), axes=[2, 3], mode="cubic", symbolic="batch", cubic_coeff_a=-0.75),
    case("Resize", (1, 2, 4, 4), None, None, ints(7, 3), axes=[2, 3], mode="nearest", symbolic="batch"),
    case("Resize", (1, 2, 4, 5), None, None, ints(6, 8), axes=[-2, -1], mode="linear", symbolic="batch",
         oracle=lambda x: F.interpolate(x, (6, 8), mode="bilinear")),
    case("Resize", (1, 2, 3, 4), None, np.asarray([2, 3], np.float32), axes=[-1, -2], mode="nearest", symbolic="batch",
         oracle=lambda x: F.interpolate(x, (9, 8), mode="nearest")),
    # As many elements as before: copied if this is so in all dimensions, else read at other places.
    case("Resize", (1, 1, 5), None, np.asarray([1, 1, 2.3], np.float32), mode="linear", symbolic="",
         coordinate_transformation_mode="align_corners", note="fractional factor",
         oracle=lambda x: F.interpolate(x, scale_factor=2.3, mode="linear", align_corners=True)),
    case("Resize", (1, 1, 2), None, np.asarray([1, 1, 0.6], np.float32), mode="linear", symbolic="",
         coordinate_transformation_mode="pytorch_half_pixel", note="one element", oracle=lambda x: x[..., :1]),
    case("Resize", (1, 1, 4), None, np.asarray([1, 1, 1.2], np.float32), mode="linear", symbolic="",
         oracle=lambda x: F.interpolate(x, scale_factor=1.2, mode="linear", recompute_scale_factor=False)),
    *(
        case("Resize", (1, 1, 5, 2), None, None, ints(*sizes), axes=[2, 3], mode="linear", symbolic="",
             keep_aspect_ratio_policy=policy)
        for policy, sizes in (("not_larger", (6, 9)), ("not_smaller", (6, 2)), ("not_larger", (8, 4)), ("not_smaller", (7, 1)))
    ),
]  # fmt: skip


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


COS, SIN = np.linspace(0.2, 0.9, 12).reshape(2, 3, 2), np.linspace(-0.5, 0.5, 12).reshape(2, 3, 2)


def rotary(x):
    cos, sin = torch.from_numpy(COS)[:, None], torch.from_numpy(SIN)[:, None]
    a, b = x[..., :2], x[..., 2:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


MASK = np.asarray([[True, False, True], [True, True, False], [False, False, True]])


def three_dimensional(q, k, v):
    q, k, v = (x.unflatten(2, (2, 4)).transpose(1, 2) for x in (q, k, v))
    mask = torch.from_numpy(MASK)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3).transpose(1, 2).flatten(2)


FUNCTIONS = [
    case("Attention", (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), opset=23, symbolic="batch", oracle=attention),
    case("Attention", (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), opset=23, is_causal=1, symbolic="batch",
         oracle=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    case("Attention", (2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), opset=23, symbolic="batch",
         oracle=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
    case("Attention", (2, 3, 8), (2, 3, 8), (2, 3, 8), MASK, opset=23, symbolic="batch", q_num_heads=2, kv_num_heads=2,
         scale=0.3, oracle=three_dimensional),
    case("Attention", (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (3, 3), opset=23, symbolic="",
         oracle=lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)),
    case("CenterCropPad", (2, 5, 3), ints(3, 6), axes=[1, 2], symbolic="",
         oracle=lambda x: F.pad(x[:, 1:4], (1, 2))),
    case("RotaryEmbedding", (2, 2, 3, 4), COS, SIN, opset=23, oracle=rotary),
]  # fmt: skip
RNN_KINDS = [
    (op, gates, direction, initial, options)
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    for direction, initial, options in (
        ("forward", True, {}),
        ("reverse", False, {"linear_before_reset": 1} if op == "GRU" else {}),
        ("bidirectional", True, {"linear_before_reset": 1} if op == "GRU" else {}),
    )
]


def recurrent(op, gates, direction, initial, options):
    time, batch, size, hidden = 4, 2, 3, 5
    ways = 2 if direction == "bidirectional" else 1
    weights = [(ways, gates * hidden, size), (ways, gates * hidden, hidden), (ways, 2 * gates * hidden)]
    states = [(ways, batch, hidden)] * (2 if op == "LSTM" else 1) if initial else []
    return case(
        op, (time, batch, size), *weights, None, *states, direction=direction, hidden_size=hidden, low=-0.7, high=0.7,
        outputs=3 if op == "LSTM" else 2, **options, oracle=by_torch(op, direction, hidden, options), symbolic="sequence",
    )  # fmt: skip


def by_torch(op, direction, hidden, options):
    """The same recurrence step by step, in PyTorch; all outputs in one vector."""

    def cell(x, h, c, w, r, b):
        wb, rb = b.chunk(2)
        if op == "RNN":
            return torch.tanh(x @ w.T + h @ r.T + wb + rb), c
        if op == "LSTM":
            i, o, f, g = (x @ w.T + h @ r.T + wb + rb).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        xz, xr, xn = (x @ w.T + wb).chunk(3, -1)
        hz, hr, hn = (h @ r.T + rb).chunk(3, -1)
        z, gate = (xz + hz).sigmoid(), (xr + hr).sigmoid()
        if options.get("linear_before_reset"):
            n = (xn + gate * hn).tanh()
        else:
            n = (xn + (gate * h) @ r[2 * hidden :].T + rb[2 * hidden :]).tanh()
        return (1 - z) * n + z * h, c

    def run(x, w, r, b, *states):
        ys, hs, cs = [], [], []
        for way, backwards in enumerate([False, True] if direction == "bidirectional" else [direction == "reverse"]):
            h = states[0][way] if states else x.new_zeros(x.shape[1], hidden)
            c = states[1][way] if len(states) > 1 else x.new_zeros(x.shape[1], hidden)
            order = range(x.shape[0])
            y = {}
            for t in reversed(order) if backwards else order:
                h, c = cell(x[t], h, c, w[way], r[way], b[way])
                y[t] = h
            ys.append(torch.stack([y[t] for t in order]))
            hs.append(h)
            cs.append(c)
        results = [torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)]
        return results if op == "LSTM" else results[:2]

    return run


RECURRENT = [recurrent(*kind) for kind in RNN_KINDS]
LABELS = ints(2, 0, 1, 1)


def cross_entropy(**options):
    return lambda x: F.cross_entropy(x, torch.from_numpy(LABELS), **options)


WEIGHT = np.asarray([0.5, 2.0, 1.5])
LOSSES = [
    *(
        case("SoftmaxCrossEntropyLoss", (4, 3), LABELS, reduction=r, oracle=cross_entropy(reduction=r))
        for r in ("none", "sum", "mean")
    ),
    *(
        case("SoftmaxCrossEntropyLoss", (4, 3), LABELS, WEIGHT, reduction=r, ignore_index=0,
             oracle=cross_entropy(reduction=r, ignore_index=0, weight=torch.from_numpy(WEIGHT)))
        for r in ("none", "sum", "mean")
    ),
    case("SoftmaxCrossEntropyLoss", (2, 3, 2, 2), LABELS.repeat(2).reshape(2, 2, 2), ignore_index=2,
         oracle=lambda x: F.cross_entropy(x, torch.from_numpy(LABELS.repeat(2).reshape(2, 2, 2)), ignore_index=2)),
    *(
        case("NegativeLogLikelihoodLoss", (4, 3), LABELS, WEIGHT, reduction=r, ignore_index=1,
             oracle=lambda x, r=r: F.nll_loss(x, torch.from_numpy(LABELS), torch.from_numpy(WEIGHT), reduction=r, ignore_index=1))
        for r in ("none", "sum", "mean")
    ),
    case("SoftmaxCrossEntropyLoss", (4, 3), LABELS, outputs=2),
]  # fmt: skip

CASES = EINSUMS + RESIZES + FUNCTIONS + RECURRENT + LOSSES


@pytest.mark.parametrize("case", CASES, ids=lambda item: item.id)
def test_rule(check_case, case):
    check_case(case)


def test_number_of_cases():
    assert len(CASES) == 50


def resized(axes, sizes, policy, mode, place, antialias):
    """A weighted sum of a Resize; the weights are the input `seed`."""
    options = {
        "mode": mode,
        "keep_aspect_ratio_policy": policy,
        "coordinate_transformation_mode": place,
        "antialias": antialias,
    }
    nodes = [
        helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], axes=axes, **options),
        helper.make_node("Mul", ["y", "seed"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["loss"], keepdims=0),
    ]
    x, seed, loss = (
        helper.make_tensor_value_info(*item)
        for item in (("x", 1, (1, 2, 5, 3)), ("seed", 1, list("ABCD")), ("loss", 1, ()))
    )
    graph = helper.make_graph(nodes, "g", [x, seed], [loss], [numpy_helper.from_array(np.asarray(sizes), "sizes")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)


@pytest.mark.parametrize("place", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize(("mode", "antialias"), [("nearest", 0), ("linear", 0), ("linear", 1), ("cubic", 1)])
def test_resizes_that_keep_the_ratio(mode, antialias, place):
    """Negative axes, which ONNX Runtime does not find there: what it computes with axes from the front, one element of x after another."""
    rng = np.random.default_rng(0)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    for axes, sizes, policy in (
        ([-2, -1], [6, 9], "not_larger"),
        ([-1, 2], [2, 6], "not_smaller"),
        ([-2, -1], [6, 4], "not_smaller"),
    ):
        front = resized([axis % 4 for axis in axes], sizes, policy, mode, place, antialias)
        front.graph.output.append(onnx.ValueInfoProto(name="y"))
        session = ort.InferenceSession(front.SerializeToString(), options, providers=["CPUExecutionProvider"])
        x = rng.standard_normal((1, 2, 5, 3)).astype(np.float32)
        y = session.run(["y"], {"x": x, "seed": np.zeros((1, 1, 1, 1), np.float32)})[0]
        seed = rng.standard_normal(y.shape).astype(np.float32)
        unit = np.eye(x.size, dtype=np.float32).reshape(x.size, *x.shape)
        want = [session.run(["loss"], {"x": one, "seed": seed})[0] for one in unit]
        model = ir.to_proto(gradient_model(resized(axes, sizes, policy, mode, place, antialias), "loss", ["x"]))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        loss, got = session.run(["loss", "grad/x"], {"x": x, "seed": seed})
        np.testing.assert_allclose(loss, (x.reshape(-1) * want).sum(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got.reshape(-1), want, rtol=1e-4, atol=1e-5)
