"""What a micro-batch leaves in the state: gradients, sums of the window, running statistics, and what a bad one does not.

Policy ``window``: everything is added, and reduce.onnx judges the sum. Policy ``micro``: the loss and all gradients of the
micro-batch are judged before any is added. Of a bad one (a loss that is not finite, or gradients whose norm does not fit into
FP32) nothing stays but three counts, so that the window is the one that never had it. Dropped values are selected away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir

from onnxamp.training.fragment import BOOL, FLOAT, INT64, Fragment
from onnxamp.training.manifest import WINDOW, WINDOW_SIZE
from onnxamp.training.objective import Objective

_KEPT = ("bad_losses", "dropped", "dropped_rows")
"""Fields of the window that count micro-batches that were dropped."""


class Ports(Protocol):
    """The graph that is made, as far as accumulation sees it."""

    op: Fragment
    rows: ir.Value

    def take(self, name: str, dtype: ir.DataType, shape: Sequence[int | str], kind: str, ref: str = "") -> ir.Value:
        """A new input."""

    def give(self, value: ir.Value, name: str, kind: str, ref: str = "", alias: str | None = None) -> None:
        """A new output."""


class Accumulation:
    """Appends the end of grad.onnx.

    Args:
        built: The graph.
        micro: The policy is ``micro``.

    Attributes:
        first: Bool scalar: the micro-batch is the first of its window; whatever an earlier window left is selected away.
    """

    def __init__(self, built: Ports, micro: bool) -> None:
        self._built = built
        self._micro = micro
        self._bad: ir.Value | None = None
        self.first = built.take("amp.first", BOOL, (), "host", "first")
        self._window = built.take("amp.window", FLOAT, (WINDOW_SIZE,), "tensor", "window/window")

    def dropped(self, field: str) -> ir.Value | None:
        """`dropped` or `dropped_rows` of the window so far, an int64 scalar; None if nothing is ever dropped."""
        if not self._micro:
            return None
        op = self._built.op
        count = op.Gather(self._window, np.asarray(WINDOW.index(field)), axis=0)
        return op.Cast(op.select(self.first, 0.0, count), to=INT64)

    def number(self) -> ir.Value:
        """Which micro-batch of the window this is, from 1, those that were dropped left out; an FP32 scalar."""
        op = self._built.op
        count = op.Gather(self._window, np.asarray(WINDOW.index("micro_steps")), axis=0)
        return op.Add(op.select(self.first, 0.0, count), 1.0)

    def judge(self, terms: Objective, gradients: Sequence[ir.Value]) -> None:
        """Decide about the micro-batch before anything of it is added."""
        if not self._micro:
            return
        op = self._built.op
        op.section("overflow")
        squares = [op.emit("ReduceSumSquare", [g], {"keepdims": 0})[0] for g in gradients]
        total = op.sum_all(op.Concat(*[op.Reshape(square, [1]) for square in squares], axis=0))
        self._bad = op.Not(op.And(op.finite(total), op.finite(terms.loss_sum)))

    def gradient(self, name: str, value: ir.Value) -> None:
        """Add the gradient of a parameter."""
        op = self._built.op
        op.section(f"accumulate/{name}")
        added = value if self._bad is None else op.select(self._bad, 0.0, value)
        added.shape = value.shape
        assert value.shape is not None
        shape = tuple(int(size) for size in value.shape.numpy())
        before = self._built.take(f"acc/{name}", FLOAT, shape, "tensor", f"gradient/{name}")
        self._add(before, added, f"acc_out/{name}", f"gradient/{name}")

    def statistics(self, name: str, before: ir.Value, after: ir.Value) -> None:
        """Running statistics after the micro-batch."""
        kept = after if self._bad is None else self._built.op.Where(self._bad, before, after)
        kept.shape = before.shape
        self._built.give(kept, f"stat_work_out/{name}", "tensor", f"statistics_work/{name}", alias=f"stat_work/{name}")

    def window(self, terms: Objective) -> None:
        """Add the sums and counts."""
        op = self._built.op
        op.section("window")
        rows = op.count(self._built.rows, [0])
        zero, one = op.number(0.0), op.number(1.0)
        fields: dict[str, ir.Value] = {
            "weight_sum": terms.weight_sum,
            "loss_sum": terms.loss_sum,
            "rows": rows if isinstance(rows, ir.Value) else op.number(rows),
            "micro_steps": one,
            "bad_losses": op.Cast(op.Not(op.finite(terms.loss_sum)), to=FLOAT),
            "dropped": zero,
            "dropped_rows": zero,
        }
        if self._bad is not None:
            fields |= {
                "dropped": op.Cast(self._bad, to=FLOAT),
                "dropped_rows": op.select(self._bad, fields["rows"], zero),
            }
            fields = {k: v if k in _KEPT else op.select(self._bad, 0.0, v) for k, v in fields.items()}
        self._add(self._window, self._vector(fields), "amp.window_out", "window/window")

    def _vector(self, fields: Mapping[str, ir.Value]) -> ir.Value:
        op = self._built.op
        rest = op.constant(np.zeros(WINDOW_SIZE - len(WINDOW), np.float32))
        return op.Concat(*[op.Reshape(fields[name], [1]) for name in WINDOW], rest, axis=0)

    def _add(self, before: ir.Value, value: ir.Value, result: str, key: str) -> None:
        op = self._built.op
        self._built.give(op.Add(op.select(self.first, 0.0, before), value), result, "tensor", key, before.name)
