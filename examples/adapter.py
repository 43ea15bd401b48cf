"""Low-rank adapters move a classifier of digits 0 to 4 (scikit-learn's) to 5 to 9, within a point of full fine-tuning."""

import itertools

import numpy as np
import onnx
from onnx import helper, numpy_helper
from sklearn.datasets import load_digits

import onnxamp
from onnxamp.training import AdamW, Lora, build

SIZES = (64, 128, 128, 5)


def model(seed: int = 0) -> onnx.ModelProto:
    """A multilayer perceptron, not trained: three layers of Gemm, Relu between them."""
    rng = np.random.default_rng(seed)
    nodes, weights, source = [], [], "pixels"
    for index, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        bound = inputs**-0.5
        for name, shape in ((f"layer{index}.weight", (inputs, outputs)), (f"layer{index}.bias", (outputs,))):
            weights.append(numpy_helper.from_array(rng.uniform(-bound, bound, shape).astype(np.float32), name))
        last = index == len(SIZES) - 2
        result = "logits" if last else f"sum{index}"
        nodes.append(helper.make_node("Gemm", [source, f"layer{index}.weight", f"layer{index}.bias"], [result]))
        source = f"hidden{index}"
        if not last:
            nodes.append(helper.make_node("Relu", [result], [source]))
    pixels = helper.make_tensor_value_info("pixels", 1, ["batch", SIZES[0]])
    logits = helper.make_tensor_value_info("logits", 1, ["batch", SIZES[-1]])
    graph = helper.make_graph(nodes, "digits", [pixels], [logits], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def data(low: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test rows of the digits 0 to 4, or 5 to 9 as classes 0 to 4."""
    pixels, digits = load_digits(return_X_y=True)
    chosen = np.flatnonzero((digits < 5) == low)
    chosen = np.random.default_rng(0).permutation(chosen)
    rows = {"pixels": (pixels[chosen] / 16).astype(np.float32), "labels": digits[chosen].astype(np.int64) % 5}
    cut = 2 * len(chosen) // 3
    return {name: value[:cut] for name, value in rows.items()}, {name: value[cut:] for name, value in rows.items()}


def train(source: object, low: bool, epochs: int, **options: object) -> tuple[onnxamp.Trainer, float]:
    """Train a model, and its accuracy on the test rows."""
    bundle = build(source, loss="cross_entropy", optimizer=AdamW(lr=options.pop("lr", 3e-3)), **options)
    trainer = onnxamp.Trainer(bundle)
    fitted, test = data(low)
    history = trainer.fit(fitted, epochs=epochs, batch_size=32, val=test, metrics=["accuracy"])
    return trainer, history.values["accuracy"]


def main(level: str = "O2") -> dict[str, float]:
    """Test accuracies on the digits 5 to 9, and the bytes that train."""
    first, base = train(model(), True, 15, level="O0")
    pretrained = first.inference_model()
    full, tuned = train(pretrained, False, 20, level=level)
    small, adapted = train(pretrained, False, 20, level=level, lora=Lora(rank=8, alpha=16), trainable="*.bias", lr=5e-3)
    result = {
        "base": base,
        "full": tuned,
        "adapter": adapted,
        "full bytes": full.bundle.summary()["trained_bytes"],
        "adapter bytes": small.bundle.summary()["trained_bytes"],
    }
    print(result)
    return result


if __name__ == "__main__":
    found = main()
    assert found["adapter"] >= found["full"] - 0.01
