"""Sizes that decisions rest on: those of the data, else of the command line, else made up."""

import json
import pathlib

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

TEXT = """g (float[batch,1,samples] sound) => (float[batch,8,frames] z) {
    y = Conv <strides = [128]> (sound, w)  z = Relu(y) }"""


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ([], {"batch": 1, "samples": 512}),
        (["--calibrate", "DATA"], {"batch": 2, "samples": 16000}),
        (["--verify", "--data", "DATA"], {"batch": 2, "samples": 16000}),
        (["--calibrate", "DATA", "--dim", "samples=300"], {"batch": 2, "samples": 300}),
    ],
)
def test_sizes_are_those_of_the_data(call, tmp_path: pathlib.Path, options: list[str], sizes: dict[str, int]) -> None:
    graph = onnx.parser.parse_graph(TEXT)
    graph.initializer.append(numpy_helper.from_array(np.ones((8, 1, 256), np.float32), "w"))
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 19)]), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", sound=np.zeros((2, 1, 16000), np.float32))
    given = [str(tmp_path / "data.npz") if option == "DATA" else option for option in options]
    code, _, err = call("convert", tmp_path / "m.onnx", "-o", tmp_path / "o.onnx", *given)
    assert code == 0, err
    made = onnx.load(tmp_path / "o.onnx")
    (summary,) = (entry.value for entry in made.metadata_props if entry.key == "onnxamp.summary")
    assert json.loads(summary)["dims"] == sizes
