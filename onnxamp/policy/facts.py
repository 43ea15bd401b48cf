"""What the rules ask of a graph: constants and their extents, producers, and walks along values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.model.constants import fixed_tensor
from onnxamp.model.signatures import operator_name
from onnxamp.model.tensors import elements, mapped
from onnxamp.model.units import TypeGraph, Unit
from onnxamp.policy.operators import Kind, Range, operator, row
from onnxamp.policy.options import HEADROOM

# Constants above this size are weights, never the small numbers that patterns look for.
_SMALL = 4096
_CONSTANT_MOVES = frozenset({"Identity", "Cast", "CastLike", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten"})


@dataclasses.dataclass(frozen=True)
class Extent:
    """What a 16-bit type does to a constant.

    Attributes:
        largest: Largest finite size of an element.
        nonzero: Number of elements that are not zero.
        flushed: How many of those become zero.
        over: How many finite elements the type cannot hold.
        loss: Relative error of the whole, sqrt(sum (x - low(x))^2 / sum x^2), from the elements below the type's normal numbers.
    """

    largest: float
    nonzero: int
    flushed: int
    over: int
    loss: float


class Facts:
    """Cached answers about one type graph and one 16-bit type."""

    def __init__(
        self,
        graph: TypeGraph,
        low: FloatType,
        ranges: Mapping[str, float] | None = None,
        headroom: float = HEADROOM,
    ) -> None:
        self.graph = graph
        self.low = low
        self.ranges: Mapping[str, float] = ranges or {}
        self.ordinary = low.max / headroom  # the largest calibrated size that gives no cause for concern
        self.constants = frozenset(graph.constants)
        self._tensors: dict[ir.Value, ir.TensorProtocol | None] = {}
        self._extents: dict[ir.Value, Extent] = {}
        self._scalars: dict[ir.Value, float | None] = {}

    def kind(self, unit: Unit) -> Kind | None:
        """The kind of the unit's operator; None for the interface."""
        return row(self.graph.operators[unit.node]).kind if unit.node is not None else None

    def tensor(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        """The data of a constant of any type; None for what is computed, or may be overridden."""
        if value is None:
            return None
        if value not in self._tensors:
            self._tensors[value] = fixed_tensor(value, self.graph.model.ir_version)
        return self._tensors[value]

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number that a constant is, if all its elements are equal; also behind moves of it."""
        if value is None:
            return None
        if value not in self._scalars:
            self._scalars[value] = self._find_scalar(value)
        return self._scalars[value]

    def _find_scalar(self, value: ir.Value) -> float | None:
        for _ in range(6):
            node = value.producer()
            if node is None or operator_name(node) not in _CONSTANT_MOVES or node.inputs[0] is None:
                break
            value = node.inputs[0]
        tensor = self.tensor(value)
        if tensor is None or tensor.dtype == ir.DataType.STRING or not 0 < elements(tensor) <= _SMALL:
            return None
        array = tensor.numpy().reshape(-1)
        return float(array[0]) if array.size == 1 or (array == array[0]).all() else None

    def extent(self, constant: ir.Value) -> Extent:
        """What the 16-bit type does to `constant`."""
        if constant not in self._extents:
            tensor = self.tensor(constant)
            self._extents[constant] = extent(tensor, self.low) if tensor is not None else Extent(0.0, 0, 0, 0, 0.0)
        return self._extents[constant]

    def observed_small(self, values: Iterable[ir.Value]) -> bool:
        """Whether calibration saw all values, well inside the type's range."""
        found = [self.ranges.get(value.name or "") for value in values]
        return bool(found) and all(top is not None and top <= self.ordinary for top in found)

    def computed(self, unit: Unit) -> list[ir.Value]:
        """The values that the unit reads and that are no constants."""
        return [read.value for read in unit.reads if read.value in self.graph.writer]

    def through_moves(self, value: ir.Value) -> ir.Value:
        """The value that `value` is a copy of, behind moves with one data operand."""
        while (
            (node := value.producer()) is not None
            and operator_name(node) in SINGLE_MOVES
            and node.inputs[0] is not None
        ):
            value = node.inputs[0]
        return value

    def source(self, value: ir.Value | None) -> ir.Node | None:
        """The node that makes what `value` is a copy of; None for what no node makes, and for no value."""
        return self.through_moves(value).producer() if value is not None else None

    def backward(self, values: Iterable[ir.Value], stop: Callable[[Unit], bool] | None = None) -> Iterator[Unit]:
        """The units that compute `values` from heavy results, inputs and constants, each once; the walk ends before what stops it."""
        pending = list(values)
        seen = set(pending)
        found: set[Unit] = set()
        while pending:
            unit = self.graph.writer.get(pending.pop())
            if unit is None or unit in found or unit.node is None or self.kind(unit) is Kind.HEAVY:
                continue
            if stop is not None and stop(unit):
                continue
            found.add(unit)
            yield unit
            for read in unit.reads:
                if read.value not in seen:
                    seen.add(read.value)
                    pending.append(read.value)

    def restores(self, node: ir.Node, reads: set[ir.Value]) -> bool:
        """Whether the node's results are ordinary although the values `reads` among its operands are not."""
        op = operator_name(node)
        if op == "Pow":
            exponent = self.scalar(node.inputs[1])
            return exponent is not None and abs(exponent) < 1
        if op == "Div":
            numerator, denominator = node.inputs[0], node.inputs[1]
            if numerator not in reads or (denominator is not None and self._reduces(denominator, numerator)):
                return True
        if op in ("Mul", "Div"):
            return self._averages(node, reads)
        if op == "Clip":
            bounds = [self.scalar(value) for value in node.inputs[1:3]]
            bounds += [a.as_float() for name in ("min", "max") if (a := node.attributes.get(name)) is not None]
            return len(bounds) == 2 and all(b is not None and abs(b) <= self.low.max / 64 for b in bounds)
        return operator(node).range is Range.RESTORES

    def _averages(self, node: ir.Node, reads: set[ir.Value]) -> bool:
        """Whether the node makes a mean of ordinary values, or less: a sum of n of them times a number of at most 1/n."""
        sums = [value for value in node.inputs if value is not None and self.scalar(value) is None]
        source = self.source(sums[0]) if len(sums) == 1 and len(node.inputs) == 2 else None
        if source is None or operator_name(source) != "ReduceSum" or source.inputs[0] in reads:
            return False
        count = self._reduced(source)
        number = self.scalar(node.inputs[1] if sums[0] is node.inputs[0] else node.inputs[0])
        if count is None or not number:
            return False
        share = abs(number) if operator_name(node) == "Mul" else 1 / abs(number)
        return share * count <= 1 + self.low.eps  # 1/n is rounded

    def _reduced(self, node: ir.Node) -> int | None:
        """How many elements of its operand each result of a reduction is made of; None if that is not known."""
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if shape is None:
            return None
        axes = list(node.attributes.get_ints("axes", ()))
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            tensor = self.tensor(node.inputs[1])
            if tensor is None:
                return None
            axes = tensor.numpy().reshape(-1).tolist()
        if not axes and not node.attributes.get_int("noop_with_empty_axes", 0):
            axes = list(range(len(shape)))
        sizes = [size for axis in axes if -len(shape) <= axis < len(shape) and isinstance(size := shape[axis], int)]
        return math.prod(sizes) if len(sizes) == len(axes) else None

    def _reduces(self, denominator: ir.Value, numerator: ir.Value | None) -> bool:
        """Whether `denominator` is a reduction of `numerator`, with an epsilon at most between."""
        value = self.through_moves(denominator)
        for _ in range(4):
            node = value.producer()
            if node is None:
                return False
            if operator_name(node).startswith("Reduce"):
                return node.inputs[0] is numerator
            operands = [v for v in node.inputs if v is not None and self.scalar(v) is None]
            if operator_name(node) not in ("Add", "Max", "Clip", "Sqrt") or len(operands) != 1:
                return False
            value = self.through_moves(operands[0])
        return False


# What makes a random sequence, and no size.
_NO_NUMBERS = frozenset({"seed"})


def float_attributes(node: ir.Node) -> dict[str, float]:
    """The attributes that are numbers an operator computes with, by name; of several the largest. What says "no bound" is left out."""
    found: dict[str, float] = {}
    if not node.attributes:
        return found
    for name, attribute in node.attributes.items():
        if name in _NO_NUMBERS or attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.FLOAT:
            numbers = [attribute.as_float()]
        elif attribute.type == ir.AttributeType.FLOATS:
            numbers = list(attribute.as_floats())
        elif name == "value" and operator_name(node) == "ConstantOfShape":
            numbers = [float(x) for x in attribute.as_tensor().numpy().reshape(-1)]
        else:
            continue
        # Clip wrote the ends of fp32 where it had no bound.
        ends = 3e38 if operator_name(node) == "Clip" or name == "clip" else np.inf
        numbers = [number for number in numbers if abs(number) < ends]
        if numbers:
            found[name] = max(numbers, key=abs)
    return found


SINGLE_MOVES = frozenset(
    {"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Slice", "Gather"}
)


def extent(tensor: ir.TensorProtocol, low: FloatType) -> Extent:
    """What `low` does to the elements of `tensor`, in one pass of bounded memory.

    Normal numbers round by a part in 2^12 (fp16) at most, which no threshold looks at; so only numbers below `low.tiny` are rounded here.
    """
    largest, nonzero, flushed, over, error, power = 0.0, 0, 0, 0, 0.0, 0.0
    for part in mapped(tensor, functools.partial(_extent, low=low)):
        largest = max(largest, part[0])
        nonzero, flushed, over = nonzero + part[1], flushed + part[2], over + part[3]
        error, power = error + part[4], power + part[5]
    return Extent(largest, nonzero, flushed, over, float(np.sqrt(error / power)) if power else 0.0)


def _extent(block: np.ndarray, low: FloatType) -> tuple[float, int, int, int, float, float]:
    """The same of one block: largest, nonzero, flushed, over, sum of squared errors, sum of squares."""
    limit = low.max * (1 + low.eps / 4)  # rounds to the largest number, not to infinity
    over = 0
    size = np.abs(block.astype(np.float32, copy=False))
    top = float(size.max(initial=0.0))
    if not np.isfinite(top):
        size = size[np.isfinite(size)]
        top = float(size.max(initial=0.0))
    if top >= limit:
        held = size < limit
        over = int(size.size - np.count_nonzero(held))
        size = size[held]
    if low.name == "bf16":
        return top, 0, 0, over, 0.0, 0.0  # has the exponents of fp32: flushes nothing
    power = float(np.dot(size, size))
    small = size[size < low.tiny].astype(np.float64)
    if not small.size:
        return top, size.size, 0, over, 0.0, power
    zeros = int(small.size - np.count_nonzero(small))
    rounded = np.round(small / low.smallest) * low.smallest
    flushed = int(np.count_nonzero(small) - np.count_nonzero(rounded))
    return top, size.size - zeros, flushed, over, float(np.sum((small - rounded) ** 2)), power
