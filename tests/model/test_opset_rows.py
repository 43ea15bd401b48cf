"""Each row of the opset table, at both opsets, against the reference evaluator or numpy."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnxamp.errors import UnsupportedError
from onnxamp.model import io, types
from onnxamp.model.opset import HIGHEST, ROWS, OpsetError, raise_opset
from onnxamp.model.opset.raising import changed, versions

X = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
M = X[0, 0]
POSITIVE = np.abs(X) + np.float32(0.1)
INTS = np.array([[0, 2], [1, 0]], np.int64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A node and what it must give.

    Attributes:
        op: The operator.
        version: The opset of the row.
        feeds: Operands that are fed.
        attributes: Attributes in the form of the opset before.
        want: The result; None where the reference evaluator knows the old version.
        constants: Operands that are initializers, behind those that are fed.
        outputs: How many results the node has.
        ort: Whether ONNX Runtime is the oracle, since the reference lacks the operator or its old version.
    """

    op: str
    version: int
    feeds: tuple[np.ndarray, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    want: Callable[..., Any] | None = None
    constants: tuple[np.ndarray, ...] = ()
    outputs: int = 1
    ort: bool = False


def source(case: Case) -> onnx.ModelProto:
    """The node alone in a model of the opset before."""
    names = [f"x{index}" for index in range(len(case.feeds))]
    held = [f"c{index}" for index in range(len(case.constants))]
    node = helper.make_node(
        case.op, names + held, [f"y{index}" for index in range(case.outputs)], "node", **case.attributes
    )
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in case.feeds]
    inputs = [
        helper.make_tensor_value_info(name, kind, array.shape)
        for name, kind, array in zip(names, kinds, case.feeds, strict=True)
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    tensors = [numpy_helper.from_array(array, name) for name, array in zip(held, case.constants, strict=True)]
    graph = helper.make_graph([node], "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.version - 1)], ir_version=8)


def evaluate(model: onnx.ModelProto, arrays: Sequence[np.ndarray], ort: bool) -> list[np.ndarray]:
    feeds = {f"x{index}": array for index, array in enumerate(arrays)}
    if not ort:
        return onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def channels(values: np.ndarray) -> np.ndarray:
    """One number a channel of four-dimensional data."""
    return values.reshape(-1, 1, 1)


def flattened(function: Callable[[np.ndarray], np.ndarray], axis: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: function(x.reshape(int(np.prod(x.shape[:axis])), -1)).reshape(x.shape)


def softmax(rows: np.ndarray) -> np.ndarray:
    e = np.exp(rows - rows.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def hardmax(rows: np.ndarray) -> np.ndarray:
    return (np.arange(rows.shape[1]) == rows.argmax(axis=1)[:, None]).astype(rows.dtype)


def repeated(values: np.ndarray, *axes: int) -> np.ndarray:
    for axis in axes:
        values = values.repeat(2, axis)
    return values


def group_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    g = x.reshape(x.shape[0], scale.size, -1)
    normal = (g - g.mean(axis=2, keepdims=True)) / np.sqrt(g.var(axis=2, keepdims=True) + 1e-5)
    return (normal * scale[:, None] + bias[:, None]).reshape(x.shape)


CHANNELS = tuple(np.arange(1, 4, dtype=np.float32) * k for k in (1, 2, 3, 4))
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(op: str, version: int, attributes: dict[str, Any]) -> Case:
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=(1, GATES[op] * 2, size)).astype(np.float32) for size in (5, 2)]
    later = source(Case(op, 8, (X[0], *weights), {"hidden_size": 2, "direction": "forward"}, outputs=2))

    def want(*feeds: np.ndarray) -> list[np.ndarray]:
        return evaluate(later, feeds, False)

    return Case(op, version, (X[0], *weights), {"hidden_size": 2, **attributes}, want, outputs=2)


def normalized(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray, mean: np.ndarray, variance: np.ndarray
) -> np.ndarray:
    return (x - channels(mean)) / np.sqrt(channels(variance) + 1e-5) * channels(scale) + channels(bias)


def instance_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return normalized(x[0], scale, bias, x[0].mean((1, 2)), x[0].var((1, 2)))[None]


def prelu(x: np.ndarray, slope: np.ndarray) -> np.ndarray:
    return np.where(x < 0, slope.reshape(slope.shape + (1,) * (x.ndim - 2)) * x, x)


def dft(axis: int) -> Callable[[np.ndarray], np.ndarray]:
    def transformed(x: np.ndarray) -> np.ndarray:
        spectrum = np.fft.fft(x[..., 0], axis=axis)
        return np.stack([spectrum.real, spectrum.imag], -1)

    return transformed


def doubled_linearly(x: np.ndarray) -> np.ndarray:
    """Twice as high, new rows in the middle between old ones, the last one twice."""
    below = np.concatenate([x[:, :, 1:], x[:, :, -1:]], axis=2)
    return np.stack([x, (x + below) / 2], axis=3).reshape(2, 3, 8, 5)


def scattered(x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    result = x.copy()
    np.put_along_axis(result[: len(indices)], indices, updates, axis=1)
    return result


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Abs": np.abs,
    "Ceil": np.ceil,
    "Clip": lambda x: x,
    "Elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "Exp": np.exp,
    "Floor": np.floor,
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "Neg": np.negative,
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
}
BINARY: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Div": np.divide,
    "Equal": np.equal,
    "Greater": np.greater,
    "Less": np.less,
    "Mul": np.multiply,
    "Pow": np.power,
    "Sub": np.subtract,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}
TYPED = {"Equal": np.int64, "And": bool, "Or": bool, "Xor": bool}


def aligned(op: str, inner: tuple[int, ...], behind: int, axis: int | None) -> Case:
    """A binary operator of opset 6 whose second operand lies at `axis` of the first."""
    kind = TYPED.get(op, np.float32)
    first, second = POSITIVE.astype(kind), (POSITIVE + 1).ravel()[: int(np.prod(inner))].reshape(inner).astype(kind)
    attributes = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
    return Case(
        op,
        7,
        (first, second),
        attributes,
        lambda a, b: BINARY[op](a, b.reshape(b.shape + (1,) * behind if inner else ())),
    )


HEIGHT = (np.array([1, 1, 2, 1], np.float32),)
HINT = {"consumed_inputs": [0]}
HINTS = {"consumed_inputs": [0, 0]}
GRID = np.clip(X[:, 0, :, :2], -1, 1).reshape(2, 2, 2, 2)
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
SOFTMAXES = {"Softmax": softmax, "LogSoftmax": lambda rows: np.log(softmax(rows)), "Hardmax": hardmax}

CASES = [
    *(Case(op, 6, (X,), HINT, function) for op, function in UNARY.items()),
    *(Case(op, 6, (POSITIVE,), HINT, function) for op, function in (("Log", np.log), ("Sqrt", np.sqrt))),
    *(Case(op, 6, (X, POSITIVE), HINTS, BINARY[op]) for op in ("Add", "Sub", "Mul", "Div")),
    Case("Max", 6, (X, -X), HINTS, np.maximum),
    Case("Min", 6, (X, -X), HINTS, np.minimum),
    Case("Sum", 6, (X, X), HINTS, np.add),
    Case("Mean", 6, (X, -X + 1), HINTS, lambda a, b: (a + b) / 2),
    Case("Selu", 6, (X,), HINT, lambda x: 1.0507 * np.where(x < 0, 1.6732 * np.expm1(x), x)),
    Case("PRelu", 6, (X, np.array([0.5], np.float32)), HINTS, prelu),
    Case("InstanceNormalization", 6, (X[:1], *CHANNELS[:2]), {"consumed_inputs": [0, 0, 0]}, instance_norm),
    Case("BatchNormalization", 6, (X, *CHANNELS), {"consumed_inputs": [0] * 5, "is_test": 1}, normalized),
    Case("BatchNormalization", 7, (X, *CHANNELS), {"is_test": 1}, normalized),
    Case("BatchNormalization", 9, (X, *CHANNELS), {"spatial": 1}, normalized),
    Case("BatchNormalization", 14, (X, *CHANNELS), {}, normalized),
    Case("Dropout", 6, (X,), {**HINT, "is_test": 1}, np.copy),
    Case("Dropout", 7, (X,), {"is_test": 1}, np.copy),
    Case("Dropout", 10, (X,), {"ratio": 0.3}, np.copy),
    Case("Dropout", 12, (X,), {"ratio": 0.3}, np.copy),
    *(aligned(op, (3, 4), 1, 1) for op in BINARY),
    *(aligned(op, (4, 5), 0, None) for op in BINARY),
    aligned("Add", (), 0, None),
    aligned("Add", (3,), 2, -3),
    Case("Gemm", 7, (M, M.T, np.ones(4, np.float32)), {"broadcast": 1}, lambda a, b, c: a @ b + c),
    Case("PRelu", 7, (X, np.array([0.1, 0.2, 0.3], np.float32)), {}, prelu),
    Case("PRelu", 7, (M, np.linspace(0, 1, 5, dtype=np.float32)), {}, prelu),
    Case("Concat", 4, (X, X), {}, lambda a, b: np.concatenate([a, b], axis=1)),
    Case("Cast", 6, (X,), {"to": "INT32"}, lambda x: x.astype(np.int32)),
    Case("Reshape", 5, (X,), {"shape": [2, 0, -1]}, lambda x: x.reshape(2, 3, -1)),
    Case("Split", 2, (X,), {"axis": 1, "split": [1, 2]}, lambda x: [x[:, :1], x[:, 1:]], outputs=2),
    Case("Split", 13, (X,), {"axis": -2, "split": [1, 3]}, outputs=2),
    Case("Split", 18, (X,), {"axis": 2}, outputs=2),
    Case("Slice", 10, (X,), {"starts": [1, 0], "ends": [9, -1], "axes": [1, 3]}, lambda x: x[:, 1:9, :, :-1]),
    Case("Slice", 10, (X,), {"starts": [0, 1], "ends": [2, 3]}, lambda x: x[0:2, 1:3]),
    Case("TopK", 10, (X,), {"k": 2, "axis": 3}, lambda x: np.sort(x, axis=3)[..., :-3:-1], outputs=2),
    Case("Pad", 2, (M,), {"paddings": [1, 0, 0, 2]}, lambda x: np.pad(x, ((1, 0), (0, 2)))),
    Case(
        "Pad", 11, (M,), {"pads": [1, 0, 0, 2], "value": 3.0}, lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=3)
    ),
    Case("Pad", 11, (M,), {"pads": [1, 0, 0, 2], "mode": "edge"}, lambda x: np.pad(x, ((1, 0), (0, 2)), mode="edge")),
    Case("Clip", 11, (X,), {"min": -0.5, "max": 0.25}, lambda x: np.clip(x, -0.5, 0.25)),
    Case("Clip", 11, (X,), {"min": 0.0}, lambda x: np.maximum(x, 0)),
    Case("Clip", 11, (X,), {"min": 0.0, "max": 3.4028234663852886e38}, lambda x: np.maximum(x, 0)),
    *(Case(f"Reduce{name}", 18, (POSITIVE,), {"axes": [1, -1], "keepdims": 0}) for name in REDUCTIONS),
    *(Case(f"Reduce{name}", 18, (POSITIVE,)) for name in REDUCTIONS),
    Case("ReduceSum", 13, (X,), {"axes": [0, 2]}),
    Case("ReduceSum", 13, (X,)),
    Case("Squeeze", 13, (X[:1],), {"axes": [0]}),
    Case("Squeeze", 13, (X[:1],)),
    Case("Unsqueeze", 13, (X,), {"axes": [0, -1]}),
    *(Case(op, 13, (X,), {}, flattened(function, 1)) for op, function in SOFTMAXES.items()),
    *(Case(op, 13, (X,), {"axis": 0}, flattened(function, 0)) for op, function in SOFTMAXES.items()),
    *(Case(op, 13, (X,), {"axis": 3}, flattened(function, 3)) for op, function in SOFTMAXES.items()),
    *(Case(op, 13, (X,), {"axis": -2}, flattened(function, 2)) for op, function in SOFTMAXES.items()),
    *(Case(op, 13, (X[..., :1, :1],), {}, flattened(function, 1)) for op, function in SOFTMAXES.items()),
    Case("DFT", 20, (X[..., :1],), {"axis": 2}, dft(2)),
    Case("DFT", 20, (X[..., :1],), {}, dft(1)),
    *(recurrent(op, 7, {"output_sequence": 1}) for op in GATES),
    recurrent("GRU", 3, {}),
    Case("GlobalLpPool", 2, (X,), {"p": 2.0}, lambda x: np.sqrt((x**2).sum((2, 3), keepdims=True)), ort=True),
    Case("LpPool", 2, (X,), {"p": 1.0, "kernel_shape": [4, 5]}, lambda x: np.abs(x).sum((2, 3), keepdims=True)),
    *(
        Case(op, 22, (X,), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})
        for op in ("AveragePool", "MaxPool")
    ),
    *(Case(op, 22, (X,), {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}) for op in ("AveragePool", "MaxPool")),
    Case("ConvTranspose", 11, (X, np.ones((3, 1, 2, 2), np.float32)), {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    Case("GridSample", 20, (X, GRID), {"mode": "bilinear"}, ort=True),
    Case("GridSample", 20, (X, GRID), {"mode": "bicubic"}, ort=True),
    Case("GridSample", 20, (X, GRID), ort=True),
    Case("GroupNormalization", 21, (X.reshape(2, 6, 2, 5), *CHANNELS[:2]), {"num_groups": 3}, group_norm),
    Case("Upsample", 7, (X,), {"height_scale": 2.0, "width_scale": 2.0}, lambda x: repeated(x, 2, 3)),
    Case("Upsample", 9, (X,), {"scales": [1.0, 1.0, 2.0, 2.0]}, lambda x: repeated(x, 2, 3)),
    Case("Upsample", 10, (X,), {}, lambda x: repeated(x, 2), HEIGHT),
    Case("Upsample", 10, (X,), {"mode": "linear"}, doubled_linearly, HEIGHT),
    Case("Resize", 11, (X,), {}, lambda x: repeated(x, 2), HEIGHT),
    Case("Resize", 11, (X,), {"mode": "linear"}, doubled_linearly, HEIGHT),
    Case("Resize", 11, (X,), {}, lambda x: x[:, :, ::2], (np.array([1, 1, 0.5, 1], np.float32),)),
    Case("Resize", 13, (X,), {"mode": "linear"}, None, (np.array([], np.float32), *HEIGHT)),
    Case(
        "RoiAlign",
        16,
        (X, np.array([[0, 0, 3, 3]], np.float32), np.array([1], np.int64)),
        {"output_height": 2, "output_width": 2},
        ort=True,
    ),
    Case("Scatter", 11, (M, INTS, M[:2, :2] + 9), {"axis": 1}, scattered),
]
NAMES = [f"{case.op}-{case.version}-{number}" for number, case in enumerate(CASES)]


def raised(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    copy = io.load(model)
    types.infer(copy)
    raise_opset(copy, version)
    types.infer(copy)
    return ir.to_proto(copy)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_row_gives_the_same_results_at_both_opsets(case: Case) -> None:
    model = source(case)
    # Constants of integers came with opset 9.
    onnx.checker.check_model(raised(model, max(case.version, 9)), full_check=True)
    later = raised(model, 21 if case.ort else HIGHEST)  # at 22 ONNX Runtime's CPU provider lacks them
    onnx.checker.check_model(later, full_check=True)
    want = evaluate(model, case.feeds, case.ort) if case.want is None else case.want(*case.feeds)
    want = want if isinstance(want, list) else [want]
    got = evaluate(later, case.feeds, case.ort)
    for one, other in zip(want, got, strict=False):
        assert one.shape == other.shape
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert [node.name for node in later.graph.node].count("node") == 1


def test_every_row_has_a_case() -> None:
    assert {(case.op, case.version) for case in CASES} == set(ROWS)


def test_every_other_step_only_adds() -> None:
    """By the schemas; the two steps that change something and have no row are refused."""
    operators = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    steps = [(op, version) for op in operators for version in versions(op)[1:]]
    assert len(steps) >= 349
    assert set(ROWS) <= set(steps)
    assert {step for step in steps if changed(*step) and step not in ROWS} == {("Scan", 9), ("Tile", 6)}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("BatchNormalization", 9, (X, *CHANNELS), {"spatial": 0}), "spatial=0"),
        (Case("BatchNormalization", 7, (X, *CHANNELS)), "batch statistics"),
        (Case("BatchNormalization", 14, (X, *CHANNELS), outputs=5), "batch statistics"),
        (Case("Dropout", 7, (X,)), "random mask"),
        (Case("Dropout", 10, (X,), outputs=2), "mask is read"),
        (Case("ConvTranspose", 11, (X, np.ones((3, 1, 2, 2), np.float32)), {"auto_pad": "SAME_UPPER"}), "implied"),
        (
            Case(
                "MaxPool",
                22,
                (X[..., :4],),
                {"kernel_shape": [1, 1], "strides": [3, 3], "pads": [0, 0, 2, 2], "ceil_mode": 1},
            ),
            "ceil_mode",
        ),
        (Case("Resize", 11, (X,), {}, None, (np.array([1, 1, 2, 0.5], np.float32),)), "shrinks one"),
        (Case("Resize", 11, (X, *HEIGHT)), "scales are not constant"),
        (
            Case(
                "Resize",
                13,
                (X,),
                {"coordinate_transformation_mode": "tf_half_pixel_for_nn"},
                None,
                (np.array([], np.float32), *HEIGHT),
            ),
            "tf_half",
        ),
        (Case("LpPool", 2, (X,), {"p": 1.5, "kernel_shape": [2, 2]}), "p=1.5 is no integer"),
        (Case("Tile", 6, (M, np.array(2, np.float32), np.array(0, np.float32))), "changed in operands"),
        (Case("Erf", 13, (np.array([1, 2]),)), r"takes no tensor\(int64\)"),
    ],
    ids=lambda value: value.op if isinstance(value, Case) else "",
)
def test_what_cannot_be_said_later_is_refused_by_name(case: Case, reason: str) -> None:
    with pytest.raises(OpsetError, match=f"{case.op} 'node' cannot be written in opset .*{reason}"):
        raised(source(case), HIGHEST)


def test_what_the_table_does_not_reach() -> None:
    model = source(Case("Relu", 14, (X,)))
    for version in (12, HIGHEST + 1):
        with pytest.raises(UnsupportedError, match="has opset 13 and cannot be brought to"):
            raised(model, version)
