"""The opset is raised where a decision needs it, never past a kernel, and what blocks it is said."""

import pathlib

import onnx
import onnx_ir as ir
import pytest

import onnxamp
from onnxamp.errors import UsageError
from onnxamp.model import io
from onnxamp.model.preparation import prepare
from onnxamp.policy.options import Options
from onnxamp.policy.raising import plan_at_best_opset

MODELS = pathlib.Path(__file__).parents[2] / "models"
CONV = "[conv] h = Conv(x, w)"
POOL = "[pool] p = MaxPool<kernel_shape = [2, 2]>(h)"


def proto(body: str, opset: int, shape: str = "1,1,4,4", ir_version: int = 8) -> onnx.ModelProto:
    """A graph from x to y with a weight w."""
    text = f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g (float[{shape}] x) => (float[a,b,c,d] y) '
    return onnx.parser.parse_model(text + "<float[1,1,1,1] w = {2}> {" + body + "}")


def converted(body: str, opset: int, **options: object) -> onnxamp.ConvertResult:
    return onnxamp.convert(proto(body, opset), **{"dtype": "bf16", **options})  # type: ignore[arg-type]


def decision(result: onnxamp.ConvertResult, name: str) -> tuple[str, str, dict[str, object]]:
    (found,) = [d for node, d in result.plan.nodes.items() if node.name == name]
    return found.precision, found.code, found.evidence


@pytest.mark.parametrize(
    ("body", "opset", "options", "expected"),
    [
        (CONV + " y = Relu(h)", 17, {}, 22),
        (CONV + " y = Relu(h)", 17, {"dtype": "fp16"}, 17),
        (CONV + " y = Relu(h)", 17, {"level": "O0"}, 17),
        (CONV + " y = Relu(h)", 17, {"target": "ort-cpu"}, 17),  # no kernel in any opset
        (CONV + " y = Relu(h)", 17, {"keep": "conv"}, 17),
        (CONV + " y = Relu(h)", 17, {"keep_op": "Conv"}, 17),
        (CONV + " y = Relu(h)", 23, {}, 23),
        ("[mm] h = MatMul(x, x) y = Relu(h)", 11, {}, 13),
        ("[mm] h = MatMul(x, x) y = Relu(h)", 13, {}, 13),
        ("h = Relu(x) [act] y = Elu(h)", 17, {}, 17),  # nothing heavy
        ("h = Relu(x) [act] y = Softplus(h)", 17, {"lower": "act"}, 22),
        ("h = Relu(x) [act] y = Softplus(h)", 17, {"level": "O3"}, 22),
        (CONV + POOL + " y = Relu(p)", 17, {}, 17),
        (CONV + POOL + " y = Relu(p)", 17, {"target": "any"}, 22),
        (CONV + POOL + " [mm] y = MatMul(p, p)", 11, {}, 13),
        (CONV + " d = Dropout(h) y = Relu(d)", 12, {}, 22),  # removed before kernels are looked up
        (CONV + " d, m = Dropout(h) k = Cast<to = 1>(m) y = Add(d, k)", 17, {}, 17),
        (CONV + " [act] y = Elu(h)", 17, {}, 17),
        ("[up] u = ConvTranspose(x, w) y = Relu(u)", 17, {}, 17),  # no kernel in any opset
    ],
)
def test_the_opset_rises_where_a_decision_needs_it(
    body: str, opset: int, options: dict[str, object], expected: int, tmp_path: pathlib.Path
) -> None:
    result = converted(body, opset, **options)
    assert result.model.opset_imports[""] == expected
    assert result.summary.opset == (opset, expected)
    result.save(tmp_path / "m.onnx")
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    again = onnxamp.convert(tmp_path / "m.onnx", **{"dtype": "bf16", **options})  # type: ignore[arg-type]
    again.save(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


def test_what_blocks_the_opset_is_in_the_evidence() -> None:
    result = converted(CONV + POOL + " [mm] y = MatMul(p, p)", 11)
    precision, code, evidence = decision(result, "conv")
    assert (precision, code) == ("fp32", "AMP202")
    assert evidence["opset"] == 22
    assert evidence["blocker"] == {
        "node": "pool",
        "operator": "MaxPool",
        "reason": "onnxruntime-gpu 1.31.1, CUDAExecutionProvider has no kernel for it at opset 22",
    }
    assert decision(result, "mm")[:2] == ("bf16", "AMP002")
    assert not any("blocks" in text for text in result.warnings)  # half of the heavy nodes are served


def test_an_operator_that_cannot_be_written_later_blocks() -> None:
    result = converted(CONV + " [bn] b = BatchNormalization<spatial = 0>(h, w, w, w, w) y = Relu(b)", 7)
    assert result.model.opset_imports[""] == 7
    evidence = decision(result, "conv")[2]
    assert evidence["blocker"] == {
        "node": "bn",
        "operator": "BatchNormalization",
        "reason": "spatial=0 has no later form",
    }
    assert "BatchNormalization 'bn' blocks" in result.warnings[0]


def test_shapes_that_only_the_later_opset_refuses_block() -> None:
    """A scale of four dimensions: BatchNormalization's rules look at its rank from opset 14 on."""
    source = proto(CONV + " [bn] b = BatchNormalization(h, w, w, w, w) y = Relu(b)", 13)
    onnx.checker.check_model(source, full_check=True)
    result = onnxamp.convert(source, dtype="bf16")
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert result.model.opset_imports[""] == 13
    blocker = decision(result, "conv")[2]["blocker"]
    assert isinstance(blocker, dict)
    assert (blocker["node"], blocker["operator"]) == ("bn", "BatchNormalization")
    assert "opset 22 refuses its shapes" in blocker["reason"]


def test_a_node_that_is_named_is_an_error_only_if_no_opset_helps() -> None:
    assert decision(converted(CONV + " y = Relu(h)", 17, lower="conv"), "conv")[:2] == ("bf16", "AMP402")
    with pytest.raises(UsageError, match="'conv' \\(Conv\\) cannot become bf16"):
        converted(CONV + POOL + " y = Relu(p)", 17, lower="conv")


def test_operators_of_any_opset_without_a_kernel_say_so() -> None:
    precision, code, evidence = decision(converted("[up] u = ConvTranspose(x, w) y = Relu(u)", 17), "up")
    assert (precision, code, evidence["target"]) == ("fp32", "AMP301", "ort-cuda")


def test_initializers_that_are_inputs_stay_constants_below_ir_4() -> None:
    source = proto(CONV + " y = Relu(h)", 9, ir_version=3)
    source.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [1, 1, 1, 1]))
    result = onnxamp.convert(source, dtype="bf16")
    assert (result.model.ir_version, result.model.opset_imports[""]) == (3, 22)
    assert decision(result, "conv")[0] == "bf16"
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)


