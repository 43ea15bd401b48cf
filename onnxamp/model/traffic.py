"""Modelled memory traffic: the bytes that one run of a model reads and writes.

Every node reads each of its non-empty inputs whole, constants included, and writes each output. Shape and Size read nothing, Constant
writes nothing, and a body counts once. A value whose readers want another type than its writer has is cast once per type: one more read
and one more write. Caches, fusion and views are not modelled, so only ratios mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxamp.model import dimensions
from onnxamp.model.units import SHAPE_ONLY, Read, TypeGraph, Unit, all_values, is_float

# A value without shape, sequences among them, counts as one unknown dimension.
_UNRANKED = dimensions.OTHER_DIM
_UNSIZED = (None, ir.DataType.STRING, ir.DataType.UNDEFINED)


class Traffic:
    """Element counts of one type graph, and the bytes that it moves when its units have given types.

    Attributes:
        graph: The model's type graph.
        dims: Sizes of named dimensions. A name not given is added when first seen, graph inputs first: 1 if it then leads a shape, else 64,
            or another usual size if a value would be empty (`dimensions.fitting`). Expressions of names are evaluated.
    """

    def __init__(self, graph: TypeGraph, dims: Mapping[str, int]) -> None:
        self.graph = graph
        self._sizes = dimensions.fitting(all_values(graph.model.graph), dims)
        self.dims = self._sizes.dims
        self._elements: dict[ir.Value, int] = {}
        for value in graph.model.graph.inputs:
            self.elements(value)
        self.of_unit = {unit: self._unit_elements(unit) for unit in graph.units}
        self._constant_bytes = self._outside_units()

    def elements(self, value: ir.Value) -> int:
        """The number of elements of `value`."""
        count = self._elements.get(value)
        if count is None:
            shape = value.shape
            count = _UNRANKED if shape is None else self._sizes.elements(shape)
            assert count >= 0, f"{value.name!r} has {count} elements"
            self._elements[value] = count
        return count

    def bytes(
        self,
        dtype: Callable[[Unit], ir.DataType],
        is_cast: Callable[[Read], bool] = lambda read: False,
    ) -> int:
        """Bytes of one run when every unit has the type that `dtype` gives it.

        Args:
            dtype: The type of each unit.
            is_cast: Whether a constant is cast at run time where it is read in another type; else it is stored in that type.
        """
        types = {unit: dtype(unit) for unit in self.graph.units}
        total = self._constant_bytes + sum(count * _width(types[unit]) for unit, count in self.of_unit.items())
        for value, readers in self.graph.readers.items():
            writer = self.graph.writer.get(value)
            source = types[writer] if writer is not None else value.dtype
            assert source is not None
            wanted = {types[reader] for reader in readers if types[reader] != source}
            if writer is None and wanted:
                reads = ((types[reader], read) for reader in readers for read in reader.reads if read.value is value)
                wanted = {kind for kind, read in reads if kind != source and is_cast(read)}
            for kind in wanted:
                total += self.elements(value) * (_width(source) + _width(kind))
        return total

    def _unit_elements(self, unit: Unit) -> int:
        """Elements that the unit's node reads and writes in the unit's type; ends of bodies and of the model move nothing."""
        if unit.node is None:
            return 0
        read = sum(self.elements(read.value) for read in unit.reads if isinstance(read.site, ir.Node))
        return read + sum(self.elements(value) for value in unit.writes if value.producer() is not None)

    def _outside_units(self) -> int:
        """Bytes of values that take no part in the decision: those of other types."""
        total = 0
        for node, name in self.graph.operators.items():
            if name == "Constant":
                continue
            if name not in SHAPE_ONLY:
                total += sum(self._bytes(value) for value in node.inputs if value is not None and not is_float(value))
            total += sum(self._bytes(value) for value in node.outputs if value.name and not is_float(value))
        return total

    def _bytes(self, value: ir.Value) -> int:
        bits = 64 if value.dtype in _UNSIZED else value.dtype.bitwidth
        return -(-self.elements(value) * bits // 8)


def _width(dtype: ir.DataType) -> int:
    return dtype.bitwidth // 8
