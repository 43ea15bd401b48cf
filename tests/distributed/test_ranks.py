"""Several ranks give what one process gives on the same rows; here each rank is a thread, so that four cost no more than one."""

import itertools

import numpy as np
import pytest

from onnxamp import training
from onnxamp.errors import RankLostError, UsageError
from onnxamp.trainer.callbacks import Callback, Checkpoints, checkpoints
from onnxamp.trainer.collective import divided
from onnxamp.trainer.position import INTERRUPTED
from onnxamp.trainer.trainer import Trainer


def build(model, level="O0"):
    scale = training.DynamicLossScale(init_scale=1024.0, growth_interval=4) if level != "O0" else "auto"
    return training.build(model, loss="cross_entropy", optimizer=training.AdamW(lr=0.01), level=level, loss_scale=scale)


def same(ranks, alone, rtol):
    for each in ranks:
        for name, value in alone.parameters().items():
            np.testing.assert_array_equal(ranks[0].parameters()[name], each.parameters()[name])
            np.testing.assert_allclose(each.parameters()[name], value, rtol=rtol, atol=rtol / 10, err_msg=name)


class Reports(Callback):
    def __init__(self):
        self.reports = []

    def on_window(self, loop, window):
        self.reports.append(window.report)


# Rows: whole windows; a last window that not every rank has rows for; one that leaves all but one rank without any.
@pytest.mark.parametrize("count", [64, 55, 49])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_one_process(mlp, rows, ranks, size, count):
    bundle, data = build(mlp), rows(count)

    def work(trainer):
        before = trainer.collective.reduced
        history = trainer.fit(data, epochs=2, batch_size=8 // size)
        return trainer, history, trainer.collective.reduced - before

    found = ranks(bundle, size, work, accumulate=2)
    alone = Trainer(bundle, "cpu", 2, threads=1)
    history = alone.fit(data, epochs=2, batch_size=8)
    same([trainer for trainer, *_ in found], alone, 2e-5)
    for _, each, reduced in found:
        assert reduced == each.windows + 1  # one for the seed at the start, then one a window
        assert (each.windows, each.steps, each.rows) == (history.windows, history.steps, history.rows)
        np.testing.assert_allclose(each.losses, history.losses, rtol=1e-5)


def test_the_mean_is_over_the_labels_that_count(mlp, rows, ranks):
    """Ranks with unequal numbers of ignored labels: a mean of the ranks' means would be another one."""
    bundle, data = build(mlp), rows(32)
    data["labels"][
        [0, 1, 2, 8, 9, 10, 11, 17, 24, 25]
    ] = -100  # 3, 4, 1 and 2 of the four rows of rank 0, and none of rank 1

    def work(trainer):
        trainer.fit(data, epochs=2, batch_size=4, shuffle=False)
        return trainer

    alone = Trainer(bundle, "cpu", threads=1)
    alone.fit(data, epochs=2, batch_size=8, shuffle=False)
    same(ranks(bundle, 2, work), alone, 2e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_an_overflow_on_one_rank_is_one_of_all(mlp, rows, ranks, size):
    bundle, data = build(mlp, "O2"), rows(64)
    data["x"][37] = 1e6  # infinity in fp16; in the fifth micro-batch of eight rows
    seen = [Reports() for _ in range(size)]

    def work(trainer):
        trainer.fit(data, epochs=2, batch_size=8, shuffle=False, callbacks=[seen[trainer.collective.rank]])
        return trainer

    found = ranks(bundle, size, work)
    # The same micro-batches, so that 16-bit sums are rounded alike.
    alone, expected = Trainer(bundle, "cpu", size, threads=1), Reports()
    alone.fit(data, epochs=2, batch_size=8, shuffle=False, callbacks=[expected])
    same(found, alone, 1e-4)
    skipped = [not report["ok"] for report in expected.reports]
    assert sum(skipped) == 2
    assert skipped.index(True) == 4 // size
    for each in seen:
        assert [not report["ok"] for report in each.reports] == skipped
        for field in ("loss_scale", "step", "rows"):
            assert [report[field] for report in each.reports] == [report[field] for report in expected.reports]


@pytest.mark.parametrize(("value", "said"), [(np.nan, "NaN"), (np.inf, "Inf")])
def test_every_rank_hears_whose_row_is_not_finite(mlp, rows, ranks, value, said):
    """Rank 1 has it: rank 0, which writes the records, would know only that some loss was not finite."""
    data = rows(64)
    data["x"][37] = value  # of the rows 32 to 39 rank 0 has four, rank 1 the rest
    causes = [[], []]

    class Causes(Callback):
        def on_window(self, loop, window):
            if window.cause is not None:
                causes[loop.trainer.collective.rank].append(window.cause)

    ranks(build(mlp), 2, lambda trainer: trainer.fit(data, batch_size=4, shuffle=False, callbacks=[Causes()]))
    assert causes[0] == causes[1]
    (cause,) = causes[0]
    assert cause.endswith(f"rank 1: the input 'x' holds 6 {said} in row 37 of the data")
    assert cause.startswith("rank 1") == (said == "NaN")


def test_running_statistics_are_averaged(normed, rows, ranks):
    bundle, data = build(normed), rows(16)
    halves = [{name: value[part] for name, value in data.items()} for part in (slice(8), slice(8, 16))]

    def work(trainer):
        before = trainer.collective.reduced
        result = trainer.micro_step(halves[trainer.collective.rank], (8, 8))
        assert result.applied
        assert trainer.collective.reduced == before + 2  # the seed and the window
        assert not trainer.refusals
        return trainer._arenas.values("statistics")

    first, second = ranks(bundle, 2, work)
    apart = []
    for half in halves:
        trainer = Trainer(bundle, "cpu", threads=1)
        trainer.micro_step(half)
        apart.append(trainer._arenas.values("statistics"))
    for name in ("mean", "var"):
        assert not np.allclose(apart[0][name], apart[1][name], rtol=1e-3)
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], (apart[0][name] + apart[1][name]) / 2, rtol=1e-5, atol=1e-6)


