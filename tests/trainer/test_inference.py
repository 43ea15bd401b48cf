"""Exported models: trained values under the original names, and nothing that only training needs."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxamp.errors import DataError, ModelError
from onnxamp.trainer.inference import inference_model, take_weights, weights_of
from onnxamp.trainer.outputs import joined
from onnxamp.trainer.trainer import Trainer

TEXT = """<ir_version: 10, opset_import: ["" : 17]>
net (float[n,3] x) => (float[n,4] y, bool[n,4] kept) {
    w = Constant<value = float[3,4] {0,0,0,0,0,0,0,0,0,0,0,0}>()
    h = MatMul(x, w)
    m, rm, rv = BatchNormalization<training_mode=1, momentum=0.9>(h, scale, shift, mean, var)
    d, unread = Dropout(m, half, yes)
    e, kept = Dropout(d, half, yes)
    f, z = Dropout(e, half)
    y = Relu(f)
}"""


def _source() -> ir.Model:
    proto = onnx.parser.parse_model(TEXT)
    for name, value in {
        "scale": np.ones(4, np.float32),
        "shift": np.zeros(4, np.float32),
        "mean": np.zeros(4, np.float32),
        "var": np.ones(4, np.float32),
        "half": np.array(0.5, np.float32),
        "yes": np.array(True),
    }.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return ir.from_proto(proto)


def test_constants_initializers_and_statistics_are_set_and_training_nodes_go():
    rng = np.random.default_rng(0)
    values = {name: rng.uniform(0.5, 2, 4).astype(np.float32) for name in ("scale", "shift", "mean", "var")}
    values["w"] = rng.standard_normal((3, 4), np.float32)
    source = _source()
    before = ir.to_proto(source).SerializeToString()
    result = ir.to_proto(inference_model(source, values))
    assert ir.to_proto(source).SerializeToString() == before
    onnx.checker.check_model(result, full_check=True)
    x = rng.standard_normal((5, 3), np.float32)
    y, kept = ReferenceEvaluator(result).run(None, {"x": x})
    normal = (x @ values["w"] - values["mean"]) / np.sqrt(values["var"] + 1e-5) * values["scale"] + values["shift"]
    np.testing.assert_allclose(y, np.maximum(normal, 0), rtol=1e-5, atol=1e-6)
    assert kept.all()
    operators = [node.op_type for node in result.graph.node]
    assert operators.count("Dropout") == 1  # its mask is an output of the model
    assert result.graph.node[0].output[0] == "w"


def test_unknown_parameters_are_named():
    with pytest.raises(ModelError, match="no parameter 'v'"):
        inference_model(_source(), {"v": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"no parameter 'scale' of shape \[5\]"):
        inference_model(_source(), {"scale": np.zeros(5, np.float32)})


def test_weights_are_taken_over_in_whatever_form_each_model_holds_them():
    values = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "scale": np.full(4, 3, np.float32)}
    source, model = inference_model(_source(), values), _source()
    source.graph.initializers["shift"].name = "other"
    assert take_weights(model, source) == ["shift"]
    names = ["w", "scale"]
    assert {name: value.tolist() for name, value in weights_of(model, names).items()} == {
        name: value.tolist() for name, value in values.items()
    }


def test_constants_that_are_no_weights_stay():
    """Exporters number Constant nodes, so a target of Reshape or a factor has the same name in two models by chance."""

    def model(size, factor, weight):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[a] x) => (float[b, c] y) {{
            t = Constant<value = int64[2] {{-1, {size}}}>() f = Constant<value = float {{{factor}}}>()
            w = Constant<value = float[2] {{{weight}, 1}}>() u = Tile(w, t) r = Reshape(x, t) y = Mul(r, f) }}"""
        return ir.from_proto(onnx.parser.parse_model(text))

    ours = model(4, 0.5, 3.0)
    assert take_weights(ours, model(8, 0.25, 7.0)) == []
    t, f, w = (node.attributes["value"].as_tensor().numpy() for node in list(ours.graph)[:3])
    assert (t.tolist(), float(f), w.tolist()) == ([-1, 4], 0.5, [7, 1])


def test_a_trainer_exports_its_parameters(bundle, batches, tmp_path):
    trainer = Trainer(bundle, "cpu", threads=1)
    for batch in batches:
        trainer.micro_step(batch)
    trainer.export(tmp_path / "model.onnx")
    exported = onnx.load(tmp_path / "model.onnx")
    (y,) = ReferenceEvaluator(exported).run(None, {"x": batches[0]["x"]})
    np.testing.assert_allclose(y, trainer.predict(batches[0])["y"], rtol=1e-5, atol=1e-6)


def test_batches_of_outputs_are_joined_by_rows_only():
    parts = [(2, {"y": np.ones((2, 3))}), (1, {"y": np.zeros((1, 3))})]
    np.testing.assert_array_equal(joined(parts)["y"], [[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    for value in (np.ones(()), np.ones((3, 2)), [1, 2]):
        with pytest.raises(DataError, match="has no row for each of the 2 input rows"):
            joined([(2, {"y": value})])


@pytest.mark.parametrize("last", ["y = Mul(e, shared)", "s = Mul(x, shared) y = Dropout(s, ratio, yes)"])
def test_what_only_a_dropout_has_read_goes_with_it(last):
    """What nobody has read before, or others read too, is the user's and stays."""
    text = f"""<ir_version: 10, opset_import: ["" : 17]> net (float[n,3] x) => (float[n,3] y) {{
        one = Constant<value_int=1>() flag = Cast<to=9>(one) d = Dropout(x, ratio, flag) e = Dropout(d, shared, yes) {last} }}"""
    proto = onnx.parser.parse_model(text)
    for name, value in {"ratio": 0.1, "shared": 0.5, "spare": 7.0, "yes": True}.items():
        array = np.array(value, np.float32 if isinstance(value, float) else bool)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result = inference_model(ir.from_proto(proto), {})
    assert set(result.graph.initializers) == {"shared", "spare"}
    assert [node.op_type for node in result.graph] == (["Mul"] if last.startswith("y") else ["Mul", "Identity"])
