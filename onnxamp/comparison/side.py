"""One model as the matcher sees it: scopes, constants, and values looked at through Casts between float types."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Hashable, Iterator, Mapping

import onnx_ir as ir

from onnxamp.comparison.records import NodeRef
from onnxamp.dtypes import BY_IR, LOW
from onnxamp.model.constants import constant_tensor
from onnxamp.model.dimensions import fitting
from onnxamp.model.signatures import TYPE_ATTRIBUTES
from onnxamp.model.tensors import cast_target
from onnxamp.model.units import SHAPE_ONLY, all_values, named_bodies

Body = ir.Graph | ir.Function
Operator = tuple[str, str, str]


@dataclasses.dataclass(eq=False)
class Scope:
    """A graph, body or function, with its nodes (but Constants) and its constants: initializers and Constants' results.

    `path` is "" for the main graph.
    """

    path: str
    graph: Body
    nodes: list[ir.Node]
    constants: list[ir.Value]


def bodies(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """(attribute name, graph) of the bodies of a node, in the order of the names."""
    found = list(named_bodies(node))
    yield from sorted(found, key=lambda one: one[0].partition("[")[0])


def operator(node: ir.Node) -> Operator:
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload)


def type_name(kind: ir.DataType | None) -> str:
    """``fp32``, ``fp16``, ``bf16``, or ONNX's name in lower case; "" if unknown."""
    if kind is None:
        return ""
    return BY_IR[kind].name if kind in BY_IR else kind.name.lower()


