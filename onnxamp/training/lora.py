"""Low-rank adapters: train W + s·A·B with W fixed (Hu et al., "LoRA", arXiv:2106.09685).

An adapter stands beside its node: y = x·W + s·(x·A)·B with s = alpha / rank, so that nothing of W's size is ever differentiated. For a
convolution A is a convolution of the same form to `rank` channels (per group) and B one of size 1. A starts as PyTorch's default for
linear layers, uniform within 1/√fan_in, and B as zeros: the adapted model begins as the model.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxamp.errors import UsageError
from onnxamp.model import types
from onnxamp.model.constants import add_initializer
from onnxamp.policy.options import matches
from onnxamp.training.manifest import Adapter

PREFIX = "lora/"
# What a weight may pass on its way to the node.
_PASSED = frozenset({"Identity", "Cast", "Transpose"})


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which weights get an adapter, and how large it is.

    Attributes:
        rank: Columns of A and rows of B.
        alpha: Numerator of the scale alpha / rank.
        target: Pattern of names of weights or of their nodes (MatMul, Gemm, Conv); several in a tuple.
    """

    rank: int = 8
    alpha: float = 16.0
    target: str | tuple[str, ...] = "*"

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"rank of lora is {self.rank}: it must be a whole number of at least 1.")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UsageError(f"alpha of lora is {self.alpha}: it must be a finite number above 0.")
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", tuple(self.target))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `target`."""
        return (self.target,) if isinstance(self.target, str) else self.target


def lora(spec: Lora | Mapping[str, Any] | str | None) -> Lora | None:
    """Adapters from an instance, a mapping, or text such as ``rank=8,alpha=16,target=*attn*`` (`target` comes last).

    Raises:
        UsageError: `spec` means nothing.
    """
    if spec is None or isinstance(spec, Lora):
        return spec
    if isinstance(spec, str):
        head, found, target = spec.partition("target=")
        entries = [entry.partition("=") for entry in head.rstrip(",").split(",") if entry]
        try:
            values: dict[str, Any] = {key: {"rank": int, "alpha": float}[key](value) for key, _, value in entries}
        except (KeyError, ValueError):
            raise UsageError(f"--lora {spec!r} is not rank=N,alpha=X,target=PATTERN.") from None
        spec = {**values, **({"target": target} if found else {})}
    known = [field.name for field in dataclasses.fields(Lora)]
    if not isinstance(spec, Mapping) or not set(spec) <= set(known):
        raise UsageError(f"lora takes {', '.join(known)}, not {spec!r}.")
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
    return Lora(**arguments)


def inject(model: ir.Model, options: Lora, seed: int) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """Put adapters beside the nodes that read the weights of `options`, in place; nodes that share a weight share its adapter.

    What is trained must be what `merge` writes, and that changes a weight for all that read it. So a weight that something else reads too
    (the Gather of a tied embedding, a MatMul that reads it the other way round, the body of a loop) gets no adapter.

    Args:
        model: The model in training form.
        options: Which and how large.
        seed: Of the initial A.

    Returns:
        The adapters, and a sentence for each weight that a pattern names and that gets none.

    Raises:
        UsageError: A pattern matches no weight that can have one.
    """
    graph = model.graph
    readers: dict[str, list[tuple[ir.Node, Adapter]]] = {}
    for node in graph:
        adapter = _adaptable(node)
        if adapter is not None:
            readers.setdefault(adapter.weight, []).append((node, adapter))
    others = {name: _other_reader(graph.initializers[name], found) for name, found in readers.items()}
    chosen: dict[str, None] = {}
    for pattern in options.patterns:
        named = [
            name for name, found in readers.items() if any(_named(pattern, node, adapter) for node, adapter in found)
        ]
        if not named:
            raise UsageError(
                f"No weight of a MatMul, Gemm or Conv matches lora's target {pattern!r}; there are "
                f"{', '.join(readers) or 'none'}."
            )
        if all(others[name] for name in named):
            raise UsageError(f"{_refusal(named[0], others[named[0]])} Nothing else matches lora's target {pattern!r}.")
        chosen |= dict.fromkeys(named)
    adapters = []
    for name in readers:
        if name in chosen and not others[name]:
            adapter = dataclasses.replace(readers[name][0][1], scale=options.alpha / options.rank)
            for node, _ in readers[name]:
                _insert(graph, node, adapter, options.rank, seed)
            adapters.append(adapter)
    graph.sort()
    types.infer(model)
    return tuple(adapters), tuple(_refusal(name, others[name]) for name in readers if name in chosen and others[name])


def _refusal(weight: str, reader: str) -> str:
    return (
        f"{weight!r} gets no adapter: {reader} reads it too, and would read another weight once the adapter is merged."
    )


def _other_reader(weight: ir.Value, adapted: Sequence[tuple[ir.Node, Adapter]]) -> str:
    """What reads a weight, as it is or transposed, without the adapter of the first of `adapted`; empty if nothing does."""
    same = {node for node, adapter in adapted if adapter == adapted[0][1]}
    pending = [weight]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return f"the output {value.name!r}"
        for node, position in value.uses():
            if node.domain == "" and node.op_type in _PASSED and node.graph is weight.graph:
                pending.extend(node.outputs)
            elif node not in same or position != 1:
                return f"{node.op_type} {node.name!r}"
    return ""