def test_a_stream_is_dealt_out(mlp, rows, ranks):
    """Batches of a stream as they come, of different sizes, and a last turn that is not every rank's."""
    data, edges = rows(29), [0, 5, 9, 12, 20, 29]
    stream = [{name: value[a:b] for name, value in data.items()} for a, b in itertools.pairwise(edges)]
    bundle = build(mlp)

    def work(trainer):
        trainer.fit(stream, epochs=2, batch_size=None)
        return trainer

    alone = Trainer(bundle, "cpu", 2, threads=1)
    alone.fit(stream, epochs=2, batch_size=None)
    same(ranks(bundle, 2, work), alone, 2e-5)


def test_a_lost_rank_leaves_the_last_window(mlp, rows, ranks, tmp_path):
    """Rank 1 fails in the third window: rank 0 saves what two windows gave, and one process goes on from there."""
    bundle, data = build(mlp), rows(48)
    bundle = bundle.save(tmp_path / "bundle")

    class Failing(Callback):
        def on_window(self, loop, window):
            if loop.windows == 2 and loop.trainer.collective.rank == 1:
                raise OSError("cable")

    def work(trainer):
        saving = Checkpoints(tmp_path / f"rank{trainer.collective.rank}", every=100)
        trainer.fit(data, epochs=2, batch_size=4, callbacks=[saving, Failing()])

    with pytest.raises(OSError, match="cable"):
        ranks(bundle, 2, work)
    files = [path.name for path in checkpoints(tmp_path / "rank0")]
    assert files == ["step-00000000.safetensors", "step-00000002.safetensors"]
    assert not checkpoints(tmp_path / "rank1")
    resumed = Trainer.load(tmp_path / "rank0" / files[-1], "cpu", bundle=bundle, threads=1)
    assert resumed.regroup(8) == 8
    resumed.fit(data, epochs=2, batch_size=8)
    whole = Trainer(bundle, "cpu", threads=1)
    whole.fit(data, epochs=2, batch_size=8)
    same([resumed], whole, 2e-5)


