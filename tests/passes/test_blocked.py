"""Convolutions in the runtime's blocked layout against the plain ones."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.ort.layouts import channel_block
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.blocked import BlockedConvPass

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
CONFIG = SessionConfig("cpu", threads=1)
BLOCK = channel_block()

# (what, x, w, attributes): rewritten
SUITABLE = [
    ("3 x 3", "N,32,9,7", "16,32,3,3", "pads=[1,1,1,1]"),
    ("no padding", "2,16,9,7", "32,16,3,3", "kernel_shape=[3,3]"),
    ("strides", "N,16,H,W", "48,16,3,3", "strides=[2,3], pads=[1,1,1,1]"),
    ("dilations and uneven pads", "N,16,12,11", "16,16,2,3", "dilations=[2,1], pads=[1,0,2,1]"),
    ("a filter each", "N,32,9,7", "32,1,3,3", "group=32, pads=[1,1,1,1]"),
    ("a filter each, strides", "N,16,H,W", "16,1,3,5", "group=16, strides=[2,1], pads=[1,2,1,2], dilations=[1,1]"),
    ("one wide", "N,16,9,7", "16,16,1,5", "pads=[0,2,0,2]"),
]
# left as they are
OTHERS = [
    ("one element", "N,32,9,7", "16,32,1,1", "strides=[1,1]"),
    ("three channels", "N,3,9,7", "16,3,3,3", "strides=[1,1]"),
    ("ten results", "N,16,9,7", "10,16,3,3", "strides=[1,1]"),
    ("groups", "N,32,9,7", "32,16,3,3", "group=2"),
    ("two filters each", "N,16,9,7", "32,1,3,3", "group=16"),
    ("ten filters", "N,10,9,7", "10,1,3,3", "group=10"),
    ("auto_pad", "N,16,9,7", "16,16,3,3", 'auto_pad="SAME_UPPER"'),
    ("one dimension", "N,16,9", "16,16,3", "strides=[1]"),
    ("three dimensions", "N,16,5,5,5", "16,16,3,3,3", "strides=[1,1,1]"),
]


def _model(x: str, w: str, attributes: str) -> onnx.ModelProto:
    rank = x.count(",") + 1
    y = ",".join("abcde"[:rank])
    return onnx.parser.parse_model(
        f"{HEAD}g (float[{x}] x, float[{w}] w, float[{w.split(',')[0]}] b) => (float[{y}] y, float[{y}] z) {{\n"
        f"y = Conv<{attributes}>(x, w, b)\nz = Conv<{attributes}>(x, w)\n}}"
    )


def _both(x: str, w: str, attributes: str) -> tuple[list[str], dict[str, np.ndarray], dict[str, np.ndarray]]:
    source = _model(x, w, attributes)
    model = ir.from_proto(source)
    assert BlockedConvPass(BLOCK)(model).modified == any(node.domain for node in model.graph)
    rng = np.random.default_rng(0)
    sizes = [{"N": 3, "H": 10, "W": 8}.get(size) or int(size) for size in x.split(",")]
    feeds = {
        "x": rng.standard_normal(sizes, np.float32),
        "w": rng.standard_normal([int(size) for size in w.split(",")], np.float32),
        "b": rng.standard_normal(int(w.split(",")[0]), np.float32),
    }
    operators = [node.op_type for node in model.graph]
    return operators, run(open_session(source, CONFIG), feeds), run(open_session(model, CONFIG), feeds)


def test_this_machine_has_a_blocked_layout():
    assert BLOCK in (8, 16)  # of x86-64 and ARM64, where these tests run


@pytest.mark.parametrize("case", SUITABLE, ids=[case[0] for case in SUITABLE])
def test_blocked_convolutions_give_the_numbers_of_plain_ones(case):
    operators, want, got = _both(*case[1:])
    assert operators.count("ReorderInput") == 1  # both read the same x
    assert operators.count("Conv") == operators.count("ReorderOutput") == 2
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", OTHERS, ids=[case[0] for case in OTHERS])
def test_others_stay(case):
    operators, want, got = _both(*case[1:])
    assert operators == ["Conv", "Conv"]
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)


def test_constant_weights_are_left_to_the_runtime():
    model = ir.from_proto(_model("N,16,9,7", "16,16,3,3", "pads=[1,1,1,1]"))
    weight = model.graph.inputs.pop(1)
    weight.const_value = ir.tensor(np.zeros((16, 16, 3, 3), np.float32), name="w")
    model.graph.register_initializer(weight)
    assert not BlockedConvPass(BLOCK)(model).modified
