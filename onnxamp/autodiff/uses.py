"""Where tensors of a graph are used, and as what: weights, scales, tables, settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

import onnx_ir as ir

from onnxamp.autodiff.provenance import noted
from onnxamp.autodiff.varying import varying
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
    ("", "GatherND"): {0: "table"},
    ("", "GatherElements"): {0: "table"},
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

NORMALIZATIONS = frozenset(
    {
        "BatchNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "RMSNormalization",
    }
)
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
    **{name: frozenset({0, 1}) for name in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")},
    "NonMaxSuppression": frozenset({0, 1, 2, 3, 4}),
}

# What a parameter may pass on its way to its slot.
_PASSED = frozenset({"Identity", "Transpose", "Reshape", "Cast", "Unsqueeze", "Squeeze", "Flatten"})
# What weights are cut, joined and reordered with (the gates of recurrent ones, for example), before they are used.
_MOVED = frozenset({"Slice", "Split", "Concat", "Pad", "Expand", "Tile"})
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
PARAMETERS = frozenset({"weight", "bias", "scale", "slope", "table"})
# What a weight is computed from: direction and gain of weight normalization, for example.
COMPUTED = "part of a computed weight"
# Places that hold parameters and constants alike: the numbers must tell.
CHANNELS = "factor or summand of channels"
PLACES = frozenset({"position table", "token", CHANNELS, COMPUTED})
# What such a tensor may also pass: cut to the length of the sample, repeated for each sample.
_FITTED = frozenset({"Slice", "Expand", "Tile"})


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a tensor is used, after Identity, Transpose, Reshape and Cast.

    Attributes:
        node: Name of the node.
        op: Its operator.
        position: Input of the node.
        role: ``weight``, ``bias``, ``scale``, ``slope``, ``table``; ``running mean``, ``running variance``, ``setting``;
            one of `PLACES`; or empty.
    """

    node: str
    op: str
    position: int
    role: str


class Uses:
    """The uses of the tensors of a typed graph; each is looked for once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._changing = varying(graph)
        self._found: dict[ir.Value, tuple[Use, ...]] = {}

    def of(self, value: ir.Value) -> tuple[Use, ...]:
        """Where a tensor is used, in the order of the graph."""
        if value not in self._found:
            self._found[value] = tuple(dict.fromkeys(self._walk(value)))
        return self._found[value]

    def _walk(self, value: ir.Value) -> Iterator[Use]:
        for node, position in value.uses():
            if node.domain == "" and node.op_type in _PASSED and position == 0:
                yield from self.of(node.outputs[0])
                continue
            if node.domain == "" and node.op_type in _FITTED and position == 0:
                uses = self.of(node.outputs[0])
                if uses and all(use.role in PLACES for use in uses):
                    yield from uses
                    continue
            role = _role(node, position, value, self._changing)
            if not role and node.graph is value.graph and self._changing.isdisjoint(node.outputs):
                yield from self._computing(node, position, value)
                continue
            yield Use(node.name or str(node.outputs[0].name), node.op_type, position, role)

    def _computing(self, node: ir.Node, position: int, value: ir.Value) -> Iterator[Use]:
        """Uses of a tensor by a node that computes something from initializers alone: where the result is a parameter, so is the tensor.

        In arithmetic that is a tensor of the result's size, or a vector (a gain for each channel); the numbers must agree.
        """
        found = [use for result in node.outputs for use in self.of(result) if use.role in PARAMETERS | PLACES]
        if found and node.op_type in _MOVED and (position == 0 or node.op_type == "Concat"):
            yield from found
            return
        axes = _long_axes(value)
        part = axes == _long_axes(node.outputs[0]) or len(axes) == 1
        role = COMPUTED if found and part else ""
        yield Use(node.name or str(node.outputs[0].name), node.op_type, position, role)


def _long_axes(value: ir.Value) -> list[int]:
    """The fixed sizes of a value that are not 1; the others are those of a batch, for which a learned query is repeated."""
    return [size for size in value.shape or () if isinstance(size, int) and size != 1]


def _role(node: ir.Node, position: int, value: ir.Value, changing: Set[ir.Value]) -> str:
    key = (node.domain, node.op_type)
    if node.op_type in _PRODUCTS and changing.isdisjoint(node.outputs) and (position < 2 or node.op_type == "Einsum"):
        return COMPUTED if len(_long_axes(value)) > 1 else ""
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
    other = node.inputs[1 - position] if key in (("", "Mul"), ("", "Add")) else None
    if other is not None and other in changing and _is_each_channel(node, position, value):
        return CHANNELS
    if key == ("", "Add") and _is_table(node, value):
        return "position table"
    if key == ("", "Concat") and not changing.isdisjoint(node.inputs):
        return "token"
    return ""


def _is_group_constant(node: ir.Node, position: int, value: ir.Value) -> bool:
    """Whether `value` is a scale of ones or a bias of zeros of an InstanceNormalization that is part of a GroupNorm.

    PyTorch's exporters write GroupNorm so, between a Reshape to [N, groups, -1] and one back (left out where they do nothing: one group
    for each channel), with a Mul and an Add behind it that hold the parameters.
    """
    tensor = value.const_value
    if tensor is None or noted(value) or not (tensor.numpy() == (1 if position == 1 else 0)).all():
        return False  # a fresh InstanceNorm that PyTorch's exporter says is one is no part of a GroupNorm
    source, readers = producer(node.inputs[0]), [reader for reader, _ in node.outputs[0].uses()]
    if source is not None and source.op_type == "Reshape" and all(reader.op_type == "Reshape" for reader in readers):
        return bool(readers) and _is_by_groups(node)
    scaled = [
        reader.op_type == "Mul" and any(v and _is_channels(reader, v) for v in reader.inputs) for reader in readers
    ]
    return bool(scaled) and all(scaled)


def _is_by_groups(node: ir.Node) -> bool:
    """Whether a normalization between Reshapes has the form of one by groups, [N, groups, -1], and not of images or videos."""
    value = node.inputs[0]
    return value is not None and value.shape is not None and len(value.shape) == 3


def _is_channels(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` is one number for each channel (axis 1) of the result: [C, 1, ...]."""
    result = node.outputs[0].shape
    if (
        value.shape is None
        or result is None
        or len(result) < 2
        or len(value.shape) not in (len(result) - 1, len(result))
    ):
        return False
    first, *rest = list(value.shape)[-(len(result) - 1) :]
    ahead = list(value.shape)[: -(len(result) - 1)]
    return first == result[1] and all(size == 1 for size in (*rest, *ahead))


