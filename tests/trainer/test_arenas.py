"""Arenas: places, sides, and the low copies that are rounded from the masters."""

import ml_dtypes
import numpy as np
import pytest

from onnxamp.errors import ModelError
from onnxamp.trainer.arenas import Arenas
from onnxamp.training.manifest import Arena, GraphPorts, Manifest, Port, Segment, StateTensor


def _manifest(low: str = "bfloat16") -> Manifest:
    return Manifest(
        level="O2",
        dtype="bf16",
        graphs={"grad": GraphPorts("grad.onnx", (), ())},
        arenas=(
            Arena("master", "float32", 1024),
            Arena("low", low, 64, saved=False),
            Arena("gradient", "float32", 1024),
            Arena("window", "float32", 16, after="gradient"),
            Arena("counters", "int64", 16),
        ),
        tensors=(
            StateTensor("w", "master", (2, 3), 0),
            StateTensor("b", "master", (5,), 32),
            StateTensor("w", "low", (2, 3), 0),
            StateTensor("w", "gradient", (2, 3), 0),
            StateTensor("b", "gradient", (5,), 32),
            StateTensor("window", "window", (16,), 0),
            StateTensor("step", "counters", (), 0),
            StateTensor("skipped", "counters", (), 8),
        ),
        segments=(Segment("all", 0, 32, 0, {}), Segment("all", 32, 1024, None, {})),
        labels=None,
        rows="x",
    )


STATE = {
    "master/w": np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
    "master/b": np.full(5, 1e38, np.float32),
    "counters/step": np.array(7, np.int64),
}


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_state_is_placed_and_low_copies_are_rounded_to_nearest_even(low):
    arenas = Arenas(_manifest(low))
    arenas.load(STATE)
    kind = np.dtype(ml_dtypes.bfloat16) if low == "bfloat16" else np.dtype(np.float16)
    np.testing.assert_array_equal(arenas.tensor("low/w"), STATE["master/w"].astype(kind))
    np.testing.assert_array_equal(arenas.tensor("master/w"), STATE["master/w"])
    assert arenas.tensor("counters/step") == 7
    assert arenas.tensor("counters/skipped") == 0
    for view in (arenas.view(Port("p", "float32", (), "tensor", tensor)) for tensor in ("master/b", "gradient/w")):
        assert view.pointer % 64 == 0


def test_the_window_lies_behind_the_gradients_and_both_are_one_tensor_for_the_ranks():
    arenas = Arenas(_manifest())
    gradient = arenas.view(Port("g", "float32", (1024,), "arena", "gradient"))
    window = arenas.view(Port("w", "float32", (16,), "tensor", "window/window"))
    assert window.pointer == gradient.pointer + 4 * 1024
    exchanged, means = arenas.reduced()
    assert (exchanged.shape, exchanged.pointer, means) == ((1040,), gradient.pointer, 0)


def test_sides_take_turns_and_constants_are_right_on_both():
    arenas = Arenas(_manifest())
    arenas.load(STATE)
    block = arenas.blocks["counters"]
    block.double()
    arenas.write("counters/skipped", np.array(3, np.int64))
    port = Port("s", "int64", (), "tensor", "counters/step")
    assert arenas.view(port).pointer != arenas.view(port, other=True).pointer
    arenas.view(port, other=True).write(np.array(8, np.int64))
    assert arenas.tensor("counters/step") == 7
    block.turn()
    assert arenas.tensor("counters/step") == 8
    assert arenas.tensor("counters/skipped") == 3


def test_pieces_cover_each_segment_once():
    arenas = Arenas(_manifest())
    pieces = arenas.pieces(100)
    covered = np.zeros(1024, int)
    for piece in pieces:
        covered[piece.start : piece.stop] += 1
        assert piece.stop - piece.start <= 100
        assert (piece.low_start is None) == (piece.start >= 32)
    assert (covered == 1).all()
    assert len(arenas.pieces(None)) == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"master/w": np.zeros((3, 2), np.float32)}, r"float32\[2, 3\], not float32\[3, 2\]"),
        ({"master/w": np.zeros((2, 3))}, "not float64"),
        ({"master/unknown": np.zeros(1, np.float32)}, "belongs to another one"),
    ],
)
def test_state_of_another_bundle_is_refused(state, words):
    with pytest.raises(ModelError, match=words):
        Arenas(_manifest()).load(state)
