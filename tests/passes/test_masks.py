"""The mask of a Relu by Casts is its sign."""

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.masks import ReluMaskPass

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N] x) => (float[N] a, float[N] b) {
    y = Relu(x)
    a = Sign(y)
    b = Sign(x)
}"""


def test_only_the_sign_of_a_relu_changes_form():
    source = onnx.parser.parse_model(TEXT)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(source))
    assert ReluMaskPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Relu", "Cast", "Cast", "Sign"]
    x = np.array([-np.inf, -1, -0.0, 0, 1e-45, 1e-30, 2, np.inf], np.float32)
    config = SessionConfig("cpu", threads=1)
    want, got = (run(open_session(each, config), {"x": x}) for each in (source, model))
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)
    assert not ReluMaskPass()(model).modified
