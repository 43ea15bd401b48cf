"""Gradient rules of elementwise operators, reductions, movement of data and products against central differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from operator_case import case, ints

from onnxamp import autodiff

# The end of a Slice that has none.
END = 2**63 - 1
BINARY = [
    case(op, a, b)
    for op in ("Add", "Sub", "Mul", "Div")
    for a, b in (((2, 3), (2, 3)), ((2, 3, 4), (4,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((1, 3), (2, 3)))
]
CHOICES = [
    *(case(op, (2, 3), (2, 3), (3,)) for op in ("Max", "Min", "Sum", "Mean")),
    *(case(op, (2, 3)) for op in ("Max", "Min", "Sum", "Mean")),
    case("Where", np.asarray([[True, False, True]]), (2, 3), (2, 1)),
    case("Where", np.asarray([True, False]), (1,), (3, 2)),
    case("Clip", (3, 4), np.float64(-0.5), np.float64(0.7)),
    case("Clip", (3, 4), None, np.float64(0.7)),
    case("Clip", (3, 4), np.float64(-0.5)),
    case("Clip", (3, 4)),
    case("Clip", (3, 4), (), (), symbolic=""),
    case("Clip", (3, 4), None, (), low=0.1, symbolic="batch"),
    case("Clip", np.linspace(-1, 1, 12).reshape(3, 4), (), (), note="bounds"),
    case("Clip", np.linspace(-1, 1, 12).reshape(3, 4), np.float64(0.5), (), high=0.4, note="empty"),
    case("Range", (), np.float64(3.0), (), low=0.5, high=1.0, symbolic=""),
    case("OneHot", ints(0, 2, 7, 2), np.int64(4), (2,), axis=0, symbolic=""),
    case("OneHot", ints([0, -1], [1, 2]), np.int64(3), (2,), symbolic=""),
    case("Pow", (3, 4), np.float64(2.0)),
    case("Pow", (3, 4), np.float64(3.0)),
    case("Pow", (3, 4), np.float64(0.5), low=0.5),
    case("Pow", (3, 4), np.float64(-1.5), low=0.5),
    case("Pow", (3, 4), np.float64(1.0)),
    case("Pow", (3, 4), (4,), low=0.5),
    case("Pow", (3, 1), np.asarray([0.0, 2.0, 3.0, 1.0])),
    case("CastLike", (3, 4), np.float64(1.0)),
    case("Cast", (3, 4), to=11, ort=False),
    case("Mod", (3, 4), (4,), fmod=1, low=0.6, high=5.0),
]
UNARY = [
    *(
        case(op, (2, 3))
        for op in ("Neg", "Identity", "Abs", "Exp", "Erf", "Sin", "Cos", "Sinh", "Cosh", "Tanh", "Atan", "Asinh")
    ),
    *(case(op, (2, 3), low=0.3) for op in ("Log", "Sqrt", "Reciprocal")),
    *(case(op, (2, 3), low=-0.9, high=0.9) for op in ("Asin", "Acos", "Atanh", "Tan")),
    case("Acosh", (2, 3), low=1.2),
]
REDUCTIONS = [
    case(op, (2, 3, 4), *axes, keepdims=keep, low=0.2, note=str(i))
    for op in [
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSum",
        "ReduceLogSumExp",
    ]
    for i, (axes, keep) in enumerate((((ints(1),), 1), ((ints(-1, 0),), 0), ((), 0), ((), 1)))
] + [
    case("ReduceSum", (2, 3), noop_with_empty_axes=1),
    case("ReduceMean", (2, 3), ints(0), note="signed"),
    case("ReduceMean", (2, 3), opset=13, axes=[1], keepdims=0),
    case("ReduceMax", (2, 3), opset=13, axes=[1]),
    case("CumSum", (3, 4), np.int64(1)),
    case("CumSum", (3, 4), np.int64(0), exclusive=1),
    case("CumSum", (3, 4), np.int64(-1), reverse=1, exclusive=1),
]
SHAPES = [
    case("Reshape", (2, 6), ints(2, -1, 3), symbolic="batch"),
    case("Reshape", (2, 3, 4), ints(0, -1)),
    case("Flatten", (2, 3, 4), axis=2),
    case("Flatten", (2, 3, 4), axis=0),
    case("Squeeze", (2, 1, 3), ints(1)),
    case("Squeeze", (2, 1, 3), symbolic="batch"),
    case("Unsqueeze", (2, 3), ints(0, -1)),
    case("Transpose", (2, 3, 4), perm=[2, 0, 1]),
    case("Transpose", (2, 3, 4)),
    case("Expand", (3, 1), ints(2, 1, 4)),
    case("Expand", (3, 4), ints(1, 1)),
    case("Concat", (2, 3), (2, 1), (2, 4), axis=1),
    case("Concat", (2, 3), (4, 3), axis=-2),
    case("Concat", (2, 3), (4, 3), axis=0, frozen=(0,)),
    case("Split", (6, 2), ints(1, 3, 2), axis=0, outputs=3),
    case("Split", (2, 6), axis=-1, num_outputs=2, outputs=2, symbolic="batch"),
    case("Split", (2, 6), ints(2, 4), axis=1, outputs=2, seeded=1),
    case("Slice", (4, 5), ints(1), ints(3), ints(1)),
    case("Slice", (4, 5), ints(1, 0), ints(END, -1)),
    case("Slice", (4, 5), ints(-3), ints(-1), ints(0)),
    case("Slice", (4, 5), ints(0), ints(END), ints(-1)),
    case("Slice", (4, 6), ints(0), ints(END), ints(1), ints(2)),
    case("Slice", (4, 6), ints(-1, 3), ints(-END, 0), ints(1, 0), ints(-2, -1)),
    case("Pad", (2, 3), ints(1, 0, 0, 2)),
    case("Pad", (2, 3), ints(1, -1, 0, 2), symbolic="batch", runner="ort"),
    case("Pad", (2, 5), ints(0, -1, 0, -2), runner="ort"),
    case("Pad", (2, 3), ints(1, 2), None, ints(1)),
    case("Pad", (2, 3), ints(1, 2), (), ints(1), symbolic="batch"),
    case("Pad", (2, 3), ints(1, -1, 0, 2), (), symbolic="batch", runner="ort"),
    case("Pad", np.ones((2, 3)), ints(1, 0, 0, 2), ()),
    case("Pad", (2, 4), ints(2, 3), None, ints(1), mode="reflect", symbolic="batch"),
    case("Pad", (2, 4), ints(0, 3, 1, 2), mode="edge", symbolic=""),
    *(
        case("Pad", (2, 5), ints(*pads), mode=mode, opset=19, symbolic="", note="crop", runner="ort")
        for mode in ("reflect", "edge", "wrap")
        for pads in ((0, -2, 0, 2), (0, 3, 1, -1), (0, -1, 0, -2))
    ),
    case("Tile", (2, 3), ints(2, 3)),
    case("Tile", (2, 3), ints(1, 2)),
    case("Tile", (2, 3), ints(1, 1)),
    case("Trilu", (3, 4)),
    case("Trilu", (2, 3, 3), np.int64(-1), upper=0),
    case("DepthToSpace", (2, 8, 2, 3), blocksize=2, symbolic="batch"),
    case("DepthToSpace", (2, 8, 2, 3), blocksize=2, mode="CRD", symbolic="batch"),
    case("SpaceToDepth", (2, 3, 4, 2), blocksize=2, symbolic="batch"),
    case("ReverseSequence", (4, 3), ints(2, 4, 1)),
]
PRODUCTS = [
    *(
        case("MatMul", a, b)
        for a, b in (
            ((2, 3), (3, 4)),
            ((2, 5, 3), (3, 4)),
            ((2, 5, 3), (2, 3, 4)),
            ((2, 1, 5, 3), (4, 3, 2)),
            ((3,), (3, 4)),
            ((2, 3), (3,)),
            ((3,), (3,)),
            ((2, 5, 3), (3,)),
            ((3,), (2, 3, 4)),
            ((5, 3), (2, 3, 4)),
            ((1, 5, 3), (2, 3, 4)),
        )
    ),
    case("Gemm", (2, 3), (3, 4)),
    case("Gemm", (2, 3), (3, 4), (4,), alpha=0.5, beta=2.0),
    case("Gemm", (3, 2), (4, 3), (2, 1), transA=1, transB=1, alpha=0.5),
    case("Gemm", (3, 2), (3, 4), (), transA=1),
    case("Gemm", (2, 3), (4, 3), (1, 4), transB=1),
]
SOFTMAX = [case(op, (2, 3, 4), axis=axis) for op in ("Softmax", "LogSoftmax") for axis in (-1, 1, 0)]

CASES = BINARY + CHOICES + UNARY + REDUCTIONS + SHAPES + PRODUCTS + SOFTMAX


@pytest.mark.parametrize("case", CASES, ids=lambda item: item.id)
def test_rule(check_case, case):
    check_case(case)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"])
@pytest.mark.parametrize("axes", [ints(), ints(1), ints(-2, 1)], ids=str)
@pytest.mark.parametrize("empty_is_all", [True, False])
def test_axes_that_are_computed_at_run_time(op, axes, empty_is_all):
    module = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3] x, int64[N] axes, float[A, B] seed) => (float[A, B] y)
        {{ y = {op}<noop_with_empty_axes={int(not empty_is_all)}>(x, axes) }}""")
    )
    graph = module.graph
    graph.outputs.append(
        autodiff.backward(graph, {graph.outputs[0]: graph.inputs[2]}, graph.inputs[:1])[graph.inputs[0]]
    )
    run = ReferenceEvaluator(ir.to_proto(module)).run
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    tensor = torch.tensor(x, requires_grad=True)
    reduced = tensor
    over = sorted({int(axis) % 2 for axis in axes}) if len(axes) or not empty_is_all else [0, 1]
    for axis in over:
        reduce = {"ReduceMean": torch.mean, "ReduceMax": torch.amax, "ReduceMin": torch.amin, "ReduceProd": torch.prod}[
            op
        ]
        reduced = reduce(reduced, axis, keepdim=True)
    seed = np.arange(1.0, 1 + reduced.numel(), dtype=np.float32).reshape(reduced.shape)
    reduced.backward(torch.from_numpy(seed))
    _, got = run(None, {"x": x, "axes": axes, "seed": seed})
    np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-5)


def test_number_of_cases():
    assert len(CASES) == 190