def _is_each_channel(node: ir.Node, position: int, value: ir.Value) -> bool:
    """Whether `value` is one number for each channel (axis 1 or the last) of the other operand: a layer scale, a bias."""
    other = node.inputs[1 - position]
    if value.shape is None or other is None or other.shape is None or len(other.shape) < max(len(value.shape), 2):
        return False
    sizes = [1] * (len(other.shape) - len(value.shape)) + list(value.shape)
    long = [axis for axis, size in enumerate(sizes) if size != 1]
    return len(long) == 1 and long[0] in (1, len(sizes) - 1) and sizes[long[0]] == other.shape[long[0]]


def _is_grouped(value: ir.Value | None) -> bool:
    """Whether `value` is a GroupNorm before its bias, or before its scale too, looking through Cast."""
    node = _producer(value)
    if node is None or node.op_type != "Mul":
        return _is_group_norm(node)
    factors = zip(node.inputs, reversed(node.inputs), strict=True)
    return any(
        scale is not None and _is_channels(node, scale) and _is_group_norm(_producer(one)) for one, scale in factors
    )


def _is_group_norm(node: ir.Node | None) -> bool:
    """Whether a node is the Reshape behind an InstanceNormalization that is part of a GroupNorm, or that itself."""
    if node is not None and node.op_type == "Reshape":
        node = _producer(node.inputs[0])
        return node is not None and node.op_type == "InstanceNormalization" and _is_by_groups(node)
    scale = node.inputs[1] if node is not None and node.op_type == "InstanceNormalization" else None
    return node is not None and scale is not None and _is_group_constant(node, 1, scale)


def _is_table(node: ir.Node, value: ir.Value) -> bool:
    """Whether `value` has several axes of the result of an Add, and is the same for every sample."""
    result = node.outputs[0].shape
    if value.shape is None or result is None or len(value.shape) > len(result):
        return False
    axes = list(zip(reversed(list(value.shape)), reversed(list(result)), strict=False))
    own = [size for size, whole in axes if size != 1 and size == whole]
    alike = len(value.shape) < len(result) or any(size == 1 and whole != 1 for size, whole in axes)
    return len(own) > 1 and alike and all(size in (1, whole) for size, whole in axes)


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
