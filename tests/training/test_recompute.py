"""Activation recompute: the same bits for less memory, and nothing merges the repeated nodes back."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from onnxamp.errors import UsageError
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import SGD, build


class _Transformer(nn.Module):
    """Residual blocks of attention and GELU with Dropout on an embedding."""

    def __init__(self, layers=4, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, width)
        block = [
            nn.TransformerEncoderLayer(width, 2, 32, 0.2, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        self.blocks, self.head = nn.ModuleList(block), nn.Linear(width, 5)

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class _Convolutions(nn.Module):
    """BatchNormalization with batch statistics, and a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(5))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


CASES = {
    "transformer": (_Transformer, lambda rng, rows: rng.integers(0, 20, (rows, 7))),
    "convolutions": (_Convolutions, lambda rng, rows: rng.normal(size=(rows, 2, 8, 8)).astype(np.float32)),
}
ROWS = 6


def _model(export, name):
    make, draw = CASES[name]
    example = torch.tensor(draw(np.random.default_rng(0), 2))
    return export(make(), example, train=True), draw


def _options(**more):
    return {"loss": "cross_entropy", "optimizer": SGD(lr=0.1, momentum=0.9), "dim": {"batch": ROWS}, **more}


def _modelled(bundle):
    """Bytes before and after, from the note."""
    note = next(note for note in bundle.manifest.notes if note.startswith("Activations take"))
    numbers = [int(word.replace(",", "")) for word in note.split() if word.replace(",", "").isdigit()]
    return numbers[:2]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("level", "dtype"), [("O0", "fp16"), ("O2", "fp16"), ("O2", "bf16")])
def test_the_bits_stay(export, name, level, dtype):
    """Gradients, parameters, statistics; in windows of one and of several micro-batches; masks of Dropout included."""
    model, draw = _model(export, name)
    options = _options(level=level, dtype=dtype, loss_scale=64)
    need = _modelled(build(model, memory_budget=10**12, **options))[0]
    small = build(model, memory_budget=int(0.6 * need), **options)
    before, after = _modelled(small)[1], _modelled(small)[0]
    assert (before, after <= 0.6 * need) == (need, True)
    repeated = [node for node in small.graphs["grad"].graph if (node.name or "").startswith("recompute/")]
    assert len(repeated) > 20
    assert not [node for node in repeated if node.domain not in ("",)]
    plain = build(model, **options)
    trainers = [Trainer(bundle, "cpu", 1, threads=1) for bundle in (plain, small)]
    rng = np.random.default_rng(1)
    for accumulate in (1, 1, 2):
        batches = [{"x0": draw(rng, ROWS), "labels": rng.integers(0, 5, ROWS)} for _ in range(accumulate)]
        for trainer in trainers:
            trainer.accumulate = accumulate
            for batch in batches:
                trainer.micro_step(batch)
        for tensor in trainers[0].manifest.tensors:
            first, second = (trainer._arenas.tensor(tensor.key) for trainer in trainers)
            np.testing.assert_array_equal(first, second, err_msg=tensor.key)


@pytest.mark.parametrize("name", CASES)
def test_the_runtime_keeps_what_is_repeated(export, name, tmp_path):
    """Its optimizers, which drop common subexpressions, find none: every heavy node that is repeated runs twice."""
    model, _ = _model(export, name)
    need = _modelled(build(model, memory_budget=10**12, level="O0", **_options()))[0]
    graph = build(model, memory_budget=int(0.6 * need), level="O0", **_options()).graphs["grad"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")

    def heavy(nodes):
        kinds = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Conv", "FusedConv")
        return sum(node.op_type in kinds and (node.name or "").startswith("recompute/") for node in nodes)

    assert heavy(optimized.graph.node) == heavy(graph.graph) > 3


RANDOM = {
    "noise": "n{i} = RandomNormalLike(h{i}) s{i} = Mul(h{i}, n{i}) z{i} = Add(h{i}, s{i})",
    "mask": "p{i} = Sigmoid(h{i}) m{i} = Bernoulli(p{i}) z{i} = Mul(h{i}, m{i})",
    "body": """q{i} = ReduceMax<keepdims=0>(h{i}) f{i} = Less(q{i}, two) k{i} = If(f{i}) <then_branch = then{i} () => (bool[batch, 16] c{i})
                 {{ u{i} = RandomUniformLike(h{i}) c{i} = Less(u{i}, half) }},
               else_branch = other{i} () => (bool[batch, 16] b{i}) {{ b{i} = Less(h{i}, half) }}>
               z{i} = Where(k{i}, h{i}, half)""",
    "branches": """q{i} = ReduceMax<keepdims=0>(h{i}) f{i} = Less(q{i}, two) z{i} = If(f{i})
                   <then_branch = then{i} () => (float[batch, 16] c{i}) {{ c{i} = Mul(h{i}, h{i}) }},
                   else_branch = other{i} () => (float[batch, 16] b{i}) {{ b{i} = Neg(h{i}) }}>""",
}


@pytest.mark.parametrize("kind", RANDOM)
def test_what_is_drawn_at_random_is_drawn_once_and_bodies_run_once(kind):
    """z = μ + σ·RandomNormalLike(μ): gradients are those of the numbers that the forward half drew."""
    layers = 6
    body = "\n".join(
        f"a{i} = MatMul({f'r{i - 1}' if i else 'x'}, w{i}) h{i} = Tanh(a{i}) {RANDOM[kind].format(i=i)} r{i} = Tanh(z{i})"
        for i in range(layers)
    )
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 16] x) => (float[batch, 16] y) <float half = {{0.5}}, float two = {{2}}>
        {{ {body} y = MatMul(r{layers - 1}, w0) }}""")
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(rng.normal(size=(16, 16)).astype(np.float32) / 4, f"w{i}") for i in range(layers)
    )
    need = _modelled(build(model, memory_budget=10**12, level="O0", **_options()))[0]
    bundle = build(model, memory_budget=int(0.7 * need), level="O0", **_options())
    nodes = list(bundle.graphs["grad"].graph.all_nodes())
    drawn = [node.op_type for node in nodes if node.op_type in ("RandomNormalLike", "RandomUniformLike", "Bernoulli")]
    assert len(drawn) == (layers if kind != "branches" else 0)
    assert sum((node.name or "").startswith("recompute/") for node in nodes) >= layers
    batch = {"x": rng.normal(size=(ROWS, 16)).astype(np.float32), "labels": rng.integers(0, 5, ROWS)}
    assert Trainer(bundle, "cpu", 1, threads=1).micro_step(batch).report["ok"]


def test_less_memory_is_more_work(export):
    model, _ = _model(export, "transformer")
    need = _modelled(build(model, memory_budget=10**12, level="O0", **_options()))[0]
    counts = []
    for share in (0.8, 0.6, 0.45):
        bundle = build(model, memory_budget=int(share * need), level="O0", **_options())
        assert _modelled(bundle)[0] <= share * need
        counts.append(sum((node.name or "").startswith("recompute/") for node in bundle.graphs["grad"].graph))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    with pytest.raises(UsageError, match="with everything recomputed"):
        build(model, memory_budget=100, level="O0", **_options())
    with pytest.raises(UsageError, match="memory_budget is -1"):
        build(model, memory_budget=-1, level="O0", **_options())


def test_the_options_build_the_same_bundle(export):
    model, _ = _model(export, "convolutions")
    first = build(model, memory_budget=10**12, level="O0", **_options())
    assert build(model, **first.manifest.options).manifest == first.manifest
