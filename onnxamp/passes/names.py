"""Names for what the passes add: readable, the same in every run, unique in the whole model."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.model.naming import unique
from onnxamp.model.units import all_nodes, all_values


class Names:
    """The names of a model's values and nodes, in every scope."""

    def __init__(self, model: ir.Model) -> None:
        self._values = {value.name for value in all_values(model.graph)}
        self._nodes = {node.name for node in all_nodes(model.graph)}

    def value(self, base: str, dtype: ir.DataType) -> str:
        """A name for the copy of value `base` in another precision: ``x__fp16``, or ``x__fp16_2`` if that is taken."""
        return self.copy(base, BY_IR[dtype].name)

    def copy(self, base: str, suffix: str) -> str:
        """A name for another copy of value `base`: ``x__suffix``, or ``x__suffix_2`` if that is taken."""
        return unique(f"{base}__{suffix}", self._values)

    def node(self, name: str) -> str:
        """A name for a new node: `name` itself unless it is taken."""
        return unique(name, self._nodes)
