"""Export a scripted model with an If and a Loop: `loop.onnx`.

Newton's iteration for the inverse square root of a positive definite matrix (as in decorrelated batch normalization), with a
data-dependent number of steps, applied to the input or, if `whiten` is false, left out. Inputs `x` [batch, 8], `steps` (int64),
`whiten` (bool); output `y` [batch, 4].

    python models/export_loop.py
"""

import pathlib

import torch
from torch import nn

HERE = pathlib.Path(__file__).parent


class Whiten(nn.Module):
    """Linear layers around an optional whitening step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, steps: torch.Tensor, whiten: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if bool(whiten):
            centred = h - h.mean(0, keepdim=True)
            covariance = centred.t() @ centred / h.shape[0] + 0.1 * torch.eye(8)
            trace = torch.diagonal(covariance).sum()
            normed = covariance / trace
            p = torch.eye(8)
            for _ in range(int(steps)):
                p = 1.5 * p - 0.5 * (p @ p @ p @ normed)
            h = centred @ p / torch.sqrt(trace)
        return self.last(h)


def main() -> None:
    torch.manual_seed(0)
    arguments = (torch.randn(16, 8), torch.tensor(5), torch.tensor(True))
    torch.onnx.export(
        torch.jit.script(Whiten().eval()),
        arguments,
        HERE / "loop.onnx",
        dynamo=False,
        opset_version=17,
        input_names=["x", "steps", "whiten"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )


if __name__ == "__main__":
    main()
