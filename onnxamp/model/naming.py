"""Names that nothing has yet: readable, the same in every run, unique in the whole model."""

from __future__ import annotations

import functools

import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.model.units import all_nodes, all_values


def unique(wanted: str, taken: set[str] | set[str | None]) -> str:
    """`wanted`, or the first of ``wanted_2``, ``wanted_3``, ... that is not taken; it is taken from now on."""
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name


class Names:
    """The names of a model's values and nodes, in every scope and function, read when the first one is asked for."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model

    @functools.cached_property
    def _values(self) -> set[str | None]:
        return {value.name for graph in self._graphs() for value in all_values(graph)}

    @functools.cached_property
    def _nodes(self) -> set[str | None]:
        return {node.name for graph in self._graphs() for node in all_nodes(graph)}

    def _graphs(self) -> list[ir.Graph]:
        return [self._model.graph, *(function.graph for function in self._model.functions.values())]

    def value(self, wanted: str) -> str:
        """A name for a new value: `wanted` itself unless it is taken."""
        return unique(wanted, self._values)

    def node(self, wanted: str) -> str:
        """A name for a new node: `wanted` itself unless it is taken."""
        return unique(wanted, self._nodes)

    def copy(self, base: str, suffix: str) -> str:
        """A name for a copy of value `base`: ``x__suffix``, or ``x__suffix_2`` if that is taken."""
        return self.value(f"{base}__{suffix}")

    def typed(self, base: str, dtype: ir.DataType) -> str:
        """A name for the copy of value `base` in another precision: ``x__fp16``, or ``x__fp16_2`` if that is taken."""
        return self.copy(base, BY_IR[dtype].name)

    def rename(self, value: ir.Value, wanted: str) -> None:
        """Give `value` another name, and free its own."""
        self._values.discard(value.name)
        value.name = self.value(wanted)
