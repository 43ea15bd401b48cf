"""What an adapter may do to a node: read and change its attributes and operands, put nodes in front of it, or give up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.model.constants import fixed_tensor
from onnxamp.model.naming import Names

_ADDED = "onnxamp.added"  # key of Value.meta: a row put its node in front of another


class OpsetError(UnsupportedError):
    """An operator cannot be written in the opset that is wanted.

    Attributes:
        node: The node's name, or that of its first result.
        operator: The node's operator.
        reason: Why, as a clause.
    """

    def __init__(self, node: ir.Node, version: int, reason: str) -> None:
        self.node = node.name or next((value.name for value in node.outputs if value.name), "")
        self.operator = node.op_type
        self.reason = reason
        super().__init__(
            f"{self.operator} {self.node!r} cannot be written in opset {version}: {reason}; export the model at that opset."
        )


class Edit:
    """One node on its way from one opset to the next.

    Attributes:
        node: The node.
        version: The opset that it is brought to; what is added is written in that one.
    """

    def __init__(self, node: ir.Node, version: int, names: Names, ir_version: int) -> None:
        self.node = node
        self.version = version
        self._names = names
        self._ir_version = ir_version

    def refuse(self, reason: str) -> OpsetError:
        """The error to raise where the later version cannot say what the node says."""
        return OpsetError(self.node, self.version, reason)

    # Attributes -------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the attribute is given."""
        return name in self.node.attributes

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute's value, or `default`.

        Raises:
            OpsetError: It is a parameter of the function that holds the node.
        """
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.is_ref():
            raise self.refuse(f"its attribute {name!r} is a parameter of a function")
        value = attribute.value
        return list(value) if isinstance(value, tuple) else value

    def set(self, name: str, value: Any) -> None:
        """Give the attribute a value."""
        self.node.attributes[name] = ir.convenience.convert_attribute(name, value)

    def drop(self, *names: str) -> None:
        """Remove attributes, those that are given."""
        for name in names:
            self.node.attributes.pop(name, None)

    # Operands ---------------------------------------------------------------------------------------------------------

    def operand(self, index: int) -> ir.Value | None:
        """The operand; None if it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def put(self, index: int, value: ir.Value | None) -> None:
        """Make `value` the operand; operands between are left out."""
        if len(self.node.inputs) <= index:
            self.node.resize_inputs(index + 1)
        self.node.replace_input_with(index, value)

    def shape(self, index: int) -> tuple[int | None, ...] | None:
        """The operand's sizes, None for one that is unknown; None if not even the rank is known."""
        value = self.operand(index)
        if value is None or value.shape is None:
            return None
        return tuple(size if isinstance(size, int) else None for size in value.shape)

    def content(self, index: int) -> np.ndarray | None:
        """The operand's elements, if it is a constant that callers cannot replace."""
        tensor = fixed_tensor(self.operand(index), self._ir_version)
        return None if tensor is None else tensor.numpy()

    def rank(self, index: int) -> int:
        """The operand's rank.

        Raises:
            OpsetError: It is unknown.
        """
        shape = self.shape(index)
        if shape is None:
            raise self.refuse("the rank of its operand is unknown")
        return len(shape)

    def dtype(self, index: int) -> np.dtype[Any]:
        """The operand's type.

        Raises:
            OpsetError: It is unknown.
        """
        value = self.operand(index)
        if value is None or value.dtype is None:
            raise self.refuse("the type of its operand is unknown")
        return value.dtype.numpy()

    def discard(self, value: ir.Value) -> None:
        """Remove a constant that a row put in front, once nothing takes it; the source's own stay."""
        node = value.producer()
        if node is not None and _ADDED in value.meta and not value.uses() and not value.is_graph_output():
            assert node.graph is not None
            node.graph.remove(node)

    def is_read(self, index: int) -> bool:
        """Whether something takes the result, or could."""
        outputs = self.node.outputs
        return index < len(outputs) and bool(outputs[index].uses() or outputs[index].is_graph_output())

    # Nodes in front ---------------------------------------------------------------------------------------------------

    def constant(self, content: np.ndarray, role: str) -> ir.Value:
        """A Constant node; `role` ends its name."""
        tensor = ir.tensor(content)
        value = self.add("Constant", [], {"value": tensor}, role)
        value.const_value, value.type, value.shape = tensor, ir.TensorType(tensor.dtype), ir.Shape(content.shape)
        return value

    def ints(self, values: Sequence[int], role: str) -> ir.Value:
        """A one-dimensional int64 constant."""
        return self.constant(np.array(values, np.int64), role)

    def add(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], role: str) -> ir.Value:
        """The result of a new node in front of this one; `role` ends the names of both."""
        node = self._insert(op_type, inputs, attributes)
        node.name = self._names.node(f"{self._base()}/{role}")
        node.outputs[0].name = self._names.value(f"{self._result()}/{role}")
        node.outputs[0].meta[_ADDED] = True
        return node.outputs[0]

    def split(self, role: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any]) -> ir.Value:
        """Move the operator to a new node in front, which takes the node's name; this one keeps its results and shall `become` another.

        Values keep their names and their identity, and a name of a node still means the operator that it meant.
        """
        node = self._insert(self.node.op_type, inputs, attributes)
        node.outputs[0].name = self._names.value(f"{self._result()}/{role}")
        node.name, node.doc_string = self.node.name, self.node.doc_string
        node.metadata_props.update(self.node.metadata_props)
        self.node.name, self.node.doc_string = self._names.node(f"{self._base()}/result"), None
        self.node.metadata_props.clear()
        return node.outputs[0]

    def become(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any]) -> None:
        """Make the node another operator with the same results."""
        self.node.op_type = op_type
        self.node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            self.node.replace_input_with(index, value)
        self.node.attributes.clear()
        for name, value in attributes.items():
            self.set(name, value)

    def _insert(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any]) -> ir.Node:
        given = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", op_type, inputs, given, num_outputs=1)
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, node)
        return node

    def _base(self) -> str:
        return self.node.name or self._result()

    def _result(self) -> str:
        return next((value.name for value in self.node.outputs if value.name), self.node.op_type)
