"""Proof that an output of a graph may be written over one of its inputs.

ONNX Runtime reorders and fuses nodes, so the order in the file proves nothing: a node that reads the input after its
memory was overwritten sees the new value, without an error. The proof is made on the graph that the session really
runs (`session.optimized`), by two conditions:

1. Every reader of the input, other than the node that writes the output, is an ancestor of that node. Whatever order
   the runtime picks, it has run before. A node whose result may share the memory of its operand (Reshape and its
   kind) passes the question on to the readers of its result.
2. The writer does not read the input at all, or reads each element of it no later than it writes the same element:
   it is elementwise, Where, or Gemm with the input as C.
"""

from __future__ import annotations

import onnx_ir as ir

_VIEWS = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Optional", "If", "Loop", "Scan"}
)
"""Operators whose results can be the operand's own memory (bodies hand their captures on)."""

_UNARY = (
    "Abs Neg Sign Sqrt Exp Log Reciprocal Floor Ceil Round Not Erf Relu Sigmoid Tanh Softplus Elu Selu LeakyRelu "
    "ThresholdedRelu HardSigmoid Sin Cos Identity Cast Clip IsNaN IsInf Gelu QuickGelu"
)
_BINARY = "Add Sub Mul Div Pow PRelu Mod And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual"
# Variadic operators make one pass per operand: the third would be read after the output was begun.
_VARIADIC = frozenset({"Sum", "Max", "Min", "Mean"})
_ELEMENTWISE = frozenset(_UNARY.split()) | frozenset(_BINARY.split()) | {"Where", "GatedAdd"}
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})


class Aliasing:
    """Answers which inputs of one graph may share memory with which outputs.

    Args:
        model: The graph as the runtime executes it.
    """

    def __init__(self, model: ir.Model) -> None:
        self._inputs = {value.name: value for value in model.graph.inputs}
        self._outputs = {value.name: value for value in model.graph.outputs}
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        self._bit: dict[ir.Node, int] = {}
        self._ancestors: dict[ir.Node, int] = {}
        for position, node in enumerate(model.graph):
            self._bit[node] = 1 << position
            before = 0
            for value in _reads(node):
                self._readers.setdefault(value, []).append(node)
                producer = value.producer()
                if producer is not None:
                    before |= self._ancestors[producer] | self._bit[producer]
            self._ancestors[node] = before

    def refusal(self, source: str, target: str, *, congruent: bool = True) -> str | None:
        """Why the output `target` may not be written over the input `source`; None if it may.

        Args:
            source: Name of a graph input.
            target: Name of a graph output.
            congruent: The two would share their memory element by element; if not (they only overlap), the writer
                must not read the input at all.
        """
        if source not in self._inputs or target not in self._outputs:
            missing = source if source not in self._inputs else target
            return f"{missing} is not in the graph that the runtime executes"
        value = self._inputs[source]
        writer = self._outputs[target].producer()
        if writer is None:
            return f"no node computes {target}"
        pending, seen = [value], {value}
        while pending:
            current = pending.pop()
            if current is not value and current in self._outputs.values() and current is not self._outputs[target]:
                return f"the output {current.name} may be the memory of {source} itself"
            for reader in self._readers.get(current, ()):
                if reader is writer:
                    if not congruent:
                        return f"{_label(writer)} reads {source}, which only overlaps {target}"
                    if not _in_place(writer, current):
                        return f"{_label(writer)} may read an element of {source} after it has written there"
                    continue
                if not self._ancestors[writer] & self._bit[reader]:
                    return f"{_label(reader)} reads {source} and may run after {_label(writer)}"
                if reader.op_type in _VIEWS:
                    fresh = [result for result in reader.outputs if result not in seen]
                    seen.update(fresh)
                    pending.extend(fresh)
        return None


def _reads(node: ir.Node) -> list[ir.Value]:
    """The values that a node needs before it can run: its operands and what its bodies capture."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            inner = [value for each in body.all_nodes() for value in each.inputs if value is not None]
            inner += [value for graph in (body, *body.subgraphs()) for value in graph.outputs]
            values += [value for value in inner if value.graph is node.graph]
    return values


def _in_place(writer: ir.Node, operand: ir.Value) -> bool:
    if writer.domain not in _DOMAINS:
        return False
    if writer.op_type in _ELEMENTWISE:
        return True
    if writer.op_type in _VARIADIC:
        return len(writer.inputs) <= 2
    if writer.op_type == "Gemm":
        return len(writer.inputs) == 3 and operand is writer.inputs[2] and operand not in writer.inputs[:2]
    return False


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} of {node.outputs[0].name!r}"
