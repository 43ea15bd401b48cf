"""Sequences that a Loop fills: the same results from a Loop that stacks, and no sequence where nothing else needs one."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxamp.model.types import infer
from onnxamp.passes.collected import CollectSequences

JOIN = "y = ConcatFromSequence<{how}>(last)"
BODY = "{insert} after = Add(h, x) more = Identity(c)"


def loop(
    how="axis=0, new_axis=1", insert="q = SequenceInsert(p, h)", join=JOIN, empty="SequenceEmpty<dtype=1>()", size="B"
):
    """A state that grows by `x` in each step, and a list of what it was."""
    return f"""g (float[{size}, 3] x, int64 n, bool go) => (float[A, C, D] y, float[{size}, 3] z)
        {{ none = {empty} z, last = Loop<body = b (int64 i, bool c, float[{size}, 3] h, seq(float[{size}, 3]) p)
            => (bool more, float[{size}, 3] after, seq(float[{size}, 3]) q) {{ {BODY.format(insert=insert)} }}>(n, go, x, none)
          {join.format(how=how)} }}"""


CASES = {
    "a new axis in front": (loop(), True),
    "a new axis inside": (loop("axis=1, new_axis=1"), True),
    "a new axis at the end": (loop("axis=-1, new_axis=1"), True),
    "joined": (loop("axis=0", size="2", join="j = ConcatFromSequence<{how}>(last) y = Unsqueeze(j, axes)"), True),
    "joined inside": (
        loop("axis=1", size="2", join="j = ConcatFromSequence<{how}>(last) y = Unsqueeze(j, axes)"),
        True,
    ),
    "joined, of free sizes": (loop("axis=0", join="j = ConcatFromSequence<{how}>(last) y = Unsqueeze(j, axes)"), False),
    "what is computed": (loop(insert="t = Mul(h, h) q = SequenceInsert(p, t)"), True),
    "in front": (loop(insert="zero = Constant<value_int=0>() q = SequenceInsert(p, h, zero)"), False),
    "twice": (loop(insert="m = SequenceInsert(p, h) q = SequenceInsert(m, x)"), False),
    "not from the beginning": (loop(empty="SequenceConstruct(x)"), False),
    "one is read": (loop(join="e = SequenceAt(last, n) y = Unsqueeze(e, axes)"), False),
}


def run(proto, feeds):
    """ONNX Runtime's results: onnx's evaluator joins what a Loop should stack."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize(("text", "changes"), CASES.values(), ids=CASES)
def test_a_loop_stacks_what_it_appends(text, changes):
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
    model = ir.from_proto(proto)
    infer(model)
    assert CollectSequences()(model).modified == changes
    assert any("Sequence" in node.op_type for node in model.graph if node.op_type != "SequenceEmpty") != changes
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    if "SequenceAt" in text:
        return
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3), "go": np.array(True)}
    for got, want in zip(run(ir.to_proto(model), feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
