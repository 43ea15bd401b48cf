"""The aliasing proof against what ONNX Runtime really computes when memory is shared."""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxamp.ort.aliasing import Aliasing
from onnxamp.ort.binding import Binding
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.ort.values import Buffer

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'

# (what, inputs, outputs, body, words of the refusal of acc → acc2 or None)
CASES = [
    ("accumulator", "float[4,4] g, bool first", "", "a = Add(acc, g)\nacc2 = Where(first, g, a)", None),
    ("plain addition", "float[4,4] g", "", "acc2 = Add(acc, g)", None),
    ("Gemm C", "float[4,4] g", "", "acc2 = Gemm(g, g, acc)", None),
    ("Gemm A", "float[4,4] g", "", "acc2 = Gemm(acc, g, g)", "after it has written"),
    ("MatMul", "float[4,4] g", "", "acc2 = MatMul(acc, g)", "after it has written"),
    ("third of Sum", "float[4,4] g", "", "acc2 = Sum(g, g, acc)", "after it has written"),
    ("Transpose", "", "", "acc2 = Transpose<perm=[1,0]>(acc)", "after it has written"),
    ("unread", "float[4,4] g", "", "acc2 = MatMul(g, g)", None),
    ("late reader", "float[4,4] g", "float[4,4] q", "acc2 = Add(acc, g)\nq = Mul(acc, acc)", "may run after"),
    (
        "reader first in the file",
        "float[4,4] g",
        "float[4,4] q",
        "q = Mul(acc, acc)\nacc2 = Add(acc, g)",
        "may run after",
    ),
    ("reader is an ancestor", "float[4,4] g", "", "q = Softmax(acc)\nacc2 = Add(acc, q)", None),
    ("fused by the runtime to Gemm(acc, g, acc)", "float[4,4] g", "", "q = MatMul(acc, g)\nacc2 = Add(acc, q)", "Gemm"),
    (
        "a view of it is read late",
        "float[4,4] g",
        "float[16] q",
        "s = Constant<value_ints=[16]>()\nv = Reshape(acc, s)\nr = Abs(v)\nq = Exp(r)\nacc2 = Add(acc, g)",
        "may run after",
    ),
    (
        "an ancestor's view is read late",
        "float[4,4] g",
        "float[16] q",
        "s = Constant<value_ints=[16]>()\nt = Constant<value_ints=[4,4]>()\nv = Reshape(acc, s)\nk = Neg(v)\n"
        "u = Reshape(k, t)\nacc2 = Mul(g, u)\nq = Exp(v)",
        "may run after",
    ),
    (
        "captured by a body",
        "float[4,4] g, bool first",
        "float[4,4] q",
        "acc2 = Add(acc, g)\nq = If(first) <then_branch = t () => (float[4,4] y) { y = Neg(acc) }, "
        "else_branch = e () => (float[4,4] z) { z = Abs(g) }>",
        "may run after",
    ),
    ("scaled sum", "float[4,4] g, float[4,1] s", "", "acc2 = com.microsoft.GatedAdd(acc, g, s)", None),
    ("scaled in a sum", "float[4,4] g, float[4,1] s", "", "acc2 = com.microsoft.GatedAdd(g, acc, s)", None),
]


def _model(inputs: str, outputs: str, body: str) -> onnx.ModelProto:
    ins = ", ".join(part for part in ("float[4,4] acc", inputs) if part)
    outs = ", ".join(part for part in ("float[4,4] acc2", outputs) if part)
    return onnx.parser.parse_model(f"{HEAD}g ({ins}) => ({outs}) {{\n{body}\n}}")


def _optimized(model: onnx.ModelProto, tmp_path) -> tuple[object, Aliasing]:
    path = tmp_path / "optimized.onnx"
    session = open_session(model, SessionConfig("cpu", threads=1, optimized_path=path))
    return session, Aliasing(ir.load(path))


@pytest.mark.parametrize(
    ("inputs", "outputs", "body", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_only_provably_safe_aliases_are_allowed(inputs, outputs, body, words, tmp_path):
    _, aliasing = _optimized(_model(inputs, outputs, body), tmp_path)
    refusal = aliasing.refusal("acc", "acc2")
    assert refusal is None if words is None else words in refusal


ALLOWED = [case for case in CASES if case[4] is None]


@pytest.mark.parametrize(("inputs", "outputs", "body"), [c[1:4] for c in ALLOWED], ids=[c[0] for c in ALLOWED])
def test_allowed_aliases_compute_the_same_bits(inputs, outputs, body, tmp_path):
    session, _ = _optimized(_model(inputs, outputs, body), tmp_path)
    rng = np.random.default_rng(0)
    acc, g = (rng.standard_normal((4, 4), np.float32) for _ in range(2))
    for first in (True, False):
        results = []
        for shared in (False, True):
            source = Buffer(64).view(0, (4, 4), onnx.TensorProto.FLOAT)
            source.write(acc)
            target = source if shared else Buffer(64).view(0, (4, 4), onnx.TensorProto.FLOAT)
            binding = Binding(session)
            binding.input("acc", source)
            binding.output("acc2", target)
            for value in session.get_inputs():
                if value.name != "acc":
                    binding.feed(value.name, {"g": g, "first": np.array(first), "s": g[:, :1].copy()}[value.name])
            binding.run()
            results.append(target.read())
        np.testing.assert_array_equal(*results)


def test_an_unsafe_alias_gives_wrong_values_in_the_runtime(tmp_path):
    """The danger is real: without the proof the runtime returns the new value where the old one was asked for."""
    session, aliasing = _optimized(
        _model("float[4,4] g", "float[4,4] q", "acc2 = Add(acc, g)\nq = Sub(acc2, acc)"), tmp_path
    )
    assert aliasing.refusal("acc", "acc2") is not None
    shared = Buffer(64).view(0, (4, 4), onnx.TensorProto.FLOAT)
    other = Buffer(64).view(0, (4, 4), onnx.TensorProto.FLOAT)
    shared.write(np.ones((4, 4), np.float32))
    binding = Binding(session)
    binding.input("acc", shared)
    binding.output("acc2", shared)
    binding.output("q", other)
    binding.feed("g", np.ones((4, 4), np.float32))
    binding.run()
    assert other.read().max() == 0  # g is 1


def test_overlapping_memory_needs_a_writer_that_does_not_read_it(tmp_path):
    _, aliasing = _optimized(_model("float[4,4] g", "", CASES[1][3]), tmp_path)
    assert aliasing.refusal("acc", "acc2", congruent=False) is not None
    _, aliasing = _optimized(_model("float[4,4] g", "", CASES[7][3]), tmp_path)
    assert aliasing.refusal("acc", "acc2", congruent=False) is None


def test_unknown_names_are_refused(tmp_path):
    _, aliasing = _optimized(_model("float[4,4] g", "", CASES[1][3]), tmp_path)
    assert "nothing is not in the graph" in aliasing.refusal("nothing", "acc2")


def test_the_proof_is_linear_in_the_graph():
    """A chain of many readers is answered from one table; here only that it ends, and what it says."""
    x = ir.Value(name="acc")
    nodes, value = [], x
    for i in itertools.count():
        node = ir.node("Add", [value, x], outputs=[ir.Value(name=f"v{i}")])
        nodes.append(node)
        value = node.outputs[0]
        if i == 3000:
            break
    graph = ir.Graph([x], [value], nodes=nodes, opset_imports={"": 21})
    assert Aliasing(ir.Model(graph, ir_version=10)).refusal("acc", "v3000") is None