def test_declared_shapes_survive_the_copy() -> None:
    source = proto(CONV + " y = Relu(h)", 17)
    source.graph.value_info.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [1, "c", 4, 4]))
    found = {v.name: v.shape for node in onnxamp.convert(source, dtype="bf16").model.graph for v in node.outputs}
    assert str(found["h"]) == "[1,c,4,4]"


def test_the_model_itself_stays_as_it_is() -> None:
    model = io.load(proto(CONV + " y = Relu(h)", 17))
    prepare(model)
    before = ir.to_proto(model).SerializeToString()
    plan = plan_at_best_opset(model, Options(dtype="bf16"))
    assert plan.graph.model.opset_imports[""] == 22
    assert ir.to_proto(model).SerializeToString() == before


def test_a_raised_model_computes_what_its_source_does(tmp_path: pathlib.Path) -> None:
    result = onnxamp.convert(MODELS / "cnn.onnx", dtype="bf16")
    assert result.summary.opset == (17, 22)
    low, everything = result.summary.heavy
    assert low == everything == 4
    result.save(tmp_path / "low.onnx")
    found = onnxamp.verify(MODELS / "cnn.onnx", tmp_path / "low.onnx", seed=1)
    assert found.passed


def test_an_opset_that_is_not_raised_for_what_the_user_keeps_is_no_reason() -> None:
    result = converted(CONV + " y = Relu(h)", 17, keep="conv")
    assert decision(result, "conv")[:2] == ("fp32", "AMP401")
    assert not result.held_by_opset
