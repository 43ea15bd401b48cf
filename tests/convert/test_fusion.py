"""Written-out layer normalizations load in ONNX Runtime at its default level, where it fuses them."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxamp

LEVELS = ("O1", "O2", "O3")
# Not ort-cpu with 16-bit inputs: its target has no 16-bit Mul and Add, and ONNX Runtime refuses what it makes of the fp32 ones.
TARGETS = (("ort-cuda", "keep"), ("ort-cuda", "low"), ("ort-cpu", "keep"))
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
    assert len(paths) == 9
    loaded(paths)


def test_the_cases(tmp_path: pathlib.Path) -> None:
    paths = []
    for source, level in itertools.product(sorted((pathlib.Path(__file__).parent / "cases").glob("*.onnx")), LEVELS):
        paths.append(tmp_path / f"{source.stem}.{level}.onnx")
        onnxamp.convert(source, level=level).save(paths[-1])
    assert len(paths) >= 66
    loaded(paths)
