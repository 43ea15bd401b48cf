"""Models that a search is tried on, with samples."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

Samples = list[dict[str, np.ndarray]]
RNG = np.random.default_rng(7)


def weights(rows: int, columns: int) -> np.ndarray:
    return (RNG.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)


def proto(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


# Five layers; the difference of [c] cancels all but a ten-thousandth of its operands, so that what feeds it must not be rounded.
CANCELS = proto(
    """g (float[8,32] x) => (float[8,32] y)
    { [l1] a = MatMul(x, w1)  [l2] b = MatMul(x, w2)  [c] c = Sub(a, b)  [l3] d = MatMul(c, w3)  [r] e = Relu(d)
      [l4] f = MatMul(e, w4)  [l5] y = MatMul(f, w5) }""",
    w1=(base := weights(32, 32)),
    w2=(base + 1e-4 * weights(32, 32)).astype(np.float32),
    w3=weights(32, 32) * 1000,
    w4=weights(32, 32),
    w5=weights(32, 32),
)
# Softmax and a LayerNormalization in the middle, harmless in 16 bits.
ISLANDS = proto(
    """g (float[8,32] x) => (float[8,32] y)
    { [l1] a = MatMul(x, w1)  [soft] b = Softmax<axis = -1>(a)  [l2] c = MatMul(b, w2)
      [norm] d = LayerNormalization<axis = -1>(c, scale)  [l3] y = MatMul(d, w3) }""",
    w1=weights(32, 32),
    w2=weights(32, 32),
    w3=weights(32, 32),
    scale=np.ones(32, np.float32),
)
DATA = [{"x": RNG.standard_normal((8, 32)).astype(np.float32)} for _ in range(3)]
IN_A_LOOP = proto(
    """g (float[8,32] x, bool c, int64 n) => (float[8,32] y)
    { y = Loop<body = b (int64 i, bool go, float[8,32] s) => (bool more, float[8,32] o) {
        more = Identity(go)  [l1] a = MatMul(s, w1)  [l2] b = MatMul(s, w2)  [c] d = Sub(a, b)  [l3] e = MatMul(d, w3)
        o = If(c)<then_branch = yes () => (float[8,32] t) { [soft] q = Softmax<axis = -1>(e)  [m1] t = MatMul(q, w4) },
                  else_branch = no () => (float[8,32] f) { [lsm] r = LogSoftmax<axis = -1>(e)  [m2] f = MatMul(r, w4) }> }>(n, c, x) }""",
    w1=base,
    w2=(base + 1e-3 * weights(32, 32)).astype(np.float32),
    w3=weights(32, 32) * 1000,
    w4=weights(32, 32) * 4,
)
LOOP_DATA = [sample | {"c": np.array(True), "n": np.array(2)} for sample in DATA]


@pytest.fixture(scope="session")
def cancels() -> onnx.ModelProto:
    """O2 spoils it."""
    return CANCELS


@pytest.fixture(scope="session")
def islands() -> onnx.ModelProto:
    """More than O2 does it no harm."""
    return ISLANDS


@pytest.fixture(scope="session")
def in_a_loop() -> onnx.ModelProto:
    """Both, in a Loop and in a branch of an If."""
    return IN_A_LOOP


@pytest.fixture(scope="session")
def samples() -> Samples:
    """Inputs of the first two."""
    return DATA


@pytest.fixture(scope="session")
def loop_samples() -> Samples:
    """Inputs of the loop, which take one of the two branches."""
    return LOOP_DATA
