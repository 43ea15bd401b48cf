"""Patterns, scopes, conflicts, policy files and pages."""

from __future__ import annotations

import re

import onnx_ir as ir
import pytest

from onnxamp.errors import UsageError
from onnxamp.model.units import type_graph
from onnxamp.policy import codes, pages
from onnxamp.policy.file import plan_text, read_policy
from onnxamp.policy.plan import Options, make_plan
from onnxamp.policy.user import label, scopes

FLOAT = ir.TensorType(ir.DataType.FLOAT)
SCOPES = ("encoder", "encoder.layers.0", "encoder.layers.0.linear")


def network() -> ir.Model:
    """MatMul, Relu, Softmax and MatMul with names, the first two in a module scope."""
    names = [
        ("layers.0/MatMul", "MatMul"),
        ("layers.0/Relu", "Relu"),
        ("head[0]/Softmax", "Softmax"),
        ("head[0]/MatMul", "MatMul"),
    ]
    weight = ir.Value(name="w", const_value=ir.tensor([[1.0, 2.0], [3.0, 4.0]]), type=FLOAT, shape=ir.Shape((2, 2)))
    values = [ir.Value(name="x", type=FLOAT, shape=ir.Shape((2, 2)))]
    nodes = []
    for i, (name, op) in enumerate(names):
        values.append(ir.Value(name=f"v{i}", type=FLOAT, shape=ir.Shape((2, 2))))
        operands = [values[-2], weight] if op == "MatMul" else [values[-2]]
        nodes.append(ir.Node("", op, operands, outputs=[values[-1]], name=name))
    nodes[0].metadata_props["pkg.torch.onnx.name_scopes"] = repr(["", *SCOPES, "linear"])
    nodes[1].metadata_props["namespace"] = ": torch.nn.Module/encoder: mod.Encoder/layers.0: mod.Layer/relu: aten.relu"
    graph = ir.Graph(values[:1], values[-1:], nodes=nodes, initializers=[weight], opset_imports={"": 17}, name="g")
    return ir.Model(graph, ir_version=9)


def decide(**options: object) -> dict[str, tuple[str, str]]:
    plan = make_plan(type_graph(network()), Options(**options))  # type: ignore[arg-type]
    return {label(node): (d.precision, d.code) for node, d in plan.nodes.items()}


FIRST, RELU, SOFTMAX, LAST = "layers.0/MatMul", "layers.0/Relu", "head[0]/Softmax", "head[0]/MatMul"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": FIRST}, {FIRST: ("fp32", "AMP401"), LAST: ("fp16", "AMP002")}),
        ({"keep": "layers.0/*"}, {FIRST: ("fp32", "AMP401"), RELU: ("fp32", "AMP401")}),
        ({"keep": "re:.*/MatMul"}, {FIRST: ("fp32", "AMP401"), LAST: ("fp32", "AMP401")}),
        ({"keep_op": "MatMul"}, {FIRST: ("fp32", "AMP401"), LAST: ("fp32", "AMP401")}),
        ({"keep": "encoder.layers.0"}, {FIRST: ("fp32", "AMP401"), RELU: ("fp32", "AMP401"), LAST: ("fp16", "AMP002")}),
        ({"keep": "encoder.layers.0.lin*"}, {FIRST: ("fp32", "AMP401")}),
        ({"lower": SOFTMAX}, {SOFTMAX: ("fp16", "AMP402")}),  # the brackets are no glob: the name is exact
        ({"lower": "*"}, dict.fromkeys((FIRST, RELU, SOFTMAX, LAST), ("fp16", "AMP402"))),
        ({"lower_op": "Softmax", "keep": SOFTMAX}, {SOFTMAX: ("fp32", "AMP401")}),
        ({"lower": FIRST, "keep": "layers*"}, {FIRST: ("fp16", "AMP402"), RELU: ("fp32", "AMP401")}),
        ({"lower": "*", "keep_op": "Softmax"}, {SOFTMAX: ("fp32", "AMP401"), RELU: ("fp16", "AMP402")}),
        ({"policy": ((FIRST, "fp32"), (SOFTMAX, "low"))}, {FIRST: ("fp32", "AMP403"), SOFTMAX: ("fp16", "AMP403")}),
        ({"policy": ((FIRST, "fp32"),), "lower": FIRST}, {FIRST: ("fp16", "AMP402")}),
        ({"level": "O3", "keep": SOFTMAX}, {SOFTMAX: ("fp32", "AMP401"), FIRST: ("fp16", "AMP009")}),
    ],
)
def test_patterns(options, expected):
    found = decide(**options)
    assert {node: found[node] for node in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "nothing*"}, "matches no node"),
        ({"keep": "layers.0/MatMull"}, "did you mean 'layers.0/MatMul'"),
        ({"keep_op": "MatMull"}, "no operator 'MatMull'.*did you mean 'MatMul'"),
        ({"lower_op": "Bogus"}, "no operator 'Bogus'"),
        ({"io": ("xx=low",)}, "'xx' matches no float input or output; did you mean 'x'"),
        ({"dim": (("bacth", 8),)}, "no dimension 'bacth'"),
        ({"policy": ((FIRST, "fp16"),)}, "use fp32 or low"),
        ({"lower": "nothing"}, "The lower pattern 'nothing' matches no node"),
        ({"policy": (("nothing", "low"),)}, "The policy file's pattern 'nothing' matches no node"),
        ({"keep": "layers*", "lower": "*/MatMul"}, "just as specific"),
        ({"keep_op": "MatMul", "lower_op": "MatMul"}, "just as specific"),
        ({"keep": "re:("}, "no valid regular expression"),
        ({"keep": "*", "lower": "*"}, "just as specific"),
    ],
)
def test_bad_patterns(options, message):
    with pytest.raises(UsageError, match=message):
        decide(**options)