class Side:
    """A model with what matching and comparing ask again and again, each computed once in linear time."""

    def __init__(
        self,
        model: ir.Model,
        positions: Mapping[ir.Node, int] | None = None,
        declared: Mapping[ir.Value, str] | None = None,
    ) -> None:
        """Args:
        model: The model, sorted and with its types.
        positions: Order of the nodes in the file; that of the model if None. Nodes without one go to their neighbours.
        declared: Types and shapes of the interface as the file has them; as the model has them if None.
        """
        self.model = model
        self.sizes = fitting(
            all_values(model.graph)
        )  # for the names of dimensions, graph inputs first, as the traffic model does
        for graph_input in model.graph.inputs:
            self.sizes.elements(graph_input.shape or ())
        self.declared = declared or {}
        self._positions = positions or {}
        self.scopes: list[Scope] = []
        self.scope: dict[ir.Node, Scope] = {}
        self.index: dict[ir.Node, int] = {}
        self.constants: dict[ir.Value, ir.TensorProtocol] = {}
        self.casts: list[ir.Node] = []  # float Casts
        self._roots: dict[ir.Value, ir.Value] = {}
        self._is_cast: dict[ir.Node, bool] = {}
        self._by_graph: dict[Body, Scope] = {}
        self._enter("", model.graph)
        for function in model.functions.values():
            self._enter("::".join(part for part in function.identifier() if part), function)
        self.readers: dict[ir.Value, list[tuple[ir.Node, int]]] = collections.defaultdict(list)
        self.names: dict[ir.Value, set[str]] = collections.defaultdict(set)
        for node in self.index:
            if not self.is_cast(node):
                for slot, value in enumerate(node.inputs):
                    if value is not None:
                        self.readers[self.root(value)].append((node, slot))
        for node in self.casts:
            name = node.outputs[0].name
            if name:
                self.names[self.root(node.outputs[0])].add(name)

    def _enter(self, path: str, graph: Body) -> None:
        todo: list[tuple[str, Body]] = [(path, graph)]
        while todo:
            path, graph = todo.pop()
            scope = Scope(path, graph, [], [])
            self.scopes.append(scope)
            self._by_graph[graph] = scope
            if isinstance(graph, ir.Graph):
                for value in graph.initializers.values():
                    if value.const_value is not None:
                        self.constants[value] = value.const_value
                        scope.constants.append(value)
            found: list[tuple[str, Body]] = []
            for node in self._in_file_order(graph):
                tensor = constant_tensor(node.outputs[0])
                if tensor is not None:
                    self.constants[node.outputs[0]] = tensor
                    scope.constants.append(node.outputs[0])
                    continue
                self.index[node] = len(scope.nodes)
                self.scope[node] = scope
                scope.nodes.append(node)
                if self.is_cast(node):
                    self.casts.append(node)
                for name, body in bodies(node):
                    inner = f"{node_name(node)}/{name}"
                    found.append((f"{path}/{inner}" if path else inner, body))
            todo.extend(reversed(found))

    def _in_file_order(self, graph: Body) -> list[ir.Node]:
        last = -1
        place = {}
        for node in graph:
            last = place[node] = self._positions.get(node, last)
        return sorted(place, key=place.__getitem__)

    def at(self, graph: Body) -> Scope:
        """The scope of a graph of this model."""
        return self._by_graph[graph]

    def path_of(self, value: ir.Value) -> str:
        """Path of the scope that defines a value."""
        producer = value.producer()
        if producer in self.scope:
            return self.scope[producer].path
        graph = producer.graph if producer is not None else value.graph
        return self._by_graph[graph].path if graph in self._by_graph else ""

    def is_cast(self, node: ir.Node) -> bool:
        """Whether a node is a Cast between fp32, fp16 and bf16. An untyped operand counts as float if the target is 16-bit."""
        found = self._is_cast.get(node)
        if found is None:
            found = self._is_cast[node] = _is_float_cast(node)
        return found

    def root(self, value: ir.Value) -> ir.Value:
        """The value that float Casts in front of `value` start from."""
        found = self._roots.get(value)
        if found is None:
            chain = []
            found = value
            while (node := found.producer()) is not None and self.is_cast(node):
                chain.append(found)
                found = node.inputs[0]
                assert found is not None
            for step in (*chain, value):
                self._roots[step] = found
        return found

    def labels(self, value: ir.Value) -> set[str]:
        """Names that a root goes by: its own, its Casts', and the original's that onnxamp recorded."""
        found = set(self.names.get(value, ()))
        if value.name:
            found.add(value.name)
        if origin := value.metadata_props.get("onnxamp.source"):
            found.add(origin)
        return found

    def ref(self, node: ir.Node) -> NodeRef:
        domain, op, overload = operator(node)
        text = "::".join(part for part in (domain, op) if part) + (f":{overload}" if overload else "")
        return NodeRef(self.scope[node].path, self.index[node], node_name(node), text)

    def precision(self, node: ir.Node) -> str:
        """The type of a node's float results, or of its float operands if it has none; joined by "/" if they differ.

        Shape and Size look at no elements and have no precision.
        """
        if node.op_type in SHAPE_ONLY:
            return ""
        kinds = dict.fromkeys(type_name(v.dtype) for v in node.outputs if v.dtype in BY_IR)
        if not kinds:
            kinds = dict.fromkeys(type_name(v.dtype) for v in node.inputs if v is not None and v.dtype in BY_IR)
        return "/".join(sorted(kinds))


def _is_float_cast(node: ir.Node) -> bool:
    if node.op_type != "Cast" or node.domain not in ("", "ai.onnx") or len(node.inputs) != 1 or not node.inputs[0]:
        return False
    target, source = cast_target(node), node.inputs[0].dtype
    if target is None:
        return False
    if "onnxamp.cast" in node.metadata_props:
        return True
    return target in BY_IR and (source in BY_IR or (source is None and target in LOW))


def node_name(node: ir.Node) -> str:
    """A node's name, or its first named output's."""
    return node.name or next((v.name for v in node.outputs if v.name), None) or node.op_type


def attributes_key(node: ir.Node) -> Hashable:
    """A digest of the attributes that are no types, tensors or bodies."""
    simple = sorted(
        (name, str(attribute.value))
        for name, attribute in node.attributes.items()
        if not attribute.is_ref()
        and name not in TYPE_ATTRIBUTES
        and attribute.type
        in (
            ir.AttributeType.INT,
            ir.AttributeType.INTS,
            ir.AttributeType.FLOAT,
            ir.AttributeType.FLOATS,
            ir.AttributeType.STRING,
            ir.AttributeType.STRINGS,
        )
    )
    return hashlib.blake2b(repr(simple).encode(), digest_size=8).digest()
