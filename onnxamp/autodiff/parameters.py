"""Which tensors of a model are parameters: what trains, what may, and what never does."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxamp.autodiff.emitter import FLOATS
from onnxamp.autodiff.provenance import folded_from, looks_learned, named, noted
from onnxamp.model.units import producer

# Positions that hold parameters: weights and biases of heavy operators, scales and biases of normalizations, tables.
_SLOTS: dict[tuple[str, str], dict[int, str]] = {
    ("", "Conv"): {1: "weight", 2: "bias"},
    ("", "ConvTranspose"): {1: "weight", 2: "bias"},
    ("", "DeformConv"): {1: "weight", 3: "bias"},
    ("", "Gemm"): {0: "weight", 1: "weight", 2: "bias"},
    ("", "MatMul"): {0: "weight", 1: "weight"},
    ("", "LSTM"): {1: "weight", 2: "weight", 3: "bias", 7: "weight"},
    ("", "GRU"): {1: "weight", 2: "weight", 3: "bias"},
    ("", "RNN"): {1: "weight", 2: "weight", 3: "bias"},
    ("", "BatchNormalization"): {1: "scale", 2: "bias"},
    ("", "InstanceNormalization"): {1: "scale", 2: "bias"},
    ("", "LayerNormalization"): {1: "scale", 2: "bias"},
    ("", "GroupNormalization"): {1: "scale", 2: "bias"},
    ("", "RMSNormalization"): {1: "scale"},
    ("", "PRelu"): {1: "slope"},
    ("", "Gather"): {0: "table"},
    ("com.microsoft", "FusedMatMul"): {0: "weight", 1: "weight"},
    ("com.microsoft", "FusedGemm"): {0: "weight", 1: "weight", 2: "bias"},
    ("com.microsoft", "FusedConv"): {1: "weight", 2: "bias"},
    ("com.microsoft", "GemmFastGelu"): {1: "weight", 2: "bias"},
    ("com.microsoft", "BiasGelu"): {1: "bias"},
    ("com.microsoft", "FastGelu"): {1: "bias"},
    ("com.microsoft", "Attention"): {1: "weight", 2: "bias"},
    ("com.microsoft", "SkipLayerNormalization"): {2: "scale", 3: "bias", 4: "bias"},
    ("com.microsoft", "SimplifiedLayerNormalization"): {1: "scale"},
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): {2: "scale", 3: "bias"},
    ("", "SimplifiedLayerNormalization"): {1: "scale"},
    ("com.microsoft", "EmbedLayerNormalization"): {2: "table", 3: "table", 4: "table", 5: "scale", 6: "bias"},
    ("com.microsoft", "GroupNorm"): {1: "scale", 2: "bias"},
}

# Operands that are statistics, bounds or settings: never trained.
_BUFFERS: dict[tuple[str, str], dict[int, str]] = {
    ("", "BatchNormalization"): {3: "running mean", 4: "running variance"},
}
_SETTINGS: dict[str, frozenset[int]] = {
    "Clip": frozenset({1, 2}),
    "Pad": frozenset({2}),
    "Resize": frozenset({1, 2}),
    "Upsample": frozenset({1}),
    "Dropout": frozenset({1}),
    "OneHot": frozenset({2}),
    "Range": frozenset({0, 1, 2}),
    "QuantizeLinear": frozenset({0, 1}),
    "DequantizeLinear": frozenset({0, 1}),
    "CastLike": frozenset({1}),
    "NonMaxSuppression": frozenset({0, 1, 2, 3, 4}),
}

# What a parameter may pass on its way to its slot.
_PASSED = frozenset({"Identity", "Transpose", "Reshape", "Cast", "Unsqueeze", "Squeeze", "Flatten"})
# What exporters reorder the gates of recurrent weights with.
_REGROUPED = frozenset({"Slice", "Concat"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
# Places that hold parameters and constants alike: the numbers must tell.
_PLACES = frozenset({"position table", "token"})
# What such a tensor may also pass: cut to the length of the sample, repeated for each sample.
_FITTED = frozenset({"Slice", "Expand", "Tile"})
BY_NUMBERS = "by its numbers"
"""In the reason of a parameter that is one by its place and its numbers."""

# Below this number of elements equal content says nothing about ties.
_TIE_ELEMENTS = 64


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a tensor is used, after Identity, Transpose, Reshape and Cast.

    Attributes:
        node: Name of the node.
        op: Its operator.
        position: Input of the node.
        role: ``weight``, ``bias``, ``scale``, ``slope``, ``table``; ``running mean``, ``running variance``, ``setting``;
            ``position table``, ``token``; or empty.
    """

    node: str
    op: str
    position: int
    role: str


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
        numbers: Single numbers among `unsure` that are called like a variable (a temperature), in a file whose exporter notes nothing, or
            were computed by the exporter from what is: name → what it was computed from, or empty.
    """

    trainable: tuple[Parameter, ...]
    unsure: tuple[Parameter, ...]
    frozen: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    tied: dict[str, tuple[str, ...]]
    copies: tuple[tuple[str, ...], ...]
    numbers: dict[str, str]


def classify(model: ir.Model) -> Parameters:
    """Sort the float initializers of a typed model (functions inlined) by what they are.

    Trainable are those that reach a parameter slot (weights and biases of heavy operators and normalizations, PRelu,
    Gather data) through Identity, Transpose, Reshape or Cast, the last-axis biases of Add, the last-axis scales of a
    normalization that is written out (Mul of x / √v), and scale and bias of a GroupNorm that is written as InstanceNormalization
    between two Reshapes, whose own ones and zeros are frozen. Weights of recurrent operators may also pass Slice and Concat, with
    which exporters reorder their gates. Tables that Add adds to every sample alike (positions) and vectors that Concat puts in
    front (class tokens) are trainable if their numbers look learned (`provenance`). What the exporter itself notes (PyTorch with
    `dynamo=True`) goes before all of it. Initializers of subgraphs are constants.
    """
    classes: dict[str, list[Parameter]] = {"trainable": [], "unsure": [], "frozen": [], "buffers": []}
    tied: dict[str, tuple[str, ...]] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        uses = tuple(dict.fromkeys(_uses(value)))
        shape = tuple(int(size) for size in tensor.shape.numpy())
        kind, reason = ("frozen", "no elements") if 0 in shape else _class(uses)
        if kind in ("trainable", "unsure") and (parameter := noted(value)) is not None:
            kind = "trainable" if parameter else "frozen"
            reason = f"{reason}, {'a parameter' if parameter else 'no parameter'} in PyTorch"
        elif kind == "unsure" and (role := _placed(uses)) and looks_learned(tensor.numpy()):
            kind, reason = "trainable", f"{role} of {uses[0].op}, {BY_NUMBERS}"
        classes[kind].append(Parameter(str(value.name), tensor.dtype, shape, uses, reason))
        nodes = tuple(dict.fromkeys(use.node for use in uses))
        if kind == "trainable" and len(nodes) > 1:
            tied[str(value.name)] = nodes
    return Parameters(
        trainable=tuple(classes["trainable"]),
        unsure=tuple(classes["unsure"]),
        frozen=tuple(classes["frozen"]),
        buffers=tuple(classes["buffers"]),
        tied=tied,
        copies=_copies(model, classes["trainable"]),
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
        if use.role in ("weight", "bias", "scale", "slope", "table"):
            return "trainable", f"{use.role} of {use.op}"
    if not uses:
        return "frozen", "not used"
    if all(role.startswith("running") for role in roles):
        return "buffers", roles[0]
    if all(role.startswith("running") or role == "setting" for role in roles):
        return "frozen", f"setting of {uses[0].op}"
    first = next(use for use in uses if not use.role or use.role in _PLACES)
    return "unsure", f"operand of {first.op}"


def _placed(uses: tuple[Use, ...]) -> str:
    """What a tensor may be by the place of its uses, if its numbers agree; empty if they all say nothing."""
    roles = {use.role for use in uses}
    return roles.pop() if len(roles) == 1 and roles <= _PLACES else ""


def _uses(value: ir.Value) -> Iterator[Use]:
    for node, position in value.uses():
        if node.domain == "" and node.op_type in _PASSED and position == 0:
            yield from _uses(node.outputs[0])
            continue
        if node.domain == "" and node.op_type in _REGROUPED:
            uses = list(_uses(node.outputs[0]))
            if uses and all(use.op in _RECURRENT and use.role for use in uses):
                yield from uses
                continue
        if node.domain == "" and node.op_type in _FITTED and position == 0:
            uses = list(_uses(node.outputs[0]))
            if uses and all(use.role in _PLACES for use in uses):
                yield from uses
                continue
        role = _role(node, position, value)
        yield Use(node.name or str(node.outputs[0].name), node.op_type, position, role)


def _role(node: ir.Node, position: int, value: ir.Value) -> str:
    key = (node.domain, node.op_type)
    if key == ("", "InstanceNormalization") and _is_group_constant(node, position, value):
        return "setting"
    if position in _SLOTS.get(key, {}):
        return _SLOTS[key][position]
    if position in _BUFFERS.get(key, {}):
        return _BUFFERS[key][position]
    if node.domain == "" and position in _SETTINGS.get(node.op_type, frozenset()):
        return "setting"
    if node.domain == "" and node.op_type == "Einsum":
        return "weight"
    if key == ("", "Add") and _is_last_axis(node, value):
        return "bias"
    if key == ("", "Mul") and _is_last_axis(node, value) and _is_normalized(node.inputs[1 - position]):
        return "scale"
    if key in (("", "Mul"), ("", "Add")) and _is_channels(node, value) and _is_grouped(node.inputs[1 - position]):
        return "scale" if node.op_type == "Mul" else "bias"
    if key == ("", "Add") and _is_table(node, value):
        return "position table"
    if key == ("", "Concat") and any(_is_activation(other) for other in node.inputs):
        return "token"
    return ""


def _is_group_constant(node: ir.Node, position: int, value: ir.Value) -> bool:
    """Whether `value` is a scale of ones or a bias of zeros of an InstanceNormalization between two Reshapes.

    PyTorch's TorchScript exporter writes GroupNorm so, with a Mul and an Add behind it that hold the parameters.
    """
    around = [producer(node.inputs[0]), *(reader for reader, _ in node.outputs[0].uses())]
    if len(around) < 2 or any(other is None or other.op_type != "Reshape" for other in around):
        return False
    tensor = value.const_value
    if noted(value):  # a fresh InstanceNorm that PyTorch's exporter says is one
        return False
    return tensor is not None and bool((tensor.numpy() == (1 if position == 1 else 0)).all())


def _is_channels(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` is one number for each channel (axis 1) of the result: [C, 1, ...]."""
    result = node.outputs[0].shape
    if (
        value.shape is None
        or result is None
        or len(result) < 3
        or len(value.shape) not in (len(result) - 1, len(result))
    ):
        return False
    first, *rest = list(value.shape)[-(len(result) - 1) :]
    ahead = list(value.shape)[: -(len(result) - 1)]
    return first == result[1] and all(size == 1 for size in (*rest, *ahead))


