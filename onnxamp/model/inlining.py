"""Inlining of the model-local functions that hold floats, so that each call can have its own precision."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxamp.errors import UnsupportedError, cause
from onnxamp.model.naming import unique
from onnxamp.model.signatures import signature
from onnxamp.model.units import all_nodes, bodies, is_float


def inline_float_functions(model: ir.Model) -> bool:
    """Inline, in place, every function that takes or gives floats somewhere; whether there was one.

    Names come from the function's own and are unique in the whole model; metadata of the call go to the inlined nodes. Functions on
    integers stay. The values of `model` are typed.

    Raises:
        UnsupportedError: A function calls itself, has an operator that changed between its opset and the model's, or takes a graph as
            attribute.
    """
    if not model.functions:
        return False
    wanted = {
        node.op_identifier()
        for node in all_nodes(model.graph)
        if node.op_identifier() in model.functions
        and any(
            is_float(value) or (value is not None and value.type is None) for value in (*node.inputs, *node.outputs)
        )
    }
    called = [model.functions[name] for name in wanted]
    while called:  # whatever they call is inlined with them
        for node in all_nodes(called.pop().graph):
            name = node.op_identifier()
            if name in model.functions and name not in wanted:
                wanted.add(name)
                called.append(model.functions[name])
    if not wanted:
        return False
    for name in wanted:
        _align_opsets(model.functions[name], model.opset_imports)
    try:
        InlinePass(lambda function: function.identifier() in wanted)(model)
    except (ir.passes.InvariantError, ir.passes.PassError, RuntimeError, ValueError) as problem:
        raise UnsupportedError(
            f"A model-local function cannot be inlined: {cause(problem)}; inline it before the conversion."
        ) from None
    everything = {value.name for graph in model.graphs() for value in _defined(graph) if value.name}
    _rename_shadows(model.graph, frozenset(), everything)
    return True


def _align_opsets(function: ir.Function, imports: dict[str, int]) -> None:
    """Let a function import what the model imports of each domain, where its operators mean the same in both versions."""
    for domain, version in list(function.opset_imports.items()):
        wanted = imports.get(domain, version)
        own = {node.op_type for node in all_nodes(function.graph) if node.domain == domain}
        if wanted != version and all(_is_same(op_type, domain, version, wanted) for op_type in own):
            function.opset_imports[domain] = wanted


def _is_same(op_type: str, domain: str, one: int, other: int) -> bool:
    """Whether two versions of a domain have the same version of an operator."""
    found = [signature(domain, op_type, version) for version in (one, other)]
    return found[0] is not None and found[1] is not None and found[0].since == found[1].since


def _defined(graph: ir.Graph) -> list[ir.Value]:
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    return list(dict.fromkeys(values))


def _rename_shadows(graph: ir.Graph, outer: frozenset[str], everything: set[str]) -> None:
    """Rename what an inlined body and a graph inside or around it both define; the inner one gives way."""
    own: set[str] = set()
    for value in _defined(graph):
        name = value.name
        if not name:
            continue
        if name in outer:
            name = unique(name, everything)
            value.name = name
        own.add(name)
    visible = outer | own
    for node in graph:
        for body in bodies(node):
            _rename_shadows(body, visible, everything)
