"""Train a small MobileNet-like network in PaddlePaddle and export it with paddle2onnx: `paddle_mobilenet.onnx`.

Depthwise convolutions, BatchNorm, hard-swish, squeeze-and-excitation. The input `image` is [batch, 1, 8, 8], the output is
[batch, 10] logits. Needs `paddlepaddle` and `paddle2onnx`, and the data file that `export_cnn.py` writes.

    python models/export_paddle.py
"""

import pathlib

import numpy as np
import paddle
from paddle import nn

HERE = pathlib.Path(__file__).parent


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Layer:
    """Convolution, BatchNorm, hard-swish."""
    return nn.Sequential(
        nn.Conv2D(inputs, outputs, size, stride, size // 2, groups=groups, bias_attr=False),
        nn.BatchNorm2D(outputs),
        nn.Hardswish(),
    )


class Mobile(nn.Layer):
    """Two depthwise-separable stages with squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 16, 3)
        self.stage1 = nn.Sequential(conv(16, 16, 3, groups=16), conv(16, 32, 1))
        self.squeeze, self.excite = nn.Conv2D(32, 8, 1), nn.Conv2D(8, 32, 1)
        self.stage2 = nn.Sequential(conv(32, 32, 3, stride=2, groups=32), conv(32, 48, 1))
        self.head = nn.Linear(48, 10)

    def forward(self, image: paddle.Tensor) -> paddle.Tensor:
        x = self.stage1(self.stem(image))
        gate = nn.functional.adaptive_avg_pool2d(x, 1)
        x = x * nn.functional.hardsigmoid(self.excite(nn.functional.relu(self.squeeze(gate))))
        return self.head(self.stage2(x).mean([2, 3]))


def main() -> None:
    paddle.seed(0)
    data = np.load(HERE / "digits_train.npz")
    x, y = paddle.to_tensor(data["image"]), paddle.to_tensor(data["labels"])
    model = Mobile()
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
    for epoch in range(12):
        order = np.random.default_rng(epoch).permutation(len(y))
        for rows in np.array_split(order, len(y) // 64):
            index = paddle.to_tensor(rows)
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
    model.eval()
    test = np.load(HERE / "digits_test.npz")
    accuracy = (model(paddle.to_tensor(test["image"])).argmax(1).numpy() == test["labels"]).mean()
    print(f"test accuracy {accuracy:.4f}")
    spec = [paddle.static.InputSpec([None, 1, 8, 8], "float32", "image")]
    paddle.onnx.export(model, str(HERE / "paddle_mobilenet"), input_spec=spec, opset_version=13)


if __name__ == "__main__":
    main()
