"""A user's loss model, joined to the model that it judges."""

from __future__ import annotations

import dataclasses
import difflib

import onnx
import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.model import types
from onnxamp.training.manifest import Labels

PREFIX = "loss/"
"""What names of the loss model begin with once it is joined."""
_SUMS = ("loss_sum", "weight_sum")


@dataclasses.dataclass(frozen=True)
class Joined:
    """What became of the loss model.

    Attributes:
        outputs: The mean loss, or Σ loss·w and Σ w.
        labels: The inputs that it compares outputs with.
    """

    outputs: tuple[ir.Value, ...]
    labels: tuple[Labels, ...]


def join(model: ir.Model, loss: ir.Model) -> Joined:
    """Append a loss model to `model`, in place.

    1. An input of the loss model that is called like an output or input of `model` is that value; the others become inputs.
    2. Its nodes, values and initializers get the prefix ``loss/``.
    3. A free size of an input that was joined is called as in `model`, everywhere in the loss model.

    Args:
        model: The model in training form.
        loss: The loss model in training form; it is used up.

    Raises:
        UsageError: No input fits by name, one fits by name and not by type or shape, the outputs are not scalars, or the two
            models have opsets that differ in an operator of the loss.
    """
    _check_opsets(model, loss)
    known = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    graph, results = loss.graph, _results(loss.graph)
    outputs = [str(value.name) for value in model.graph.outputs]
    joined = [value for value in graph.inputs if value.name in known]
    if not any(value.name in outputs for value in joined):
        names = [str(value.name) for value in graph.inputs]
        close = difflib.get_close_matches(names[0] if names else "", outputs, n=1)
        hint = f": did you mean {close[0]!r}" if close else ""
        raise UsageError(
            f"No input of the loss model ({', '.join(names)}) is called like an output of the model ({', '.join(outputs)}){hint}."
        )
    sizes: dict[str, int | str | None] = {}
    for value in joined:
        _match(value, known[str(value.name)], sizes)
    labels = []
    for value in [value for value in graph.inputs if value.name not in known]:
        dims = [_renamed(dim, sizes) for dim in value.shape or ()]
        if value.shape is None or value.dtype is None:
            raise UsageError(f"The input {value.name!r} of the loss model has no type or shape: export it with them.")
        value.shape = ir.Shape(dims)
        labels.append(
            Labels(
                value.dtype.numpy().name, tuple(d if isinstance(d, int) else str(d) for d in dims), name=str(value.name)
            )
        )
    for value in joined:
        value.replace_all_uses_with(known[str(value.name)])
    free = [value for value in graph.inputs if value not in joined]
    graph.inputs.clear()
    model.graph.inputs.extend(free)
    for value in list(graph.initializers.values()):
        del graph.initializers[str(value.name)]
        if value.const_value is not None:  # a renamed initializer renames its tensor, which is the user's
            value.const_value = ir.Tensor(value.const_value.numpy(), value.const_value.dtype)
        value.name = PREFIX + str(value.name)
        model.graph.register_initializer(value)
    graph.outputs.clear()
    nodes = list(graph)
    graph.remove(nodes)
    for node in nodes:
        node.name = PREFIX + str(node.name)
        for value in node.outputs:
            if value.name:
                value.name = PREFIX + str(value.name)
            value.shape = None
    model.graph.extend(nodes)
    types.infer(model)
    for value in results:
        value.shape = ir.Shape([]) if value.shape is None else value.shape
    return Joined(tuple(results), tuple(labels))


def _results(graph: ir.Graph) -> list[ir.Value]:
    """The scalars that the loss model gives."""
    names = [str(value.name) for value in graph.outputs]
    results = list(graph.outputs) if len(names) == 1 else [v for name in _SUMS for v in graph.outputs if v.name == name]
    if len(results) != len(names) or len(results) not in (1, 2):
        raise UsageError(
            f"The loss model has the outputs {', '.join(names)}: it must have one scalar, or {' and '.join(_SUMS)}."
        )
    for value in results:
        if value.dtype != ir.DataType.FLOAT or value.shape is None or any(dim != 1 for dim in value.shape):
            raise UsageError(
                f"The output {value.name!r} of the loss model is {value.type} {value.shape}, not a float32 scalar."
            )
        if value.producer() is None:
            raise UsageError(f"The output {value.name!r} of the loss model is not computed from anything.")
    return results


def _match(value: ir.Value, source: ir.Value, sizes: dict[str, int | str | None]) -> None:
    """Check that an input of the loss model can take `source`, and learn what its free sizes are called there."""
    wanted, found = (f"{v.dtype} {v.shape}" for v in (value, source))
    sentence = f"The loss model takes {value.name!r} as {wanted}, and the model gives {found}"
    if value.dtype != source.dtype:
        raise UsageError(f"{sentence}: the types differ.")
    if value.shape is None or source.shape is None:
        return
    if len(value.shape) != len(source.shape):
        raise UsageError(f"{sentence}: the numbers of dimensions differ.")
    for mine, theirs in zip(value.shape, source.shape, strict=True):
        if isinstance(mine, int) and isinstance(theirs, int) and mine != theirs:
            raise UsageError(f"{sentence}: the sizes differ.")
        if isinstance(mine, ir.SymbolicDim) and mine.value is not None:
            sizes.setdefault(str(mine.value), theirs if isinstance(theirs, int) else theirs.value)


def _renamed(dim: int | ir.SymbolicDim, sizes: dict[str, int | str | None]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    name = str(dim.value)
    return sizes.get(name, PREFIX + name)


def _check_opsets(model: ir.Model, loss: ir.Model) -> None:
    """The loss model's operators must mean the same at the model's opset."""
    for domain, version in loss.opset_imports.items():
        own = model.opset_imports.setdefault(domain, version)
        if own == version:
            continue
        for node in loss.graph.all_nodes():
            if node.domain == domain and _since(node, version) != _since(node, own):
                raise UsageError(
                    f"The loss model has opset {version}, the model {own}, and {node.op_type} ({node.name}) differs between them: "
                    f"export the loss model with opset {own}."
                )


def _since(node: ir.Node, version: int) -> int | None:
    try:
        return int(onnx.defs.get_schema(node.op_type, version, node.domain).since_version)
    except onnx.defs.SchemaError:
        return None