def _is_grouped(value: ir.Value | None) -> bool:
    """Whether `value` is the Reshape of an InstanceNormalization, looking through Cast and a Mul by the scale."""
    node = _producer(value)
    if node is not None and node.op_type == "Mul":
        return any(_is_grouped(factor) for factor in node.inputs)
    source = _producer(node.inputs[0]) if node is not None and node.op_type == "Reshape" else None
    return source is not None and source.op_type == "InstanceNormalization"


def _is_table(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` has several axes of the result of an Add, and is the same for every sample."""
    result = node.outputs[0].shape
    if value.shape is None or result is None or len(value.shape) > len(result):
        return False
    axes = list(zip(reversed(list(value.shape)), reversed(list(result)), strict=False))
    own = [size for size, whole in axes if size != 1 and size == whole]
    alike = len(value.shape) < len(result) or any(size == 1 and whole != 1 for size, whole in axes)
    return len(own) > 1 and alike and all(size in (1, whole) for size, whole in axes)


def _is_activation(value: ir.Value | None) -> bool:
    """Whether a value depends on an input of the model."""
    waiting, seen = [value], set()
    while waiting:
        source = waiting.pop()
        if source is None or source in seen:
            continue
        seen.add(source)
        if source.is_graph_input() and not source.is_initializer():
            return True
        if (node := source.producer()) is not None and node.op_type not in ("Shape", "Size"):
            waiting += node.inputs
    return False


def _is_last_axis(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` is a vector of more than one element along the last axis of the result."""
    result = node.outputs[0].shape
    if value.shape is None or result is None or len(value.shape) != 1 or not len(result):
        return False
    return isinstance(value.shape[0], int) and value.shape[0] > 1 and value.shape[0] == result[-1]


def _is_normalized(value: ir.Value | None) -> bool:
    """Whether `value` is x / √v or x · (1 / √v), looking through Cast."""
    node = _producer(value)
    if node is None or node.op_type not in ("Div", "Mul"):
        return False
    divisors = node.inputs[1:] if node.op_type == "Div" else node.inputs
    for divisor in divisors:
        source = _producer(divisor)
        if node.op_type == "Mul" and source is not None:
            if source.op_type not in ("Reciprocal", "Pow", "Div"):
                continue
            if source.op_type == "Pow":
                return True
            source = _producer(source.inputs[-1])
        if source is not None and source.op_type == "Sqrt":
            return True
    return False


def _producer(value: ir.Value | None) -> ir.Node | None:
    node = producer(value)
    while node is not None and node.op_type == "Cast":
        node = producer(node.inputs[0])
    return node


def _copies(model: ir.Model, trainable: list[Parameter]) -> tuple[tuple[str, ...], ...]:
    groups: dict[bytes, list[str]] = {}
    for parameter in trainable:
        if parameter.size < _TIE_ELEMENTS:
            continue
        tensor = model.graph.initializers[parameter.name].const_value
        assert tensor is not None
        array = tensor.numpy()
        if (array == array.reshape(-1)[0]).all():
            continue  # all ones, all zeros: fresh, not tied
        digests = [hashlib.sha256(array.tobytes()).digest()]
        if array.ndim == 2:
            digests.append(hashlib.sha256(array.T.tobytes()).digest())
        groups.setdefault(min(digests), []).append(parameter.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
