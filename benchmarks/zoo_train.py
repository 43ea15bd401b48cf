"""Train small models of public architectures beside PyTorch: gradients, twenty steps at each level, and the export.

    python benchmarks/zoo_train.py [NAME...] [--variants train,eval,dynamo] [--levels O0,O1,O2,O2:bf16] [--rows ROWS.jsonl] [--out TABLE.md]

Needs torch 2.13, onnxscript, transformers, timm and torchvision (benchmarks/zoo_models.py makes the models; nothing is downloaded).
Variants: `train` and `eval` are PyTorch's TorchScript exporter in training mode without, and in inference mode with constant folding;
`dynamo` is the one on torch.export. Dropout is 0. The oracle is autograd of the same module in float64. A gradient is found by the
parameter's name, else by its numbers: whatever the exporter transposed, joined or cut.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import pathlib
import tempfile
import time
import warnings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime
import safetensors.numpy
import torch
import zoo_base
import zoo_models
from torch import nn
from torch.nn import functional

import onnxamp
from onnxamp import training

STEPS = 20
NAMES = [
    "bert",
    "gpt2",
    "llama",
    "t5",
    "vit",
    "swin",
    "convnext",
    "mamba",
    "wav2vec2_layer",
    "segformer",
    "tv_mobilenet_v3_small",
]


def make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor, str]:
    """(module, inputs, labels, loss): classes where the output has few or is a vocabulary, else numbers beside the output."""
    torch.manual_seed(0)
    zoo = zoo_models.MODELS[name]()
    module, inputs = zoo.module.eval(), zoo.sample(0)
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for key, value in list(vars(holder).items()) if holder is not None else []:
                if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(part).__name__)):
                    setattr(holder, key, 0.0)
        if isinstance(part, nn.Embedding):
            part.padding_idx = None  # which no ONNX file says
    with torch.no_grad():
        output = module(*inputs.values())
    axis = output.ndim - 1 if output.ndim <= 3 else 1
    if output.ndim == 2 or output.shape[axis] in (5, 21, zoo_base.VOCABULARY):
        shape = [size for index, size in enumerate(output.shape) if index != axis]
        return module, inputs, torch.randint(0, output.shape[axis], shape), "cross_entropy"
    return module, inputs, output + output.std() * torch.randn_like(output), "mse"


def loss_of(output: torch.Tensor, labels: torch.Tensor, loss: str) -> torch.Tensor:
    if loss == "mse":
        return functional.mse_loss(output, labels)
    return functional.cross_entropy(output.transpose(1, 2) if output.ndim == 3 else output, labels)


def export(module: nn.Module, inputs: dict[str, torch.Tensor], variant: str, path: str) -> None:
    module, names, arguments = copy.deepcopy(module), list(inputs), tuple(inputs.values())
    if variant == "dynamo":
        torch.onnx.export(
            module,
            arguments,
            path,
            dynamo=True,
            verbose=False,
            input_names=names,
            output_names=["y"],
            external_data=False,
        )
        return
    mode = torch.onnx.TrainingMode.TRAINING if variant == "train" else torch.onnx.TrainingMode.EVAL
    torch.onnx.export(
        module.train(variant == "train"), arguments, path, dynamo=False, training=mode, do_constant_folding=variant == "eval",
        input_names=names, output_names=["y"], opset_version=17, dynamic_axes={name: {0: "batch"} for name in names},
    )  # fmt: skip


def as_in_file(module: nn.Module, proto: onnx.ModelProto) -> nn.Module:
    """The module with batch statistics where the file has a BatchNormalization; those that the exporter merged keep their own."""
    reference = copy.deepcopy(module)
    kept = set()
    for node in (node for node in proto.graph.node if node.op_type == "BatchNormalization"):
        scopes = [ast.literal_eval(p.value) for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"]
        # Fresh statistics are equal, and the newer exporter reads the first ones everywhere; it notes the module.
        kept.add(scopes[0][-2] if scopes else node.input[3].removesuffix(".running_mean"))
    for name, part in reference.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train(name in kept)
    return reference


def autograd(
    module: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor, loss: str
) -> tuple[float, dict[str, np.ndarray]]:
    exact = copy.deepcopy(module).double()
    feeds = [value.double() if value.is_floating_point() else value for value in (*inputs.values(), labels)]
    torch.set_default_dtype(torch.float64)
    value = loss_of(exact(*feeds[:-1]), feeds[-1], loss)
    value.backward()
    torch.set_default_dtype(torch.float32)
    return value.item(), {
        n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in exact.named_parameters()
    }


def compare(
    got: dict[str, np.ndarray], start: dict[str, np.ndarray], module: nn.Module, want: dict[str, np.ndarray]
) -> dict:
    """The largest difference to the largest gradient; parameters without counterpart on either side.

    Copies of a tied tensor each have a part of its gradient, so parts are summed.
    """
    values = {name: p.detach().numpy() for name, p in module.named_parameters()}
    flat, grads = (np.concatenate([part[name].ravel() for name in values]) for part in (values, want))
    ends = np.cumsum([value.size for value in values.values()])
    first = dict(zip(values, [0, *ends], strict=False))
    owner = np.repeat(np.arange(len(values)), [value.size for value in values.values()])
    order = np.argsort(flat, kind="stable")
    ranked, names = flat[order], list(values)
    sums, seen, unclear, strangers = np.zeros(grads.size), np.zeros(grads.size, bool), np.zeros(grads.size, bool), []
    for name, gradient in got.items():
        if name in values and np.array_equal(values[name], start[name]):  # a merged one may keep its name
            found, part = first[name] + np.arange(gradient.size), gradient.ravel()
        else:
            numbers = start[name].ravel()
            low, high = np.searchsorted(ranked, numbers, "left"), np.searchsorted(ranked, numbers, "right")
            single = high - low == 1  # numbers that only one parameter has tell which it is
            if (high > low).mean() < 0.98 or not single.any():
                strangers.append(name)
                continue
            found, part = order[low[single]], gradient.ravel()[single]
            whose = np.isin(owner, np.unique(owner[found]))
            unclear |= whose & ~np.isin(np.arange(grads.size), found)  # has a part from here that was not found
        sums[found] += part
        seen[found] = True
    seen &= ~unclear
    worst = np.abs(sums - grads)[seen].max() / np.abs(grads).max()
    covered = {names[index] for index in np.unique(owner[seen])}
    missing = [name for name in names if name not in covered and np.abs(want[name]).max() > 0]
    return {
        "error": float(worst),
        "trained": len(got),
        "parameters": len(values),
        "missing": missing,
        "strangers": strangers,
    }


def steps(path: str, level: str, loss: str, feeds: dict, labels: np.ndarray) -> dict:
    """Twenty steps of AdamW on one batch, and how far the exported model is from the trainer's prediction."""
    level, _, dtype = level.partition(":")
    bundle = training.build(path, loss=loss, optimizer=training.AdamW(lr=1e-3), level=level, dtype=dtype or "fp16")
    trainer, losses, skipped = onnxamp.Trainer(bundle, provider="cpu", threads=1), [], 0
    while len(losses) < STEPS and skipped < 30:
        result = trainer.micro_step({**feeds, "labels": labels})
        skipped += result.skipped
        if not result.skipped:
            losses.append(float(result.loss))
    trained = f"{path}.trained.onnx"
    trainer.export(trained, overwrite=True)
    session = onnxruntime.InferenceSession(trained, providers=["CPUExecutionProvider"])
    predicted = trainer.predict(feeds, weights="master")
    exported = max(
        float(np.abs(value - predicted[out.name]).max() / np.abs(value).max())
        for out, value in zip(session.get_outputs(), session.run(None, feeds), strict=True)
        if value.dtype == np.float32
    )
    return {
        "first": losses[0],
        "last": losses[-1],
        "skipped": skipped,
        "scale": float(result.scale),
        "exported": exported,
    }


