"""Modelled memory traffic: the bytes that one run of a model reads and writes.

Every node reads each of its non-empty inputs whole, constants included, and writes each output. Shape and Size read nothing, Constant
writes nothing, and a body counts once. A value whose readers want another type than its writer has is cast once per type: one more read
and one more write. Caches, fusion and views are not modelled, so only ratios mean something.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxamp.model.units import SHAPE_ONLY, TypeGraph, Unit, all_nodes

FIRST_DIM, OTHER_DIM = 1, 64
_UNRANKED = 64


@dataclasses.dataclass
class Sizes:
    """Element counts of values, with assumed sizes for unknown dimensions.

    Attributes:
        dims: Sizes of named dimensions. A name not given is added when first seen: 1 if it then leads a shape, else 64.
    """

    dims: dict[str, int]
    _elements: dict[ir.Value, int] = dataclasses.field(default_factory=dict)

    def elements(self, value: ir.Value) -> int:
        """The number of elements of `value`."""
        count = self._elements.get(value)
        if count is None:
            count = self._elements[value] = self._count(value)
        return count

    def _count(self, value: ir.Value) -> int:
        if value.shape is None:
            return _UNRANKED
        return math.prod(self._size(dim, axis) for axis, dim in enumerate(value.shape))

    def _size(self, dim: int | ir.SymbolicDim, axis: int) -> int:
        if isinstance(dim, int):
            return dim
        default = FIRST_DIM if axis == 0 else OTHER_DIM
        return default if dim.value is None else self.dims.setdefault(str(dim.value), default)

    def bytes(self, value: ir.Value) -> int:
        """The size of `value` in its own type."""
        bits = value.dtype.bitwidth if value.dtype is not None and value.dtype != ir.DataType.STRING else 64
        return -(-self.elements(value) * bits // 8)


def sizes(graph: TypeGraph, dims: Mapping[str, int]) -> Sizes:
    """Sizes that take named dimensions from `dims`, then in order of the graph's inputs."""
    result = Sizes(dict(dims))
    for value in graph.model.graph.inputs:
        result.elements(value)
    return result


def unit_elements(unit: Unit, sizes: Sizes) -> int:
    """Elements that the unit's node reads and writes in the unit's type; ends of bodies and of the model move nothing."""
    if unit.node is None:
        return 0
    read = sum(sizes.elements(read.value) for read in unit.reads if isinstance(read.site, ir.Node))
    return read + sum(sizes.elements(value) for value in unit.writes if value.producer() is not None)


def traffic(
    graph: TypeGraph,
    sizes: Sizes,
    dtype: Callable[[Unit], ir.DataType],
    is_cast: Callable[[ir.Value, ir.DataType], bool] = lambda constant, dtype: False,
) -> int:
    """Bytes of one run when every unit has the type that `dtype` gives it.

    Args:
        graph: The model's type graph.
        sizes: Element counts.
        dtype: The type of each unit.
        is_cast: Whether a constant is cast at run time for readers of a type; else it is stored in that type.
    """
    total = _outside_units(graph, sizes)
    for unit in graph.units:
        total += unit_elements(unit, sizes) * _width(dtype(unit))
    for value, readers in graph.readers.items():
        wanted = {dtype(reader) for reader in readers}
        writer = graph.writer.get(value)
        if writer is not None:
            source = dtype(writer)
            casts = wanted - {source}
        else:
            assert value.dtype is not None
            source = value.dtype
            casts = {kind for kind in wanted if kind != source and is_cast(value, kind)}
        total += sum(sizes.elements(value) * (_width(source) + _width(kind)) for kind in casts)
    return total


def _width(dtype: ir.DataType) -> int:
    return dtype.bitwidth // 8


def _outside_units(graph: TypeGraph, sizes: Sizes) -> int:
    """Bytes of values that take no part in the decision."""
    inside = {(read.site, read.index) for unit in graph.units for read in unit.reads}
    total = 0
    for node in all_nodes(graph.model.graph):
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            continue
        if node.op_type not in SHAPE_ONLY:
            total += sum(
                sizes.bytes(value)
                for i, value in enumerate(node.inputs)
                if value is not None and (node, i) not in inside
            )
        total += sum(sizes.bytes(value) for value in node.outputs if value.name and value not in graph.writer)
    return total
