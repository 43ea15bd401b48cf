"""The opset table: what changed in an operator from one version to the next, and the adapter that says the same in the later one.

A row is for the step to the version that it names, from the version before. A step without a row must only add: types, optional operands,
results or attributes whose default is the old behaviour (`raising` compares the schemas); any other step is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from onnxamp.model.opset import adapters as adapt
from onnxamp.model.opset.editing import Edit


@dataclasses.dataclass(frozen=True)
class Row:
    """One step of one operator.

    Attributes:
        change: What changed, for the docs.
        apply: Says in the later version what the node says in the earlier; raises `OpsetError` if it cannot.
    """

    change: str
    apply: Callable[[Edit], None]


# fmt: off
_CONSUMED = (
    "Abs", "Add", "BatchNormalization", "Ceil", "Clip", "Div", "Dropout", "Elu", "Exp", "Floor", "HardSigmoid", "InstanceNormalization",
    "LeakyRelu", "Log", "Max", "Mean", "Min", "Mul", "Neg", "PRelu", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sub", "Sum", "Tanh",
)
_BROADCAST = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
# fmt: on

ROWS: dict[tuple[str, int], Row] = {
    **{(op, 6): Row("`consumed_inputs`, a hint, is gone", adapt.without("consumed_inputs")) for op in _CONSUMED},
    **{(op, 7): Row("`broadcast` and `axis` give way to numpy's broadcasting", adapt.broadcast) for op in _BROADCAST},
    **{
        (f"Reduce{name}", 18): Row("attribute `axes` becomes an operand", adapt.axes_to_operand) for name in _REDUCTIONS
    },
    ("ReduceSum", 13): Row("attribute `axes` becomes an operand", adapt.axes_to_operand),
    ("Squeeze", 13): Row("attribute `axes` becomes an operand", adapt.axes_to_operand),
    ("Unsqueeze", 13): Row("attribute `axes` becomes an operand", adapt.axes_to_operand),
    **{
        (op, 13): Row("worked on the input flattened at `axis`, default 1; now along `axis`, default -1", adapt.softmax)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
    },
    ("AveragePool", 22): Row("with `ceil_mode`, windows that start in the padding at the end are left out", adapt.pool),
    ("BatchNormalization", 7): Row("`is_test` is gone: the number of results tells", adapt.batch_norm_7),
    ("BatchNormalization", 9): Row("`spatial` is gone: always 1", adapt.must_be("spatial", 1)),
    ("BatchNormalization", 14): Row("`training_mode` tells, no longer the number of results", adapt.batch_norm_14),
    ("Cast", 6): Row("`to` is a number, no longer a name", adapt.cast),
    ("Clip", 11): Row("attributes `min` and `max` become operands", adapt.clip),
    ("Concat", 4): Row("`axis` has no default any more; it was 1", adapt.with_default("axis", 1)),
    ("ConvTranspose", 11): Row("where the odd pixel of implied padding goes", adapt.conv_transpose),
    ("DFT", 20): Row("attribute `axis`, default 1, becomes an operand, default -2", adapt.dft),
    ("Dropout", 7): Row("`is_test` is gone: Dropout infers", adapt.dropout_7),
    ("Dropout", 10): Row("the mask is bool", adapt.dropout_10),
    ("Dropout", 12): Row("attribute `ratio` becomes an operand", adapt.dropout_12),
    ("GRU", 3): Row("default of `direction` spelled right", adapt.direction),
    ("GRU", 7): Row("`output_sequence` is gone: the results tell", adapt.without("output_sequence")),
    ("Gemm", 7): Row("`broadcast` gives way to numpy's broadcasting", adapt.without("broadcast")),
    ("GlobalLpPool", 2): Row("`p` is an integer", adapt.integral("p")),
    ("GridSample", 20): Row("modes renamed: bilinear is linear, bicubic is cubic", adapt.grid_sample),
    ("GroupNormalization", 21): Row("scale and bias by channel, no longer by group", adapt.group_norm),
    ("LSTM", 7): Row("`output_sequence` is gone: the results tell", adapt.without("output_sequence")),
    ("LpPool", 2): Row("`p` is an integer", adapt.integral("p")),
    ("MaxPool", 22): Row("with `ceil_mode`, windows that start in the padding at the end are left out", adapt.pool),
    ("PRelu", 7): Row("the slope is broadcast as in numpy, no longer along the channels", adapt.prelu),
    ("Pad", 2): Row("`paddings` is called `pads`", adapt.renamed("paddings", "pads")),
    ("Pad", 11): Row("attributes `pads` and `value` become operands", adapt.pad),
    ("RNN", 7): Row("`output_sequence` is gone: the results tell", adapt.without("output_sequence")),
    ("Reshape", 5): Row("attribute `shape` becomes an operand", adapt.reshape),
    ("Resize", 11): Row("coordinates were asymmetric and rounded down; roi is an operand", adapt.resize_11),
    ("Resize", 13): Row("tf_half_pixel_for_nn is gone; an empty roi may be left out", adapt.resize_13),
    ("RoiAlign", 16): Row(
        "default of `coordinate_transformation_mode` was output_half_pixel",
        adapt.with_default("coordinate_transformation_mode", "output_half_pixel"),
    ),
    ("Scatter", 11): Row("is called ScatterElements", adapt.called("ScatterElements")),
    ("Selu", 6): Row("more digits in the defaults; `consumed_inputs` is gone", adapt.selu),
    ("Slice", 10): Row("attributes `starts`, `ends` and `axes` become operands", adapt.slice_10),
    ("Split", 2): Row("operand `split` is an attribute; `axis` defaults to 0", adapt.split_2),
    ("Split", 13): Row("attribute `split` becomes an operand", adapt.split_13),
    ("Split", 18): Row("without `split`, `num_outputs` must be given", adapt.split_18),
    ("TopK", 10): Row("attribute `k` becomes an operand", adapt.top_k),
    ("Upsample", 7): Row("`height_scale` and `width_scale` become `scales`; bilinear is linear", adapt.upsample_7),
    ("Upsample", 9): Row("attribute `scales` becomes an operand", adapt.upsample_9),
    ("Upsample", 10): Row("is called Resize", adapt.called("Resize")),
}
