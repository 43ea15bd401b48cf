"""Models that are valid and rare: inputs of other types than FP32, parameters without elements."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxamp.errors import UsageError
from onnxamp.trainer.inference import inference_model
from onnxamp.training import build
from onnxamp.training.optimizers import SGD

W = np.arange(12, dtype=np.float32).reshape(4, 3) / 8 - 0.5


def _model(nodes, inputs, outputs, initializers):
    graph = helper.make_graph(
        nodes,
        "unusual",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


INPUTS = {
    "float64": (TensorProto.DOUBLE, np.float64),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "int32": (TensorProto.INT32, np.int32),
    "uint8": (TensorProto.UINT8, np.uint8),
    "bool": (TensorProto.BOOL, np.bool_),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize(("kind", "dtype"), INPUTS.values(), ids=INPUTS)
def test_rows_are_counted_on_inputs_of_any_type(drive, kind, dtype, level):
    nodes = [helper.make_node("Cast", ["x"], ["xf"], to=1), helper.make_node("MatMul", ["xf", "w"], ["y"])]
    model = _model(nodes, [("x", kind, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 3])], {"w": W})
    driver = drive(build(model, loss="mse", optimizer=SGD(lr=0.1), level=level, loss_scale=1.0))
    x = np.random.default_rng(0).integers(0, 2, (6, 4)).astype(dtype)
    report = driver.step({"x": x, "labels": np.zeros((6, 3), np.float32)})
    features = x.astype(np.float32)
    assert report["rows"] == 6
    assert report["loss"] == pytest.approx(np.mean((features @ W) ** 2), rel=2e-3)
    slope = features.T @ (features @ W) * 2 / 18
    np.testing.assert_allclose(driver.view("master/w"), W - 0.1 * slope, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_parameter_without_elements_does_not_train(drive, level):
    nodes = [
        helper.make_node("MatMul", ["x", "none"], ["nothing"]),
        helper.make_node("Concat", ["x", "nothing"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "w"], ["y"]),
    ]
    constants = {"none": np.zeros((4, 0), np.float32), "w": W}
    model = _model(nodes, [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 3])], constants)
    bundle = build(model, loss="mse", optimizer=SGD(lr=0.1), level=level, loss_scale=1.0, trainable="*")
    assert bundle.manifest.frozen == {"none": "no elements"}
    x = np.ones((2, 4), np.float32)
    report = drive(bundle).step({"x": x, "labels": np.zeros((2, 3), np.float32)})
    assert report["loss"] == pytest.approx(np.mean((x @ W) ** 2), rel=2e-3)


CONSTANTS = {
    "tensor": {"value": numpy_helper.from_array(W[:, 0], "w")},
    "floats": {"value_floats": W[:, 0].tolist()},
}


@pytest.mark.parametrize("value", CONSTANTS.values(), ids=CONSTANTS)
def test_weights_in_small_constant_nodes_train_and_stay_there(value):
    nodes = [
        helper.make_node("Constant", [], ["w"], **value),
        helper.make_node("Unsqueeze", ["w", "axes"], ["column"]),
        helper.make_node("MatMul", ["x", "column"], ["y"]),
    ]
    axes = {"axes": np.array([1])}
    model = _model(nodes, [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 1])], axes)
    bundle = build(model, loss="mse", optimizer=SGD(lr=0.1), level="O0", trainable="w")
    assert [tensor.name for tensor in bundle.manifest.tensors_in("master")] == ["w"]
    np.testing.assert_array_equal(bundle.state["master/w"], W[:, 0])
    trained = inference_model(bundle.model, {"w": W[:, 1]})
    (constant,) = (node for node in trained.graph if node.op_type == "Constant")
    np.testing.assert_array_equal(constant.attributes["value"].as_tensor().numpy(), W[:, 1])


@pytest.mark.parametrize("rows", ["N", 2])
def test_an_input_that_nothing_reads_counts_no_rows(drive, rows):
    inputs = [("unused", TensorProto.FLOAT, [rows, 2]), ("x", TensorProto.FLOAT, [rows, 4])]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = _model(nodes, inputs, [("y", TensorProto.FLOAT, [rows, 3])], {"w": W})
    bundle = build(model, loss="mse", optimizer=SGD(lr=0.1), level="O0")
    assert bundle.manifest.rows == "x"
    assert bundle.input_names == {"unused", "x"}
    assert drive(bundle).step({"x": np.ones((2, 4), np.float32), "labels": np.zeros((2, 3), np.float32)})["rows"] == 2


def test_a_model_without_weights_is_refused():
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    model = _model(nodes, [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 4])], {})
    with pytest.raises(UsageError, match="no float weights"):
        build(model, loss="mse", optimizer=SGD(lr=0.1))


def _norms(names, statistics):
    """Two BatchNormalizations in a row, each with its scale and bias; a Dropout beside each."""
    nodes = []
    for index, (name, stats) in enumerate(zip(names, statistics, strict=True)):
        source = f"d{index - 1}" if index else "x"
        nodes += [
            helper.make_node(
                "BatchNormalization", [source, f"s{index}", f"b{index}", *stats], [f"n{index}"], name=name
            ),
            helper.make_node("Dropout", [f"n{index}", "half"], [f"d{index}"], name="drop"),
        ]
    nodes.append(helper.make_node("MatMul", [f"d{len(names) - 1}", "w"], ["y"], name="head"))
    vectors = {f"{kind}{index}": np.full(4, 1.0 + index, np.float32) for kind in "sb" for index in range(len(names))}
    stats = {name: np.full(4, 0.5, np.float32) for each in statistics for name in each}
    ends = [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 3])]
    return _model(nodes, *ends, {"w": W, "half": np.float32(0.5), **vectors, **stats})


def test_nodes_of_one_name_are_told_apart(drive):
    """Two "bn", one frozen: only the other one uses batch statistics. Two "drop": each has its masks."""
    model = _norms(["bn", "bn"], [("m0", "v0"), ("m1", "v1")])
    bundle = build(model, loss="mse", optimizer=SGD(lr=0.1), level="O0", frozen=["s0", "b0"])
    kept = {tensor.key for tensor in bundle.manifest.tensors if tensor.key.startswith("statistics/")}
    assert kept == {"statistics/m1", "statistics/v1"}
    names = [node.name for node in bundle.graphs["grad"].graph.all_nodes()]
    assert len(names) == len(set(names))
    assert drive(bundle).step({"x": np.ones((6, 4), np.float32), "labels": np.zeros((6, 3), np.float32)})["ok"]
    masks = [node for node in bundle.graphs["grad"].graph if node.op_type == "Less" and node.name.startswith("drop")]
    keys = {tuple(value.name for value in node.inputs) for node in masks}
    assert len(keys) == 2


def test_a_frozen_norm_reads_the_statistics_that_another_one_moves(drive):
    model = _norms(["moving", "frozen"], [("m", "v"), ("m", "v")])
    bundle = build(model, loss="mse", optimizer=SGD(lr=0.1), level="O0", frozen=["s1", "b1"])
    driver = drive(bundle)
    before = driver.view("statistics/m").copy()
    assert driver.step({"x": np.ones((6, 4), np.float32), "labels": np.zeros((6, 3), np.float32)})["ok"]
    assert (driver.view("statistics/m") != before).all()


def test_weight_normalization_trains_direction_and_gain(drive):
    """w = g·v/‖v‖, computed in the graph: v and g get autograd's gradients."""
    rng = np.random.default_rng(0)
    v, g = rng.standard_normal((3, 4), np.float32), rng.standard_normal((3, 1), np.float32)
    nodes = [
        helper.make_node("ReduceL2", ["v"], ["n"], axes=[1]),
        helper.make_node("Div", ["v", "n"], ["u"]),
        helper.make_node("Mul", ["u", "g"], ["w"]),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ]
    model = _model(nodes, [("x", TensorProto.FLOAT, ["N", 4])], [("y", TensorProto.FLOAT, ["N", 3])], {"v": v, "g": g})
    driver = drive(build(model, loss="mse", optimizer=SGD(lr=1.0), level="O0"))
    x = rng.standard_normal((6, 4), np.float32)
    driver.step({"x": x, "labels": np.ones((6, 3), np.float32)})
    exact = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in (("v", v), ("g", g))}
    weight = exact["g"] * exact["v"] / exact["v"].norm(dim=1, keepdim=True)
    ((torch.from_numpy(x).double() @ weight.T - 1) ** 2).mean().backward()
    for name, value in exact.items():
        np.testing.assert_allclose(driver.view(f"master/{name}"), value.detach() - value.grad, rtol=1e-5, atol=1e-6)
