"""The type graph: the variables that a precision decision is about, and how values join them.

A *unit* is one type variable of one node (Pow's exponent is another unit than its base), with the operands that it reads and
the values that it writes. What control flow ties together is one unit too:

* an output of If reads that output of both branches and writes the node's output;
* a carried value of Loop or Scan reads its initial value and the body's output, and writes the body's input and the node's output;
* a scanned input or output of Loop or Scan reads on one side and writes on the other.

Graph inputs and outputs are units without a node. So every value has at most one writer, and the precision of all units
determines where Casts are needed: at each read whose unit differs from its value's writer. Constants (initializers, Constant
nodes) have no writer: they exist in whichever precision their readers want. Shape and Size look at no elements, so they are no
unit and take either type.

Only float tensors (fp32, fp16, bf16) take part; integers, doubles and untyped values without float partners do not appear.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxamp.dtypes import BY_IR
from onnxamp.model.signatures import Formal, Signature, node_signature, operator_name

# Operators that read only the shape of their operand.
SHAPE_ONLY = frozenset({"Shape", "Size"})

# Attributes that set the type of a result: (operator, type variable) -> attribute. An absent optional one means "as the input".
TYPE_ATTRIBUTE = {
    ("Cast", "T2"): "to",
    ("EyeLike", "T2"): "dtype",
    ("RandomNormal", "T"): "dtype",
    ("RandomUniform", "T"): "dtype",
    ("RandomNormalLike", "T2"): "dtype",
    ("RandomUniformLike", "T2"): "dtype",
    ("Bernoulli", "T2"): "dtype",
    ("ConstantOfShape", "T2"): "value",
    ("BlackmanWindow", "T2"): "output_datatype",
    ("HammingWindow", "T2"): "output_datatype",
    ("HannWindow", "T2"): "output_datatype",
    ("MelWeightMatrix", "T3"): "output_datatype",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One place that reads a value: operand `index` of a node, or output `index` of a graph."""

    value: ir.Value
    site: ir.Node | ir.Graph
    index: int

    def redirect(self, value: ir.Value) -> None:
        """Make this place read another value."""
        if isinstance(self.site, ir.Node):
            self.site.replace_input_with(self.index, value)
        else:
            self.site.outputs[self.index] = value


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """One decision variable; compared by identity.

    Attributes:
        node: The node, or None for an input or output of the main graph.
        variable: The type variable in the node's signature; ``output[k]``, ``state[k]``, ``scan[k]`` for control flow; the literal type for
            an operand without variable; ``input`` or ``output`` for the interface.
        dtype: The float type that the values have in the source.
        reads: Operands (and body outputs) that have the unit's type.
        writes: Values that have the unit's type.
        fixed: Why the unit must keep its type whatever the policy says (``interface``, ``overridable``, ``unknown operator``, ``untyped``,
            ``sequence``, ``literal``), or None.
    """

    node: ir.Node | None
    variable: str
    dtype: ir.DataType
    reads: tuple[Read, ...]
    writes: tuple[ir.Value, ...]
    fixed: str | None = None

    def __repr__(self) -> str:
        where = f"{self.node.op_type} {self.node.name}" if self.node else "graph"
        return f"Unit({where}, {self.variable})"


@dataclasses.dataclass(frozen=True)
class TypeGraph:
    """All units of a model in a fixed order: graph inputs, nodes in graph order with their bodies after them, graph outputs.

    Attributes:
        model: The model, with types inferred and functions inlined.
        units: The decision variables.
        writer: The unit that writes a value; absent for constants and for values that take no part.
        readers: The units that read a value, each once, in order.
        constants: Values of initializers and Constant nodes, in every scope, that are float tensors.
        of: The units of a node, by type variable, in signature order.
        signatures: The signature of each node; None where no schema is known.
        operators: The operator of each node, as `operator_name` gives it.
    """

    model: ir.Model
    units: tuple[Unit, ...]
    writer: dict[ir.Value, Unit]
    readers: dict[ir.Value, tuple[Unit, ...]]
    constants: tuple[ir.Value, ...]
    of: dict[ir.Node, tuple[Unit, ...]]
    signatures: dict[ir.Node, Signature | None]
    operators: dict[ir.Node, str]

    def nodes(self, operators: Collection[str]) -> Iterator[ir.Node]:
        """The nodes of these operators that have units, in graph order."""
        return (node for node, name in self.operators.items() if name in operators and node in self.of)


