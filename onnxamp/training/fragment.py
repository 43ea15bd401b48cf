"""What losses, optimizers, schedules and loss scales build their pieces of graph with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.builder import Builder

FLOAT = ir.DataType.FLOAT
DOUBLE = ir.DataType.DOUBLE
INT64 = ir.DataType.INT64
BOOL = ir.DataType.BOOL
FLOAT_MAX = float(np.finfo(np.float32).max)

OPSET = 21
IR_VERSION = 10


class Fragment(Builder):
    """The builder of gradient rules, with inputs, outputs and selections; all nodes are named after a section.

    Selections never multiply by 0 or 1: an Inf or NaN in the branch not taken leaves no trace.
    """

    def section(self, name: str, metadata: dict[str, str] | None = None) -> None:
        """Nodes that follow are named ``name/Op``."""
        self._prefix, self._metadata = name, metadata or {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str] = ()) -> ir.Value:
        """A new graph input."""
        value = ir.Value(name=self.unique(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str) -> ir.Value:
        """Make `value` a graph output called `name`; an input, constant or other output gets there through an Identity."""
        if value.is_graph_input() or value.is_initializer() or value.is_graph_output() or value.producer() is None:
            value = self._append("Identity", [value], None, 1, "")[0]
            if value.is_graph_output():  # an equal Identity was found
                node = ir.node("Identity", [value], name=self.unique(f"{name}/Identity"))
                self.graph.append(node)
                value = node.outputs[0]
        self._names.discard(value.name)
        value.name = self.unique(name)
        self.graph.outputs.append(value)
        return value

    def number(self, value: float, dtype: ir.DataType = FLOAT) -> ir.Value:
        """A scalar constant, FP32 by default."""
        return self.scalar(value, dtype)

    def select(self, condition: ir.Value, yes: ir.Value | float, no: ir.Value | float) -> ir.Value:
        """Where, with numbers taking the type of the branch that is a tensor (FP32 if neither is)."""
        dtype = next((value.dtype for value in (yes, no) if isinstance(value, ir.Value)), FLOAT)
        branches = [value if isinstance(value, ir.Value) else self.scalar(value, dtype) for value in (yes, no)]
        return self.Where(condition, *branches)

    def is_zero(self, value: ir.Value) -> ir.Value:
        """value == 0."""
        return self.Equal(value, 0.0)

    def finite(self, value: ir.Value) -> ir.Value:
        """|value| ≤ FLT_MAX; NaN is not (there is no IsFinite operator)."""
        return self.LessOrEqual(self.Abs(value), FLOAT_MAX)

    def count(self, value: ir.Value, axes: Sequence[int]) -> float | ir.Value:
        """Number of elements over `axes`: a number when static, else an FP32 scalar, whatever the type of `value`."""
        count = super().count(value, axes)
        return self.cast(count, FLOAT) if isinstance(count, ir.Value) else count

    def sum_all(self, value: ir.Value) -> ir.Value:
        """Sum of all elements, as a scalar."""
        return self.emit("ReduceSum", [value], {"keepdims": 0})[0] if value.shape is None or len(value.shape) else value


def graph(name: str, opset: int = OPSET) -> Fragment:
    """An empty graph to build one of the bundle's own files in."""
    return Fragment(ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name))


def model(fragment: Fragment) -> ir.Model:
    """The finished graph as a model."""
    return ir.Model(fragment.graph, ir_version=IR_VERSION, producer_name="onnxamp")
