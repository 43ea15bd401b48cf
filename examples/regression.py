"""A scikit-learn regressor as ONNX goes on training with onnxamp: R² on held-out rows of the diabetes data."""

import warnings

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor

import onnxamp
from onnxamp.training import AdamW, build


def exported(regressor: MLPRegressor) -> onnx.ModelProto:
    """The network of an `MLPRegressor` with ReLU as an ONNX model."""
    nodes, weights, value = [], [], "features"
    for index, (weight, bias) in enumerate(zip(regressor.coefs_, regressor.intercepts_, strict=True)):
        last = index == len(regressor.coefs_) - 1
        weights += [
            numpy_helper.from_array(weight.astype(np.float32), f"coef_{index}"),
            numpy_helper.from_array(bias.astype(np.float32), f"intercept_{index}"),
        ]
        result = "prediction" if last else f"hidden_{index}"
        nodes.append(
            helper.make_node("Gemm", [value, f"coef_{index}", f"intercept_{index}"], [result], f"layer_{index}")
        )
        if not last:
            nodes.append(helper.make_node("Relu", [result], [f"active_{index}"], f"relu_{index}"))
            value = f"active_{index}"
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", regressor.n_features_in_])
    prediction = helper.make_tensor_value_info("prediction", TensorProto.FLOAT, ["batch", 1])
    graph = helper.make_graph(nodes, "regressor", [features], [prediction], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def main() -> float:
    """R² after training."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std(0)).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)[:, None]
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three iterations do not converge, and are not meant to
        regressor = MLPRegressor(hidden_layer_sizes=(32,), max_iter=3, random_state=0).fit(x_train, y_train.ravel())
    train, test = {"features": x_train, "labels": y_train}, {"features": x_test, "labels": y_test}
    bundle = build(
        exported(regressor), loss="mse", optimizer=AdamW(lr=3e-3, weight_decay=0.1), level="O2", dtype="bf16"
    )
    trainer = onnxamp.Trainer(bundle)
    print("before:", trainer.evaluate(test))
    history = trainer.fit(train, epochs=15, batch_size=32, val=test, metrics=["r2", "mae"])
    print("after: ", dict(history.values))
    return history.values["r2"]


if __name__ == "__main__":
    assert main() > 0.25
