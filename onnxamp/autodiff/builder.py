"""What gradient rules build with: shapes, counts, transposes and un-broadcasting on top of the emitter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS, Emitter, Operand
from onnxamp.dtypes import LOW
from onnxamp.errors import UnsupportedError
from onnxamp.passes.reshapes import constant_sizes

Dim = int | str | None

_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Pow"})


def required(node: ir.Node, position: int = 0) -> ir.Value:
    """An input that the operator of `node` cannot lack."""
    value = node.inputs[position]
    assert value is not None
    return value


class Builder(Emitter):
    """The `op` argument of a gradient rule."""

    def emit(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        attributes: dict[str, Any] | None = None,
        *,
        outputs: int = 1,
        domain: str = "",
        fresh: bool = False,
    ) -> tuple[ir.Value, ...]:
        """As `Emitter.emit`; an Expand that broadcasting makes needless is looked through."""
        if op_type in _BROADCASTING and domain == "":
            inputs = self._without_expand(list(inputs))
        return super().emit(op_type, inputs, attributes, outputs=outputs, domain=domain, fresh=fresh)

    def _without_expand(self, inputs: list[Operand]) -> list[Operand]:
        for position, value in enumerate(inputs):
            if not isinstance(value, ir.Value) or value.shape is None:
                continue
            producer = value.producer()
            if producer is None or producer.op_type != "Expand" or producer not in self.emitted:
                continue
            others = [other for index, other in enumerate(inputs) if index != position and isinstance(other, ir.Value)]
            if any(other.shape is not None and self.same_shape(value, other) for other in others):
                inputs[position] = producer.inputs[0]
        return inputs

    # Facts -----------------------------------------------------------------------------------------------------------

    def dims(self, value: ir.Value) -> list[Dim]:
        """The dimensions of `value`: integers, names, or None where unknown.

        Raises:
            UnsupportedError: Not even the number of dimensions is known.
        """
        if value.shape is None:
            raise UnsupportedError(
                f"The number of dimensions of {value.name!r} is unknown and the gradient of {self._prefix[5:]!r} needs it; "
                f"inference ends at {_first_unknown(value)}: see whether the model runs, and export it with shapes."
            )
        return [dim if isinstance(dim, int) else (None if dim.value is None else str(dim)) for dim in value.shape]

    def rank(self, value: ir.Value) -> int:
        """Number of dimensions of `value`."""
        return len(self.dims(value))

    def known(self, value: ir.Value | None) -> np.ndarray | None:
        """The content of a constant, or None when `value` is not constant (or is an overridable input)."""
        if value is None or (value.is_initializer() and value.is_graph_input()):
            return None
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def same_shape(self, first: ir.Value, second: ir.Value) -> bool:
        """Whether two shapes are known to be equal."""
        a, b = self.dims(first), self.dims(second)
        return len(a) == len(b) and all(x is not None and x == y for x, y in zip(a, b, strict=True))

    # Shapes ----------------------------------------------------------------------------------------------------------

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of `value` as an int64 tensor, a constant when it is static."""
        dims = self.dims(value)
        if all(isinstance(dim, int) for dim in dims):
            return self.constant(np.asarray(dims, np.int64), "shape")
        return self.Shape(value)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """One dimension as an int64 tensor of one element."""
        size = self.dims(value)[axis]
        if isinstance(size, int):
            return self.constant(np.asarray([size], np.int64), "shape")
        axis %= self.rank(value)
        return self.shape_slice(value, axis, axis + 1)

    def shape_slice(self, value: ir.Value, start: int, end: int) -> ir.Value:
        """Dimensions `start` to `end` (exclusive, both non-negative) as an int64 tensor.

        One Shape node where the opset has its attributes: CUDA leaves a Slice of a shape to the CPU.
        """
        if self.opset >= 15:
            return self.emit("Shape", [value], {"start": start, "end": end})[0]
        return self.Slice(self.Shape(value), [start], [end], [0])

    def target(self, value: ir.Value) -> ir.Value:
        """A shape for Reshape that gives the shape of `value`: constant with one −1 where that suffices."""
        dims = self.dims(value)
        open_dims = [dim for dim in dims if not isinstance(dim, int)]
        if len(open_dims) > 1 or (open_dims and 0 in dims):
            return self.Shape(value)
        return self.constant(np.asarray([dim if isinstance(dim, int) else -1 for dim in dims], np.int64), "shape")

    def reshape(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """`value` with the shape of `like`, which has as many elements; by constants where these can tell."""
        if value.shape is not None and self.same_shape(value, like):
            return value
        sizes = None if like.shape is None else constant_sizes(like.shape, value.shape)
        if sizes is not None:
            result = self.Reshape(value, self.constant(np.asarray(sizes, np.int64), "shape"))
        else:
            zero = {"allowzero": 1} if 0 in self.dims(like) and self.opset >= 14 else {}
            result = self.Reshape(value, self.target(like), **zero)
        result.shape = like.shape
        return result

    def rows(self, value: ir.Value, width: ir.Value, axis: int) -> ir.Value:
        """`value` as a matrix whose rows are as long as dimension `axis` of `width`."""
        if self.rank(value) == 2:
            return value
        size = self.dims(width)[axis]
        if isinstance(size, int):
            return self.Reshape(value, [-1, size])
        return self.Reshape(value, self.Concat([-1], self.dim(width, axis), axis=0))

    def expand(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """`value` broadcast to the shape of `like`."""
        if value.shape is not None and self.same_shape(value, like):
            return value
        result = self.Expand(value, self.shape(like))
        result.shape = like.shape
        return result

    def zeros(self, like: ir.Value) -> ir.Value:
        """Zeros with type and shape of `like`."""
        return self.expand(self.scalar(0.0, like.dtype), like)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Transpose, composed with the Transpose or Gemm that `value` comes from."""
        perm = list(perm)
        if perm == sorted(perm):
            return value
        producer = value.producer()
        if producer is not None and producer.domain == "":
            source = producer.inputs[0] if producer.inputs else None
            if producer.op_type == "Transpose" and source is not None:
                first = producer.attributes.get_ints("perm", list(reversed(range(len(perm)))))
                return self.transpose(source, [first[axis] for axis in perm])
            if producer.op_type == "Gemm" and len(producer.inputs) == 2 and producer in self.emitted:
                a, b = producer.inputs
                left, right = (1 - producer.attributes.get_int(name, 0) for name in ("transB", "transA"))
                return self.Gemm(b, a, transA=left, transB=right)
        return self.Transpose(value, perm=perm)

    def swap(self, value: ir.Value) -> ir.Value:
        """The matrices in the last two dimensions transposed."""
        axes = list(range(self.rank(value)))
        return self.transpose(value, [*axes[:-2], axes[-1], axes[-2]])

    def per_channel(self, value: ir.Value, rank: int) -> ir.Value:
        """[C] as [C, 1...], to broadcast over the spatial dimensions of [N, C, ...] of so many dimensions."""
        return self.Unsqueeze(value, list(range(1, rank - 1))) if rank > 2 else value

    # Axes that are an attribute in older opsets ---------------------------------------------------------------------

    def reduce(self, name: str, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """A Reduce* operator over constant axes, at any opset; no axes: `value` itself."""
        if not axes:
            return value
        if self.opset >= 18 or name == "ReduceSum":
            return self.emit(name, [value, sorted(axes)], {"keepdims": int(keepdims)})[0]
        return self.emit(name, [value], {"axes": sorted(axes), "keepdims": int(keepdims)})[0]

    def sum(self, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """ReduceSum over constant axes; no axes: `value` itself."""
        return self.reduce("ReduceSum", value, axes, keepdims)

    def reduced_axes(self, node: ir.Node) -> list[int] | None:
        """The axes of a Reduce* node, normalized; None when they are computed at run time."""
        source = node.inputs[0]
        assert source is not None
        rank = self.rank(source)
        axes: Sequence[int] | None = None
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            content = self.known(node.inputs[1])
            if content is None:
                return None
            axes = content.reshape(-1).tolist()
        elif "axes" in node.attributes:
            axes = node.attributes["axes"].as_ints()
        if not axes:
            return [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
        return sorted(axis % rank for axis in axes)

    # Counts ----------------------------------------------------------------------------------------------------------

    def count(self, value: ir.Value, axes: Sequence[int]) -> float | ir.Value:
        """Number of elements over `axes`: a number when static, else an FP32 (FP64 for FP64) scalar tensor.

        The dynamic part is a ReduceSum of expanded ones: a Cast of Shape would put nodes on the CPU and a copy into the
        graph.
        """
        dims = self.dims(value)
        static = math.prod(dim for axis in axes if isinstance(dim := dims[axis], int))
        open_axes = [axis for axis in axes if not isinstance(dims[axis], int)]
        if not open_axes:
            return float(static)
        dtype = ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        sizes = [self.dim(value, axis) for axis in open_axes]
        extent = sizes[0] if len(sizes) == 1 else self.Concat(*sizes, axis=0)
        ones = self.Expand(self.scalar(1.0, dtype), extent)
        ones.shape = ir.Shape([dims[axis] for axis in open_axes])  # Expand does not tell it
        total = self.sum(ones, range(len(open_axes)), keepdims=False)
        return self.Mul(total, float(static)) if static != 1 else total

    def divide(self, value: ir.Value, count: float | ir.Value) -> ir.Value:
        """`value` / `count` in the type of `value`."""
        if not isinstance(count, ir.Value):
            return value if count == 1 else self.Mul(value, 1.0 / count)
        if value.dtype == count.dtype:
            return self.Div(value, count)
        assert value.dtype is not None
        return self.Mul(value, self.cast(self.Div(1.0, count), value.dtype))

    # Un-broadcasting -------------------------------------------------------------------------------------------------

    def unbroadcast(self, g: ir.Value, target: ir.Value, operands: Sequence[ir.Value | None]) -> ir.Value:
        """Sum `g`, of the broadcast shape of `operands`, back to the shape of `target`, one of them.

        Dimensions of equal name are equal. Where a dimension of `target` may be 1 at run time while another operand's
        is not, the axes to sum are computed at run time, so that the result is exact in both cases.
        """
        others = [self.dims(value) for value in operands if value is not None and value is not target]
        return self.unbroadcast_dims(g, target, others)

    def unbroadcast_dims(self, g: ir.Value, target: ir.Value, others: Sequence[list[Dim]]) -> ir.Value:
        """`unbroadcast` with the shapes of the other operands instead of the operands."""
        own = self.dims(target)
        rank = max([len(own), *(len(dims) for dims in others)])
        lead = rank - len(own)
        fixed = list(range(lead))
        open_axes = []
        for axis in range(lead, rank):
            dim = own[axis - lead]
            rest = [d[axis - rank] for d in others if rank - axis <= len(d)]
            if dim == 1:
                if any(other != 1 for other in rest):
                    fixed.append(axis)
            elif not isinstance(dim, int) and any(other != 1 and (dim is None or other != dim) for other in rest):
                open_axes.append(axis)
        if open_axes:
            return self._unbroadcast_dynamic(g, target, fixed, open_axes, lead)
        if not fixed:
            return g
        if fixed == list(range(lead)):
            return self.sum(g, fixed, keepdims=False)
        total = self.sum(g, fixed)
        return self.reshape(total, target) if lead else total

    def _unbroadcast_dynamic(
        self, g: ir.Value, target: ir.Value, fixed: list[int], open_axes: list[int], lead: int
    ) -> ir.Value:
        sizes = self.Gather(self.Shape(target), [axis - lead for axis in open_axes], axis=0)
        ones = self.Equal(sizes, self.constant(np.asarray([1], np.int64)))
        found = self.Reshape(self.NonZero(ones), [-1])
        axes = self.Gather(self.constant(np.asarray(open_axes, np.int64)), found, axis=0)
        if fixed:
            axes = self.Concat(self.constant(np.asarray(fixed, np.int64)), axes, axis=0)
        total = self.emit("ReduceSum", [g, axes], {"keepdims": 1, "noop_with_empty_axes": 1})[0]
        result = self.Reshape(total, self.Shape(target)) if lead else total
        result.shape = target.shape
        return result

    # Small pieces that many rules share ------------------------------------------------------------------------------

    def join(self, sizes: Sequence[int | ir.Value]) -> ir.Value:
        """A shape or list of integers from numbers and int64 tensors; a constant where all are known."""
        parts: list[np.ndarray | ir.Value] = []
        for size in sizes:
            content = np.asarray([size], np.int64) if not isinstance(size, ir.Value) else self.known(size)
            if content is None:
                assert isinstance(size, ir.Value)
                parts.append(size)
            elif parts and isinstance(parts[-1], np.ndarray):
                parts[-1] = np.concatenate([parts[-1], content.reshape(-1)])
            else:
                parts.append(content.reshape(-1))
        if len(parts) == 1 and isinstance(parts[0], np.ndarray):
            return self.constant(parts[0], "shape")
        return self.Concat(*parts, axis=0)

    def total(self, sizes: Sequence[ir.Value]) -> ir.Value:
        """The sum of int64 tensors of one element, a constant where all are known."""
        fixed = sum(int(content.reshape(())) for size in sizes if (content := self.known(size)) is not None)
        rest = [size for size in sizes if self.known(size) is None]
        result = self.constant(np.asarray([fixed], np.int64))
        for size in rest:
            result = size if self.known(result) is not None and fixed == 0 else self.Add(result, size)
        return result

    def product(self, value: ir.Value) -> ir.Value:
        """The number of elements of `value` as an int64 tensor of one element."""
        dims = self.dims(value)
        if all(isinstance(dim, int) for dim in dims):
            return self.join([math.prod(dim for dim in dims if isinstance(dim, int))])
        return self.Reshape(self.Size(value), [1])

    def index(self, number: int) -> ir.Value:
        """An int64 scalar constant."""
        return self.constant(np.asarray(number, np.int64))

    def int64(self, value: ir.Value) -> ir.Value:
        """`value` as int64 (indices may be int32)."""
        return self.cast(value, ir.DataType.INT64)

    def refuse(self, condition: bool, reason: str) -> None:
        """Raise UnsupportedError with the node and `reason` when `condition` holds."""
        if condition:
            raise UnsupportedError(f"The gradient of {self._prefix[5:]!r} is not supported: {reason}.")

    def wide(self, value: ir.Value) -> ir.Value:
        """A 16-bit value as FP32, others as they are: for squares, exponentials and counts that leave the range of FP16 on the
        way to a result inside it. The walk casts gradients back."""
        return self.cast(value, ir.DataType.FLOAT) if value.dtype in LOW else value

    def mask(self, condition: ir.Value, g: ir.Value) -> ir.Value:
        """`g` where `condition`, else 0."""
        return self.Where(condition, g, self.scalar(0.0, g.dtype))

    def is_float(self, value: ir.Value | None) -> bool:
        """Whether `value` is a float tensor."""
        return value is not None and value.dtype in FLOATS


def _first_unknown(value: ir.Value) -> str:
    """The first node on the way to `value` from whose operands nothing follows, with what is known of these."""
    node, seen = value.producer(), set()
    while node is not None and node not in seen:
        seen.add(node)
        before = next((v.producer() for v in node.inputs if v is not None and v.shape is None and v.producer()), None)
        if before is None:
            shapes = " and ".join(str(v.shape) if v.shape is not None else "?" for v in node.inputs if v is not None)
            return f"{node.op_type} {node.name!r} of {shapes or 'nothing'}"
        node = before
    return f"{value.name!r}, which no node makes"
