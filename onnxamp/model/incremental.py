"""Types and shapes of nodes one at a time, as a pass appends them to a typed graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnxamp.model import contrib_shapes


class IncrementalInference:
    """Gives the outputs of a new node their types and symbolic shapes, from those of its inputs.

    Dimension names stay; element values of small integer tensors (Shape, Concat, Slice, ...) are followed, so that
    a Reshape by a computed shape is known too. What cannot be inferred is left open, never guessed.

    Args:
        opset_imports: The opsets of the graph that the nodes are appended to.
    """

    def __init__(self, opset_imports: Mapping[str, int]) -> None:
        contrib_shapes.register()
        self._opsets = {domain or "": version for domain, version in opset_imports.items()}
        self._context = ShapeInferenceContext(self._opsets, policy="refine")

    def reserve(self, graph: ir.Graph) -> None:
        """Keep new dimension names distinct from those that `graph` uses."""
        names: set[str] = set()
        for value in [*graph.inputs, *(out for node in graph.all_nodes() for out in node.outputs)]:
            names.update(str(dim.value) for dim in value.shape or () if isinstance(dim, ir.SymbolicDim))
        self._context.reserve_symbol_names(names)

    def infer(self, node: ir.Node) -> None:
        """Set type and shape on the outputs of `node` where its schema and inputs tell them."""
        rule = registry.get(node.domain, node.op_type, version=self._opsets.get(node.domain, 1))
        if rule is None:
            return
        for value in node.inputs:
            if value is not None:
                self._context.name_anonymous_dims(value)
        try:
            rule(self._context, node)
        except Exception:  # an incomplete shape is allowed here; a wrong graph is found by the checker
            return
