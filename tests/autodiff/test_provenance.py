"""Which tensors are parameters by their numbers, their names and what the exporter notes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from parsed import parse, with_weights

from onnxamp.autodiff.parameters import classify
from onnxamp.autodiff.provenance import looks_learned, named
from onnxamp.model.types import infer


def _sines(length=12, width=16, halves=False):
    """The table of "Attention is all you need"."""
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    if halves:
        return np.concatenate([np.sin(angle), np.cos(angle)], 1)
    return np.stack([np.sin(angle), np.cos(angle)], 2).reshape(length, width)


RNG = np.random.default_rng(0)
TABLES = {
    "drawn": (RNG.standard_normal((12, 16)), True),
    "small": (1e-4 * RNG.standard_normal((12, 16)), True),
    "nearly ones": (1 + 3e-4 * RNG.standard_normal((12, 16)), True),
    "trained sines": (_sines() + 0.05 * RNG.standard_normal((12, 16)), True),
    "sines": (_sines(), False),
    "sines, scaled": (0.25 * _sines(), False),
    "sines, halves": (_sines(halves=True), False),
    "sines, two axes": (np.concatenate([_sines(12, 8, True)[RNG.permutation(12)] for _ in range(2)], 1), False),
    "sines, a zero row": (np.concatenate([np.zeros((1, 16)), _sines(11)]), False),
    "sines, in front": (_sines(16, 12).T, False),
    "distances": (-0.5 * np.abs(np.subtract.outer(np.arange(12), np.arange(16))), False),
    "a ramp": (np.linspace(-1, 1, 192).reshape(12, 16), False),
    "numbers": (np.arange(192.0).reshape(12, 16), False),
    "frequencies": (np.geomspace(1, 1e-4, 192).reshape(12, 16), False),
    "a ramp for each row": (np.outer(RNG.standard_normal(12), np.linspace(0.1, 1, 16)), False),
    "mask": (np.where(np.tri(12, 16) > 0, 0, -1e9), False),
    "zeros": (np.zeros((12, 16)), False),
    "grid": (np.arange(12)[:, None] + np.zeros((12, 16)), False),
    "infinite": (np.where(np.tri(12, 16) > 0, RNG.standard_normal((12, 16)), -np.inf), False),
}


@pytest.mark.parametrize(("table", "learned"), TABLES.values(), ids=TABLES)
def test_a_table_of_positions_is_a_parameter_by_its_numbers(table, learned):
    text = "g (float[N, 12, 16] x) => (float[N, 12, 16] y) { y = Add(x, table) }"
    model = ir.from_proto(with_weights(parse(text), table=table.astype(np.float32)))
    infer(model)
    found = classify(model)
    assert [p.name for p in (found.trainable if learned else found.unsure)] == ["table"]


@pytest.mark.parametrize("count", [16, 4096])
def test_a_ramp_is_one_however_small_its_steps_are(count):
    assert not looks_learned(np.linspace(0, 1, count, dtype=np.float32))
    assert looks_learned((1 + 3e-4 * RNG.standard_normal(16)).astype(np.float32))


NUMBERS = {
    "a large table": (RNG.standard_normal((2048, 64)).astype(np.float32), True),
    "of fp16": (RNG.standard_normal((256, 64)).astype(np.float16), True),
    "of bf16": (RNG.standard_normal((256, 64)).astype(ml_dtypes.bfloat16).astype(np.float32), True),
    "a few of bf16": (RNG.standard_normal(8).astype(ml_dtypes.bfloat16).astype(np.float32), True),
    "large waves": (_sines(1024, 512), False),
    "large distances": (np.abs(np.subtract.outer(np.arange(1024.0), np.arange(1024))), False),
    "large distances, scaled": (0.3 * np.abs(np.subtract.outer(np.arange(1024), np.arange(1024))), False),
    "distances of fp16": (0.25 * np.abs(np.subtract.outer(np.arange(64.0), np.arange(64))), False),
    "levels": (RNG.integers(-8, 8, (64, 64)) / 8, False),
    "zeros": (np.zeros(2), False),
    "mostly ones": (np.array([1, 1, 1, 1, 1, 0.75, 0.5]), False),
}


@pytest.mark.parametrize(("array", "learned"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_any_size_and_type(array, learned):
    assert looks_learned(array) == learned


def test_a_batch_normalization_that_is_written_out_keeps_its_statistics():
    """... and what it is frozen with, where the exporter notes nothing of it."""
    text = """g (float[N, 16, 4, 4] x) => (float[N, 16, 4, 4] y)
        { v = Add(bn.running_var, eps) r = Sqrt(v) i = Reciprocal(r) s = Mul(bn.weight, i) m = Mul(bn.running_mean, s)
          b = Sub(bn.bias, m) c = Conv(x, w) n = Mul(c, s) o = Add(n, b) g = Mul(o, layer.scale) y = Add(g, norm.moving_mean) }"""
    each = (1, 16, 1, 1)
    dotted = [f"bn.{name}" for name in ("running_var", "weight", "running_mean", "bias")] + [
        "layer.scale",
        "norm.moving_mean",
    ]
    for name in dotted:
        text = text.replace(name, name.replace(".", "_"))
    tensors = {name.replace(".", "_"): each for name in dotted} | {
        "bn_running_var": np.abs(RNG.standard_normal(each)).astype(np.float32)
    }
    model = ir.from_proto(with_weights(parse(text), w=(16, 16, 1, 1), eps=np.float32(1e-5), **tensors))
    for name in dotted:
        model.graph.initializers[name.replace(".", "_")].name = name
    infer(model)
    found = classify(model)
    assert [p.name for p in found.trainable] == ["w", "layer.scale"]
    assert [p.name for p in found.buffers] == ["bn.running_var", "bn.running_mean", "norm.moving_mean"]
    assert {p.name for p in found.unsure} == {"bn.weight", "bn.bias", "eps"}


def test_a_table_of_positions_may_be_cut_to_the_sample():
    text = """g (float[N, 12, 16] x) => (float[N, 12, 16] y)
        { cut = Slice(table, zero, length, one) y = Add(x, cut) }"""
    cut = {"zero": np.array([0]), "length": np.array([12]), "one": np.array([1])}
    model = ir.from_proto(with_weights(parse(text), table=(1, 14, 16), **cut))
    infer(model)
    assert [p.reason for p in classify(model).trainable] == ["position table of Add, by its numbers"]


@pytest.mark.parametrize(("kind", "want"), [("PARAMETER", "trainable"), ("BUFFER", "frozen"), (None, "unsure")])
@pytest.mark.parametrize("op", ["Mul", "MatMul"])
def test_what_the_exporter_notes_decides(kind, want, op):
    text = f"g (float[3, 4] x) => (float[3, 4] y) {{ y = {op}(x, w) }}"
    model = ir.from_proto(with_weights(parse(text), w=(4, 4) if op == "MatMul" else (3, 1)))
    if kind is not None:
        name = "pkg.torch.export.graph_signature.InputSpec.kind"
        model.graph.initializers["w"].metadata_props[name] = kind
    infer(model)
    found = classify(model)
    want = "trainable" if op == "MatMul" and kind is None else want
    assert [p.name for p in getattr(found, want)] == ["w"]


@pytest.mark.parametrize("op", ["Gather", "GatherND", "GatherElements"])
def test_what_is_looked_up_is_a_table(op):
    """PyTorch's exporters write `weight[index]` in each of these ways: experts, codes, embeddings."""
    form = "int64[3, 1] i, float[3, 4] x" if op != "GatherElements" else "int64[2, 4] i, float[2, 4] x"
    text = f"g ({form}) => (float y) {{ e = {op}(experts, i) p = Mul(e, x) y = ReduceSum<keepdims=0>(p) }}"
    model = ir.from_proto(with_weights(parse(text), experts=(5, 4)))
    infer(model)
    assert [p.reason for p in classify(model).trainable] == [f"table of {op}"]


