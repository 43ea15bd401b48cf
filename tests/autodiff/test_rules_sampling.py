"""Gradient rules of sampling at fractional positions, Fourier transforms, determinants, scatters and running products."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from operator_case import case, ints

from onnxamp.autodiff import gradient_model


def sampled(mode, padding, corners):
    return lambda x, grid: F.grid_sample(
        x, grid, {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}[mode], padding, bool(corners)
    )


GRIDS = [
    case("GridSample", shape, grid, mode=mode, padding_mode=padding, align_corners=corners, opset=22, low=-1.3, high=1.4,
         symbolic="space", oracle=sampled(mode, padding, corners), frozen=(1,) if mode == "nearest" else (),
         ort=len(shape) == 4 or mode != "cubic")
    for shape, grid in (((2, 2, 4, 5), (2, 3, 2, 2)), ((1, 2, 3, 4, 3), (1, 2, 3, 2, 3)))
    for mode in ("linear", "nearest", "cubic")
    for padding in ("zeros", "border", "reflection")
    for corners in (0, 1)
    if (mode != "cubic" or (len(shape) == 4 and padding != "reflection"))
] + [
    case("GridSample", shape, (2, 3, 2, 2), mode=mode, padding_mode="reflection", align_corners=corners, opset=22, low=-1.3,
         high=1.4, symbolic="space", oracle=sampled(mode, "reflection", corners), frozen=(1,) if mode == "nearest" else (),
         note="one pixel")
    for shape in ((2, 2, 1, 5), (2, 2, 1, 1))
    for mode in ("linear", "nearest")
    for corners in (0, 1)
]  # fmt: skip
AFFINE = [
    case("AffineGrid", (2, 2, 3), ints(2, 3, 4, 5), align_corners=corners, opset=20,
         oracle=lambda t, c=corners: F.affine_grid(t, [2, 3, 4, 5], align_corners=bool(c)))
    for corners in (0, 1)
] + [
    case("AffineGrid", (2, 3, 4), ints(2, 3, 4, 5, 6), opset=20,
         oracle=lambda t: F.affine_grid(t, [2, 3, 4, 5, 6], align_corners=False)),
]  # fmt: skip


def deformed(strides=1, pads=(0, 0), dilations=1, masked=True):
    def run(x, weight, offset, *rest):
        """Every tap read bilinearly at its shifted place, without torchvision."""
        bias, mask = (rest if masked else (*rest, None)) if rest else (None, None)
        n, c, _, _ = x.shape
        m, inner, kh, kw = weight.shape
        rows, columns = offset.shape[2:]
        groups, parts = c // inner, offset.shape[1] // (2 * kh * kw)
        shifts = offset.reshape(n, parts, kh * kw, 2, rows, columns)
        patches = []
        for tap in range(kh * kw):
            y = torch.arange(rows).double()[:, None] * strides - pads[0] + (tap // kw) * dilations
            z = torch.arange(columns).double()[None] * strides - pads[1] + (tap % kw) * dilations
            own = []
            for part in range(parts):
                grid = torch.stack([
                    (z + shifts[:, part, tap, 1]) / (x.shape[3] - 1) * 2 - 1,
                    (y + shifts[:, part, tap, 0]) / (x.shape[2] - 1) * 2 - 1,
                ], -1)  # fmt: skip
                share = x[:, part * c // parts : (part + 1) * c // parts]
                value = F.grid_sample(share, grid, "bilinear", "zeros", True)
                own.append(value if mask is None else value * mask[:, part * kh * kw + tap, None])
            patches.append(torch.cat(own, 1))
        whole = torch.stack(patches, 2).reshape(n, groups, inner, kh * kw, rows, columns)
        matrix = weight.reshape(groups, m // groups, inner, kh * kw)
        result = torch.einsum("ngcthw,gmct->ngmhw", whole, matrix).reshape(n, m, rows, columns)
        return result if bias is None else result + bias[:, None, None]

    return run


DEFORMED = [
    case("DeformConv", (2, 2, 4, 5), (3, 2, 2, 2), (2, 8, 3, 4), (3,), (2, 4, 3, 4), opset=19, kernel_shape=[2, 2],
         pads=[0, 0, 0, 0], low=-0.9, high=0.8, symbolic="batch", oracle=deformed(), ort=False),
    case("DeformConv", (1, 4, 5, 5), (4, 2, 3, 3), (1, 36, 3, 3), opset=19, kernel_shape=[3, 3], pads=[1, 1, 1, 1],
         strides=[2, 2], group=2, offset_group=2, low=-0.7, high=0.8, symbolic="", oracle=deformed(2, (1, 1)), ort=False),
]  # fmt: skip
BOXES = np.asarray([[0.3, 0.6, 3.2, 3.9], [1.1, 0.2, 4.7, 2.8], [2.3, 2.6, 3.1, 3.3]])
ALIGNED = [
    case("RoiAlign", (2, 2, 5, 6), BOXES, ints(0, 1, 0), output_height=2, output_width=3, sampling_ratio=2, mode=mode,
         spatial_scale=0.8, opset=16, symbolic="space", coordinate_transformation_mode=transform,
         ort=mode == "avg")  # the maximum is of other samples in ONNX Runtime than in the reference evaluator
    for mode in ("avg", "max")
    for transform in ("half_pixel", "output_half_pixel")
]  # fmt: skip


def largest(rois, pooled, scale):
    """Each bin of each box by itself."""

    def run(x):
        rows = []
        for batch, *corners in rois:
            x1, y1, x2, y2 = (math.copysign(math.floor(abs(corner * scale) + 0.5), corner) for corner in corners)
            cells = []
            for i, j in itertools.product(*map(range, pooled)):
                edges = []
                for k, low, high, bins, size in (
                    (i, y1, y2, pooled[0], x.shape[2]),
                    (j, x1, x2, pooled[1], x.shape[3]),
                ):
                    width = max(high - low + 1, 1) / bins
                    start, stop = math.floor(k * width) + low, math.ceil((k + 1) * width) + low
                    edges.append(slice(*(int(min(max(edge, 0), size)) for edge in (start, stop))))
                cut = x[int(batch), :, edges[0], edges[1]].flatten(1)
                cells.append(cut.amax(1) if cut.shape[1] else torch.zeros(x.shape[1], dtype=x.dtype))
            rows.append(torch.stack(cells, 1).view(x.shape[1], *pooled))
        return torch.stack(rows)

    return run


ROIS = np.asarray(
    [[0, 0.3, 0.6, 5.2, 4.9], [1, -2.6, 1.2, 4.7, 9.8], [0, 2.3, 2.6, 2.4, 2.9], [1, 8.0, 1.0, 11.0, 3.0]]
)
POOLED = [
    case("MaxRoiPool", (2, 2, 5, 7), ROIS, pooled_shape=list(pooled), spatial_scale=scale, opset=16, symbolic="space",
         oracle=largest(ROIS, pooled, scale))
    for pooled, scale in (((2, 3), 1.0), ((1, 1), 0.5), ((3, 2), 0.8))
]  # fmt: skip
KEPT = [
    case("Unique", (6,), opset=18, symbolic=""),
    case("Unique", (3, 4), opset=18, sorted=0, symbolic="", runner="ort"),
    case("Unique", (3, 4), opset=18, axis=0, symbolic=""),
    case("Unique", (2, 4, 3), opset=18, axis=-2, symbolic=""),
]
FOURIER = [
    case("DFT", shape, opset=17, axis=1, inverse=inverse, onesided=onesided, ort=True)
    for shape in ((2, 5, 1), (2, 5, 2), (2, 4, 1))
    for inverse, onesided in ((0, 0), (1, 0), (0, 1))
    if not (onesided and shape[2] == 2) and not (inverse and shape[2] == 1)
] + [
    case("DFT", (2, 4, 3, 2), None, ints(1).reshape(()), opset=20),
    case("DFT", (2, 4, 1), ints(6).reshape(()), opset=17, axis=1, symbolic=""),
    case("DFT", (2, 6, 1), ints(4).reshape(()), opset=17, axis=1, onesided=1, symbolic=""),
    case("STFT", (2, 12, 1), ints(3).reshape(()), (4,), onesided=1, opset=17, symbolic="batch"),
    case("STFT", (1, 9, 2), ints(2).reshape(()), (5,), opset=17, onesided=0, symbolic="batch"),
    case("STFT", (2, 10, 1), ints(2).reshape(()), None, ints(4).reshape(()), onesided=1, opset=17, symbolic="batch"),
]  # fmt: skip
PLACES = ints([[1, 0], [2, 2]], [[0, 2], [1, 1]]).reshape(4, 2)
REDUCED = [
    case(*row, reduction=reduction, opset=18, low=low, high=high, note=str(low))
    for reduction in ("mul", "min", "max")
    for low, high in ((-2.0, 2.0), (0.5, 3.0))
    for row in (
        ("ScatterElements", (3, 2), ints([1, 0], [2, 0]), (2, 2)),
        ("ScatterND", (3, 4), ints([1], [0], [1]), (3, 4)),
    )
]
OTHERS = [
    case("Det", (3, 3), opset=18, symbolic=""),
    case("Det", (2, 4, 4), opset=18, symbolic="batch"),
    case("Det", (2, 1, 1), opset=18, symbolic="batch"),
    case("CumProd", (3, 4), ints(1).reshape(()), opset=26, ort=False),
    case("CumProd", (5,), ints(0).reshape(()), opset=26, ort=False),
    case("CumProd", (2, 3, 2), ints(-2).reshape(()), opset=26, exclusive=1, ort=False),
    case("CumProd", (4, 2), ints(0).reshape(()), opset=26, reverse=1, ort=False),
    case("CumProd", (4, 2), ints(0).reshape(()), opset=26, reverse=1, exclusive=1, ort=False),
    case("TensorScatter", (2, 3, 6, 2), (2, 3, 2, 2), ints(1, 4), opset=24, symbolic="batch", ort=False),
    case("TensorScatter", (2, 5, 2), (2, 3, 2), ints(4, 3), opset=24, mode="circular", symbolic="", ort=False),
    case("TensorScatter", (2, 5, 2), (2, 3, 2), opset=24, symbolic="", ort=False),
    case("MaxUnpool", (1, 1, 2, 2), ints(5, 7, 13, 15).reshape(1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2], opset=18),
    case("MaxUnpool", (1, 1, 2, 2), ints(5, 7, 13, 15).reshape(1, 1, 2, 2), ints(1, 1, 5, 5), kernel_shape=[2, 2], strides=[2, 2],
         opset=18, symbolic="", ort=False),
    case("Col2Im", (1, 5, 5), ints(5, 5), ints(1, 5), opset=18, symbolic=""),
    case("Col2Im", (2, 8, 9), ints(4, 4), ints(2, 2), opset=18, symbolic="batch"),
    case("Col2Im", (1, 4, 12), ints(6, 6), ints(2, 2), opset=18, pads=[0, 1, 0, 1], strides=[2, 2], dilations=[1, 1], symbolic="",
         oracle=lambda x: F.fold(x, (6, 6), 2, padding=(0, 1), stride=2)),
    case("Einsum", (3, 3), (3,), equation="ii,i->i", symbolic=""),
    case("Einsum", (2, 3, 3), equation="bii->b", symbolic=""),
    case("Einsum", (3, 3, 2), equation="iij->ij", symbolic=""),
    case("DequantizeLinear", np.asarray([[3, -4], [5, 7]], np.int8), (), np.asarray(1, np.int8), opset=19,
         oracle=lambda scale: (torch.tensor([[3, -4], [5, 7]]) - 1) * scale, symbolic=""),
    case("DequantizeLinear", np.asarray([[3, -4, 1], [5, 7, 2]], np.int8), (3,), np.asarray([1, 2, 3], np.int8), axis=1, opset=19,
         oracle=lambda scale: (torch.tensor([[3, -4, 1], [5, 7, 2]]) - torch.tensor([1, 2, 3])) * scale),
    case("SwiGLU", (2, 3), (2, 3), opset=28, ort=False),
]  # fmt: skip

CASES = GRIDS + AFFINE + DEFORMED + ALIGNED + POOLED + KEPT + FOURIER + REDUCED + OTHERS


@pytest.mark.parametrize("case", CASES, ids=lambda item: item.id)
def test_rule(check_case, case):
    check_case(case)


@pytest.mark.parametrize(("axis", "expected"), [("", [[1, 2, 0], [0, 0, 3]]), ("<axis = 1>", [[1, 0, 2], [3, 0, 4]])])
def test_what_repeats_receives_nothing(axis, expected):
    """Unique keeps what occurs first."""
    weights = "{1, 2, 3}" if not axis else "{1, 2, 3, 4}"
    text = f"""<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] x) => (float y)
        <float[{3 if not axis else "2, 2"}] w = {weights}>
        {{ a, i = Unique{axis}(x) b = Mul(a, w) y = ReduceSum<keepdims = 0>(b) }}"""
    model = ir.to_proto(gradient_model(onnx.parser.parse_model(text)))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.asarray([[1, 2, 2], [1, 1, 3]] if not axis else [[1, 1, 2], [0, 0, 3]], np.float32)
    np.testing.assert_array_equal(session.run(["grad/x"], {"x": x})[0], expected)


def test_places_beyond_the_whole_numbers_of_fp32():
    """The gradient of one element of a large map arrives at this element."""
    side, row, column = 4200, 4199, 4197
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[1, 1, {side}, {side}] x, float[1, 1, 1, 2] grid) => (float y)
        {{ s = GridSample<align_corners=1, mode="nearest">(x, grid) y = ReduceSum<keepdims=0>(s) }}"""
    model = gradient_model(onnx.parser.parse_model(text), wrt=["x"])
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    grid = np.asarray([column, row], np.float32).reshape(1, 1, 1, 2) * 2 / (side - 1) - 1
    (dx,) = session.run(["grad/x"], {"x": np.zeros((1, 1, side, side), np.float32), "grid": grid.astype(np.float32)})
    assert (np.flatnonzero(dx).tolist(), float(dx[0, 0, row, column])) == ([row * side + column], 1.0)


def test_number_of_cases():
    assert len(CASES) == 98
