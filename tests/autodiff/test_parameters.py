"""Parameter classes, ties, folded tensors, integer folding, and the two commands."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from parsed import parse, with_weights

from onnxamp.autodiff.gradients import prepare
from onnxamp.autodiff.inspection import inspect, kept_bytes
from onnxamp.autodiff.parameters import classify
from onnxamp.model.types import infer
from onnxamp.passes.integers import FoldIntegers

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


def test_a_free_size_is_that_of_its_place_in_the_inputs():
    """Not of the value that is looked at first: with the time first, as recurrent layers have it, it would count as a batch."""
    text = """g (float[N, time, 4] x) => (float[time, N, 4] y)
        { t = Transpose<perm = [1, 0, 2]>(x) a = MatMul(t, w) y = Tanh(a) }"""
    model = prepare(with_weights(parse(text), w=(4, 4)))
    assert kept_bytes(model, ["y"], {}) == (2 * 64 * 4 * 4, {"N": 1, "time": 64})


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