NAMES = {
    True: [
        "temperature", "logit_scale", "head.temperature", "blocks.0.gate", "pool.p", "model.visual.logit_scale", "_scale",
        "net/scale/mul/ReadVariableOp:0", "alpha/read", "create_parameter_0.w_0", "learned_value",
    ],
    False: [
        "val_12", "_val_3", "const_0", "Constant_4", "onnx::Mul_12", "/Constant_output_0", "/attn/Sqrt_output_0", "123", "c", "c1",
        "p2o.helper.constant.0", "const_fold_opt__7", "eps", "norm.eps", "layer_norm_epsilon", "inv_sqrt_d", "sqrt_dim", "two", "minus_one",
        "clip_min", "half", "", "model/mul/y:0",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "variable"), [(name, kind) for kind, names in NAMES.items() for name in names])
def test_names_of_variables(name, variable):
    assert named(name) == variable


@pytest.mark.parametrize("op", ["Mul", "Div", "Pow"])
def test_a_single_number_is_in_doubt_by_its_name(op):
    """... where the exporter says nothing of any tensor; where it does, that decides."""

    def found(kind=None, other=None, folded=None):
        text = f"g (float[N, 4] x) => (float[N, 4] y) {{ m = MatMul(x, w) s = {op}(m, temperature) t = Add(s, eps) y = Clip(t, low) }}"
        numbers = {"temperature": np.float32(0.07), "eps": np.full(1, 1e-5, np.float32), "low": np.float32(-1)}
        model = ir.from_proto(with_weights(parse(text), w=(4, 4), **numbers))
        for name, noted_as in (("temperature", kind), ("w", other)):
            if noted_as is not None:
                key = "pkg.torch.export.graph_signature.InputSpec.kind"
                model.graph.initializers[name].metadata_props[key] = noted_as
        if folded is not None:
            eps = model.graph.initializers["eps"]
            eps.metadata_props["pkg.onnxscript.optimizer.folded_from"] = folded
        infer(model)
        return classify(model)

    plain = found()
    assert plain.numbers == {"temperature": ""}
    assert [p.name for p in plain.unsure] == ["temperature", "eps"]
    assert [p.name for p in plain.trainable] == ["w"]
    assert found(other="PARAMETER").numbers == {}
    learned = found("PARAMETER", "PARAMETER", "['val_7']")
    assert ([p.name for p in learned.trainable], learned.numbers) == (["w", "temperature"], {})
    assert found("BUFFER", folded="[broken").numbers == {}
    assert found("BUFFER", folded="['val_7', 'logit_scale']").numbers == {"eps": "logit_scale"}


