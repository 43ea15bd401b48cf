"""Which tensors of a model are parameters: what trains, what may, and what never does."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.provenance import (
    folded_from,
    follows_formula,
    is_literal,
    looks_learned,
    module_of,
    named,
    noted,
    statistic_of,
)
from onnxamp.autodiff.uses import CHANNELS, COMPUTED, NORMALIZATIONS, PARAMETERS, PLACES, Use, Uses
from onnxamp.model.modules import are_siblings, module_of_node
from onnxamp.model.tensors import content_key, is_distinct

LITERAL = "a constant of the exporter"
"""In the reason of the ones and zeros of a normalization that has no scale or bias of its own."""
BY_NUMBERS = "by its numbers"
"""In the reason of a parameter that is one by its place and its numbers."""
# Fewer channels than this may be those of the data.
_FEW = 8


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One float initializer.

    Attributes:
        name: Its name.
        dtype: Its type.
        shape: Its shape.
        uses: Where it is used.
        reason: Why it is in its class, in a few words.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    uses: tuple[Use, ...]
    reason: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bytes(self) -> int:
        """Bytes in its own type."""
        return int(self.size * self.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """All float initializers of a model by class, each in file order.

    Attributes:
        trainable: They reach a parameter slot.
        unsure: They may be parameters or constants; trained only on request.
        frozen: Settings of operators, quantization parameters, tensors that nothing reads.
        buffers: Statistics (running mean and variance).
        tied: Groups of uses of one tensor: name of the trainable → names of the nodes, where there are several.
        copies: Groups of trainable tensors with equal content, transposed or not: perhaps tied before the export.
        layers: Such groups in the layers of a list, which were copied, and are equal until they train.
        numbers: Single numbers among `unsure` that are called like a variable (a temperature), in a file whose exporter notes nothing, or
            were computed by the exporter from what is: name → what it was computed from, or empty.
    """

    trainable: tuple[Parameter, ...]
    unsure: tuple[Parameter, ...]
    frozen: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    tied: dict[str, tuple[str, ...]]
    copies: tuple[tuple[str, ...], ...]
    layers: tuple[tuple[str, ...], ...]
    numbers: dict[str, str]


def classify(model: ir.Model) -> Parameters:
    """Sort the float initializers of a typed model (functions inlined) by what they are.

    Trainable are those that reach a parameter slot (weights and biases of heavy operators and normalizations, PRelu,
    Gather data) through Identity, Transpose, Reshape or Cast, the last-axis biases of Add, the last-axis scales of a
    normalization that is written out (Mul of x / √v), and scale and bias of a GroupNorm that is written as InstanceNormalization
    between two Reshapes, whose own ones and zeros are frozen. Weights may also be cut and joined on their way (gates of recurrent
    operators). Trainable if their numbers look learned (`provenance`) are tables that Add adds to every sample alike (positions),
    vectors that Concat puts in front (class tokens), named vectors of eight or more channels that Mul or Add takes (layer
    scales), and what a weight is computed from (weight normalization); weights and tables of sines are not trainable. Of a
    normalization that has none of its own in PyTorch, scale and bias are ones and zeros of the exporter, and frozen. Of a
    BatchNormalization that is written out, what is called a running mean or variance is a buffer, and its scale and bias are in
    doubt: frameworks write so what they freeze. What the exporter itself notes (PyTorch with `dynamo=True`) goes before all of it.
    Initializers of subgraphs are constants.
    """
    classes: dict[str, list[Parameter]] = {"trainable": [], "unsure": [], "frozen": [], "buffers": []}
    tied: dict[str, tuple[str, ...]] = {}
    uses_of = Uses(model.graph).of
    notes = any(noted(value) is not None for value in model.graph.initializers.values())
    computed = {str(value.name) for node in model.graph for value in node.outputs}
    normalized = {module for name in model.graph.initializers if (module := statistic_of(name)) is not None}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        uses = uses_of(value)
        shape = tuple(int(size) for size in tensor.shape.numpy())
        kind, reason = ("frozen", "no elements") if 0 in shape else _class(uses)
        if kind in ("trainable", "unsure") and (parameter := noted(value)) is not None:
            kind = "trainable" if parameter else "frozen"
            reason = f"{reason}, {'a parameter' if parameter else 'no parameter'} in PyTorch"
        elif (
            kind == "trainable" and all(use.op in NORMALIZATIONS for use in uses) and is_literal(value, notes, computed)
        ):
            kind, reason = "frozen", f"{reason}, {LITERAL}"
        elif (
            kind == "trainable"
            and all(use.role in ("weight", "table") for use in uses)
            and follows_formula(tensor.numpy())
        ):
            kind, reason = "unsure", f"{reason}, by a formula"
        elif kind == "unsure" and statistic_of(str(value.name)) is not None:
            kind, reason = "buffers", "statistic by its name"
        elif kind == "unsure" and module_of(str(value.name)) in normalized:
            reason = f"{reason}, beside statistics"
        elif kind == "unsure" and (role := _placed(uses, value)) and looks_learned(tensor.numpy()):
            kind, reason = "trainable", f"{role} of {uses[0].op}, {BY_NUMBERS}"
        classes[kind].append(Parameter(str(value.name), tensor.dtype, shape, uses, reason))
        nodes = tuple(dict.fromkeys(use.node for use in uses))
        if kind == "trainable" and len(nodes) > 1:
            tied[str(value.name)] = nodes
    copies, layers = _copies(model, classes["trainable"])
    return Parameters(
        trainable=tuple(classes["trainable"]),
        unsure=tuple(classes["unsure"]),
        frozen=tuple(classes["frozen"]),
        buffers=tuple(classes["buffers"]),
        tied=tied,
        copies=copies,
        layers=layers,
        numbers=_numbers(model, classes["unsure"]),
    )


def _numbers(model: ir.Model, unsure: list[Parameter]) -> dict[str, str]:
    initializers = model.graph.initializers
    notes = any(noted(value) is not None for value in initializers.values())
    found = {}
    for name in (parameter.name for parameter in unsure if parameter.size == 1):
        sources = [source for source in folded_from(initializers[name]) if named(source)]
        if sources or (not notes and named(name)):
            found[name] = ", ".join(sources)
    return found


def _class(uses: tuple[Use, ...]) -> tuple[str, str]:
    roles = [use.role for use in uses]
    for use in uses:
        if use.role in PARAMETERS:
            return "trainable", f"{use.role} of {use.op}"
    if not uses:
        return "frozen", "not used"
    if all(role.startswith("running") for role in roles):
        return "buffers", roles[0]
    if all(role.startswith("running") or role == "setting" for role in roles):
        return "frozen", f"setting of {uses[0].op}"
    first = next(use for use in uses if not use.role or use.role in PLACES)
    return "unsure", f"operand of {first.op}"


def _placed(uses: tuple[Use, ...], value: ir.Value) -> str:
    """What a tensor may be by the place of its uses, if its numbers agree; empty if they all say nothing.

    A few factors may as well be what data are normalized with, and so may any that no framework has named.
    """
    roles = {use.role for use in uses}
    if CHANNELS in roles and (
        not named(str(value.name)) or value.shape is None or max(value.shape.numpy(), default=0) < _FEW
    ):
        return ""
    if COMPUTED in roles:  # a weight's norm is computed from it too
        return COMPUTED
    return roles.pop() if len(roles) == 1 and roles <= PLACES else ""


def _copies(
    model: ir.Model, trainable: list[Parameter]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Groups of equal tensors: those that may have been tied, and those of layers that were copied."""
    groups: dict[str, list[ir.Value]] = {}
    for parameter in trainable:
        value = model.graph.initializers[parameter.name]
        assert value.const_value is not None
        array = value.const_value.numpy()
        if is_distinct(array):
            keys = [content_key(array)] + ([content_key(array.T)] if array.ndim == 2 else [])
            groups.setdefault(min(keys), []).append(value)
    copies: list[tuple[str, ...]] = []
    layers: list[tuple[str, ...]] = []
    for values in groups.values():
        if len(values) > 1:
            modules = [{module_of_node(node) for node, _ in value.uses()} for value in values]
            known = [next(iter(found)) for found in modules if len(found) == 1]
            copied = len(set(known)) == len(values) and are_siblings(known)
            names = tuple(str(value.name) for value in values)
            (layers if copied or are_siblings(names) else copies).append(names)
    return tuple(copies), tuple(layers)