def merged(adapter: Adapter, weight: NDArray[Any], a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float32]:
    """W + s·A·B in the form of W, computed in FP64 and rounded once."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    try:
        if adapter.form == "conv":
            groups = adapter.groups
            down = a.reshape(groups, -1, *a.shape[1:])
            up = b.reshape(groups, -1, down.shape[1])
            delta = np.einsum("gor,gr...->go...", up, down).reshape(weight.shape)
        else:
            delta = a @ b
            delta = delta.T if adapter.transposed else delta
    except ValueError:
        raise UsageError(
            f"A {list(a.shape)} and B {list(b.shape)} of the adapter of {adapter.weight!r} do not fit together or to the "
            f"weight {list(weight.shape)}."
        ) from None
    if delta.shape != weight.shape:
        raise UsageError(
            f"The adapter of {adapter.weight!r} is for a weight of shape {list(delta.shape)}, and the model's has {list(weight.shape)}."
        )
    return np.asarray(weight.astype(np.float64) + adapter.scale * delta, np.float32)


def merge(
    adapters: Sequence[Adapter], values: Mapping[str, NDArray[Any]], weights: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The parameters of the plain model: adapters become part of their weights, other values stay.

    Args:
        adapters: The adapters.
        values: Trained tensors by name, those of the adapters included.
        weights: Weights of the model as it was; a trained one of `values` comes first.

    Raises:
        UsageError: A weight is not there, or has another shape.
    """
    result = {name: value for name, value in values.items() if not name.startswith(PREFIX)}
    for adapter in adapters:
        before = result.get(adapter.weight, weights.get(adapter.weight))
        if before is None:
            raise UsageError(
                f"The model has no weight {adapter.weight!r}, for which there is an adapter: is it the right model?"
            )
        result[adapter.weight] = merged(adapter, before, values[adapter.a], values[adapter.b])
    return result


def _named(pattern: str, node: ir.Node, adapter: Adapter) -> bool:
    return matches(pattern, adapter.weight) or matches(pattern, str(node.name))


def _adaptable(node: ir.Node) -> Adapter | None:
    """The adapter that a node could have: its second operand is a float weight, as it is or transposed."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm", "Conv"):
        return None
    value, turned = node.inputs[1], False
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None or producer.domain != "" or producer.op_type not in _PASSED:
            return None
        if producer.op_type == "Transpose":
            turned = not turned
        value = producer.inputs[0]
    if value is None or value.shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return None
    rank = len(value.shape)
    name = str(value.name)
    if node.op_type == "Conv":
        groups = node.attributes.get_int("group", 1)
        return (
            None
            if turned or rank < 3
            else Adapter(name, f"{PREFIX}{name}/A", f"{PREFIX}{name}/B", "conv", False, groups)
        )
    flags = [node.attributes.get_int(name, 0) != 0 for name in ("transA", "transB")]
    if rank != 2 or flags[0]:
        return None
    turned ^= flags[1]
    return Adapter(name, f"{PREFIX}{name}/A", f"{PREFIX}{name}/B", "matmul", turned)


def _insert(graph: ir.Graph, node: ir.Node, adapter: Adapter, rank: int, seed: int) -> None:
    weight = graph.initializers[adapter.weight]
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None and weight.shape is not None and weight.dtype is not None  # noqa: PT018 (for mypy)
    dims = [int(size) for size in weight.shape.numpy()]
    if adapter.form == "conv":
        groups = adapter.groups
        down, up = [groups * rank, *dims[1:]], [dims[0], rank, *[1] * (len(dims) - 2)]
        fan_in = math.prod(dims[1:])
    else:
        inputs, outputs = dims[::-1] if adapter.transposed else dims
        down, up, fan_in = [inputs, rank], [rank, outputs], inputs
    rng = np.random.default_rng([zlib.crc32(adapter.weight.encode()), seed % 2**64])
    dtype = weight.dtype.numpy()
    a = _parameter(graph, adapter.a, rng.uniform(-1, 1, down).astype(np.float32) / math.sqrt(fan_in), dtype)
    b = _parameter(graph, adapter.b, np.zeros(up, np.float32), dtype)
    # Gemm multiplies its product; what stands beside it must be multiplied alike.
    factor = adapter.scale * (node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0)
    scale = _parameter(graph, f"{PREFIX}{node.name}/scale", np.asarray(factor, np.float32), dtype)
    name = f"{node.name}/lora"
    if adapter.form == "conv":
        low = ir.node("Conv", [x, a], _attributes(node), name=f"{name}/down")
        scaled = ir.node("Mul", [low.outputs[0], scale], name=f"{name}/scale")
        high = ir.node("Conv", [scaled.outputs[0], b], {"group": adapter.groups}, name=f"{name}/up")
    else:
        low = ir.node("MatMul", [x, a], name=f"{name}/down")
        scaled = ir.node("Mul", [low.outputs[0], scale], name=f"{name}/scale")
        high = ir.node("MatMul", [scaled.outputs[0], b], name=f"{name}/up")
    total = ir.node("Add", [y, high.outputs[0]], name=f"{name}/add")
    for new in (low, scaled, high, total):
        new.metadata_props.update(node.metadata_props)
        new.outputs[0].name = str(new.name)
    result = total.outputs[0]
    result.type, result.shape = y.type, y.shape
    users = [(user, index) for user, index in y.uses() if user is not total]
    for user, index in users:
        user.replace_input_with(index, result)
    if y.is_graph_output():
        graph.outputs[:] = [result if value is y else value for value in graph.outputs]
        y.name, result.name = f"{name}/before", y.name
    graph.insert_after(node, [low, scaled, high, total])


def _attributes(node: ir.Node) -> dict[str, Any]:
    """Those of a convolution, for another one on the same input."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _parameter(graph: ir.Graph, name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> ir.Value:
    if name not in graph.initializers:
        add_initializer(graph, name, values.astype(dtype))
    return graph.initializers[name]
