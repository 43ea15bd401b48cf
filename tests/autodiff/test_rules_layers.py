"""Gradient rules of activations, normalizations, convolutions, pooling and gathers against central differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from operator_case import case, ints


def mvn(x, axes):
    centered = x - x.mean(axes, keepdim=True)
    return centered / ((centered**2).mean(axes, keepdim=True).sqrt() + 1e-9)


ACTIVATIONS = [
    *(case(op, (3, 5), low=-4.0, high=4.0) for op in ("Relu", "Sigmoid", "Softplus", "Softsign", "HardSwish", "Mish")),
    *(case(op, (3, 5)) for op in ("LeakyRelu", "Elu", "Selu", "ThresholdedRelu", "Shrink")),
    case("LeakyRelu", (3, 5), alpha=0.3),
    case("Elu", (3, 5), alpha=0.7),
    case("Celu", (3, 5), alpha=1.5, oracle=lambda x: F.celu(x, 1.5)),
    case("Selu", (3, 5), alpha=1.1, gamma=0.9),
    case("HardSigmoid", (3, 5), low=-4.0, high=4.0, alpha=0.3),
    case("ThresholdedRelu", (3, 5), alpha=0.4),
    case("Gelu", (3, 5), opset=20, oracle=F.gelu),
    case("Gelu", (3, 5), opset=20, approximate="tanh"),
    case("Gelu", (3, 5), domain="com.microsoft", oracle=F.gelu),
    case("BiasGelu", (3, 5), (5,), domain="com.microsoft", oracle=lambda x, b: F.gelu(x + b)),
    case("FastGelu", (3, 5), domain="com.microsoft", oracle=lambda x: F.gelu(x, approximate="tanh")),
    case("FastGelu", (3, 5), (5,), domain="com.microsoft", oracle=lambda x, b: F.gelu(x + b, approximate="tanh")),
    case("QuickGelu", (3, 5), domain="com.microsoft", oracle=lambda x: x * (1.702 * x).sigmoid()),
    case("Swish", (3, 5), opset=24, alpha=1.5, oracle=lambda x: x * (1.5 * x).sigmoid()),
    case("PRelu", (2, 3, 4), (3, 1)),
    case("PRelu", (2, 3), (1,)),
    case("Dropout", (2, 3)),
    case("Dropout", (2, 3), np.float64(0.3), np.asarray(False)),
]
GATHERS = [
    case("Gather", (5, 3), np.asarray([[0, 2], [2, -1]])),
    case("Gather", (2, 5, 3), np.asarray([4, 0, 4, 1]), axis=1),
    case("Gather", (2, 5), np.asarray([4, 0, 4], np.int32), axis=-1),
    case("Gather", (2, 5, 3), np.asarray(1), axis=1),
    case("Gather", (2, 5, 3), np.asarray([-1]), axis=1),
    case("Gather", (2, 5, 3), np.asarray([[3]]), axis=1),
    case("Gather", (5, 3), np.asarray([[[-2]]])),
    case("GatherElements", (3, 4), np.asarray([[0, 0, 1, 2], [2, 0, 1, 2]])),
    case("GatherElements", (3, 4), np.asarray([[0, 3], [1, 1], [2, 2]]), axis=1),
    case("GatherND", (3, 4), np.asarray([[0, 1], [2, 3], [0, 1]])),
    case("GatherND", (3, 4, 2), np.asarray([[0], [2], [0]])),
    case("GatherND", (2, 3, 2), np.asarray([[1], [0]]), batch_dims=1),
    case("ScatterElements", (3, 4), np.asarray([[0, 1, 2, 1]]), (1, 4)),
    case("ScatterElements", (3, 4), np.asarray([[0], [1], [1]]), (3, 1), axis=1, reduction="add"),
    case("ScatterND", (4, 3), np.asarray([[1], [3]]), (2, 3)),
    case("ScatterND", (4, 3), np.asarray([[1], [1]]), (2, 3), reduction="add"),
    case("TopK", (3, 5), ints(2), outputs=2, symbolic="batch"),
    case("TopK", (3, 5), ints(2), outputs=2, axis=0, largest=0),
    case("Compress", (4, 3), np.asarray([True, False, True, True]), axis=0, symbolic=""),
    case("Compress", (2, 3), np.asarray([True, False, False, True, True]), symbolic=""),
]
NORMS = [
    case("LayerNormalization", (2, 3, 4), (4,), (4,)),
    case("LayerNormalization", (2, 3, 4), (3, 4), axis=1, epsilon=0.1),
    case("RMSNormalization", (2, 3, 4), (4,), opset=23),
    case("RMSNormalization", (2, 3, 4), (3, 4), axis=1, opset=23, epsilon=0.1),
    case("BatchNormalization", (2, 3, 4, 2), (3,), (3,), np.asarray([0.1, 0.2, -0.3]), np.asarray([1.0, 0.5, 2.0])),
    case(
        "BatchNormalization", (4, 3), (3,), (3,), np.asarray([0.1, 0.2, -0.3]), np.asarray([1.0, 0.5, 2.0]), epsilon=0.1
    ),
    case("BatchNormalization", (2, 3, 4, 2), (3,), (3,), (3,), (3,), low=0.3, symbolic="batch"),
    case("InstanceNormalization", (2, 3, 4, 2), (3,), (3,), symbolic="batch"),
    case("InstanceNormalization", (2, 3, 5), (3,), (3,), epsilon=0.1),
    case(
        "GroupNormalization",
        (2, 4, 3),
        (4,),
        (4,),
        num_groups=2,
        opset=21,
        symbolic="batch",
        oracle=lambda x, s, b: F.group_norm(x, 2, s, b),
    ),
    case(
        "GroupNormalization",
        (2, 6, 3, 2),
        (6,),
        (6,),
        num_groups=2,
        opset=21,
        symbolic="space",
        epsilon=0.1,
        oracle=lambda x, s, b: F.group_norm(x, 2, s, b, 0.1),
    ),
    case("LpNormalization", (3, 4)),
    case("LpNormalization", (3, 4), p=1, axis=0, oracle=lambda x: F.normalize(x, 1, 0)),
    case("MeanVarianceNormalization", (2, 3, 2, 2), axes=[0, 2, 3], oracle=lambda x: mvn(x, (0, 2, 3))),
    case("MeanVarianceNormalization", (2, 3, 4), axes=[2], oracle=lambda x: mvn(x, (2,))),
    case("LRN", (2, 5, 2, 2), size=3, alpha=0.3, oracle=lambda x: F.local_response_norm(x, 3, 0.3)),
    case(
        "LRN",
        (2, 5, 2, 3),
        size=5,
        alpha=0.3,
        beta=0.5,
        bias=2.0,
        symbolic="batch",
        oracle=lambda x: F.local_response_norm(x, 5, 0.3, 0.5, 2.0),
    ),
]


def conv(x, w, *bias, **options):
    symbolic = "batch" if "auto_pad" in options else "batch space"
    return case("Conv", x, w, *bias, symbolic=symbolic, **options)


CONVS = [
    conv((2, 3, 5, 6), (4, 3, 3, 3), (4,)),
    conv((2, 3, 5, 6), (4, 3, 3, 3), pads=[1, 1, 1, 1]),
    conv((2, 3, 5, 6), (4, 3, 3, 2), pads=[0, 1, 2, 0], strides=[2, 1]),
    conv((2, 3, 6, 6), (4, 3, 3, 3), (4,), pads=[1, 1, 1, 1], strides=[2, 2]),
    conv((2, 3, 7, 7), (2, 3, 3, 3), dilations=[2, 2], pads=[2, 1, 0, 2]),
    conv((2, 3, 7, 7), (2, 3, 3, 3), dilations=[2, 1], strides=[2, 3], pads=[2, 1, 0, 2]),
    conv(
        (2, 4, 5, 5), (6, 2, 3, 3), group=2, pads=[1, 1, 1, 1], oracle=lambda x, w: F.conv2d(x, w, None, 1, 1, groups=2)
    ),
    conv(
        (2, 4, 5, 5), (6, 2, 3, 3), (6,), group=2, strides=[2, 2], oracle=lambda x, w, b: F.conv2d(x, w, b, 2, groups=2)
    ),
    conv((2, 4, 5, 5), (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1]),
    conv((2, 4, 5, 5), (4, 1, 3, 3), group=4, strides=[2, 2], pads=[1, 0, 0, 1]),
    conv((2, 4, 5, 5), (8, 1, 3, 3), group=4),
    conv((2, 3, 4, 4), (5, 3, 1, 1)),
    conv((2, 3, 4, 4), (5, 3, 1, 1), strides=[2, 2]),
    conv((2, 3, 3, 3), (2, 3, 1, 1), pads=[1, 1, 1, 1]),
    conv((2, 3, 4, 4), (2, 3, 2, 2), pads=[2, 2, 3, 2]),
    conv((2, 3, 5, 5), (2, 3, 3, 3), auto_pad="SAME_UPPER"),
    conv((2, 3, 5, 6), (2, 3, 2, 3), auto_pad="SAME_LOWER", strides=[2, 2]),
    conv((2, 3, 5, 5), (2, 3, 3, 3), auto_pad="VALID"),
    conv((2, 3, 8), (4, 3, 3), strides=[2], pads=[1, 1]),
    conv((2, 2, 3, 4, 3), (2, 2, 2, 2, 2), pads=[1, 0, 0, 0, 1, 0]),
    conv((1, 2, 4, 4, 3), (2, 2, 2, 2, 2), strides=[2, 2, 1]),
    conv((2, 3, 4, 6), (4, 3, 2, 3), (4,), strides=[2, 3]),
    conv((2, 3, 5, 8), (4, 3, 2, 3), strides=[2, 3]),
    conv((2, 3, 4, 7), (4, 3, 3, 3), strides=[3, 3], pads=[1, 0, 0, 2]),
    conv((3, 2, 9), (4, 2, 4), strides=[4]),
    conv((1, 2, 4, 5, 3), (2, 2, 2, 2, 3), strides=[2, 2, 3]),
]


def deconv(x, w, *bias, **options):
    return case("ConvTranspose", x, w, *bias, symbolic="batch", **options)


TRANSPOSED = [
    deconv((2, 3, 3, 4), (3, 2, 3, 3), (2,)),
    deconv((2, 3, 3, 4), (3, 2, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1]),
    deconv((2, 3, 3, 3), (3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    deconv(
        (2, 4, 3, 3),
        (4, 2, 2, 2),
        group=2,
        strides=[2, 2],
        oracle=lambda x, w: F.conv_transpose2d(x, w, None, 2, groups=2),
    ),
    deconv((2, 3, 4), (3, 2, 3), dilations=[2]),
]


def pool(op, x, **options):
    return case(op, x, symbolic=options.pop("symbolic", "batch"), **options)


POOLS = [
    pool("AveragePool", (2, 3, 4, 6), kernel_shape=[2, 2], strides=[2, 2]),
    pool("AveragePool", (2, 3, 5, 5), kernel_shape=[3, 2], strides=[2, 1]),
    pool("AveragePool", (2, 3, 5, 5), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    pool("AveragePool", (2, 3, 5, 5), kernel_shape=[3, 3], pads=[1, 0, 1, 1], strides=[2, 2], count_include_pad=1),
    pool(
        "AveragePool",
        (2, 3, 6, 6),
        kernel_shape=[3, 3],
        strides=[2, 2],
        ceil_mode=1,
        oracle=lambda x: F.avg_pool2d(x, 3, 2, 0, True),
    ),
    pool(
        "AveragePool",
        (2, 3, 6, 6),
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        ceil_mode=1,
        count_include_pad=1,
        oracle=lambda x: F.avg_pool2d(x, 3, 2, 1, True),
        opset=19,
    ),
    pool(
        "AveragePool",
        (2, 3, 7),
        kernel_shape=[3],
        opset=19,
        dilations=[2],
        oracle=lambda x: F.conv1d(x, torch.full((3, 1, 3), 1 / 3, dtype=x.dtype), dilation=2, groups=3),
    ),
    pool(
        "AveragePool",
        (2, 3, 5, 5),
        kernel_shape=[2, 2],
        auto_pad="SAME_UPPER",
        strides=[2, 2],
        oracle=lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    ),
    pool("LpPool", (2, 2, 4, 4), kernel_shape=[2, 2], p=2, oracle=lambda x: F.lp_pool2d(x, 2, 2, 1)),
    pool("LpPool", (2, 2, 5), kernel_shape=[3], p=3, low=0.2, oracle=lambda x: F.lp_pool1d(x, 3, 3, 1)),
    pool("MaxPool", (2, 3, 4, 6), kernel_shape=[2, 2], strides=[2, 2], runner="ort"),
    pool("MaxPool", (2, 3, 5, 5), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], runner="ort"),
    pool("MaxPool", (2, 3, 5, 5), kernel_shape=[3, 3], runner="ort"),
    pool("MaxPool", (2, 3, 7), kernel_shape=[2], strides=[2], ceil_mode=1, runner="ort"),
    pool("MaxPool", (1, 2, 4, 4, 4), kernel_shape=[2, 2, 2], dilations=[2, 1, 1], runner="ort"),
    *(pool(op, (2, 3, 3, 4), symbolic="all") for op in ("GlobalAveragePool", "GlobalMaxPool")),
    pool("GlobalLpPool", (2, 3, 3, 4), symbolic="all", p=2, oracle=lambda x: x.pow(2).sum((2, 3), keepdim=True).sqrt()),
    pool(
        "GlobalLpPool",
        (2, 3, 3, 4),
        symbolic="all",
        p=3,
        low=0.1,
        oracle=lambda x: x.pow(3).sum((2, 3), keepdim=True) ** (1 / 3),
    ),
]

CASES = ACTIVATIONS + GATHERS + NORMS + CONVS + TRANSPOSED + POOLS


@pytest.mark.parametrize("case", CASES, ids=lambda item: item.id)
def test_rule(check_case, case):
    check_case(case)


def test_number_of_cases():
    assert len(CASES) == 116
