"""Samples from every form of data, and inputs made up from a model."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from onnxamp.errors import DataError, UnsupportedError, UsageError
from onnxamp.evidence.inputs import model_inputs, samples
from onnxamp.evidence.sampling import choose
from onnxamp.evidence.synthesis import synthesize
from onnxamp.ort.session import SessionConfig, open_session


def model(text: str) -> ir.Model:
    return ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}'))


TWO = model("g (float[batch,3] x, int64[batch] ids) => (float[batch,3] y) { y = Identity(x) }")
FIXED = model("g (float[2,3] x, int64[2] ids) => (float[2,3] y) { y = Identity(x) }")
X, IDS = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)


class Reader:
    """As ONNX Runtime's quantization tools want it."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self._items = iter(items)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._items, None)


def npz(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "data.npz"
    np.savez(path, x=X, ids=IDS, labels=IDS)
    return path


def npy(folder: pathlib.Path) -> pathlib.Path:
    (folder / "one").mkdir()
    np.save(folder / "one" / "x.npy", X)
    np.save(folder / "one" / "ids.npy", IDS)
    return folder / "one"


def many(folder: pathlib.Path) -> pathlib.Path:
    (folder / "many").mkdir()
    for index in range(3):
        np.savez(folder / "many" / f"{index}.npz", x=X + index, ids=IDS)
    return folder / "many"


def positional(folder: pathlib.Path) -> pathlib.Path:
    np.savez(folder / "p.npz", X, IDS)
    return folder / "p.npz"


FORMS: dict[str, tuple[Callable[[pathlib.Path], Any], int]] = {
    "npz": (npz, 1),
    "npz as text": (lambda folder: str(npz(folder)), 1),
    "positional npz": (positional, 1),
    "folder of npy": (npy, 1),
    "folder of npz": (many, 3),
    "mapping": (lambda _: {"x": X, "ids": IDS}, 1),
    "iterable": (lambda _: ({"x": X + i, "ids": IDS} for i in range(2)), 2),
    "reader": (lambda _: Reader([{"x": X, "ids": IDS}] * 5), 5),
    "stack": (lambda _: {"x": np.stack([X] * 6), "ids": np.stack([IDS] * 6)}, 6),
    "float64 and int32": (lambda _: {"x": X.astype(np.float64), "ids": IDS.astype(np.int32)}, 1),
    "lists": (lambda _: {"x": X.tolist(), "ids": IDS.tolist()}, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data(form: str, tmp_path: pathlib.Path) -> None:
    make, count = FORMS[form]
    found = list(samples(make(tmp_path), model_inputs(TWO)))
    assert len(found) == count
    assert list(found[0]) == ["x", "ids"]
    np.testing.assert_array_equal(found[0]["x"], X)
    assert (found[0]["x"].dtype, found[0]["ids"].dtype) == (np.float32, np.int64)


def test_a_lone_npy_file_is_the_only_input_whatever_it_is_called(tmp_path: pathlib.Path) -> None:
    one = model("g (float[batch,3] x) => (float[batch,3] y) { y = Identity(x) }")
    np.save(tmp_path / "pictures.npy", X)
    (sample,) = samples(tmp_path / "pictures.npy", model_inputs(one))
    np.testing.assert_array_equal(sample["x"], X)
    with pytest.raises(DataError, match="lacks the model's input x"):
        list(samples(tmp_path / "pictures.npy", model_inputs(TWO)))
    with pytest.raises(DataError, match="lacks the model's input x"):  # a name that was given is not overlooked
        list(samples({"labels": X}, model_inputs(one)))


def test_rows_are_dealt_out_to_a_fixed_batch() -> None:
    found = list(samples({"x": X, "ids": IDS}, model_inputs(FIXED)))
    assert [sample["ids"].tolist() for sample in found] == [[0, 1], [2, 3]]
    assert len(list(samples({"x": X, "ids": IDS}, model_inputs(FIXED), limit=1))) == 1
    odd = samples({"x": np.zeros((5, 3), np.float32), "ids": np.arange(5)}, model_inputs(FIXED))
    assert [sample["ids"].tolist() for sample in odd] == [[0, 1], [2, 3], [3, 4]]


def test_dimensions_that_mean_any_size() -> None:
    paddle = model('g (float["?",3,"?","?"] x) => (float["?",3,"?","?"] y) { y = Identity(x) }')
    assert model_inputs(paddle)[0].shape == (None, 3, None, None)
    (sample,) = samples({"x": np.zeros((2, 3, 48, 192), np.float32)}, model_inputs(paddle))
    assert sample["x"].shape == (2, 3, 48, 192)


def test_low_inputs_take_fp32_data() -> None:
    low = model("g (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }")
    (sample,) = samples({"x": np.array([1.01], np.float32)}, model_inputs(low))
    assert sample["x"].dtype == ml_dtypes.bfloat16


def _compressed(folder: pathlib.Path, offset: int, content: bytes) -> pathlib.Path:
    """An archive with `content` at `offset` of its only member (and the compression method in its directory too)."""
    path = folder / "damaged.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random(100))
    archive = bytearray(path.read_bytes())
    archive[offset : offset + len(content)] = content
    if offset == 8:
        archive[archive.find(b"PK\x01\x02") + 10] = content[0]
    path.write_bytes(archive)
    return path


BAD: dict[str, tuple[Callable[[pathlib.Path], Any], type[Exception], str]] = {
    "no file": (lambda folder: folder / "none.npz", UsageError, "No such data"),
    "empty folder": (lambda folder: folder, UsageError, "neither"),
    "no samples": (lambda _: [], UsageError, "no sample"),
    "not an archive": (lambda folder: _text(folder), DataError, "no readable"),
    "wrong compressed bytes": (lambda folder: _compressed(folder, 80, b"\xff" * 40), DataError, "no readable"),
    "unknown compression": (lambda folder: _compressed(folder, 8, b"\x63"), DataError, "no readable"),
    "pickled": (lambda folder: _pickled(folder), DataError, "no readable"),
    "missing input": (lambda _: {"x": X}, DataError, r"lacks the model's input ids int64\[batch\]"),
    "wrong kind": (lambda _: {"x": X, "ids": IDS / 2}, DataError, "ids is float64"),
    "too large an integer": (lambda _: {"x": X, "ids": np.full(4, 2**63, np.uint64)}, DataError, "ids is uint64"),
    "beyond float32": (
        lambda _: {"x": np.array([[1, 2, 1e300]]), "ids": IDS[:1]},
        DataError,
        r"1e\+300 in x is beyond",
    ),
    "wrong rank": (lambda _: {"x": X[0], "ids": IDS}, DataError, r"expected x float32\[batch,3\]"),
    "wrong size": (lambda _: {"x": X[:, :2], "ids": IDS}, DataError, r"found x float32\[4,2\]"),
    "unequal batches": (lambda _: {"x": X, "ids": IDS[:2]}, DataError, "does not fit"),
    "half a stack": (lambda _: {"x": X[None], "ids": IDS}, DataError, "does not fit"),
    "no mapping": (lambda _: [X], DataError, "Sample 0 is a ndarray"),
}


def _text(folder: pathlib.Path) -> pathlib.Path:
    (folder / "t.npz").write_text("nothing")
    return folder / "t.npz"


def _pickled(folder: pathlib.Path) -> pathlib.Path:
    np.savez(folder / "o.npz", x=np.array([{}], dtype=object), ids=IDS)
    return folder / "o.npz"


@pytest.mark.parametrize("case", BAD)
def test_bad_data(case: str, tmp_path: pathlib.Path) -> None:
    make, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        list(samples(make(tmp_path), model_inputs(TWO)))


def test_inputs_are_what_a_caller_feeds() -> None:
    listed = model("g (float[N,?] x, float[2] w) => (float[N,?] y) <float[2] w = {1, 2}> { y = Identity(x) }")
    (item,) = model_inputs(listed)
    assert (item.name, item.dtype, item.shape) == ("x", np.dtype(np.float32), ("N", None))


TRANSFORMER = model("""g (int64[batch,seq] input_ids, int64[batch,seq] attention_mask, int64[batch,seq] position_ids,
    int64[batch,seq] token_type_ids, float[batch,past_len] past_key, int64[batch,"past_len + seq"] total, bool[1] use_cache_branch,
    int64[batch] lengths)
    => (float[batch,seq,4] y) <float[11,4] table = {1}, float[5,4] types = {1}>
    { flat = Cast <to = 7> (input_ids)  a = Gather(table, flat)  b = Gather(types, token_type_ids)  y = Add(a, b) }""")


def test_synthesis_of_a_transformer() -> None:
    made, sizes = synthesize(TRANSFORMER, 3, dim={"seq": 9})
    assert sizes == {"batch": 1, "seq": 9, "past_len": 16, "past_len + seq": 25}
    assert len(made) == 3
    ids = np.concatenate([sample["input_ids"] for sample in made])
    assert ids.shape == (3, 9)
    assert ids.min() >= 0
    assert 5 <= ids.max() < 11, "ids lie in the table of 11 rows and use it"
    assert [sample["use_cache_branch"].any() for sample in made] == [False, True, False]
    for sample in made:
        assert (sample["attention_mask"] == 1).all()
        np.testing.assert_array_equal(sample["position_ids"], np.arange(9)[None])
        assert (sample["token_type_ids"] == 0).all()
        assert sample["past_key"].shape == (1, 16)
        assert sample["lengths"].tolist() == [25]
    again, _ = synthesize(TRANSFORMER, 3, dim={"seq": 9})
    other, _ = synthesize(TRANSFORMER, 3, dim={"seq": 9}, seed=1)
    np.testing.assert_array_equal(again[2]["input_ids"], made[2]["input_ids"])
    assert (other[0]["input_ids"] != made[0]["input_ids"]).any()


def test_made_up_flags_take_both_values() -> None:
    source = model("""g (bool flag, bool[2,6] mask) => (bool[2,6] y) { y = And(mask, flag) }""")
    one, two = synthesize(source, 2)[0]
    assert (one["flag"], two["flag"]) == (True, False)
    assert one["mask"].all()
    assert two["mask"].any(axis=1).all(), "no row is shut out"
    assert not two["mask"].all(axis=1).any()


@pytest.mark.parametrize(("other", "flags"), [("h = Neg(x)", {True, False}), ("h = Reshape(x, bad)", {True})])
def test_flags_that_the_model_does_not_run_with_are_left_out(other: str, flags: set[bool]) -> None:
    source = model(f"""g (float[2,3] x, bool c) => (float[2,3] y) <int64[1] bad = {{7}}>
    {{ y = If (c) <then_branch = t () => (float[2,3] a) {{ a = Abs(x) }},
                   else_branch = e () => (float[2,3] b) {{ {other} b = Identity(h) }}> }}""")
    session = open_session(source, SessionConfig(provider="cpu", optimization="none"))
    assert {bool(sample["c"]) for sample in choose(source, session, None)} == flags


@pytest.mark.parametrize(
    ("declaration", "shape", "low", "high"),
    [
        ("float[batch,3,h,w] pixels", (1, 3, 64, 64), 0, 1),
        ("float[batch,32,40,3] pixels", (1, 32, 40, 3), 0, 1),
        ("uint8[1,3,8,8] pixels", (1, 3, 8, 8), 0, 255),
        ("float16[1,16000] audio", (1, 16000), -0.9, 0.9),
        ("float[2,1,128] state", (2, 1, 128), -1, 1),
        ("float[batch,10] features", (1, 10), -6, 6),
        ("float temperature", (), 1, 1),
        ("int64 sr", (), 16000, 16000),
        ("bfloat16[4] anything", (4,), 1, 1),
        ("double[n,?] anything", (1, 64), -6, 6),
        ("float[-1,3,?,?] pixels", (1, 3, 64, 64), 0, 1),
    ],
)
def test_synthesis_by_name_and_shape(declaration: str, shape: tuple[int, ...], low: float, high: float) -> None:
    kind, name = declaration.split()
    source = model(f"g ({declaration}) => ({kind} y) {{ y = Identity({name}) }}")
    (sample,), _ = synthesize(source, 1)
    value = sample[name]
    assert value.shape == shape
    assert value.dtype == model_inputs(source)[0].dtype
    assert low <= float(value.min())
    assert float(value.max()) <= high
    if "pixels" in name or "audio" in name:
        assert float(np.asarray(value, np.float64).std()) > 0.01 * (high - low)


@pytest.mark.parametrize(("operator", "value"), [("Add", 0), ("Mul", 1)])
def test_synthesis_opens_float_masks(operator: str, value: int) -> None:
    source = model(f"g (float[2,4] x, float[2,4] mask) => (float[2,4] y) {{ y = {operator}(x, mask) }}")
    (sample,), _ = synthesize(source, 1)
    assert (sample["mask"] == value).all()


def test_synthesis_refuses_what_it_cannot_know() -> None:
    with pytest.raises(UnsupportedError, match="--data"):
        synthesize(model("g (string[2] text) => (string[2] y) { y = Identity(text) }"))
    with pytest.raises(UnsupportedError, match="--data"):
        synthesize(model("g (seq(float[2]) s) => (seq(float[2]) y) { y = Identity(s) }"))
    with pytest.raises(UsageError, match="batsch"):
        synthesize(TRANSFORMER, dim={"batsch": 2})