def type_graph(model: ir.Model) -> TypeGraph:
    """The type graph of `model`, whose functions are inlined and whose values are typed (`model.types.infer`)."""
    builder = _Builder(model)
    builder.interface_inputs()
    builder.graph(model.graph)
    builder.interface_outputs()
    return builder.finish()


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs of a node, in the order of its attributes."""
    return (body for _, body in named_bodies(node)) if node.attributes else iter(())


def named_bodies(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The subgraphs of a node with their attributes: ``then_branch``, or ``branches[0]`` where one holds several."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield name, attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from ((f"{name}[{number}]", body) for number, body in enumerate(attribute.as_graphs()))


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """`graph` and every body in it."""
    yield graph
    for node in graph:
        if node.attributes:
            for body in bodies(node):
                yield from all_graphs(body)


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Every node of `graph`, each followed by those of its bodies."""
    for node in graph:
        yield node
        if node.attributes:
            for body in bodies(node):
                yield from all_nodes(body)


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value that `graph` and its bodies define, each once: inputs, initializers, results."""
    yield from graph.inputs
    inputs = set(graph.inputs)
    yield from (value for value in graph.initializers.values() if value not in inputs)
    for node in graph:
        yield from node.outputs
        if node.attributes:
            for body in bodies(node):
                yield from all_values(body)


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that makes the value; None for what no node makes, and for no value."""
    return value.producer() if value is not None else None


def is_float(value: ir.Value | None) -> bool:
    """Whether the value is a tensor of one of the float types that onnxamp decides between."""
    return value is not None and _float_type(value) is not None


def _float_type(value: ir.Value) -> ir.DataType | None:
    kind = value.type
    return kind.dtype if isinstance(kind, ir.TensorType) and kind.dtype in BY_IR else None


def _holds_floats(value: ir.Value | None) -> bool:
    """Whether the value is a sequence or optional of such tensors."""
    kind = value.type if value is not None else None
    if isinstance(kind, ir.TensorType):
        return False
    wrapped = isinstance(kind, ir.SequenceType | ir.OptionalType)
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        kind = kind.elem_type
    return wrapped and isinstance(kind, ir.TensorType) and kind.dtype in BY_IR


def _variable(formal: Formal | None, alone: str) -> str:
    """The type variable of an operand, or a name of its own where several operands of one formal may differ."""
    return alone if formal is None or not formal.homogeneous else formal.variable


