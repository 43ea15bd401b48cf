"""BatchNormalization with batch statistics, as plain operators in FP32.

ONNX Runtime's own training form does not exist on CUDA from opset 14, and on the CPU it gives wrong results in a known case
(microsoft/onnxruntime#29790).

The node is differentiated as a whole and written out afterwards: with d = x − μ, r = 1/√(σ² + ε) and a = γ·r,

    y  = d·a + β
    dx = a·(g − mean g) − d·(a·r²·mean(g·d)),   dγ = r·Σ g·d,   dβ = Σ g

so that d is computed once and nothing else of the size of x is kept from the forward half.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxamp.autodiff import gradient
from onnxamp.autodiff.builder import Builder
from onnxamp.autodiff.registry import Gradients
from onnxamp.training.fragment import FLOAT, Fragment

DOMAIN = "onnxamp.training"
OPERATOR = "BatchStatistics"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A BatchNormalization that uses batch statistics.

    Attributes:
        node: What stands for it until `write_out`: (x, γ, β) → (y, d, μ, σ², r), all FP32; μ, σ² and r of shape [1, C, 1...].
        momentum: Share of the running statistics that a step keeps.
        epsilon: ε.
        running: The running mean and variance, by name.
    """

    node: ir.Node
    momentum: float
    epsilon: float
    running: tuple[str, str]


def replace(op: Fragment, node: ir.Node) -> Trained:
    """Put the stand-in in the place of a BatchNormalization in inference form; running statistics are not read by it."""
    x, scale, bias, mean, variance = node.inputs
    assert x is not None and scale is not None and bias is not None and mean is not None and variance is not None  # noqa: PT018 (for mypy)
    y = node.outputs[0]
    op.section(node.name or str(y.name), dict(node.metadata_props))
    inputs = [op.cast(value, FLOAT) for value in (x, scale, bias)]
    results = op.emit(OPERATOR, inputs, outputs=5, domain=DOMAIN)
    statistics = ir.Shape([1 if axis != 1 else size for axis, size in enumerate(x.shape or ())])
    for value, shape in zip(results, (x.shape, x.shape, statistics, statistics, statistics), strict=True):
        value.type, value.shape = ir.TensorType(FLOAT), shape
    assert y.dtype is not None
    y.replace_all_uses_with(op.cast(results[0], y.dtype), replace_graph_outputs=True)
    stand_in = results[0].producer()
    assert stand_in is not None
    return Trained(
        stand_in,
        node.attributes.get_float("momentum", 0.9),
        node.attributes.get_float("epsilon", 1e-5),
        (_initializer(mean), _initializer(variance)),
    )


def statistics(node: ir.Node) -> tuple[str, str] | None:
    """Names of the running mean and variance of a BatchNormalization, if they are initializers (or Casts of some)."""
    names = [_initializer(value) for value in node.inputs[3:5] if value is not None]
    return (names[0], names[1]) if len(names) == 2 and all(names) else None


def _initializer(value: ir.Value) -> str:
    """The initializer that `value` is, or is cast from; empty if there is none."""
    node = value.producer()
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return str(value.name) if value.is_initializer() else ""


@gradient(OPERATOR, domain=DOMAIN, inputs=(0, 1, 2))
def _batch_statistics(op: Builder, node: ir.Node, g: ir.Value, *_: ir.Value | None) -> Gradients:
    """The formulas above."""
    x, scale, _bias = node.inputs
    assert x is not None and scale is not None  # noqa: PT018 (for mypy)
    _y, centered, _mean, _variance, inverse = node.outputs
    rank = op.rank(x)
    axes = [0, *range(2, rank)]
    product = op.Mul(g, centered)
    dx = None
    if 0 in op.wanted:
        a = op.Mul(op.per_channel(scale, rank), inverse)
        slope = op.Mul(op.Mul(a, op.Mul(inverse, inverse)), op.reduce("ReduceMean", product, axes))
        shifted = op.Sub(g, op.reduce("ReduceMean", g, axes))
        dx = op.Sub(op.Mul(shifted, a), op.Mul(centered, slope))
    dscale = None
    if 1 in op.wanted:
        flat = op.Squeeze(inverse, axes)
        dscale = op.Mul(op.sum(product, axes, keepdims=False), flat)
    return [dx, dscale, op.sum(g, axes, keepdims=False) if 2 in op.wanted else None]


def write_out(op: Fragment, trained: Trained) -> tuple[ir.Value, ir.Value]:
    """Replace the stand-in by its operators; returns the batch mean and the unbiased batch variance, both of shape [C]."""
    node = trained.node
    x, scale, bias = node.inputs
    assert x is not None and scale is not None and bias is not None  # noqa: PT018 (for mypy)
    rank = op.rank(x)
    axes = [0, *range(2, rank)]
    op.section(node.name or OPERATOR, dict(node.metadata_props))
    mean = op.reduce("ReduceMean", x, axes)
    centered = op.Sub(x, mean)
    variance = op.reduce("ReduceMean", op.Mul(centered, centered), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, trained.epsilon)))
    a = op.Mul(op.per_channel(scale, rank), inverse)
    y = op.Add(op.Mul(centered, a), op.per_channel(bias, rank))
    for old, new in zip(node.outputs, (y, centered, mean, variance, inverse), strict=True):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    op.graph.remove(node, safe=True)
    count = op.count(x, axes)
    # PyTorch keeps the unbiased variance; of a single value there is none, then the biased one stays.
    if isinstance(count, ir.Value):
        correction = op.Div(count, op.Max(op.Sub(count, 1.0), op.number(1.0)))
    else:
        correction = op.number(count / max(count - 1, 1))
    return op.Squeeze(mean, axes), op.Mul(op.Squeeze(variance, axes), correction)
