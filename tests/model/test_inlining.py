"""Functions that were written for another opset than the model."""

import onnx
import pytest

from onnxamp.errors import UnsupportedError
from onnxamp.model import io
from onnxamp.model.inlining import inline_float_functions


def calling(body: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "my": 1]>
        g (float[4,4] x) => (float[4,4] y) {{ h = my.F(x)  y = Exp(h) }}
        <domain: "my", opset_import: ["": {opset}]> F (a) => (o) {{ {body} }}""")


@pytest.mark.parametrize("opset", [13, 15, 18])
def test_operators_that_did_not_change(opset: int) -> None:
    model = io.load(calling("o = MatMul(a, a)", opset))
    assert inline_float_functions(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Exp"]
    assert model.opset_imports[""] == 17


@pytest.mark.parametrize(
    ("body", "opset"), [("b = MatMul(a, a) o = ReduceMean(b)", 18), ("o = Relu(a)", 13), ("o = Exp(a)", 12)]
)
def test_operators_that_changed(body: str, opset: int) -> None:
    with pytest.raises(UnsupportedError, match="Opset mismatch"):
        inline_float_functions(io.load(calling(body, opset)))
