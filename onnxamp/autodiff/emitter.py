"""Appends nodes to a graph: types, names, constants, and no node twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.model.constants import add_initializer
from onnxamp.model.incremental import IncrementalInference
from onnxamp.model.units import bodies

Operand = ir.Value | np.ndarray | float | int | Sequence[int] | None

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})

# Operators that run in FP32 between Casts because ONNX Runtime's CUDA provider has no kernel in the low type (1.31). A gradient graph by
# itself, as of `gradient_model`, has no target, and these lists are all it has; training asks the target's table too (`JointPlan`).
_FP32_FOR_FLOAT16 = frozenset({"GridSample", "Range", "EyeLike"})
_FP32_FOR_BFLOAT16 = _FP32_FOR_FLOAT16 | frozenset(
    [
        "Ceil",
        "Clip",
        "ConvTranspose",
        "CumSum",
        "DepthToSpace",
        "Einsum",
        "Equal",
        "Floor",
        "GlobalAveragePool",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "Less",
        "LessOrEqual",
        "Log",
        "LogSoftmax",
        "LRN",
        "MaxPool",
        "NonZero",
        "OneHot",
        "Pad",
        "Reciprocal",
        "ReduceL2",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceSumSquare",
        "Resize",
        "Round",
        "SpaceToDepth",
        "TopK",
    ]
)
_FP32_FOR_BFLOAT16_BELOW_22 = _FP32_FOR_BFLOAT16 | frozenset({"AveragePool", "Conv", "Cos", "Sin", "Softplus"})

_BOOLEAN = frozenset(
    ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"]
)
_INT64 = frozenset(["Shape", "Size", "NonZero", "ArgMax", "ArgMin"])
_UNREPEATABLE = frozenset(
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"]
)


class Emitter:
    """Appends standard operators to a graph: ``op.Mul(a, b)`` appends a Mul and gives its output.

    1. Numbers and lists among the inputs become constants: floats take the type of the first tensor operand, integers
       stay int64 where the operator asks for shapes, axes or indices.
    2. A node that exists already (same operator, inputs and attributes, forward nodes included) is reused.
    3. An operator that has no 16-bit kernel is computed in FP32 between two Casts.
    4. Types and symbolic shapes of outputs are inferred at once.

    Args:
        graph: The graph that the nodes are appended to; typed, with opset 13 or later.
        opset_imports: Opsets of the model, when `graph` does not carry them itself.

    Attributes:
        wanted: Positions of the inputs of the current node whose gradient is needed; captured values of its bodies follow
            after its inputs.
    """

    wanted: frozenset[int] = frozenset()

    def __init__(self, graph: ir.Graph, opset_imports: dict[str, int] | None = None) -> None:
        self.graph = graph
        self.opsets = dict(opset_imports or graph.opset_imports)
        self.opset = self.opsets.get("", self.opsets.get("ai.onnx", 0))
        if self.opset < 13:
            raise UnsupportedError(f"Gradients need opset 13 or later and the model has {self.opset}: raise its opset.")
        self.emitted: dict[ir.Node, None] = {}
        self._inference = IncrementalInference(self.opsets)
        self._inference.reserve(graph)
        self._names = {value.name for value in graph.inputs} | set(graph.initializers)
        self._node_names: set[str | None] = set()
        self._known: dict[object, tuple[ir.Value, ...]] = {}
        self._constants: dict[object, ir.Value] = {}
        for node in graph.all_nodes():
            self._names.update(value.name for value in node.outputs)
            self._node_names.add(node.name)
            for body in node.attributes.values():
                if body.type == ir.AttributeType.GRAPH:
                    self._names.update(value.name for value in body.as_graph().inputs)
                    self._names.update(body.as_graph().initializers)
        for node in graph:
            key = _key(node)
            if key is not None:
                self._known.setdefault(key, tuple(node.outputs))
        self._claimed: set[ir.Value] = set()
        self._nested = 0
        self._prefix = "grad"
        self._metadata: dict[str, str] = {}

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def emit(*inputs: Operand, **attributes: Any) -> ir.Value:
            return self.emit(op_type, inputs, attributes)[0]

        return emit

    def enter(self, node: ir.Node | None) -> None:
        """Name and mark what follows after the forward node `node`; nested walks keep the name of the outer node."""
        if self._nested:
            return
        if node is None:
            self._prefix, self._metadata = "grad", {}
            return
        name = node.name or node.outputs[0].name or node.op_type
        self._prefix = f"grad/{name}"
        self._metadata = {"onnxamp.backward": name}
        for key in ("onnxamp.precision", "onnxamp.code"):
            if key in node.metadata_props:
                self._metadata[key] = node.metadata_props[key]

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Within, `enter` changes nothing and `wanted` is put back at the end."""
        wanted = self.wanted
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1
            self.wanted = wanted

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
        """Append one node, or (unless `fresh`) find it; returns its outputs."""
        first = next((value for value in inputs if isinstance(value, ir.Value)), None)
        floats = next((v.dtype for v in inputs if isinstance(v, ir.Value) and v.dtype in FLOATS), None)
        values = [self._operand(value, first) for value in inputs]
        if domain == "" and floats is not None and op_type in self._fp32_only(floats):
            low = floats
            values = [self.cast(v, ir.DataType.FLOAT) if v is not None and v.dtype == low else v for v in values]
            results = self._append(op_type, values, attributes, outputs, domain, fresh)
            return tuple(self.cast(v, low) if v.dtype == ir.DataType.FLOAT else v for v in results)
        return self._append(op_type, values, attributes, outputs, domain, fresh)

    def body(self, name: str) -> Self:
        """A builder for an empty graph that will be the body of a node; its names are distinct from all others."""
        graph = ir.Graph([], [], nodes=[], name=self.unique(f"{self._prefix}/{name}"))
        inner = type(self)(graph, self.opsets)
        inner._names, inner._node_names = self._names, self._node_names
        inner._prefix, inner._metadata = str(graph.name), self._metadata
        return inner

    def argument(self, like: ir.Value, drop: int = 0) -> ir.Value:
        """A new input of this graph with the type and shape of `like`, without its first `drop` dimensions."""
        shape = None if like.shape is None else ir.Shape(list(like.shape)[drop:])
        value = ir.Value(name=self.unique(f"{self._prefix}/input"), type=like.type, shape=shape)
        self.graph.inputs.append(value)
        return value

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` as `dtype`: itself when it is, the source of an exact widening Cast when that is what is wanted."""
        if value.dtype == dtype:
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Cast" and producer.domain == "":
            source = producer.inputs[0]
            if source is not None and source.dtype == dtype and value.dtype == ir.DataType.FLOAT:
                return source  # low → fp32 → low is exact
        return self._append("Cast", [value], {"to": dtype}, 1, "")[0]

    def constant(self, array: np.ndarray, name: str = "const") -> ir.Value:
        """An initializer that holds `array`; equal ones are shared."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            text = "_".join(str(item) for item in array.reshape(-1)[:6].tolist()) if array.size <= 6 else "table"
            called = self.unique(f"grad/{name}/{text or 'empty'}")
            self._constants[key] = add_initializer(self.graph, called, array)
        return self._constants[key]

    def scalar(self, number: float, dtype: ir.DataType | None) -> ir.Value:
        """A scalar constant of the given type."""
        if dtype is None:
            raise UnsupportedError(f"The type of an operand of {self._prefix[5:]!r} is unknown.")
        return self.constant(np.asarray(number, dtype=dtype.numpy()))

    def unique(self, name: str) -> str:
        """`name`, or `name` with the first number that makes it unique in the graph."""
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}_{count}"
        self._names.add(candidate)
        return candidate

    def claim(self, value: ir.Value, name: str) -> None:
        """Give an emitted value its final name; the first claim counts."""
        if value not in self._claimed:
            self._claimed.add(value)
            self._names.discard(value.name)
            value.name = self.unique(name)

    def prune(self, keep: Iterable[ir.Value]) -> None:
        """Remove the emitted nodes, and then the constants, that nothing uses; `keep` is used from outside."""
        needed = set(keep)

        def idle(value: ir.Value) -> bool:
            return not (value in needed or value.uses() or value.is_graph_output())

        for node in reversed(self.emitted):
            if all(idle(value) for value in node.outputs):
                self.graph.remove(node, safe=True)
        for constant in self._constants.values():
            if idle(constant):
                del self.graph.initializers[str(constant.name)]

    def _operand(self, value: Operand, first: ir.Value | None) -> ir.Value | None:
        if value is None or isinstance(value, ir.Value):
            return value
        if isinstance(value, np.ndarray):
            return self.constant(value)
        if isinstance(value, (list, tuple)):
            return self.constant(np.asarray(value, np.int64))
        return self.scalar(float(value), None if first is None else first.dtype)  # type: ignore[arg-type]  # the branches above took the rest

    def _fp32_only(self, dtype: ir.DataType) -> frozenset[str]:
        if dtype == ir.DataType.FLOAT16:
            return _FP32_FOR_FLOAT16
        if dtype == ir.DataType.BFLOAT16:
            return _FP32_FOR_BFLOAT16 if self.opset >= 22 else _FP32_FOR_BFLOAT16_BELOW_22
        return frozenset()

    def _append(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any] | None,
        outputs: int,
        domain: str,
        fresh: bool = False,
    ) -> tuple[ir.Value, ...]:
        inputs = list(inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        node = ir.node(op_type, inputs, attributes or None, num_outputs=outputs, domain=domain)
        key = _key(node)
        if key is not None and key in self._known and not fresh:
            for position in range(len(inputs)):
                node.replace_input_with(position, None)
            return self._known[key]
        node.name = f"{self._prefix}/{op_type}"
        count = 1
        while node.name in self._node_names:
            count += 1
            node.name = f"{self._prefix}/{op_type}_{count}"
        self._node_names.add(node.name)
        node.metadata_props.update(self._metadata)
        for index, value in enumerate(node.outputs):
            value.name = self.unique(node.name if index == 0 else f"{node.name}/{index}")
        self.infer(node)
        self.graph.append(node)
        self.emitted[node] = None
        if key is not None:
            self._known[key] = tuple(node.outputs)
        return tuple(node.outputs)

    def infer(self, node: ir.Node) -> None:
        """Set type and symbolic shape of what `node` gives, as far as its inputs tell."""
        self._inference.infer(node)
        if node.outputs[0].dtype is None:
            self._type(node)

    def _type(self, node: ir.Node) -> None:
        """The type of the first output where inference gives none, an input being without a shape.

        That of a node with bodies is theirs to tell: the first input of an If or a Loop is a condition or a count.
        """
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            return
        if node.op_type == "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "CastLike":
            like = node.inputs[1]
            if like is None or like.dtype is None:
                return
            dtype = like.dtype
        elif node.op_type in _BOOLEAN:
            dtype = ir.DataType.BOOL
        elif node.op_type in _INT64:
            dtype = ir.DataType.INT64
        else:
            source = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
            if source is None or source.dtype is None or node.op_type in ("ConstantOfShape", "OneHot"):
                return
            dtype = source.dtype
        node.outputs[0].type = ir.TensorType(dtype)


def is_random(node: ir.Node) -> bool:
    """Whether a node, or one in its bodies, may give another result when it runs again."""
    if node.op_type in _UNREPEATABLE or (node.op_type == "Dropout" and len(node.inputs) > 2):
        return True
    return any(is_random(inner) for body in bodies(node) for inner in body)


def _key(node: ir.Node) -> object | None:
    """What makes two nodes the same computation, or None where that cannot be said."""
    if is_random(node):
        return None
    attributes = []
    for name, attr in sorted(node.attributes.items()):
        if attr.is_ref() or attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSORS):
            return None
        if attr.type == ir.AttributeType.TENSOR:
            tensor = attr.as_tensor()
            if tensor.size > 64:
                return None
            content: object = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        elif isinstance(attr.value, (list, tuple)):
            content = tuple(attr.value)
        else:
            content = attr.value
        attributes.append((name, content))
    inputs = tuple(None if value is None else id(value) for value in node.inputs)
    return (node.domain, node.op_type, node.overload, inputs, len(node.outputs), tuple(attributes))
