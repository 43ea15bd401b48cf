"""Strict emulation: an FP32 model that rounds wherever the original holds a 16-bit value.

Rules:

1. A result of 16 bits is computed in fp32 from the (already rounded) fp32 operands, then rounded by an explicit
   ``Cast → fp16|bf16`` and brought back by ``Cast → fp32``. Overflow, underflow and rounding happen after each operator,
   as on a device that accumulates in fp32; inside an operator they do not.
2. A Cast to 16 bits is the rounding already: only the Cast back follows it.
3. Operators that move, select or compare-and-pick values cannot round: nothing follows them.
4. 16-bit initializers and constants are widened, which is exact.
5. The interface stays: 16-bit inputs are cast up at the front, 16-bit outputs are the rounded values themselves.
6. Bodies of If, Loop and Scan follow the same rules; what crosses their borders is fp32. Functions are inlined first.
7. An operator that no schema describes keeps its 16-bit operands and results.

ONNX Runtime keeps these explicit pairs at every optimization level (a test holds it to that). Every value of the original
that is not in the interface keeps its name, and holds the rounded value in fp32.
"""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.model import io
from onnxamp.model.naming import Names
from onnxamp.model.preparation import prepare
from onnxamp.model.signatures import node_signature, operator_name, standard_opset
from onnxamp.model.units import all_values
from onnxamp.passes.append import new_cast
from onnxamp.passes.widen import low_element, widen_attributes, widened_tensor, widened_type

# Each result element is an element of an operand or a constant that is exact in the type, so it needs no rounding.
_MOVES = """
    Abs CenterCropPad Clip Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace Expand EyeLike Flatten
    Gather GatherElements GatherND GlobalMaxPool Identity If Loop Max MaxPool MaxRoiPool MaxUnpool Min Neg Optional
    OptionalGetElement Pad ReduceMax ReduceMin Relu Reshape ReverseSequence Scan ScatterElements ScatterND SequenceAt
    SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap Sign Slice SpaceToDepth Split SplitToSequence
    Squeeze Tile TopK Transpose Trilu Unique Unsqueeze Where
"""
MOVES = frozenset(_MOVES.split())


def emulate(model: str | os.PathLike[str] | onnx.ModelProto | ir.Model) -> ir.Model:
    """A new fp32 model with the rounding of `model`'s 16-bit values made explicit; `model` is not changed.

    Args:
        model: A path, a `ModelProto` or an `ir.Model`: converted, training graph, or one that was exported in 16 bits.

    Raises:
        ModelError: The model is damaged.
        UnsupportedError: A 16-bit sequence in the interface below opset 17, a 16-bit optional there, or a function that
            cannot be inlined.
    """
    result = io.load(model)
    # Shapes stay as declared: a runtime infers the others, and one that inference got wrong would misguide it.
    declared = {value: value.shape for value in all_values(result.graph)}
    names = {value.name: shape for value, shape in declared.items()} if result.functions else {}
    prepare(result)
    for value in all_values(result.graph):  # what replaces the result of a call has its name
        value.shape = declared[value] if value in declared else names.get(value.name)
    _Emulation(result).run()
    return result


