"""Buffers, views and bindings: shared memory, 16-bit types, and the count of what is copied."""

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxamp.errors import InternalError
from onnxamp.ort.binding import Binding
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.ort.values import ALIGNMENT, Buffer, Slots, element_type, numpy_type, transfers

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_])
def test_views_write_read_and_bind_every_type_of_state(dtype):
    kind = element_type(np.dtype(dtype))
    assert numpy_type(kind) == np.dtype(dtype)
    name = onnx.TensorProto.DataType.Name(kind).lower()
    model = onnx.parser.parse_model(f"{HEAD}g ({name}[2,3] x) => ({name}[2,3] y) {{ y = Identity(x) }}")
    source, target = Buffer(256).view(64, (2, 3), kind), Buffer(256).view(128, (2, 3), kind)
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    source.write(values)
    binding = Binding(open_session(model, SessionConfig("cpu", threads=1)))
    binding.input("x", source)
    binding.output("y", target)
    binding.run()
    np.testing.assert_array_equal(target.read(), values)
    assert source.pointer % ALIGNMENT == 0


def test_a_bound_run_copies_nothing_and_sees_changes_in_place():
    model = onnx.parser.parse_model(f"{HEAD}g (float[4] w, float[4] x) => (float[4] w2) {{ w2 = Add(w, x) }}")
    w = Buffer(16).view(0, (4,), onnx.TensorProto.FLOAT)
    x = np.ones(4, np.float32)
    binding = Binding(open_session(model, SessionConfig("cpu", threads=1)))
    binding.input("w", w)
    binding.output("w2", w)
    binding.feed("x", x)
    before = (transfers.reads, transfers.writes)
    for _ in range(3):
        binding.run()
    x[:] = 10
    binding.run()
    assert (transfers.reads, transfers.writes) == before
    np.testing.assert_array_equal(w.read(), np.full(4, 13, np.float32))
    assert transfers.reads == before[0] + 1


def test_bfloat16_is_fed_by_its_bits():
    model = onnx.parser.parse_model(f"{HEAD}g (bfloat16[N] x) => (float[N] y) {{ y = Cast<to=1>(x) }}")
    y = Buffer(12).view(0, (3,), onnx.TensorProto.FLOAT)
    binding = Binding(open_session(model, SessionConfig("cpu", threads=1)))
    binding.feed("x", np.array([1, -2.5, 3e38], ml_dtypes.bfloat16))
    binding.output("y", y)
    binding.run()
    np.testing.assert_array_equal(y.read(), np.array([1, -2.5, 3e38], ml_dtypes.bfloat16).astype(np.float32))


def test_views_do_not_leave_their_buffer_or_change_their_type():
    buffer = Buffer(64)
    with pytest.raises(InternalError, match="leaves a buffer of 64"):
        buffer.view(32, (9,), onnx.TensorProto.FLOAT)
    with pytest.raises(InternalError, match="cannot take"):
        buffer.view(0, (4,), onnx.TensorProto.FLOAT).write(np.zeros(4))
    model = onnx.parser.parse_model(f"{HEAD}g (float[N] x) => (float[N] y) {{ y = Neg(x) }}")
    binding = Binding(open_session(model, SessionConfig("cpu", threads=1)))
    with pytest.raises(InternalError, match="not contiguous"):
        binding.feed("x", np.zeros(8, np.float32)[::2])


def test_slots_never_overlap():
    slots, taken = Slots(), []
    for count in range(600):  # several buffers
        view = slots.take((count % 40,) if count % 3 else (), onnx.TensorProto.FLOAT)
        assert not view.read().any()
        assert view.pointer % ALIGNMENT == 0
        taken.append((view, np.full(view.shape, count, np.float32)))
        view.write(taken[-1][1])
    assert slots.take((10_000,), onnx.TensorProto.FLOAT).nbytes == 40_000
    for view, wanted in taken:
        np.testing.assert_array_equal(view.read(), wanted)
    assert 1 < len({id(view.buffer) for view, _ in taken}) < 10
