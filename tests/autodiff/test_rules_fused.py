"""Gradient rules of ONNX Runtime's fused operators, of all forms of Attention and of all variants of recurrent operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from operator_case import case, ints

from onnxamp.autodiff import gradient_model


def fused(op, *inputs, **options):
    return case(op, *inputs, **{"domain": "com.microsoft", "symbolic": "batch", **options})


def rms(x, scale, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * scale


def nhwc_groups(x, gamma, beta, groups, silu):
    y = F.group_norm(x.movedim(-1, 1), groups, gamma, beta, 1e-5).movedim(1, -1)
    return F.silu(y) if silu else y


PAIRS = np.asarray([[0, 2, 1], [1, 0, 3]])
TABLES = [np.cos(np.arange(8).reshape(4, 2) * 0.7), np.sin(np.arange(8).reshape(4, 2) * 0.7)]


def rotated(x, interleaved=False, heads=None):
    cos, sin = (torch.tensor(table)[torch.tensor(PAIRS)][:, None] for table in TABLES)
    shape = x.shape
    x = x if x.dim() == 4 else x.view(shape[0], shape[1], heads, -1).transpose(1, 2)
    turned, rest = x[..., :4], x[..., 4:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = a * cos - b * sin, a * sin + b * cos
    y = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    y = torch.cat([y, rest], -1)
    return y if len(shape) == 4 else y.transpose(1, 2).reshape(shape)


def embedded(words, positions, kinds, gamma, beta):
    ids, segments = torch.tensor([[1, 0], [2, 2]]), torch.tensor([[0, 1], [1, 0]])
    total = words[ids] + positions[:2] + kinds[segments]
    return F.layer_norm(total, (4,), gamma, beta, 1e-12)


IDS = [np.asarray(a, np.int32) for a in ([[1, 0], [2, 2]], [[0, 1], [1, 0]])]
FUSED = [
    fused("FusedMatMul", (2, 3, 4), (2, 5, 4), transB=1, alpha=0.5, oracle=lambda a, b: 0.5 * a @ b.mT),
    fused("FusedMatMul", (2, 4, 3), (4, 5), transA=1, oracle=lambda a, b: a.mT @ b),
    fused("TransposeMatMul", (3, 4), (5, 4), transB=1, oracle=lambda a, b: a @ b.T, ort=False),
    fused("FusedGemm", (3, 4), (5, 4), (5,), transB=1, activation="LeakyRelu", activation_alpha=0.1,
          oracle=lambda a, b, c: F.leaky_relu(a @ b.T + c, 0.1)),
    fused("FusedGemm", (3, 4), (4, 5), activation="Tanh", alpha=0.3,
          oracle=lambda a, b: torch.tanh(0.3 * a @ b)),
    fused("FusedConv", (1, 2, 5, 5), (3, 2, 3, 3), (3,), activation="Relu", pads=[1, 1, 1, 1],
          oracle=lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1))),
    fused("FusedConv", (1, 2, 5, 5), (3, 2, 3, 3), (3,), (1, 3, 3, 3), activation="HardSigmoid", activation_params=[0.1, 0.4],

          oracle=lambda x, w, b, z: torch.clamp(0.1 * (F.conv2d(x, w, b) + z) + 0.4, 0, 1)),
    fused("NhwcConv", (1, 5, 5, 2), (3, 3, 3, 2), (3,), strides=[2, 2], ort=False,
          oracle=lambda x, w, b: F.conv2d(x.movedim(-1, 1), w.movedim(-1, 1), b, stride=2).movedim(1, -1)),
    fused("GemmFastGelu", (3, 4), (4, 5), (5,), ort=False,
          oracle=lambda x, w, b: F.gelu(x @ w + b, approximate="tanh")),
    fused("BiasAdd", (2, 3, 4), (4,), (2, 3, 4), oracle=lambda x, b, s: x + b + s, ort=False),
    fused("BiasDropout", (2, 3), (3,), (2, 3), oracle=lambda x, b, r: x + b + r, ort=False),
    fused("BiasSoftmax", (2, 3, 4), (1, 3, 4), axis=2, is_inner_broadcast=0, ort=False,
          oracle=lambda x, b: torch.softmax(x + b, -1)),
    fused("BiasSplitGelu", (2, 3, 8), (8,), ort=False,
          oracle=lambda x, b: (x + b).chunk(2, -1)[0] * F.gelu((x + b).chunk(2, -1)[1])),
    case("SimplifiedLayerNormalization", (2, 3, 4), (4,), axis=-1, epsilon=1e-5, stash_type=1, symbolic="batch", oracle=rms, ort=False),
    fused("SkipLayerNormalization", (2, 3, 4), (2, 3, 4), (4,), (4,), (4,), epsilon=1e-5,
          oracle=lambda x, s, g, b, c: F.layer_norm(x + s + c, (4,), g, b)),
    fused("SkipLayerNormalization", (2, 3, 4), (3, 4), (4,), epsilon=1e-5, oracle=lambda x, s, g: F.layer_norm(x + s, (4,), g)),
    fused("SkipLayerNormalization", (2, 3, 4), (2, 3, 4), (4,), (4,), epsilon=1e-5, outputs=["y0", "", "", "y3"],
          oracle=lambda x, s, g, b: [F.layer_norm(x + s, (4,), g, b), x + s]),
    fused("SkipSimplifiedLayerNormalization", (2, 3, 4), (2, 3, 4), (4,), (4,), epsilon=1e-5,
          oracle=lambda x, s, g, c: rms(x + s + c, g)),
    fused("EmbedLayerNormalization", *IDS, (3, 4), (5, 4), (2, 4), (4,), (4,), symbolic="", outputs=["y0", "m"], seeded=0, oracle=embedded),
    fused("GroupNorm", (2, 3, 2, 4), (4,), (4,), groups=2, activation=1, epsilon=1e-5, ort=False,
          oracle=lambda x, g, b: nhwc_groups(x, g, b, 2, True)),
    fused("SkipGroupNorm", (2, 3, 2, 4), (4,), (4,), (2, 4), (4,), groups=2, activation=0, epsilon=1e-5, ort=False, outputs=2,
          oracle=lambda x, g, b, s, c: [nhwc_groups(x + s[:, None, None] + c, g, b, 2, False), x + s[:, None, None] + c]),
    fused("ComplexMul", (2, 3, 2), (2, 3, 2), ort=False,
          oracle=lambda a, b: torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b))),
    fused("ComplexMulConj", (2, 3, 2), (2, 3, 2), ort=False,
          oracle=lambda a, b: torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b).conj())),
    fused("CDist", (3, 4), (5, 4), metric="euclidean", symbolic="", shapes=[(3, 5)], oracle=torch.cdist),
    fused("CDist", (3, 4), (5, 4), metric="sqeuclidean", symbolic="", shapes=[(3, 5)], oracle=lambda a, b: torch.cdist(a, b) ** 2),
    fused("Inverse", (2, 3, 3), oracle=torch.linalg.inv),
    fused("ExpandDims", (2, 3), np.asarray(1, np.int32), shapes=[(2, 1, 3)], oracle=lambda x: x[:, None], symbolic=""),
    fused("Trilu", (3, 4), oracle=torch.triu),
    fused("Pad", (2, 3), ints(1, 0, 0, 2), oracle=lambda x: F.pad(x, (0, 2, 1, 0)), symbolic=""),
    fused("RotaryEmbedding", (2, 2, 3, 4), PAIRS, *TABLES, oracle=rotated),
    fused("RotaryEmbedding", (2, 3, 8), PAIRS, *TABLES, interleaved=1, num_heads=2, oracle=lambda x: rotated(x, True, 2)),
    fused("RotaryEmbedding", (2, 3, 12), PAIRS, *TABLES, num_heads=2, rotary_embedding_dim=4, oracle=lambda x: rotated(x, False, 2)),
]  # fmt: skip


def heads(x, count):
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def joined(y):
    return y.transpose(1, 2).flatten(2)


KEEP = np.asarray([[1, 1, 0], [1, 1, 1]], np.int32)
UNSEEN = np.where(KEEP[:, None, None].astype(bool), 0.0, -10000.0)


def packed(weights, x, w, b, causal, mask):
    q, k, v = (heads(part, 2) for part in (x @ w + b).chunk(3, -1))
    return joined(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))


def past(q, k, v, pk, pv):
    k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(pk.shape[2])
    return [F.scaled_dot_product_attention(q, k, v, mask), k, v]


SAME = (1, 2, 3, 4)
WINDOW = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)
ATTENTIONS = [
    fused("MultiHeadAttention", (2, 3, 8), (2, 3, 8), (2, 3, 8), (24,), KEEP, num_heads=2,
          oracle=lambda q, k, v, b: joined(F.scaled_dot_product_attention(
              *(heads(x + part, 2) for x, part in zip((q, k, v), b.chunk(3), strict=True)), torch.tensor(UNSEEN)))),
    fused("MultiHeadAttention", (2, 3, 8), (2, 3, 8), (2, 3, 8), None, None, (1, 2, 3, 3), num_heads=2, scale=0.3,
          oracle=lambda q, k, v, m: joined(F.scaled_dot_product_attention(
              heads(q, 2), heads(k, 2), heads(v, 2), m, scale=0.3))),
    fused("MultiHeadAttention", (2, 3, 2, 3, 4), num_heads=2, ort=False,
          oracle=lambda x: joined(F.scaled_dot_product_attention(*(x[:, :, :, i].transpose(1, 2) for i in range(3))))),
    fused("Attention", (2, 3, 8), (8, 24), (24,), KEEP, num_heads=2,
          oracle=lambda x, w, b: packed(None, x, w, b, False, torch.tensor(UNSEEN))),
    fused("Attention", (2, 3, 8), (8, 24), (24,), num_heads=2, unidirectional=1,
          oracle=lambda x, w, b: packed(None, x, w, b, True, None)),
    case("Attention", SAME, SAME, SAME, None, (1, 2, 2, 4), (1, 2, 2, 4), opset=23, is_causal=1, outputs=3, oracle=past, symbolic="batch"),
    case("Attention", SAME, SAME, SAME, opset=23, softcap=1.5, symbolic="batch",
         oracle=lambda q, k, v: torch.softmax(1.5 * torch.tanh(q @ k.mT / 2 / 1.5), -1) @ v),
    case("Attention", SAME, SAME, SAME, opset=23, qk_matmul_output_mode=3, outputs=["y0", "", "", "y3"], symbolic="batch",
         oracle=lambda q, k, v: [torch.softmax(q @ k.mT / 2, -1) @ v, torch.softmax(q @ k.mT / 2, -1)]),
    case("Attention", SAME, SAME, SAME, opset=23, qk_matmul_output_mode=0, outputs=["y0", "", "", "y3"], symbolic="batch",
         oracle=lambda q, k, v: [torch.softmax(q @ k.mT / 2, -1) @ v, q @ k.mT / 2]),
    case("Attention", (2, 1, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4), None, None, None, ints(3, 2), opset=24, symbolic="batch", ort=False,
         oracle=lambda q, k, v: F.scaled_dot_product_attention(
             q, k, v, torch.tensor([[True, True, True], [True, True, False]])[:, None, None])),
]  # fmt: skip


def grouped(count, shared, *, rotary=False, window=9, cap=0.0, sink=False, scale=None):
    """Causal attention with shared key heads, one query after the other."""

    def turn(x):
        cos, sin = (torch.tensor(table)[: x.shape[2]] for table in WIDE)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def run(q, *rest):
        k, v, *rest = rest if rest and rest[0].dim() == 3 else (None, None, *rest)
        if k is None:
            size = q.shape[2] // (count + 2 * shared)
            q, k, v = q.split([count * size, shared * size, shared * size], -1)
        q, k, v = heads(q, count), heads(k, shared), heads(v, shared)
        q, k = (turn(q), turn(k)) if rotary else (q, k)
        columns = []
        for row in range(q.shape[2]):
            seen = slice(max(row + 1 - window, 0), row + 1)
            keys, values = (x[:, :, seen].repeat_interleave(count // shared, 1) for x in (k, v))
            scores = q[:, :, row, None] @ keys.mT * (scale or q.shape[3] ** -0.5)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores + rest[0][:, :, row, None, seen] if rest else scores
            if sink:
                bottom = rest[1].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, bottom], -1)
            columns.append(torch.softmax(scores, -1)[..., : keys.shape[2]] @ values)
        return joined(torch.cat(columns, 2))

    return run


LAST, TOTAL = np.asarray([3, 3], np.int32), np.asarray(4, np.int32)
WIDE = [np.cos(np.arange(32).reshape(4, 8) * 0.7), np.sin(np.arange(32).reshape(4, 8) * 0.7)]
SHARED = [
    fused("GroupQueryAttention", (2, 4, 16), (2, 4, 8), (2, 4, 8), None, None, LAST, TOTAL, num_heads=2, kv_num_heads=1,
          oracle=grouped(2, 1), shapes=[(2, 4, 16)]),
    fused("GroupQueryAttention", (2, 4, 64), None, None, None, None, LAST, TOTAL, *WIDE, num_heads=2, kv_num_heads=1, do_rotary=1,
          local_window_size=2, softcap=1.5, oracle=grouped(2, 1, rotary=True, window=2, cap=1.5), shapes=[(2, 4, 32)]),
    fused("GroupQueryAttention", (2, 4, 32), (2, 4, 16), (2, 4, 16), None, None, LAST, TOTAL, None, None, None, (1, 4, 4, 4), (4,),
          num_heads=4, kv_num_heads=2, scale=0.3, oracle=grouped(4, 2, sink=True, scale=0.3), shapes=[(2, 4, 32)]),
]  # fmt: skip

LENGTHS = np.asarray([4, 2, 3], np.int32)
VARIANTS = [
    ("LSTM", {"lengths": True}),
    ("LSTM", {"lengths": True, "direction": "bidirectional", "peepholes": True}),
    ("LSTM", {"peepholes": True, "direction": "reverse", "clip": 0.8}),
    ("LSTM", {"input_forget": 1, "activations": ["HardSigmoid", "Softsign", "Elu"], "activation_alpha": [0.3, 0.7],
              "activation_beta": [0.4]}),
    ("LSTM", {"layout": 1, "direction": "bidirectional"}),
    ("GRU", {"lengths": True, "direction": "bidirectional"}),
    ("GRU", {"lengths": True, "linear_before_reset": 1, "clip": 0.7}),
    ("GRU", {"layout": 1, "activations": ["Sigmoid", "Affine"], "activation_alpha": [0.6], "activation_beta": [0.1]}),
    ("RNN", {"lengths": True, "direction": "reverse"}),
    ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.2], "clip": 0.9}),
    ("RNN", {"layout": 1, "activations": ["ScaledTanh"], "activation_alpha": [0.8], "activation_beta": [0.6]}),
]  # fmt: skip


def recurrence(op, options):
    time, batch, size, hidden = 4, 3, 2, 3
    options = dict(options)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    ways = 2 if options.get("direction") == "bidirectional" else 1
    lengths = LENGTHS if options.pop("lengths", False) else None
    peepholes = [(ways, 3 * hidden)] if options.pop("peepholes", False) else []
    first = options.get("layout")
    state = (batch, ways, hidden) if first else (ways, batch, hidden)
    inputs = [
        (batch, time, size) if first else (time, batch, size), (ways, gates * hidden, size), (ways, gates * hidden, hidden),
        (ways, 2 * gates * hidden), lengths, *([state] * (2 if op == "LSTM" else 1)), *peepholes,
    ]  # fmt: skip
    return case(
        op, *inputs, hidden_size=hidden, low=-0.7, high=0.7, outputs=3 if op == "LSTM" else 2, **options, symbolic="",
        oracle=by_torch(op, hidden, lengths, options), ort=not first,
    )  # fmt: skip


FUNCTIONS = {
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "softsign": lambda x, a, b: F.softsign(x),
    "elu": lambda x, a, b: F.elu(x, a),
    "affine": lambda x, a, b: a * x + b,
    "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
}


def by_torch(op, hidden, lengths, options):
    """The recurrence step by step, each sequence on its own."""
    usual = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}[op]
    names = [name.lower() for name in options.get("activations", usual)]
    alphas, betas = (list(options.get(f"activation_{name}", ())) for name in ("alpha", "beta"))
    functions = []
    for name in names:
        a = alphas.pop(0) if alphas and name in ("hardsigmoid", "elu", "affine", "leakyrelu", "scaledtanh") else None
        b = betas.pop(0) if betas and name in ("hardsigmoid", "affine", "scaledtanh") else None
        functions.append(lambda x, f=FUNCTIONS[name], a=a, b=b: f(x, a, b))
    bound = options.get("clip", 1e9)

    def cut(x):
        return torch.clamp(x, -bound, bound)

    def cell(x, h, c, w, r, bias, p):
        wb, rb = bias.chunk(2)
        f, g, last = functions[0], functions[-1 if op != "LSTM" else 1], functions[-1]
        if op == "RNN":
            return f(cut(x @ w.T + h @ r.T + wb + rb)), c
        if op == "LSTM":
            i, o, forget, new = (x @ w.T + h @ r.T + wb + rb).chunk(4, -1)
            pi, po, pf = p.chunk(3) if p is not None else (0.0, 0.0, 0.0)
            i = f(cut(i + pi * c))
            forget = 1 - i if options.get("input_forget") else f(cut(forget + pf * c))
            c = forget * c + i * g(cut(new))
            return f(cut(o + po * c)) * last(c), c
        xz, xr, xn = (x @ w.T + wb).chunk(3, -1)
        hz, hr, _ = (h @ r.T + rb).chunk(3, -1)
        z, gate = f(cut(xz + hz)), f(cut(xr + hr))
        rn, bn = r[2 * hidden :], rb[2 * hidden :]
        met = gate * (h @ rn.T + bn) if options.get("linear_before_reset") else (gate * h) @ rn.T + bn
        return (1 - z) * g(cut(xn + met)) + z * h, c

    def run(x, w, r, b, *rest):
        first = options.get("layout")
        states = [s.transpose(0, 1) if first else s for s in rest[: 2 if op == "LSTM" else 1]]
        p = rest[2] if len(rest) > 2 else None
        x = x.transpose(0, 1) if first else x
        direction = options.get("direction", "forward")
        ys, hs, cs = [], [], []
        for way, backwards in enumerate([False, True] if direction == "bidirectional" else [direction == "reverse"]):
            columns, ends, cells = [], [], []
            for n in range(x.shape[1]):
                steps = range(x.shape[0] if lengths is None else lengths[n])
                h = states[0][way, n]
                c = states[1][way, n] if op == "LSTM" else h
                y = [torch.zeros(hidden, dtype=x.dtype)] * x.shape[0]
                for t in reversed(steps) if backwards else steps:
                    h, c = cell(x[t, n], h, c, w[way], r[way], b[way], None if p is None else p[way])
                    y[t] = h
                columns.append(torch.stack(y))
                ends.append(h)
                cells.append(c)
            ys.append(torch.stack(columns, 1))
            hs.append(torch.stack(ends))
            cs.append(torch.stack(cells))
        results = [torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)]
        if first:
            results = [results[0].permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in results[1:])]
        return results if op == "LSTM" else results[:2]

    return run


RECURRENT = [recurrence(*variant) for variant in VARIANTS]
CASES = FUSED + ATTENTIONS + SHARED + RECURRENT


@pytest.mark.parametrize("case", CASES, ids=lambda item: item.id)
def test_rule(check_case, case):
    check_case(case)


def test_number_of_cases():
    assert len(CASES) == 56


def test_one_value_in_several_places():
    """A value that an operator reads three times receives the sum of the three gradients once."""
    x = torch.tensor(np.random.default_rng(1).standard_normal((1, 2, 3, 4)), requires_grad=True)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]> g (float[1, 2, 3, 4] x) => (float y)
        { a = Attention(x, x, x) b = Mul(a, a) y = ReduceSum<keepdims=0>(b) }""")
    proto = ir.to_proto(gradient_model(model))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(["grad/x"], {"x": x.detach().numpy().astype(np.float32)})
    (F.scaled_dot_product_attention(x, x, x) ** 2).sum().backward()
    np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-4, atol=1e-5)