class _Emulation:
    """One run of the pass over a private copy."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.low: dict[ir.Value, ir.DataType] = {}
        self.rounded: dict[ir.Value, ir.Value] = {}  # fp32 value → its 16-bit twin, where one exists
        self.names = Names(model)
        for value in all_values(model.graph):
            if (kind := low_element(value.type)) is not None:
                self.low[value] = kind

    def run(self) -> None:
        """Rewrite every graph, then the interface."""
        results = [self.low.get(value) for value in self.graph.outputs]
        for graph in self.model.graphs():
            for node in list(graph):
                self.node(node)
        for graph in self.model.graphs():
            if graph is not self.graph:
                for value in (*graph.inputs, *graph.initializers.values()):
                    self.widen(value)
        self.inputs()
        for index, kind in enumerate(results):
            if kind is not None:
                self.output(index, kind)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def node(self, node: ir.Node) -> None:
        """Apply the rule of `node`'s kind to it and to its 16-bit results."""
        known = node_signature(node, self.model.opset_imports) is not None
        low = [value for value in node.outputs if value in self.low]
        if not known:
            self.keep_operands(node)
        elif operator_name(node) == "CastLike" and low:
            node = self.plain_cast(node, self.low[low[0]])
            low = list(node.outputs)
        else:
            widen_attributes(node)
        for value in low:
            if not known or operator_name(node) == "Cast":
                if self.is_read(value):
                    self.bring_back(node, value)
            elif moves_data(node) or not (value.uses() or value.is_graph_output()):
                self.widen(value)
            else:
                self.round(node, value)

    def is_read(self, value: ir.Value) -> bool:
        """Whether anything but a Cast or the interface reads a value that stays 16 bits."""
        if value.is_graph_output() and value.graph is not self.graph:
            return True
        return any(operator_name(user) != "Cast" for user in value.consumers())

    def round(self, node: ir.Node, value: ir.Value) -> None:
        """``value`` becomes the exact fp32 result; Cast → 16 bits → Cast follow, and readers take the last."""
        kind = self.low[value]
        self.widen(value)
        name = value.name or ""
        self.names.rename(value, f"{name}/exact")
        down = self.cast(value, f"{name}/low", kind)
        low = down.outputs[0]
        up = self.cast(low, name, ir.DataType.FLOAT)
        _redirect(value, up.outputs[0], except_for=down)
        node.append([down, up])
        self.rounded[up.outputs[0]] = low

    def bring_back(self, node: ir.Node, value: ir.Value) -> None:
        """``value`` stays 16 bits; a Cast up follows, and readers take that."""
        name = value.name or ""
        self.names.rename(value, f"{name}/low")
        up = self.cast(value, name, ir.DataType.FLOAT)
        _redirect(value, up.outputs[0], except_for=up)
        node.append(up)
        self.rounded[up.outputs[0]] = value

    def keep_operands(self, node: ir.Node) -> None:
        """Hand `node` the 16-bit operands that it had."""
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if value in self.rounded:
                node.replace_input_with(index, self.rounded[value])
            elif value in self.low:
                down = self.conversion(value, f"{value.name}/low", self.low[value])
                node.prepend(down)
                node.replace_input_with(index, down.outputs[0])

    def plain_cast(self, node: ir.Node, kind: ir.DataType) -> ir.Node:
        """Cast instead of CastLike, whose second operand no longer has the type that it stood for."""
        source, value = node.inputs[0], node.outputs[0]
        assert source is not None
        name = value.name or ""
        self.names.rename(value, f"{name}/castlike")
        cast = self.cast(source, name, kind)
        out = cast.outputs[0]
        cast.name, cast.doc_string = node.name, node.doc_string
        cast.metadata_props.update(node.metadata_props)
        _redirect(value, out)
        self.low[out] = self.low.pop(value)
        graph = node.graph
        assert graph is not None
        graph.insert_after(node, cast)
        graph.remove(node, safe=True)
        return cast

    # -- values -----------------------------------------------------------------------------------------------------

    def widen(self, value: ir.Value) -> None:
        """Give `value` fp32 in place of its 16-bit type, and its constant too."""
        if value not in self.low:
            return
        value.type = widened_type(value.type)
        if value.const_value is not None:
            value.const_value = widened_tensor(value.const_value)

    def like(self, value: ir.Value, kind: ir.DataType, name: str) -> ir.Value:
        """A new value with the shape of `value`."""
        shape = value.shape.copy() if value.shape is not None else None
        return ir.Value(name=self.names.value(name), type=ir.TensorType(kind), shape=shape)

    def cast(self, value: ir.Value, name: str, kind: ir.DataType) -> ir.Node:
        """A new Cast node with a name of its own (ONNX Runtime refuses two nodes of one name)."""
        return new_cast(self.model, value, self.names.value(name), kind, self.names)

    # -- interface --------------------------------------------------------------------------------------------------

    def inputs(self) -> None:
        """Cast 16-bit inputs up where they are read; widen the other initializers."""
        visible = set(self.graph.inputs) | {v for v in self.graph.outputs if v.is_initializer()}
        front = []
        for value in dict.fromkeys((*self.graph.inputs, *self.graph.initializers.values())):
            if value not in self.low:
                continue
            if value not in visible:
                self.widen(value)
            elif self.is_read(value):
                up = self.conversion(value, f"{value.name}/fp32", ir.DataType.FLOAT)
                _redirect(value, up.outputs[0], except_for=up, outputs=False)
                front.append(up)
        if front:
            self.graph.insert_before(self.graph[0], front)

    def output(self, index: int, kind: ir.DataType) -> None:
        """Make output `index` the 16-bit value that it was, under its name."""
        value = self.graph.outputs[index]
        if low_element(value.type) is not None:  # an input or initializer handed through
            return
        low = self.rounded.get(value)
        if low is None:
            node = self.conversion(value, f"{value.name}/low", kind)
            self.graph.append(node)
            low = self.rounded[value] = node.outputs[0]
        if not low.is_graph_output():
            name = value.name or ""
            self.names.rename(value, f"{name}/fp32")
            self.names.rename(low, name)
        self.graph.outputs[index] = low

    def conversion(self, value: ir.Value, name: str, kind: ir.DataType) -> ir.Node:
        """A node that takes `value` of the interface, tensor or sequence, to or from 16 bits."""
        if isinstance(value.type, ir.TensorType):
            return self.cast(value, name, kind)
        opset = standard_opset(self.model)
        if not isinstance(value.type, ir.SequenceType) or opset < 17:
            raise UnsupportedError(
                f"{value.name!r} holds 16-bit tensors in a {value.type}, which opset {opset} cannot cast: "
                "emulate the model with this value in fp32."
            )
        element = self.like(value, value.type.elem_type.dtype, f"{name}/element")
        cast = self.cast(element, f"{name}/cast", kind)
        body = ir.Graph([element], cast.outputs, nodes=[cast], name=f"{name}/body", opset_imports={"": opset})
        out = self.like(value, kind, name)
        out.type = ir.SequenceType(ir.TensorType(kind))
        return ir.Node(
            "",
            "SequenceMap",
            [value],
            [ir.AttrGraph("body", body)],
            outputs=[out],
            name=self.names.node(out.name or ""),
        )


def moves_data(node: ir.Node) -> bool:
    """Whether `node` only moves or selects elements of its operands, so that it cannot round."""
    if operator_name(node) not in MOVES:
        return False
    if node.op_type in ("Clip", "Pad"):  # bounds and padding of old opsets are fp32 attributes
        return not any(node.attributes[name].type == ir.AttributeType.FLOAT for name in node.attributes)
    if node.op_type.startswith("Scatter"):
        reduction = node.attributes.get("reduction")
        return reduction is None or reduction.value in ("none", "max", "min")
    return True


def _redirect(value: ir.Value, to: ir.Value, *, except_for: ir.Node | None = None, outputs: bool = True) -> None:
    """Make all readers of `value` read `to`."""
    for user, index in tuple(value.uses()):
        if user is not except_for:
            user.replace_input_with(index, to)
    if outputs and value.is_graph_output():
        graph = value.graph
        assert graph is not None
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = to