def one(name: str, variant: str, levels: list[str]) -> dict:
    module, inputs, labels, loss = make(name)
    row: dict = {"model": name, "variant": variant}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "model.onnx")
        export(module, inputs, variant, path)
        proto = onnx.load(path)
        reference = as_in_file(module, proto)
        feeds = {value.name: inputs[value.name].numpy() for value in proto.graph.input}
        started = time.process_time()
        bundle = training.build(path, loss=loss, optimizer=training.SGD(lr=1e-12, momentum=0.9), level="O0")
        row |= {"nodes": len(proto.graph.node), "seconds": round(time.process_time() - started, 1)}
        row["notes"], row["grad"] = list(bundle.manifest.notes), len(list(bundle.graphs["grad"].graph.all_nodes()))
        trainer = onnxamp.Trainer(bundle, provider="cpu", threads=1)
        start = trainer.parameters()
        result = trainer.micro_step({**feeds, "labels": labels.numpy()})
        trainer.save(state := os.path.join(folder, "state.safetensors"))
        (moment,) = (arena.name for arena in bundle.manifest.arenas if "moment" in arena.name)
        saved = safetensors.numpy.load_file(state)
        got = {key.partition("/")[2]: array for key, array in saved.items() if key.startswith(f"{moment}/")}
        value, want = autograd(reference, inputs, labels, loss)
        row |= {"loss": abs(result.loss / value - 1), **compare(got, start, module, want)}
        optimizer, curve = torch.optim.AdamW(reference.parameters(), lr=1e-3), []
        for _ in range(STEPS if levels else 0):
            optimizer.zero_grad()
            curve.append(loss_of(reference(*inputs.values()), labels, loss))
            curve[-1].backward()
            optimizer.step()
        row["torch"] = [curve[0].item(), curve[-1].item()] if levels else []
        row["levels"] = {level: steps(path, level, loss, feeds, labels.numpy()) for level in levels}
    return row


