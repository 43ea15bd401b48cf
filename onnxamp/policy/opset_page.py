"""The page on bf16 and opsets, made from the opset table and the kernel tables of the targets."""

from __future__ import annotations

import itertools
import pathlib

import onnx.defs

from onnxamp.model.opset import HIGHEST, ROWS
from onnxamp.policy.operators import OPERATORS, Kind
from onnxamp.policy.targets import table

_TARGETS = ("ort-cuda", "ort-cpu")
_BF16 = "tensor(bfloat16)"

_INTRODUCTION = """\
# bf16 and opsets

ONNX allows bfloat16 operator by operator: MatMul from opset 13, Conv, pooling and recurrent operators from 22. Many models are older. So a
conversion raises the opset, if

* that makes more heavy nodes 16-bit, or more of those that you lower, or at O3 more of all; the lowest opset that serves the most is taken,
  at most {highest};
* no node loses the kernel that the target has for it. ONNX Runtime's CUDA provider, for one, has no MaxPool for opset 22 (placed): where a
  model has one, Conv stays fp32 ([AMP202](rules/AMP202.md)), and the evidence names the MaxPool. fp16 needs no opset, and `--target any`
  asks for no kernels;
* every node can be written in the later opset, and its shapes pass what ONNX checks there: the scale of a BatchNormalization may have two
  dimensions at 13, and not at 22.

The summary of the conversion then says `opset 17 → 22`. Results are the same; names of nodes and values, metadata, functions and nodes of
other domains stay. A node may get a constant or a node in front, called after it: `NODE/axes`.

## What changes from version to version

Most versions of an operator only add: types, operands or attributes that may be left out. These do more. A model with anything else that
changed (Scan before 9, Tile before 6), or in a case that the later version cannot express (BatchNormalization with batch statistics, the
random mask of an old Dropout), stays at its opset.

| operators | to opset | what changed |
|---|---|---|
"""


def page() -> str:
    """Markdown: when the opset is raised, how, and which operators compute in bf16 from which opset where."""
    lines = _INTRODUCTION.format(highest=HIGHEST).splitlines()
    for (version, change), group in itertools.groupby(
        sorted(ROWS, key=lambda key: (key[1], ROWS[key].change, key[0])), key=lambda key: (key[1], ROWS[key].change)
    ):
        lines.append(f"| {', '.join(op for op, _ in group)} | {version} | {change} |")
    runtimes = " and ".join(f"`{name}` ({table(name).runtime})" for name in _TARGETS)
    lines += [
        "",
        "## bf16 by operator",
        "",
        f"The first opset in which the schema takes bfloat16, and in which a target has a kernel (placed, not run): {runtimes}.",
        "The other targets are taken to compute what the schema allows, less a short list of known gaps, and are untested.",
        "",
        f"| operator | kind | ONNX | {' | '.join(_TARGETS)} |",
        "|---|---|---|---|---|",
    ]
    for name in sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}):
        if (first := _first_schema(name)) is not None:
            kernels = [_first_kernel(target, name) for target in _TARGETS]
            kind = OPERATORS[name].kind if name in OPERATORS else Kind.SENSITIVE
            lines.append(f"| {name} | {kind.value} | {' | '.join(map(_text, (first, *kernels)))} |")
    return "\n".join([*lines, ""])


def write(path: pathlib.Path) -> None:
    """Write the page, unless the file has that text already."""
    text = page()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _text(opset: int | None) -> str:
    return "no" if opset is None else str(opset)


def _first_schema(op_type: str) -> int | None:
    """The first version in which some type variable may be bfloat16."""
    for version in range(1, onnx.defs.onnx_opset_version() + 1):
        try:
            schema = onnx.defs.get_schema(op_type, version, "")
        except onnx.defs.SchemaError:
            continue
        if any(_BF16 in constraint.allowed_type_strs for constraint in schema.type_constraints):
            return schema.since_version
    return None


def _first_kernel(target: str, op_type: str) -> int | None:
    rows = table(target).kernels.get(op_type, [])
    return min(
        (since for since, _, types in rows if any("bfloat16" in kinds for kinds in types.values())), default=None
    )