def test_a_window_that_is_open_goes_on_with_more_ranks(mlp, rows, ranks, tmp_path):
    bundle, data = build(mlp), rows(32)
    bundle = bundle.save(tmp_path / "bundle")

    class Stop(Callback):
        def on_start(self, loop):
            self.step = loop.trainer.micro_step
            loop.trainer.micro_step = lambda batch: (
                loop.stop("enough") if loop.batch == 4 else None,
                self.step(batch),
            )[1]

    alone = Trainer(bundle, "cpu", 4, threads=1)
    alone.fit(data, epochs=3, batch_size=4, callbacks=[Stop(), Checkpoints(tmp_path)])
    path = checkpoints(tmp_path)[-1]

    def work(trainer):
        assert trainer.collective.received == trainer.state_bytes
        loaded = Trainer.load(path, "cpu", bundle=bundle, threads=1, collective=trainer.collective)
        assert trainer.collective.received == trainer.state_bytes + loaded.state_bytes  # once, not twice
        assert loaded._loop.window.micro_steps == 1
        size = loaded.regroup(4)
        assert (size, loaded.accumulate) == (
            2,
            4,
        )  # four rows are in the open window already: four more are two for each
        loaded.fit(data, epochs=3, batch_size=size)
        return loaded

    whole = Trainer(bundle, "cpu", 4, threads=1)
    whole.fit(data, epochs=3, batch_size=4)
    same(ranks(bundle, 2, work), whole, 2e-5)


def test_a_signal_on_one_rank_ends_the_run_on_all(mlp, rows, ranks):
    class Signalled(Callback):
        def on_window(self, loop, window):
            if loop.trainer.collective.rank == 1 and loop.windows == 3:
                loop.interrupt()

    def work(trainer):
        first = trainer.fit(rows(64), epochs=5, batch_size=4, callbacks=[Signalled()])
        return first, trainer.fit(rows(64), epochs=2, batch_size=4)

    for first, second in ranks(build(mlp), 2, work):
        assert (first.reason, first.windows) == (INTERRUPTED, 4)
        assert (second.reason, second.epochs) == ("done", 2)  # a signal ends one run, not the next


def test_only_rank_0_writes_and_never_in_a_window(mlp, rows, ranks, tmp_path):
    data, bundle = rows(8), build(mlp)

    def work(trainer):
        trainer.micro_step(data, (8, 8))
        with pytest.raises(UsageError, match="flush, then save"):
            trainer.save(tmp_path / "never")
        with pytest.raises(UsageError, match="those given of all ranks"):
            trainer.micro_step(data, (8, 7) if trainer.collective.rank else (7, 8))
        trainer.flush()
        trainer.save(tmp_path / f"rank{trainer.collective.rank}")

    ranks(bundle, 2, work, accumulate=2)
    assert (tmp_path / "rank0").is_file()
    assert not (tmp_path / "rank1").exists()


@pytest.mark.parametrize(
    ("window", "size", "largest", "done", "expected"),
    [
        (64, 2, 32, 0, (32, 1)),
        (64, 4, 32, 0, (16, 1)),
        (64, 1, 16, 32, (16, 4)),
        (60, 3, 8, 0, (5, 4)),
        (64, 2, 32, 8, (4, 8)),
    ],
)
def test_windows_keep_their_rows(window, size, largest, done, expected):
    assert divided(window, size, largest, done) == expected


@pytest.mark.parametrize(("window", "done"), [(64, 0), (63, 32)])
def test_windows_that_cannot_be_shared_say_by_how_many_they_can(window, done):
    with pytest.raises(UsageError, match="cannot be shared evenly by 3 processes: take 1"):
        divided(window, 3, 8, done)


def test_lost_is_an_error_of_one_sentence():
    assert RankLostError.exit_code == 5
