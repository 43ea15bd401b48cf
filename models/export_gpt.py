"""Train a small character-level GPT on the text of the Apache licence and export it with PyTorch's current exporter: `gpt.onnx`.

Inputs `ids` [batch, sequence] (int64, ASCII codes below 128) and `mask` [batch, sequence] (int64, 1 = a real character); output `logits`
[batch, sequence, 128]. `text.npz` holds some samples.

    python models/export_gpt.py
"""

import pathlib

import numpy as np
import onnx
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 64, 4, 2, 64, 128


class Block(nn.Module):
    """Pre-norm attention and feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5 + bias
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A decoder-only transformer with learned positions, a causal mask and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)
        allowed = (position[:, None] >= position[None, :])[None, None] & (mask[:, None, None, :] != 0)
        bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        x = self.tokens(ids) + self.positions(position)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list((HERE.parent / "LICENSE").read_bytes()))
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(400):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (32,))
        window = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
        logits = model(window[:, :-1], torch.ones(32, CONTEXT, dtype=torch.int64))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    model.eval()
    starts = torch.arange(8) * 700
    window = torch.stack([text[s : s + CONTEXT + 1] for s in starts])
    mask = torch.ones(8, CONTEXT, dtype=torch.int64)
    mask[::2, 48:] = 0
    labels = torch.where(mask == 1, window[:, 1:], -100)
    np.savez_compressed(HERE / "text.npz", ids=window[:, :-1].numpy(), mask=mask.numpy(), labels=labels.numpy())
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=CONTEXT)
    torch.onnx.export(
        model,
        (window[:, :-1], mask),
        HERE / "gpt.onnx",
        dynamo=True,
        external_data=False,
        input_names=["ids", "mask"],
        output_names=["logits"],
        dynamic_shapes=({0: batch, 1: sequence}, {0: batch, 1: sequence}),
        verbose=False,
    )
    exported = onnx.load(HERE / "gpt.onnx")
    for node in exported.graph.node:  # the exporter records the paths of the machine
        kept = [entry for entry in node.metadata_props if entry.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(exported, HERE / "gpt.onnx")


if __name__ == "__main__":
    main()
