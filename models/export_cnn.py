"""Train a small CNN with BatchNorm on scikit-learn's digits and export it.

Writes `cnn.onnx` and the data files `digits_train.npz`, `digits_test.npz`.

The input `image` is [batch, 1, 8, 8] in [0, 1], the output `logits` is [batch, 10]. BatchNormalization stays a
node of its own, so that the model can be trained further.

    python models/export_cnn.py
"""

import pathlib

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HERE = pathlib.Path(__file__).parent


class Cnn(nn.Module):
    """Three convolutions with BatchNorm, one of them with a residual connection, then a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        x = torch.relu(x + self.block(x))
        return self.head(self.down(x).mean(dim=(2, 3)))


def digits() -> list[np.ndarray]:
    """Training images, test images, training labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return train_test_split(images, labels.astype(np.int64), test_size=360, random_state=0, stratify=labels)


def main() -> None:
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = digits()
    np.savez_compressed(HERE / "digits_train.npz", image=train_x, labels=train_y)
    np.savez_compressed(HERE / "digits_test.npz", image=test_x, labels=test_y)
    model = Cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = torch.from_numpy(train_x), torch.from_numpy(train_y)
    for _ in range(12):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    accuracy = (model(torch.from_numpy(test_x)).argmax(1).numpy() == test_y).mean()
    print(f"test accuracy {accuracy:.4f}")
    torch.onnx.export(
        model,
        (x[:2],),
        HERE / "cnn.onnx",
        dynamo=False,
        opset_version=17,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
    )


if __name__ == "__main__":
    main()