def verdict(row: dict) -> str:
    if "failed" in row:
        return row["failed"]
    problems = [] if row["error"] < 1e-4 else [f"gradient {row['error']:.0e}"]
    for level, found in row.get("levels", {}).items():
        fall, ours = row["torch"][0] - row["torch"][1], found["first"] - found["last"]
        if not abs(ours / fall - 1) < 0.05 or not found["exported"] < (1e-4 if level == "O0" else 1e-3):
            problems.append(f"{level}: falls by {ours:.3f} and not {fall:.3f}, export {found['exported']:.0e}")
    return "; ".join(problems) or "ok"


def table(rows: list[dict]) -> str:
    names = (
        "model",
        "variant",
        "verdict",
        "gradient",
        "trained / PyTorch",
        "without counterpart",
        "fall of the loss, PyTorch: ours",
        "nodes, s",
    )
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        falls = [f"{level} {found['first'] - found['last']:.3f}" for level, found in row.get("levels", {}).items()]
        fall = f"{row['torch'][0] - row['torch'][1]:.3f}: {', '.join(falls)}" if row.get("torch") else ""
        count = f"{row['trained']} / {row['parameters']}" if "trained" in row else ""
        lonely = f"{len(row['missing'])}, {len(row['strangers'])}" if "missing" in row else ""
        lines.append(
            f"| {row['model']} | {row['variant']} | {verdict(row)} | {row.get('error', float('nan')):.0e} | {count} | {lonely} | {fall} | "
            f"{row.get('nodes', '')} → {row.get('grad', '')}, {row.get('seconds', '')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--variants", default="train,eval,dynamo")
    parser.add_argument("--levels", default="O0,O1,O2,O2:bf16")
    parser.add_argument(
        "--rows", type=pathlib.Path, default=pathlib.Path("zoo_train.jsonl"), help="journal, a line of JSON each"
    )
    parser.add_argument("--fresh", action="store_true", help="parameters as PyTorch makes them, many of them equal")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    zoo_base.fresh = options.fresh
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    for name, variant in ((n, v) for n in options.names for v in options.variants.split(",")):
        if any((row["model"], row["variant"]) == (name, variant) for row in rows):
            continue
        if (child := os.fork()) == 0:  # a process for each, which may crash
            try:
                row = one(name, variant, [level for level in options.levels.split(",") if level])
            except Exception as problem:
                row = {
                    "model": name,
                    "variant": variant,
                    "failed": f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}",
                }
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            os._exit(0)
        os.waitpid(child, 0)
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
        print(f"{name:24s} {variant:7s} {verdict(rows[-1])}", flush=True)
    if options.out:
        options.out.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