def test_a_token_in_front_is_a_parameter_by_its_numbers():
    text = """g (float[N, 6, 8] x, int64[3] shape) => (float[N, 7, 8] y)
        { each = Expand(token, shape) y = Concat<axis=1>(each, x) }"""
    model = ir.from_proto(with_weights(parse(text), token=(1, 1, 8)))
    infer(model)
    assert [(p.name, p.reason) for p in classify(model).trainable] == [("token", "token of Concat, by its numbers")]
    model.graph.initializers["token"].const_value = ir.tensor(np.zeros((1, 1, 8), np.float32), name="token")
    assert [p.name for p in classify(model).unsure] == ["token"]


# Graphs that compute a weight, its tensors besides w and x, and which of all train (the rest is in doubt).
COMPUTED = {
    "weight normalization": ("n = ReduceL2<keepdims=1>(w, axes) u = Div(w, n) c = Mul(u, g) y = Conv(x, c)", {"g": (8, 1, 1)}, "w g"),
    "a fresh gain": ("n = ReduceL2<keepdims=1>(w, axes) u = Div(w, n) c = Mul(u, g) y = Conv(x, c)", {"g": np.ones((8, 1, 1))}, "w"),
    "spectral normalization": (
        "f = Flatten(w) p = MatMul(f, v) s = MatMul(u, p) c = Div(w, s) y = Conv(x, c)", {"u": (8,), "v": (12,)}, "w",
    ),
    "a pruned weight": ("c = Mul(w, mask) y = Conv(x, c)", {"mask": np.arange(96.0).reshape(8, 4, 3) % 3 > 0}, "w"),
    "a gain of one number": ("c = Mul(w, gain) y = Conv(x, c)", {"gain": ()}, "w"),
    "halves of a weight": (
        "a, b = Split<axis=0>(both) c = Conv(x, a) d = Conv(x, b) e = Mul(c, d) y = Conv(e, w)", {"both": (8, 4, 3)}, "both w",
    ),
    "sixty sums of itself": (
        " ".join(f"c{i + 1} = Add(c{i}, c{i})" for i in range(60)).replace("Add(c0, c0)", "Add(w, w)") + " y = Conv(x, c60)", {}, "w",
    ),
    "a product of constants": (
        "r = MatMul(sines, proj) t = Transpose(r) a = Conv(x, w) y = MatMul(a, t)", {"sines": _sines(), "proj": (16, 6)}, "proj w",
    ),
    "a learned query": (
        "n = Shape<start=0, end=1>(x) one = Constant<value_ints=[1, 1]>() s = Concat<axis=0>(n, one) "
        "q = Expand(query, s) k = LayerNormalization(q, g) p = MatMul(k, m) "
        "t = Transpose<perm=[0, 2, 1]>(p) a = MatMul(t, x) y = MatMul(a, w)",
        {"query": (1, 4, 8), "g": (8,), "m": (8, 8)}, "query g m w",
    ),
    "sines as weights": ("a = Conv(x, w) y = MatMul(a, sines)", {"sines": _sines(6)}, "w"),
    "sines looked up": ("a = Conv(x, w) b = Gather(sines, axes) y = Add(a, b)", {"sines": _sines()}, "w"),
    "bins of a distribution": ("a = Conv(x, w) y = Conv(a, bins)", {"bins": np.arange(16.0).reshape(1, 16, 1)}, "w"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "tensors", "trained"), COMPUTED.values(), ids=COMPUTED)
