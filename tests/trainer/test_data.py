"""Data sets: what opens, how columns are matched, in which order rows come, and what memory it takes."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onnxamp.errors import DataError, UsageError
from onnxamp.trainer.batches import Batches, bind
from onnxamp.trainer.data import Field, Stream, hold_out, open_data
from onnxamp.trainer.drive import Plan
from onnxamp.trainer.position import FitState

ROWS = 103
X = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
Y = np.arange(ROWS, dtype=np.int64)
FIELDS = [Field("x", np.dtype(np.float32), ("batch", 2, 3)), Field("labels", np.dtype(np.int64), ("batch",))]


class Reader:
    """ORT's CalibrationDataReader in shape."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rewind()

    def rewind(self) -> None:
        self.first = 0

    def get_next(self):
        if self.first >= ROWS:
            return None
        part = slice(self.first, self.first + self.size)
        self.first += self.size
        return {"x": X[part], "labels": Y[part]}


def _npz(path: Path, packed: bool = False, part: slice = slice(None)) -> Path:
    (np.savez_compressed if packed else np.savez)(path, x=X[part], labels=Y[part])
    return path


def _sources(folder: Path) -> dict[str, object]:
    (folder / "npy").mkdir()
    np.save(folder / "npy/x.npy", X)
    np.save(folder / "npy/labels.npy", Y)
    (folder / "shards").mkdir()
    for index, first in enumerate(range(0, ROWS, 40)):
        _npz(folder / f"shards/{index}.npz", packed=index == 1, part=slice(first, first + 40))
    return {
        "npz": _npz(folder / "plain.npz"),
        "compressed": str(_npz(folder / "packed.npz", packed=True)),
        "npy": folder / "npy",
        "shards": folder / "shards",
        "dict": {"x": X, "labels": Y},
        "list": [{"x": X[first : first + 25], "labels": Y[first : first + 25]} for first in range(0, ROWS, 25)],
        "generator": ({"x": X[first : first + 25], "labels": Y[first : first + 25]} for first in range(0, ROWS, 25)),
        "reader": Reader(30),
    }


KINDS = ("npz", "compressed", "npy", "shards", "dict", "list", "generator", "reader")


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["mapped", "loaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_batches(tmp_path, kind, small, monkeypatch):
    monkeypatch.setattr("onnxamp.trainer.data._SMALL_BYTES", small)
    monkeypatch.setattr("onnxamp.trainer.data._RELEASE_BYTES", 1000)
    batches = list(Batches(bind(open_data(_sources(tmp_path)[kind]), FIELDS), 16, shuffle=False).epoch())
    assert [len(batch["labels"]) for batch in batches] == [16] * 6 + [7]
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), X)
    np.testing.assert_array_equal(np.concatenate([batch["labels"] for batch in batches]), Y)


def test_large_members_are_mapped_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxamp.trainer.data._SMALL_BYTES", 0)
    for kind in ("npz", "npy"):
        data = open_data(_sources(tmp_path / kind if not (tmp_path / kind).mkdir() else tmp_path)[kind])
        assert all(isinstance(part, np.memmap) for part in data._columns["x"].parts)