class _Builder:
    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.units: list[Unit] = []
        self.constants: dict[ir.Value, None] = {}
        self.signatures: dict[ir.Node, Signature | None] = {}
        self.of: dict[ir.Node, list[Unit]] = {}
        self.operators: dict[ir.Node, str] = {}

    def add(
        self, node: ir.Node | None, variable: str, reads: list[Read], writes: list[ir.Value], fixed: str | None
    ) -> None:
        """One unit of the float operands among `reads` and `writes`; a partner that is none, or has no type, fixes it."""
        found: dict[ir.DataType | None, tuple[list[Read], list[ir.Value]]] = {}
        for read in reads:
            found.setdefault(_float_type(read.value), ([], []))[0].append(read)
        for value in writes:
            found.setdefault(_float_type(value), ([], []))[1].append(value)
        if len(found) > 1:
            fixed = fixed or "untyped"
        for dtype in sorted(kind for kind in found if kind is not None):
            unit = Unit(node, variable, dtype, tuple(found[dtype][0]), tuple(found[dtype][1]), fixed)
            self.units.append(unit)
            if node is not None:
                self.of.setdefault(node, []).append(unit)

    def interface_inputs(self) -> None:
        constant_inputs = self.model.ir_version < 4
        for value in self.model.graph.inputs:
            if not value.is_initializer():
                self.add(None, "input", [], [value], "interface")
            elif not constant_inputs:
                self.add(None, "input", [], [value], "overridable")

    def interface_outputs(self) -> None:
        for index, value in enumerate(self.model.graph.outputs):
            self.add(None, "output", [Read(value, self.model.graph, index)], [], "interface")

    def graph(self, graph: ir.Graph) -> None:
        overridable = set() if self.model.ir_version < 4 else set(graph.inputs)
        for value in graph.initializers.values():
            if is_float(value) and value not in overridable:
                self.constants[value] = None
        for node in graph:
            self.node(node)
            if node.attributes:
                for body in bodies(node):
                    self.graph(body)

    def node(self, node: ir.Node) -> None:
        signed = node_signature(node, self.model.opset_imports)
        self.signatures[node] = signed
        self.operators[node] = name = operator_name(node)
        if name == "Constant":
            if is_float(node.outputs[0]):
                self.constants[node.outputs[0]] = None
        elif name in SHAPE_ONLY:
            pass
        elif name == "If":
            self.branches(node)
        elif name == "Loop":
            self.loop(node)
        elif name == "Scan" and signed is not None and signed.since >= 9:
            self.scan(node)
        else:
            self.plain(node, signed)

    def plain(self, node: ir.Node, signed: Signature | None) -> None:
        """A node without control flow: one unit a type variable; operands without variable stand alone.

        If it has bodies all the same (SequenceMap, Scan-8), nothing is known of what ties them: their borders keep their types.
        """
        fixed = None
        if signed is None:
            fixed = "unknown operator"
        elif any(_holds_floats(v) for v in (*node.inputs, *node.outputs)) or any(bodies(node)):
            fixed = "sequence"
        groups: dict[str, tuple[list[Read], list[ir.Value]]] = {}
        for index, value in enumerate(node.inputs):
            if value is not None:
                name = _variable(signed.input(index) if signed else None, f"input[{index}]")
                groups.setdefault(name, ([], []))[0].append(Read(value, node, index))
        for index, value in enumerate(node.outputs):
            if value.name:  # an omitted output has none
                name = _variable(signed.output(index) if signed else None, f"output[{index}]")
                groups.setdefault(name, ([], []))[1].append(value)
        for variable, (reads, writes) in groups.items():
            literal = signed is not None and variable not in signed.types
            self.add(node, variable, reads, writes, fixed or ("literal" if literal else None))
        for number, body in enumerate(bodies(node)):
            for index, value in enumerate(body.inputs):
                self.add(node, f"body[{number}].input[{index}]", [], [value], fixed)
            for index, value in enumerate(body.outputs):
                self.add(node, f"body[{number}].output[{index}]", [Read(value, body, index)], [], fixed)

    def branches(self, node: ir.Node) -> None:
        graphs = list(bodies(node))
        for index, output in enumerate(node.outputs):
            reads = [Read(graph.outputs[index], graph, index) for graph in graphs]
            self.tie(node, f"output[{index}]", reads, [output])

    def loop(self, node: ir.Node) -> None:
        (body,) = bodies(node)
        carried = len(body.inputs) - 2
        for k in range(carried):
            self.carry(node, body, f"state[{k}]", 2 + k, 1 + k, 2 + k, k)
        for k in range(carried, len(node.outputs)):
            self.tie(node, f"scan[{k}]", [Read(body.outputs[1 + k], body, 1 + k)], [node.outputs[k]])

    def scan(self, node: ir.Node) -> None:
        (body,) = bodies(node)
        states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        for k in range(states):
            self.carry(node, body, f"state[{k}]", k, k, k, k)
        for k in range(states, len(node.inputs)):
            value = node.inputs[k]
            if value is not None:
                self.tie(node, f"scan_input[{k}]", [Read(value, node, k)], [body.inputs[k]])
        for k in range(states, len(node.outputs)):
            self.tie(node, f"scan[{k}]", [Read(body.outputs[k], body, k)], [node.outputs[k]])

    def carry(self, node: ir.Node, body: ir.Graph, name: str, outer: int, inner: int, formal: int, result: int) -> None:
        initial = node.inputs[outer] if outer < len(node.inputs) else None
        reads = [Read(body.outputs[inner], body, inner)]
        if initial is not None:
            reads.insert(0, Read(initial, node, outer))
        self.tie(node, name, reads, [body.inputs[formal], *node.outputs[result : result + 1]])

    def tie(self, node: ir.Node, name: str, reads: list[Read], writes: list[ir.Value]) -> None:
        sequence = any(_holds_floats(v) for v in (*(r.value for r in reads), *writes))
        self.add(node, name, reads, writes, "sequence" if sequence else None)

    def finish(self) -> TypeGraph:
        writer = {value: unit for unit in self.units for value in unit.writes}
        readers: dict[ir.Value, dict[Unit, None]] = collections.defaultdict(dict)
        for unit in self.units:
            for read in unit.reads:
                readers[read.value][unit] = None
        return TypeGraph(
            model=self.model,
            units=tuple(self.units),
            writer=writer,
            readers={value: tuple(units) for value, units in readers.items()},
            constants=tuple(self.constants),
            of={node: tuple(units) for node, units in self.of.items()},
            signatures=self.signatures,
            operators=self.operators,
        )
