"""Insert the Casts that the plan needs: one for each value and precision."""

from __future__ import annotations

import onnx_ir as ir

from onnxamp.dtypes import BY_NAME, LOW
from onnxamp.errors import UnsupportedError
from onnxamp.model.naming import Names
from onnxamp.model.signatures import standard_opset
from onnxamp.model.units import Read
from onnxamp.passes.append import new_cast
from onnxamp.policy.plan import Plan


class InsertCastsPass(ir.passes.InPlacePass):
    """Cast every value to each other precision in which it is read.

    1. A value is cast once for a precision, in the scope that defines it, right after its producer; inputs and initializers at the
       front of their graph. All readers of that precision share the Cast, those in bodies too.
    2. An output of the main graph keeps its name: the Cast that makes it takes the name, and the value before it is called
       ``y__fp16``.
    3. Names are ``x__fp16``, made unique in the whole model; the Cast node is called like its result.
    4. The Cast notes what it does: ``onnxamp.cast`` (``low`` or ``fp32``) and ``onnxamp.source``, the value's name in the source.
    5. A model that imports no ai.onnx yet imports the version that came with its IR version.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        wanted = self._wanted()
        if not wanted:
            return ir.passes.PassResult(model, modified=False)
        self._names = Names(model)
        self._model = model
        self._front: dict[ir.Graph, ir.Node | None] = {}
        self._last: dict[ir.Node, ir.Node] = {}
        for (value, kind), reads in wanted.items():
            cast = self._cast(value, kind)
            for read in reads:
                read.redirect(cast.outputs[0])
            if any(read.site is model.graph for read in reads):
                self._take_name(value, cast, model.graph)
        return ir.passes.PassResult(model, modified=True)

    def _wanted(self) -> dict[tuple[ir.Value, ir.DataType], list[Read]]:
        """The reads whose precision is not the value's, in order."""
        found: dict[tuple[ir.Value, ir.DataType], list[Read]] = {}
        for unit in self.plan.graph.units:
            kind = BY_NAME[self.plan.decisions[unit].precision].ir
            for read in unit.reads:
                value = _current(read)
                if value.dtype != kind:
                    found.setdefault((value, kind), []).append(read)
        return found

    def _cast(self, value: ir.Value, kind: ir.DataType) -> ir.Node:
        assert value.name is not None
        opset = standard_opset(self._model)
        if kind == ir.DataType.BFLOAT16 and opset < 13:
            raise UnsupportedError(
                f"{value.name!r} has to be cast to bf16, which Cast can from opset 13 on; the model has {opset}: raise its opset."
            )
        node = new_cast(self._model, value, self._names.typed(value.name, kind), kind, self._names)
        node.metadata_props.update({"onnxamp.cast": "low" if kind in LOW else "fp32", "onnxamp.source": value.name})
        self._place(value, node)
        return node

    def _place(self, value: ir.Value, cast: ir.Node) -> None:
        graph = value.graph
        assert graph is not None
        producer = value.producer()
        if producer is not None:
            graph.insert_after(self._last.get(producer, producer), cast)
            self._last[producer] = cast
            return
        if graph not in self._front:
            self._front[graph] = next(iter(graph), None)
        first = self._front[graph]
        if first is None:
            graph.append(cast)
        else:
            graph.insert_before(first, cast)

    def _take_name(self, value: ir.Value, cast: ir.Node, graph: ir.Graph) -> None:
        output = cast.outputs[0]
        if value in graph.inputs:
            raise UnsupportedError(
                f"{value.name!r} is input and output of the graph with two types; give both one type with --io, or add an Identity node."
            )
        assert value.name is not None
        assert value.dtype is not None
        name = value.name
        value.name = self._names.typed(name, value.dtype)
        output.name = name


def _current(read: Read) -> ir.Value:
    """What the place reads now; constants may have been replaced."""
    value = read.site.inputs[read.index] if isinstance(read.site, ir.Node) else read.site.outputs[read.index]
    assert value is not None
    return value
