"""Operators that ONNX defines by a function: those whose definition is ill-typed in 16 bits stay fp32."""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir
import pytest

from onnxamp.model.signatures import signature
from onnxamp.policy.functions import body, types_agree

MVN = "g (float[1,2,4,4] x) => (float[1,2,4,4] y) { y = MeanVarianceNormalization(x) }"


def test_every_definition_but_one_is_well_typed_in_every_float_type():
    """The bodies of MeanVarianceNormalization hold an fp32 epsilon (and exponent); all others cast their constants."""
    wrong, bodies = set(), 0
    for schema in onnx.defs.get_all_schemas_with_history():
        function = body(schema.domain, schema.name, schema.since_version)
        signed = signature(schema.domain, schema.name, schema.since_version)
        if function is None or signed is None:
            continue
        bodies += 1
        for dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            kinds = {
                f.name: dtype for f in signed.inputs if f.variable in signed.types and signed.allows(f.variable, dtype)
            }
            if not types_agree(function, kinds):
                wrong.add((schema.name, schema.since_version, dtype.name))
    assert bodies >= 40
    names = {(name, since) for name, since, _ in wrong}
    assert names == {("MeanVarianceNormalization", 9), ("MeanVarianceNormalization", 13)}
    assert all(dtype != "FLOAT" for _, _, dtype in wrong)


@pytest.mark.parametrize("target", ["ort-cuda", "ort-cpu", "any", "tensorrt", "openvino", "cann"])
@pytest.mark.parametrize("opset", [9, 13, 18])
def test_mean_variance_normalization_stays_fp32(plan_of, opset, target):
    (decision,) = plan_of(MVN, opset=opset, level="O3", target=target).nodes.values()
    assert (decision.precision, decision.code) == ("fp32", "AMP301")
    if target != "ort-cpu":  # which has a kernel, in fp32
        assert decision.evidence["reason"] == "the function that defines it mixes the type with fp32 constants"


def test_a_well_typed_definition_may_be_16_bit(codes_of):
    text = "g (float[1,4] x) => (float[1,4] y) { y = Softplus(x) }"
    assert codes_of(text, level="O3", target="any")["y"][0] == "fp16"
