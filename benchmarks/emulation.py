"""Emulation against the truth, operator by operator: float64 arithmetic and one rounding to the 16-bit type.

    python benchmarks/emulation.py [--elements 200000] > table.md

For each operator, a model in the 16-bit type is emulated and run on random 16-bit numbers; the oracle computes with numpy in float64
from the same numbers and rounds once (numpy for fp16, ml_dtypes for bf16). A difference of one unit in the last place means that fp32
arithmetic, which rounds before the 16-bit type does, fell on the other side of a tie or (sums, functions) was itself off by a bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import ml_dtypes
import numpy as np
import onnx_ir as ir
import scipy.special
from onnx import parser

from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Oracle = Callable[..., np.ndarray]

ELEMENTWISE: dict[str, Oracle] = {
    "Add(x, z)": np.add,
    "Sub(x, z)": np.subtract,
    "Mul(x, z)": np.multiply,
    "Div(x, z)": np.divide,
    "Sqrt(p)": lambda x, z, p: np.sqrt(p),
    "Reciprocal(x)": lambda x, z, p: 1 / x,
    "Exp(x)": lambda x, z, p: np.exp(x),
    "Log(p)": lambda x, z, p: np.log(p),
    "Tanh(x)": lambda x, z, p: np.tanh(x),
    "Sigmoid(x)": lambda x, z, p: scipy.special.expit(x),
    "Erf(x)": lambda x, z, p: scipy.special.erf(x),
    "Pow(p, z)": lambda x, z, p: np.power(p, z),
    "Sin(x)": lambda x, z, p: np.sin(x),
    "Cos(x)": lambda x, z, p: np.cos(x),
    "Relu(x)": lambda x, z, p: np.maximum(x, 0),
}
MATRIX: dict[str, Oracle] = {
    "MatMul(a, b)": lambda a, b: a @ b,
    "Softmax<axis = -1>(a)": lambda a, b: scipy.special.softmax(a, -1),
    "ReduceSum<keepdims = 1>(a, axis)": lambda a, b: a.sum(-1, keepdims=True),
    "ReduceMean<keepdims = 1>(a, axis)": lambda a, b: a.mean(-1, keepdims=True),
}


def compare(text: str, feeds: dict[str, np.ndarray], want: np.ndarray, low: np.dtype) -> tuple[int, float, int]:
    """Elements, share that is equal bit for bit, and the largest distance in units in the last place."""
    source = ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}'))
    got = run(open_session(emulate(source), SessionConfig(provider="cpu")), feeds)["y"]
    with np.errstate(over="ignore"):
        truth = want.astype(low)
    steps = np.abs(_ordered(got) - _ordered(truth))
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(truth.astype(np.float32))
    steps[both_nan] = 0
    return steps.size, float((steps == 0).mean()), int(steps.max())


def _ordered(array: np.ndarray) -> np.ndarray:
    """16-bit floats as integers in the same order: neighbours differ by 1."""
    bits = array.view(np.uint16).astype(np.int64)
    return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--elements", type=int, default=200_000)
    count = arguments.parse_args().elements
    rng = np.random.default_rng(0)
    print("| operator | type | results | equal bit for bit | largest distance (ulp) |\n|---|---|---|---|---|")
    for name, low in TYPES.items():
        x, z = ((rng.standard_normal(count) * 4).astype(low) for _ in range(2))
        x, z = (np.where(side == 0, low.type(1), side) for side in (x, z))
        feeds = {"x": x, "z": z, "p": np.abs(x)}
        exact = [side.astype(np.float64) for side in feeds.values()]
        for expression, oracle in ELEMENTWISE.items():
            text = f"g ({name}[N] x, {name}[N] z, {name}[N] p) => ({name}[N] y) {{ y = {expression} }}"
            with np.errstate(all="ignore"):
                want = oracle(*exact[: 2 if isinstance(oracle, np.ufunc) else 3])
            row(expression, name, compare(text, feeds, want, low))
        for width in (64, 4096):
            rows = max(16, count // width // 8)
            a = rng.standard_normal((rows, width)).astype(low)
            b = rng.standard_normal((width, 128)).astype(low)
            for expression, oracle in MATRIX.items():
                text = f"""g ({name}[M,K] a, {name}[K,N] b) => ({name}[M,P] y)
                    <int64[1] axis = {{-1}}> {{ y = {expression} }}"""
                want = oracle(a.astype(np.float64), b.astype(np.float64))
                row(
                    f"{expression.split('<')[0].split('(')[0]}, {width} terms",
                    name,
                    compare(text, {"a": a, "b": b}, want, low),
                )


def row(expression: str, kind: str, found: tuple[int, float, int]) -> None:
    count, equal, worst = found
    print(f"| {expression} | {kind} | {count:,} | {100 * equal:.4f}% | {worst} |")


if __name__ == "__main__":
    main()
