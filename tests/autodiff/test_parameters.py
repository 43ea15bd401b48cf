"""Parameter classes, ties, folded tensors, integer folding, and the two commands."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.autodiff.gradients import prepare
from onnxamp.autodiff.inspection import inspect, kept_bytes
from onnxamp.autodiff.parameters import classify
from onnxamp.autodiff.provenance import looks_learned, named
from onnxamp.model.types import infer
from onnxamp.passes.integers import FoldIntegers


def parse(text, opset=18):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "test" : 1]> {text}')


def with_weights(proto, **tensors):
    rng = np.random.default_rng(0)
    for name, value in tensors.items():
        array = rng.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return proto


NET = """net (float[N, 3, 8, 8] x, int64[N] ids) => (float[N, 5] p)
{
  h = Conv<pads=[1, 1, 1, 1]>(x, conv_w, conv_b)
  n = BatchNormalization(h, bn_scale, bn_bias, bn_mean, bn_var)
  c = Clip(n, low)
  r = PRelu(c, slope)
  g = GlobalAveragePool(r)
  f = Flatten(g)
  t = Transpose<perm=[1, 0]>(fc_w)
  tc = Cast<to=1>(t)
  m = MatMul(f, tc)
  b = Add(m, fc_b)
  e = Gather(table, ids)
  q = Mul(b, gain)
  s = Add(q, e)
  mean = ReduceMean<axes=[-1]>(s)
  d = Sub(s, mean)
  v = ReduceMean<axes=[-1]>(d2)
  d2 = Mul(d, d)
  ve = Add(v, eps)
  sd = Sqrt(ve)
  nd = Div(d, sd)
  ns = Mul(nd, ln_scale)
  nb = Add(ns, ln_bias)
  z = Gemm<transB=1>(nb, table)
  p = Softmax(z)
}"""


def net():
    text = NET.replace(
        "  v = ReduceMean<axes=[-1]>(d2)\n  d2 = Mul(d, d)\n", "  d2 = Mul(d, d)\n  v = ReduceMean<axes=[-1]>(d2)\n"
    )
    proto = parse(text, 17)
    return with_weights(
        proto, conv_w=(4, 3, 3, 3), conv_b=(4,), bn_scale=(4,), bn_bias=(4,), bn_mean=(4,),
        bn_var=np.ones(4, np.float32), low=np.float32(-1), slope=(4, 1, 1), fc_w=(6, 4), fc_b=(6,), table=(5, 6),
        gain=(6,), eps=np.float32(1e-5), ln_scale=(6,), ln_bias=(6,), unused=(3,), count=np.asarray(3),
    )  # fmt: skip


def test_classes():
    found = classify(prepare(net()))
    reasons = {parameter.name: parameter.reason for parameter in found.trainable}
    assert reasons == {
        "conv_w": "weight of Conv",
        "conv_b": "bias of Conv",
        "bn_scale": "scale of BatchNormalization",
        "bn_bias": "bias of BatchNormalization",
        "slope": "slope of PRelu",
        "fc_w": "weight of MatMul",
        "fc_b": "bias of Add",
        "table": "table of Gather",
        "ln_scale": "scale of Mul",
        "ln_bias": "bias of Add",
    }
    assert [parameter.name for parameter in found.unsure] == ["gain", "eps"]
    assert [parameter.name for parameter in found.buffers] == ["bn_mean", "bn_var"]
    assert {parameter.name for parameter in found.frozen} == {"low", "unused"}
    assert list(found.tied) == ["table"]
    assert found.trainable[0].size == 108
    assert found.trainable[0].bytes == 432


def test_equal_tensors_are_reported_transposed_or_not():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 16)).astype(np.float32)
    text = """g (float[N, 16] x, int64[N] i) => (float[N, 16] y)
        { e = Gather(a, i) h = Add(e, x) k = MatMul(h, c) m = MatMul(k, b) y = Add(m, x) }"""
    proto = with_weights(parse(text), a=np.vstack([w, w]).T.copy(), b=w, c=w.T.copy())
    del proto.graph.initializer[0]
    with_weights(proto, a=(16, 16))
    model = ir.from_proto(proto)
    infer(model)
    assert classify(model).copies == (("b", "c"),)


def test_recurrent_weights_pass_slice_and_concat():
    text = """g (float[4, 2, 3] x) => (float[4, 1, 2, 5] y)
        { a = Slice(w, z, five) b = Slice(w, five, ten) c = Concat<axis=0>(b, a, a, b) d = Unsqueeze(c, z)
          y = LSTM<hidden_size=5>(x, d, r) }"""
    proto = with_weights(
        parse(text), w=(10, 3), r=(1, 20, 5), z=np.asarray([0]), five=np.asarray([5]), ten=np.asarray([10])
    )
    model = ir.from_proto(proto)
    infer(model)
    assert [(p.name, p.reason) for p in classify(model).trainable] == [("w", "weight of LSTM"), ("r", "weight of LSTM")]
    proto.graph.node[-1].op_type = "Identity"
    del proto.graph.node[-1].input[1:], proto.graph.node[-1].attribute[:]
    proto.graph.node[-1].input[0] = "d"
    del proto.graph.output[0]
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y", 1, None))
    model = ir.from_proto(proto)
    infer(model)
    assert [p.name for p in classify(model).unsure] == ["w"]


def test_a_group_norm_as_exporters_write_it():
    """An InstanceNormalization of the groups with ones and zeros, and the parameters behind it."""
    proto = with_weights(
        parse(
            """g (float[N, 8, 4, 4] x) => (float[N, 8, 4, 4] y)
            { groups = Constant<value = int64[3] {0, 4, -1}>() whole = Shape(x) r = Reshape(x, groups)
              i = InstanceNormalization(r, ones, zeros) back = Reshape(i, whole) m = Mul(back, gamma) y = Add(m, beta) }"""
        ),
        ones=np.ones(4, np.float32), zeros=np.zeros(4, np.float32), gamma=(8, 1, 1), beta=(8, 1, 1),
    )  # fmt: skip
    model = ir.from_proto(proto)
    infer(model)
    found = classify(model)
    assert [p.name for p in found.trainable] == ["gamma", "beta"]
    assert [p.name for p in found.frozen] == ["ones", "zeros"]
    noted = model.graph.initializers["ones"]  # PyTorch's exporter says that it is a parameter: a fresh InstanceNorm
    noted.metadata_props["pkg.torch.export.graph_signature.InputSpec.kind"] = "PARAMETER"
    assert "ones" in [p.name for p in classify(model).trainable]
    plain = parse("g (float[N, 8, 4] x) => (float[N, 8, 4] y) { y = InstanceNormalization(x, ones, zeros) }")
    alone = ir.from_proto(with_weights(plain, ones=np.ones(8, np.float32), zeros=np.zeros(8, np.float32)))
    infer(alone)
    assert [p.name for p in classify(alone).trainable] == ["ones", "zeros"]
    each = """g (float[N, 8, 4] x) => (float[N, 8, 4] y)
        { i = InstanceNormalization(x, ones, zeros) m = Mul(i, gamma) y = Add(m, beta) }"""  # one group for each channel
    proto = with_weights(
        parse(each),
        ones=np.ones(8, np.float32),
        zeros=np.zeros(8, np.float32),
        gamma=np.ones((8, 1), np.float32),
        beta=(8, 1),
    )
    model = ir.from_proto(proto)
    infer(model)
    assert [p.name for p in classify(model).trainable] == ["gamma", "beta"]


def test_a_group_norm_of_rows_and_channels():
    """Behind a linear layer: its parameters are vectors, and those of a batch of one row look like the row."""
    for rows in ("N", "1"):
        text = f"""g (float[{rows}, 8] x) => (float[{rows}, 8] y)
            {{ groups = Constant<value = int64[3] {{0, 4, -1}}>() whole = Shape(x) r = Reshape(x, groups)
              i = InstanceNormalization(r, ones, zeros) back = Reshape(i, whole) m = Mul(back, gamma) y = Add(m, beta) }}"""
        weights = {"ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32), "gamma": np.ones(8, np.float32)}
        model = ir.from_proto(with_weights(parse(text), **weights, beta=(8,)))
        infer(model)
        found = classify(model)
        assert [p.name for p in found.trainable] == ["gamma", "beta"]
        assert [p.name for p in found.frozen] == ["ones", "zeros"]


def test_a_fresh_instance_norm_of_frames_is_no_group_norm():
    """A video whose frames are images of their own: only [N, groups, -1] is a form that GroupNorm is written in."""
    text = """g (float[B, 3, 4, 6, 6] x) => (float[B, 3, 4, 6, 6] y)
        { frames = Constant<value = int64[4] {-1, 4, 6, 6}>() whole = Shape(x) r = Reshape(x, frames)
          i = InstanceNormalization(r, ones, zeros) y = Reshape(i, whole) }"""
    model = ir.from_proto(with_weights(parse(text), ones=np.ones(4, np.float32), zeros=np.zeros(4, np.float32)))
    infer(model)
    assert [p.name for p in classify(model).trainable] == ["ones", "zeros"]


@pytest.mark.parametrize("depth", [1, 60])
def test_products_of_a_group_norm_with_itself_are_no_group_norm(depth):
    """Only the scale of its channels is looked through, so that squares of squares take no time either."""
    squares = " ".join(f"m{i + 1} = Mul(m{i}, m{i})" for i in range(depth))
    text = f"""g (float[N, 4, 4] x) => (float[N, 4, 4] y)
        {{ groups = Constant<value = int64[3] {{0, 2, -1}}>() whole = Shape(x) r = Reshape(x, groups)
          i = InstanceNormalization(r, ones, zeros) m0 = Reshape(i, whole) {squares} y = Add(m{depth}, c) }}"""
    proto = with_weights(parse(text), ones=np.ones(2, np.float32), zeros=np.zeros(2, np.float32), c=(4, 1))
    model = ir.from_proto(proto)
    infer(model)
    assert [p.name for p in classify(model).unsure] == ["c"]


def test_inspection():
    model = prepare(net())
    found = inspect(model)
    assert found.unsupported == {}
    assert found.final == {"p": "Softmax"}
    assert found.unknown_shapes == ()
    text = "g (float[N, 3] x) => (float[N, 3] y) { a = MatMul(x, w) b = test.Odd(a) y = Identity(b) }"
    proto = with_weights(parse(text), w=(3, 3))
    proto.graph.node[1].name = "strange"
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("b", 1, ["N", 3]))
    assert inspect(prepare(proto)).unsupported == {"test::Odd": ("strange",)}


def test_kept_bytes_counts_what_the_backward_half_reads():
    """Kept: x for dW, the result of Relu for its slope and the second weight; views of it and the rest are free."""
    text = "g (float[N, 4] x) => (float[N, 2] y) { a = MatMul(x, w) r = Relu(a) v = Reshape(r, s) y = MatMul(v, u) }"
    proto = with_weights(parse(text), w=(4, 8), u=(8, 2), s=np.asarray([-1, 8]))
    model = prepare(proto)
    kept, assumed = kept_bytes(model, ["y"], {"N": 10})
    assert (kept, assumed) == (10 * (4 + 8) * 4, {})
    assert kept_bytes(prepare(proto), ["y"], {}) == ((4 + 8) * 4, {"N": 1})


def test_integers_fold_and_floats_stay():
    text = """g (float[2, 12] x) => (float y)
        { two = Constant<value_int=2>() three = Constant<value_int=3>() m = Mod(two, three)
          one = Constant<value_ints=[1]>() shape = Shape(x) first = Gather(shape, zero) u = Unsqueeze(first, axis)
          rest = Constant<value_ints=[-1]>() mm = Reshape(m, one) t = Concat<axis=0>(u, mm, rest)
          r = Reshape(x, t) w = Constant<value_floats=[1.0, 2.0]>() k = Mul(w, w) e = ReduceSum<keepdims=0>(r)
          f = ReduceSum<keepdims=0>(k) y = Add(e, f) }"""
    proto = with_weights(parse(text), zero=np.asarray(0), axis=np.asarray([0]))
    model = ir.from_proto(proto)
    infer(model)
    assert FoldIntegers()(model).modified
    infer(model)
    kinds = [node.op_type for node in model.graph]
    assert not {"Mod", "Shape", "Gather", "Unsqueeze", "Concat"} & set(kinds)
    assert kinds.count("Mul") == 1
    (reshape,) = (node for node in model.graph if node.op_type == "Reshape")
    np.testing.assert_array_equal(reshape.inputs[1].const_value.numpy(), [2, 2, -1])
    assert list(reshape.outputs[0].shape) == [2, 2, 6]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def command(*arguments):
    result = subprocess.run([sys.executable, "-m", "onnxamp", *arguments], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


def test_check_command(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(net(), path)
    code, text, _ = command("check", str(path), "--dim", "N=4", "--json")
    found = json.loads(text)
    assert code == 0
    assert len(found["trainable"]) == 10
    assert found["final"] == {"p": "Softmax"}
    assert set(found["memory"]) == {"O0", "OD", "O1", "O2", "O3"}
    size = sum(np.prod(row["shape"]) for row in found["trainable"])
    assert found["memory"]["O0"]["state"] == 16 * size
    assert found["memory"]["O3"]["activations"] < found["memory"]["O0"]["activations"]
    code, text, error = command("check", str(path), "--of", "nothing")
    assert (code, text) == (2, "")
    assert "no output 'nothing'" in error


def test_grad_command(tmp_path):
    proto = parse("g (float[2] x) => (float y) { a = Mul(x, w) y = ReduceSum<keepdims=0>(a) }")
    path = tmp_path / "loss.onnx"
    onnx.save(with_weights(proto, w=(2,)), path)
    code, text, _ = command("grad", str(path), "--wrt", "w", "--json")
    assert code == 0
    assert json.loads(text)["gradients"] == ["grad/w"]
    written = onnx.load(tmp_path / "loss.grad.onnx")
    assert [value.name for value in written.graph.output] == ["y", "grad/w"]
    code, _, error = command("grad", str(path), "--wrt", "w")
    assert code == 2
    assert "--force" in error


@pytest.mark.parametrize(("text", "code"), [("a.onnx", 2), ("", 2)])
def test_missing_files(text, code):
    assert command("check", text)[0] == code


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