def test_everything_in_a_file_matches_nothing_in_a_model_without_floats(plan_of):
    text = "g (int64[4] x) => (int64[4] y) { y = Neg(x) }"
    for options in ({"keep": "*"}, {"policy": (("*", "fp32"),)}):
        assert plan_of(text, **options).nodes == {}


def test_naming_an_illegal_node_is_an_error_and_a_wildcard_skips_it(plan_of):
    text = "g (float[1,4] x) => (float[1,4] y) { a = Relu(x) y = com.microsoft.Unknown(a) }"
    with pytest.raises(UsageError, match=r"'y' .* cannot become fp16: unknown operator \(AMP203\)"):
        plan_of(text, lower="y")
    codes_found = {node.op_type: d.code for node, d in plan_of(text, lower="*").nodes.items()}
    assert codes_found == {"Relu": "AMP402", "Unknown": "AMP203"}


def test_operators_that_a_model_lacks_and_dimensions_that_it_has_are_no_mistakes(plan_of):
    text = "g (float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }"
    assert plan_of(text, keep_op="LSTM", dim=(("batch", 8),)).dims == {"batch": 8}


def test_naming_a_node_that_only_a_bound_operand_holds_back_is_an_error(plan_of):
    text = """g (float[1,2,4] x) => (float[1,2,4] y) <float[2] s = {1,1}, float[2] m = {1e9,1}, float[2] v = {1,1}>
    { y = BatchNormalization(x, s, s, m, v) }"""
    plan = plan_of(text, lower="*", target="ort-cuda")
    assert {d.precision for d in plan.nodes.values()} == {"fp32"}
    with pytest.raises(UsageError, match=r"'y' .* cannot become fp16: .* \(AMP210\)"):
        plan_of(text, lower="y", target="ort-cuda")


SIBLINGS = """g (float[2,2] x, bool c) => (float[2,2] y) <float[2,2] w = {1,2,3,4}>
{ y = If (c) <then_branch = a () => (float[2,2] p) { q = MatMul(x, w) p = Softmax(q) },
              else_branch = b () => (float[2,2] q) { p = MatMul(x, w) q = Softmax(p) }> }"""


def test_a_policy_file_tells_siblings_apart(tmp_path, graph_of):
    graph = graph_of(SIBLINGS)
    plan = make_plan(graph, Options(target="any"))
    path = tmp_path / "policy.toml"
    path.write_text(plan_text(plan))
    again = make_plan(graph, Options(target="any", policy=read_policy(path)))
    assert [d.precision for d in again.nodes.values()] == [d.precision for d in plan.nodes.values()]
    assert {("y/then_branch/q", "low"), ("y/else_branch/q", "fp32")} <= set(read_policy(path))
    assert {d.precision for d in plan.nodes.values()} == {"fp32", "fp16"}


def test_a_policy_file_of_one_name_with_two_decisions_is_refused():
    model = network()
    model.graph[2].name = model.graph[3].name = "same"
    with pytest.raises(UsageError, match="Two nodes are called 'same'"):
        plan_text(make_plan(type_graph(model), Options(target="any")))


def test_no_pattern_beats_a_constant_out_of_range(plan_of):
    text = "g (float[1,4] x) => (float[1,4] y) <float k = {1e9}> { y = Min(x, k) }"
    assert {d.code for d in plan_of(text, lower="*", level="O3").nodes.values()} == {"AMP210"}


def test_scopes():
    first, second, *_ = network().graph
    assert scopes(first) == SCOPES
    assert scopes(second) == ("encoder", "encoder.layers.0", "encoder.layers.0.relu")


def test_policy_file_gives_the_same_plan_back(tmp_path):
    path = tmp_path / "policy.toml"
    plan = make_plan(type_graph(network()), Options(keep=(FIRST,)))
    path.write_text(plan_text(plan), encoding="utf-8")
    again = make_plan(type_graph(network()), Options(policy=read_policy(path)))
    assert [d.precision for d in again.nodes.values()] == [d.precision for d in plan.nodes.values()]
    assert {d.code for d in again.nodes.values()} == {"AMP403"}
    assert f'"{FIRST}" = "fp32"  # MatMul: AMP401' in path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nodes", "not valid TOML"),
        ('[node]\n"a" = "fp32"', "Unknown key 'node'"),
        ('[nodes]\n"a" = "fp64"', "use fp32 or low"),
        ('[nodes]\n"a" = "fp16"', "use fp32 or low"),
        ("nodes = 3", "no table"),
    ],
)
def test_bad_policy_files(tmp_path, text, message):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_policy(path)


def test_every_code_has_a_page(tmp_path):
    used = {value for name, value in vars(codes).items() if name.isupper()}
    assert used == set(pages.entries())
    for code, entry in pages.entries().items():
        assert entry.title
        assert re.findall(r"^## (.+)$", pages.page(code), re.M) == [
            "What it does",
            "Why",
            "Example",
            "What to do",
            "References",
        ]
        assert all(len(text) > 5 for text in (entry.what, entry.why, entry.example, entry.remedy, entry.references)), (
            code
        )
    pages.write(tmp_path)
    assert len(list(tmp_path.glob("AMP*.md"))) == len(used)
    assert all(code in (tmp_path / "index.md").read_text() for code in used)
    assert pages.page("amp103").startswith("# AMP103: ")
    with pytest.raises(UsageError, match="Unknown code"):
        pages.page("AMP999")
