"""Constants in which an exporter has repeated a vector of the model, computed from it again."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from onnxamp.model.constants import add_initializer
from onnxamp.model.naming import Names
from onnxamp.model.tensors import content_key

# What PyTorch's newer exporter calls the results of operators that it computed: parameters have names of their own.
_COMPUTED = re.compile(r"(val|linear|addmm|add|mm|expand|repeat|unsqueeze|view)(_\d+)?")


def share_repeated(graph: ir.Graph, names: Names) -> int:
    """Make a folded constant that repeats a vector an `Expand` of it, in place; how many there were.

    The first product of a recurrent layer with a state of zeros leaves its bias, once for each row: as a constant it would not train
    with the bias.
    """
    repeated: list[tuple[ir.Value, np.ndarray]] = []
    vectors: dict[str, ir.Value] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or value.is_graph_input() or value.is_graph_output():
            continue
        computed = _COMPUTED.fullmatch(str(value.name)) is not None and len(tensor.shape) > 1
        if not computed and len(tensor.shape) != 1:
            continue
        row = _row(tensor.numpy())
        if row is None or not _is_drawn(row):
            continue
        if computed:
            repeated.append((value, row))
        else:
            vectors.setdefault(content_key(row), value)
    count = 0
    for value, row in repeated:
        vector = vectors.get(content_key(row))
        if vector is None or vector.dtype != value.dtype or not value.uses():
            continue
        name, tensor = str(value.name), value.const_value
        assert tensor is not None
        shape = add_initializer(graph, names.value(f"{name}/shape"), np.asarray(tensor.shape.numpy(), np.int64))
        node = ir.node("Expand", [vector, shape], name=names.node(f"{name}/Expand"))
        del graph.initializers[name]
        value.const_value = None  # it has the name too, and is the source's
        value.name = names.value(f"{name}/constant")
        result = node.outputs[0]
        result.name, result.type, result.shape = name, value.type, value.shape
        value.replace_all_uses_with(result)
        graph.insert_before(graph[0], node)
        count += 1
    return count


def _row(array: np.ndarray) -> np.ndarray | None:
    """A vector, or the last dimension of an array in which it is the same everywhere."""
    if array.size == 0:
        return None
    rows = array.reshape(-1, array.shape[-1])
    return rows[0] if (rows[-1] == rows[0]).all() and (rows == rows[0]).all() else None


def _is_drawn(row: np.ndarray) -> bool:
    """Whether another vector of these numbers must come from this one: most are different, and they are no whole numbers."""
    return 2 * len(np.unique(row)) > row.size > 1 and bool((row != np.round(row)).any())