def test_what_a_weight_is_computed_from_is_a_parameter(text, tensors, trained):
    proto = parse(f"g (float[N, 4, 8] x) => (float[N, C, L] y) {{ {text} }}")
    tensors = {k: v if isinstance(v, tuple) else np.asarray(v, np.float32) for k, v in tensors.items()}
    model = ir.from_proto(with_weights(proto, **tensors, w=(8, 4, 3), axes=np.array([1, 2])))
    infer(model)
    found = classify(model)
    assert {p.name for p in found.trainable} == set(trained.split())
    assert {p.name for p in found.unsure} == {*tensors, "w"} - set(trained.split())


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "op", "trained"),
    [
        ("layers.0.gamma", (16,), "N, 5, 16", "Mul", True),
        ("layers.0.gamma", (16, 1, 1), "N, 16, 4, 4", "Mul", True),
        ("mixer.dt_bias", (1, 16, 1), "N, 16, 5", "Add", True),
        ("layers.0.gamma", np.full(16, 1e-6), "N, 5, 16", "Mul", False),  # fresh
        ("onnx::Mul_12", (16,), "N, 5, 16", "Mul", False),
        ("std", (3, 1, 1), "N, 3, 4, 4", "Mul", False),
        ("frequencies", RNG.standard_normal(16), "N, 5, 1", "Mul", False),  # an outer product
        ("octaves", 2.0 ** np.arange(16), "N, 5, 16", "Mul", False),
        ("borders", (16,), "N, 5, 16", "Greater", False),
    ],
)
def test_a_vector_of_channels_is_a_parameter_by_name_and_numbers(name, tensor, shape, op, trained):
    kind = "bool" if op == "Greater" else "float"
    text = f"g (float[{shape}] x) => ({kind}[{shape.replace(' 1', ' 16')}] y) {{ y = {op}(v, x) }}"
    tensor = tensor if isinstance(tensor, tuple) else tensor.astype(np.float32)
    model = ir.from_proto(with_weights(parse(text), v=tensor))
    model.graph.initializers["v"].name = name
    infer(model)
    found = classify(model)
    assert [p.name for p in found.trainable] == [name] * trained
    assert [p.name for p in found.frozen] == [name] * (op == "Greater")