def test_fortran_order_and_old_headers(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxamp.trainer.data._SMALL_BYTES", 0)
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(X), labels=Y)
    batch = next(Batches(bind(open_data(tmp_path / "f.npz"), FIELDS), 5, shuffle=False).epoch())
    np.testing.assert_array_equal(batch["x"], X[:5])


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_shuffling_is_a_seeded_permutation(tmp_path, kind):
    data = bind(open_data(_sources(tmp_path)[kind]), FIELDS)

    def rows(seed: int, epoch: int) -> list[int]:
        return [int(y) for batch in Batches(data, 16, seed=seed).epoch(epoch) for y in batch["labels"]]

    assert sorted(rows(0, 0)) == list(range(ROWS))
    assert rows(0, 0) == rows(0, 0)
    assert len({tuple(rows(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    batch = next(Batches(data, 16, seed=3).epoch())
    np.testing.assert_array_equal(batch["x"], X[batch["labels"]])


@pytest.mark.parametrize("kind", ["npz", "list", "reader"])
@pytest.mark.parametrize("start", [0, 1, 4, 7, 9])
def test_an_epoch_goes_on_where_it_stopped(tmp_path, kind, start):
    data = bind(open_data(_sources(tmp_path)[kind]), FIELDS)
    whole = [batch["labels"].tolist() for batch in Batches(data, 16).epoch(2)]
    assert [batch["labels"].tolist() for batch in Batches(data, 16).epoch(2, start)] == whole[start:]


def test_streams_keep_their_own_batches_and_can_be_used_up(tmp_path):
    sources = _sources(tmp_path)
    batches = Batches(bind(open_data(sources["list"]), FIELDS), None)
    assert [len(batch["x"]) for batch in batches.epoch()] == [25, 25, 25, 25, 3]
    assert [len(batch["x"]) for batch in batches.epoch(1)] == [25, 25, 25, 25, 3]
    once = Batches(bind(open_data(sources["generator"]), FIELDS), None)
    assert len(list(once.epoch())) == 5
    with pytest.raises(DataError, match="used up"):
        list(once.epoch(1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_each_global_batch(world):
    data = bind(open_data({"x": X, "labels": Y}), FIELDS)
    single = [batch["labels"].tolist() for batch in Batches(data, 12, seed=5).epoch()]
    ranks = [
        [b["labels"].tolist() for b in Batches(data, 12 // world, seed=5, rank=rank, world_size=world).epoch()]
        for rank in range(world)
    ]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == single


def test_casts_and_leftovers_are_noted():
    data = open_data({"x": X.astype(np.float64), "labels": Y.astype(np.int32), "id": Y})
    binding = bind(data, FIELDS)
    assert binding.notes == (
        "x is float64 in the data and is cast to float32",
        "labels is int32 in the data and is cast to int64",
        "not used: id",
    )
    batch = next(Batches(binding, 4).epoch())
    assert (batch["x"].dtype, batch["labels"].dtype) == (np.float32, np.int64)
    assert set(batch) == {"x", "labels"}


def test_columns_can_be_renamed_and_optional_ones_left_out():
    data = open_data({"pixels": X, "y": Y})
    weights = Field("weights", np.dtype(np.float32), ("batch",))
    binding = bind(data, [*FIELDS, weights], columns={"x": "pixels", "labels": "y"}, optional=["weights"])
    assert set(next(Batches(binding, 4).epoch())) == {"x", "labels"}
    with pytest.raises(DataError, match="'weights' is missing"):
        bind(data, [*FIELDS, weights], columns={"x": "pixels", "labels": "y"})


BAD_COLUMNS = [
    (
        {"x": X},
        r"'labels' is missing.\n  expected: x float32\[batch, 2, 3\], labels int64\[batch\]\n  found:    x float32\[rows, 2, 3\]",
    ),
    ({"pixels": X, "labels": Y}, r"--column x=pixels"),
    ({"x": X[:, 0], "labels": Y}, r"'x' must be \[batch, 2, 3\] and is \[rows, 3\]"),
    ({"x": X[:, :1], "labels": Y}, r"'x' must be \[batch, 2, 3\] and is \[rows, 1, 3\]"),
    ({"x": X, "labels": Y.astype(np.float32)}, "'labels' must be int64 and is float32"),
    ({"x": X, "labels": Y[:, None]}, r"'labels' must be \[batch\] and is \[rows, 1\]"),
    ({"x": X.astype(np.complex64), "labels": Y}, "'x' must be float32 and is complex64"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_COLUMNS)
def test_columns_that_do_not_fit(columns, message):
    with pytest.raises(DataError, match=message):
        bind(open_data(columns), FIELDS)


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _damaged(path: Path, damage: str) -> Path:
    """A compressed archive that says it is encrypted or compressed otherwise, or whose compressed bytes are wrong."""
    np.savez_compressed(path, x=X, labels=Y)
    content = bytearray(path.read_bytes())
    central = content.find(b"PK\x01\x02")
    match damage:
        case "encrypted":
            content[6] |= 1
            content[central + 8] |= 1
        case "method":
            content[8] = content[central + 10] = 99
        case "stream":
            content[80:120] = b"\xff" * 40
    return _write(path, bytes(content))


BAD_SOURCES = [
    *(
        (lambda d, damage=damage: _damaged(d / "a.npz", damage), "no readable .npz")
        for damage in ("encrypted", "method", "stream")
    ),
    (lambda d: d / "no.npz", "no data at"),
    (lambda d: _write(d / "a.csv", b"1,2"), "no .npz file"),
    (lambda d: _write(d / "a.npz", b"junk"), "no readable .npz"),
    (lambda d: _write(d / "a.npz", _npz(d / "b.npz").read_bytes()[:900]), "no readable .npz"),
    (lambda d: _write(d / "x.npy", b"junk").parent, "no readable .npy"),
    (lambda d: d, "holds no .npz or .npy"),
    (lambda d: {}, "holds no arrays"),
    (lambda d: {"x": X[:0]}, "no rows"),
    (lambda d: {"x": X, "labels": Y[:5]}, "x 103, labels 5"),
    (lambda d: {"x": np.float32(3)}, "is a scalar"),
    (lambda d: {"x": np.array(["a", {}], object)}, "Python objects"),
    (lambda d: [X], "gave a ndarray"),
    (lambda d: [], "gave no batch"),
    (lambda d: 3, "Cannot read training data from a int"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SOURCES)
def test_sources_that_do_not_open(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        open_data(make(tmp_path))


def test_shards_that_differ(tmp_path):
    np.savez(tmp_path / "0.npz", x=X, labels=Y)
    np.savez(tmp_path / "1.npz", x=X)
    with pytest.raises(DataError, match=r"1.npz has x"):
        open_data(tmp_path)
    np.savez(tmp_path / "1.npz", x=X[:, :1], labels=Y)
    with pytest.raises(DataError, match="shards must agree"):
        open_data(tmp_path)
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(DataError, match="mixes"):
        open_data(tmp_path)


def test_object_arrays_in_files_are_refused_unread(tmp_path):
    np.savez(tmp_path / "o.npz", x=np.array([{}], object))
    with pytest.raises(DataError, match="no readable"):
        open_data(tmp_path / "o.npz")


def test_compressed_data_beyond_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 16)
    with pytest.raises(DataError, match=r"needs .* save it with numpy.savez"):
        open_data(_npz(tmp_path / "a.npz", packed=True))


def test_a_bad_batch_in_a_stream_is_raised_where_it_is_used():
    batches = Batches(bind(open_data([{"x": X, "labels": Y}, {"x": X}]), FIELDS), None).epoch()
    next(batches)
    with pytest.raises(DataError, match="lacks column 'labels'"):
        next(batches)
    assert not any(thread.name == "onnxamp-prefetch" for thread in threading.enumerate())


def test_an_abandoned_epoch_ends_its_thread():
    batches = Batches(bind(open_data({"x": X, "labels": Y}), FIELDS), 1).epoch()
    next(batches)
    batches.close()
    assert not any(thread.name == "onnxamp-prefetch" for thread in threading.enumerate())


def test_reading_ahead_is_bounded():
    taken = []

    def numbers():
        for first in range(100):
            taken.append(first)
            yield {"x": X, "labels": Y}

    batches = Batches(bind(Stream(numbers, "numbers"), FIELDS), None, prefetch=3).epoch()
    next(batches)
    next(batches)
    threading.Event().wait(0.2)
    assert len(taken) <= 2 + 3 + 2
    batches.close()


def test_memory_stays_bounded_on_data_beyond_it(tmp_path):
    """Reads 64 MB of mapped columns in random order; the process may grow by a fraction of that."""
    rows = 1 << 14
    array = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (rows, 1024))
    array[:] = np.arange(rows, dtype=np.float32)[:, None]
    array.flush()
    del array
    np.save(tmp_path / "labels.npy", np.arange(rows))
    fields = [Field("x", np.dtype(np.float32), ("batch", 1024)), FIELDS[1]]
    batches = Batches(bind(open_data(tmp_path), fields), 64, seed=1)
    grown = []
    base = _resident()
    for batch in batches.epoch():
        np.testing.assert_array_equal(batch["x"][:, 7], batch["labels"])
        grown.append(_resident() - base)
    assert len(grown) == 256
    assert max(grown) < 48 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_values_beyond_the_type_of_the_input_are_named():
    x = X.astype(np.float64)
    binding = bind(open_data({"x": x, "labels": Y}), FIELDS)
    x[0] = np.inf  # infinite before the cast: not the cast's fault
    assert np.isinf(binding.convert({"x": x, "labels": Y})["x"][0]).all()
    x[70, 1] = -1e300
    with pytest.raises(DataError, match=r"-1e\+300 in column 'x' is beyond the range of float32"):
        binding.convert({"x": x, "labels": Y})


def _numbers(kind, folder):
    """23 rows of one column that holds their numbers, from several kinds of sources."""
    x = np.arange(23, dtype=np.float32)[:, None]
    if kind == "list":
        return [{"x": x[first : first + 5]} for first in range(0, 23, 5)]
    if kind == "npz":
        np.savez(folder / "rows.npz", x=x)
        return folder / "rows.npz"
    return {"x": x}


@pytest.mark.parametrize(("kind", "size"), [("dict", 4), ("npz", 4), ("list", 4), ("list", None)])
@pytest.mark.parametrize("start", [0, 1])
def test_rows_of_a_micro_batch_are_known_by_their_numbers_in_the_data(tmp_path, kind, size, start):
    binding = bind(open_data(_numbers(kind, tmp_path)), [Field("x", np.dtype(np.float32), ("batch", 1))])
    origin = {"dict": "the data", "npz": str(tmp_path / "rows.npz"), "list": "the list"}[kind]
    seen = []

    def look(batch, locate):
        for row, value in enumerate(batch["x"][:, 0].astype(int).tolist()):
            assert locate([row]) == f"row {value} of {origin}"
            seen.append(value)
        return len(batch["x"])

    for rank in range(3):
        batches = Batches(binding, size, seed=5, rank=rank, world_size=3, prepare=look)
        assert all(isinstance(rows, int) for rows in batches.epoch(2, start))
    assert len(set(seen)) == len(seen) == 23 - 3 * start * (size or 5)


def test_rows_of_shards_are_numbered_in_their_file(tmp_path):
    for name, rows in (("a", 3), ("b", 2), ("c", 1), ("d", 4), ("e", 1)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((rows, 1), np.float32))
    data = open_data(tmp_path)
    assert data.locate(np.array([4])) == f"row 1 of {tmp_path}/b.npz"
    assert data.locate(np.array([5, 3, 2])) == (
        f"row 2 of {tmp_path}/a.npz, row 0 of {tmp_path}/b.npz, row 0 of {tmp_path}/c.npz"
    )
    assert data.locate(np.array([9, 6, 8])) == f"rows 0, 2 and 3 of {tmp_path}/d.npz"
    assert data.locate(np.arange(6, 10)) == f"rows 0, 1, 2 and 1 more of {tmp_path}/d.npz"
    assert data.locate(np.arange(11)).endswith(f"row 0 of {tmp_path}/c.npz and rows of 2 more files")


def test_rows_are_held_out_once_and_for_all():
    data = open_data({"x": X, "labels": Y})
    parts = hold_out(data, 0.2, seed=3)
    rows = [part.take(["labels"], np.arange(part.rows))["labels"] for part in parts]
    assert [part.rows for part in parts] == [ROWS - 21, 21]
    assert sorted(np.concatenate(rows)) == list(range(ROWS))
    assert rows[1].tolist() == hold_out(data, 0.2, seed=3)[1].take(["labels"], np.arange(21))["labels"].tolist()
    assert rows[1].tolist() != hold_out(data, 0.2, seed=4)[1].take(["labels"], np.arange(21))["labels"].tolist()
    assert parts[1].locate(np.array([5])) == f"row {rows[1][5]} of the data"
    again = parts[0].only(np.array([7, 2]))
    assert again.take(["labels"], np.arange(2))["labels"].tolist() == rows[0][[7, 2]].tolist()
    with pytest.raises(DataError, match="leaves none to train on"):
        hold_out(open_data({"x": X[:1]}), 0.5)


def test_what_is_wrong_with_a_row_is_said_with_its_place():
    binding = bind(open_data({"x": np.zeros((9, 1), np.float32)}), [Field("x", np.dtype(np.float32), ("batch", 1))])

    def refuse(batch, locate):
        problem = DataError("it is bad.")
        problem.row = 1
        raise problem

    with pytest.raises(DataError, match=r"^Row 1 of the data: it is bad\.$"):
        next(Batches(binding, 4, shuffle=False, prepare=refuse).epoch())


def test_a_fixed_batch_must_divide_the_rows_of_all_processes():
    data = open_data({"x": np.zeros((24, 1), np.float32)})
    binding = bind(data, [Field("x", np.dtype(np.float32), (8, 1))])
    binding.check_size(8)
    with pytest.raises(DataError, match=r"8 rows in each of 2 processes, and 24 rows of the data .* leave 8 out"):
        binding.check_size(8, 2)


def test_a_plan_counts_all_processes_before_the_run_begins():
    """Those that train share the rows; rank 0 alone evaluates."""
    trainer = SimpleNamespace(
        fields=(Field("x", np.dtype(np.float32), (4, 1)),), collective=SimpleNamespace(world_size=2)
    )
    rows = {"x": np.zeros((4, 1), np.float32)}
    with pytest.raises(DataError, match="in each of 2 processes"):
        Plan(rows, batch_size=4).check(trainer)
    Plan({"x": np.zeros((8, 1), np.float32)}, val=rows, batch_size=4).check(trainer)


@pytest.mark.parametrize(("then", "step", "now", "batch"), [(2, 3, 1, 6), (2, 2, 4, 1), (2, 3, 2, 3), (4, 1, 2, 2)])
def test_a_stream_goes_on_at_its_place_with_another_number_of_processes(then, step, now, batch):
    """Its batches are taken as they are, one for each process in a micro-step."""

    def state(ranks, position):
        binding = bind(open_data(Reader(4)), FIELDS)
        collective = SimpleNamespace(world_size=ranks, rank=0)
        trainer = SimpleNamespace(position=position, collective=collective, accumulate=1)
        return FitState(trainer, Batches(binding, None, world_size=ranks), 1, None)

    before = state(then, {})
    before.batch = step
    assert state(now, before._position()).batch == batch
    before.batch = 3
    with pytest.raises(UsageError, match=rf"{3 * then} batches of the epoch.* micro-steps of 5 batches"):
        state(5, before._position())
