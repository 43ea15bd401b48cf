"""Train a bidirectional LSTM that reads scikit-learn's digits row by row and export it: `lstm.onnx`.

The input `rows` is [batch, 8, 8], the output `logits` is [batch, 10].

    python models/export_lstm.py
"""

import pathlib

import torch
from export_cnn import digits
from torch import nn

HERE = pathlib.Path(__file__).parent


class Reader(nn.Module):
    """A bidirectional LSTM over the rows, the mean over time, a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(rows)[0].mean(1))


def main() -> None:
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = digits()
    x, y = torch.from_numpy(train_x[:, 0]), torch.from_numpy(train_y)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(15):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    accuracy = (model(torch.from_numpy(test_x[:, 0])).argmax(1).numpy() == test_y).mean()
    print(f"test accuracy {accuracy:.4f}")
    torch.onnx.export(
        model,
        (x[:2],),
        HERE / "lstm.onnx",
        dynamo=False,
        opset_version=17,
        input_names=["rows"],
        output_names=["logits"],
        dynamic_axes={"rows": {0: "batch"}, "logits": {0: "batch"}},
    )


if __name__ == "__main__":
    main()
