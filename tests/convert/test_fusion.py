"""Written-out layer normalizations load in ONNX Runtime at its default level, where it fuses them."""

import itertools
import pathlib
import subprocess
import sys
import types

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper

import onnxamp
from onnxamp.errors import UnsupportedError

LEVELS = ("O1", "O2", "O3")
TARGETS = tuple(itertools.product(("ort-cuda", "ort-cpu"), ("keep", "low")))
# In a process of its own: some 16-bit models end the process at this level.
LOAD = """
import sys
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
for path in sys.argv[1:]:
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    print(path)
"""
NORM = """mu = ReduceMean <axes = [-1]> (x)
  d = Sub(x, mu)  p = Pow(d, two)  v = ReduceMean <axes = [-1]> (p)
  ve = Add(v, eps)  sd = Sqrt(ve)  n = Div(d, sd)  ng = Mul(n, g)  y = Add(ng, b)"""
SHAPES = {"alone": NORM.replace("(x", "(x0"), "behind": f"x = MatMul(x0, w) {NORM}"}
SHAPES |= {
    name + " and before": text.replace("y = Add", "h = Add") + " y = MatMul(h, w)" for name, text in SHAPES.items()
}
# A Cast that the exporter left there (DeBERTa); ONNX Runtime takes it out before it fuses.
SHAPES["with a Cast of no effect"] = SHAPES["behind and before"].replace(
    "ng = Mul(n, g)", "nc = Cast <to = 1> (n)  ng = Mul(nc, g)"
)


def model(body: str) -> onnx.ModelProto:
    result = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[2,64] x0) => (float[2,64] y) '
        f"<float two = {{2}}, float eps = {{1e-5}}> {{ {body} }}"
    )
    random = np.random.default_rng(0)
    for name, shape in (("g", (64,)), ("b", (64,)), ("w", (64, 64))):
        result.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    return result


def loaded(paths: list[pathlib.Path]) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True)
    assert done.stdout.split() == [str(path) for path in paths], done.stderr


@pytest.mark.parametrize("name", SHAPES)
def test_layer_normalization(name: str, tmp_path: pathlib.Path) -> None:
    paths = []
    for level, (target, io) in itertools.product(LEVELS, TARGETS):
        paths.append(tmp_path / f"{level}.{target}.{io}.onnx")
        onnxamp.convert(model(SHAPES[name]), level=level, target=target, io=io).save(paths[-1])
    assert len(paths) == 12
    loaded(paths)


@pytest.mark.parametrize("name", ["alone", "behind and before"])
@pytest.mark.parametrize("target", ["ort-cuda", "ort-cpu"])
def test_whatever_the_user_keeps_or_lowers(name: str, target: str, tmp_path: pathlib.Path) -> None:
    source = model(SHAPES[name])
    nodes = [node.output[0] for node in source.graph.node]
    asked = [{"keep": pair} for pair in itertools.pairwise(nodes[-5:])]
    asked += [{"keep": (node,)} for node in nodes[-3:]] + [{"lower": ("*",)}, {"lower_op": ("Mul", "Add")}]
    paths = []
    for number, options in enumerate(asked):
        for io in ("keep", "low"):
            paths.append(tmp_path / f"{number}.{io}.onnx")
            onnxamp.convert(source, target=target, io=io, **options).save(paths[-1])  # type: ignore[arg-type]
    assert len(paths) == 18
    loaded(paths)


def test_a_bias_that_cannot_follow_gets_a_leading_dimension(tmp_path: pathlib.Path, judge: types.ModuleType) -> None:
    """The result is what it would be without ONNX Runtime's optimizations, and the source's bias is still there for its other reader."""
    source = model(SHAPES["behind"].replace("y = Add(ng, b)", "s = Add(ng, b) y = Add(s, b)"))
    result = onnxamp.convert(source, keep=("ng", "s"))
    result.save(tmp_path / "out.onnx")
    loaded([tmp_path / "out.onnx"])
    written = onnx.load(tmp_path / "out.onnx")
    shapes = {tensor.name: tuple(tensor.dims) for tensor in written.graph.initializer}
    assert shapes["b__row"] == (1, 64)
    assert "b" in {name.partition("__")[0] for name in shapes if shapes[name] == (64,)}
    feeds = {"x0": np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)}
    assert judge.error(judge.run(source, feeds), judge.run(written, feeds)) < 2e-2
    assert onnxamp.convert(tmp_path / "out.onnx", keep=("ng", "s")).summary == result.summary


def test_a_bias_in_a_body_is_copied_there_whatever_the_ir_version() -> None:
    norm = SHAPES["behind"].replace("y = Add(ng, b)", "s = Add(ng, k) z = Add(s, k)")
    body = f"k = Constant <value_floats = [{', '.join(['1.0'] * 64)}]> () {norm}"
    text = f"y = If (c) <then_branch = t () => (float[2,64] z) {{ {body} }}, else_branch = e () => (float[2,64] x1) {{ x1 = Neg(x0) }}>"
    source = model(text)
    source.ir_version = 3
    source.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, ()))
    for tensor in source.graph.initializer:
        source.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    result = onnx_ir.to_proto(onnxamp.convert(source, keep=("ng", "s")).model)
    onnx.checker.check_model(result)
    (branch,) = [a.g for node in result.graph.node for a in node.attribute if a.name == "then_branch"]
    assert "k__row" in {node.output[0] for node in branch.node if node.op_type == "Constant"}


def test_a_result_of_unknown_rank_is_refused() -> None:
    source = model(SHAPES["behind"])
    (w,) = [tensor for tensor in source.graph.initializer if tensor.name == "w"]
    source.graph.initializer.remove(w)
    source.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, None))
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedError, match="Add node 'y' belongs to a layer normalization in two precisions"):
        onnxamp.convert(source, keep=("ng", "y"))
