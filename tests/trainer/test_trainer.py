"""The training protocol on a bundle written by hand: windows, skips, sides, checkpoints."""

import itertools
import os

import numpy as np
import onnx
import pytest
import torch

import onnxamp
from onnxamp.errors import DataError, DivergedError, ModelError, UsageError
from onnxamp.ort.values import transfers
from onnxamp.trainer.export import read_trained
from onnxamp.trainer.metric import Metric
from onnxamp.trainer.metrics import metric
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import build
from onnxamp.training.manifest import REPORT
from onnxamp.training.optimizers import Adam
from onnxamp.training.scaler import DynamicLossScale, FixedLossScale


def _open(bundle, **options) -> Trainer:
    return Trainer(bundle, "cpu", threads=1, **options)


def _state(trainer: Trainer) -> dict[str, np.ndarray]:
    return {tensor.key: trainer._arenas.tensor(tensor.key) for tensor in trainer.manifest.tensors}


def _equal(first: Trainer, second: Trainer) -> None:
    left, right = _state(first), _state(second)
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def _reference(batches, windows, lr=0.05, momentum=0.9):
    """SGD with momentum in float64 on the weighted mean over each window."""
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((3, 2), np.float32).astype(np.float64), np.zeros(2)
    vw, vb, losses = 0.0, 0.0, []
    for window in windows:
        rows = [batches[i] for i in window]
        x, t, k = (np.concatenate([r[n] for r in rows]).astype(np.float64) for n in ("x", "labels", "weights"))
        e = x @ w + b - t
        losses.append((k[:, None] * e * e).sum() / k.sum())
        g = 2 * k[:, None] * e / k.sum()
        vw, vb = momentum * vw + x.T @ g, momentum * vb + g.sum(0)
        w, b = w - lr * vw, b - lr * vb
    return w, b, losses


@pytest.mark.parametrize("k", [1, 3, 5])
def test_windows_take_the_weighted_mean_over_their_micro_batches(bundle, batches, k):
    trainer = _open(bundle, accumulate=k)
    results = [trainer.micro_step(batch) for batch in batches]
    tail = trainer.flush()
    windows = [range(i, min(i + k, 12)) for i in range(0, 12, k)]
    w, b, losses = _reference(batches, windows)
    reports = [r.report for r in [*results, tail] if r is not None and r.report is not None]
    assert len(reports) == len(windows)
    np.testing.assert_allclose([r["loss"] for r in reports], losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters()["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.parameters()["b"], b, rtol=1e-5, atol=1e-6)
    assert trainer.step == len(windows)
    assert (tail is None) == (12 % k == 0)


def test_results_are_read_when_asked_and_keep_their_own_numbers(bundle, batches):
    trainer = _open(bundle, accumulate=2)
    results = [trainer.micro_step(batch) for batch in batches[:4]]
    w = bundle.state["master/w"]
    x, t, k = (batches[0][name] for name in ("x", "labels", "weights"))
    assert results[0].loss == pytest.approx((k[:, None] * (x @ w - t) ** 2).sum() / k.sum(), rel=1e-5)
    assert [r.applied for r in results] == [False, True, False, True]
    assert not any(r.skipped for r in results)
    assert [r.scale for r in results] == [2.0**16] * 4
    assert results[0].report is None
    assert results[1].report["step"] == 1
    assert results[3].report["step"] == 2
    assert results[3].cause is None


def test_the_scale_of_a_step_stays_what_it_was_however_late_it_is_read(bundle_maker, batches):
    trainer = _open(bundle_maker(scale=DynamicLossScale(init_scale=8.0, growth_interval=1)), accumulate=2)
    results = [trainer.micro_step(batch) for batch in batches[:5]]
    assert [result.scale for result in results] == [8, 8, 16, 16, 32]
    results.append(trainer.micro_step(batches[5]))
    trainer.micro_step(batches[6])
    assert [result.scale for result in results] == [8, 8, 16, 16, 32, 32]


def test_a_window_that_is_applied_in_spite_of_an_overflow_is_not_skipped(bundle_maker, batches):
    trainer = _open(bundle_maker(scale=FixedLossScale(1.0, drop_overflow_update=False)))
    x = batches[0]["x"].copy()
    x[0, 0] = np.nan
    for _ in range(60):  # more than the patience with windows that are skipped
        result = trainer.micro_step({**batches[0], "x": x})
        assert (result.applied, result.skipped, result.cause) == (True, False, None)
        assert (result.report["found_inf"], result.report["stuck"]) == (1, 0)


def test_reading_an_arena_is_one_transfer(bundle, batches):
    """On another device each transfer is of the whole buffer."""
    trainer = _open(bundle)
    trainer.micro_step(batches[0])
    for read in (trainer.parameters, trainer.nonfinite_gradients, trainer.inference_model):
        before = transfers.reads
        read()
        assert transfers.reads == before + 1


def test_metrics_read_the_output_of_the_loss():
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["good"]),
        onnx.helper.make_node("Neg", ["good"], ["neg"]),
        onnx.helper.make_node("Softmax", ["neg"], ["first"]),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in ("first", "good")]
    graph = onnx.helper.make_graph(
        nodes, "g", [x], outputs, [onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    trainer = _open(build(model, loss="cross_entropy", optimizer="sgd", level="O0", output="good"))
    assert not trainer.metric_options["probabilities"]
    data = {"x": np.eye(3, dtype=np.float32), "labels": np.arange(3)}
    assert trainer.evaluate(data, metrics=[metric("accuracy", **trainer.metric_options)])["accuracy"] == 1


def test_a_checkpoint_knows_the_frozen_weights_of_its_bundle(exporter, tmp_path):
    model = exporter(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), {"x": np.zeros((2, 3), np.float32)}
    )
    other = onnx.ModelProto()
    other.CopyFrom(model)
    frozen = next(tensor for tensor in other.graph.initializer if tensor.name == "0.weight")
    frozen.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(frozen) + 1, frozen.name))
    bundles = [
        build(source, loss="mse", optimizer="sgd", level="O0", frozen="*", trainable="1.*") for source in (model, other)
    ]
    _open(bundles[0]).save(tmp_path / "c.safetensors")
    Trainer.load(tmp_path / "c.safetensors", "cpu")
    for read in (Trainer.load, read_trained):
        with pytest.raises(ModelError, match="made with another bundle"):
            read(tmp_path / "c.safetensors", bundle=bundles[1])


def test_in_place_and_by_turns_agree_bit_for_bit(bundle_maker, batches):
    trainers = [_open(bundle_maker(Adam(lr=0.01)), accumulate=2, in_place=choice) for choice in (True, False)]
    for batch in batches:
        results = [trainer.micro_step(batch) for trainer in trainers]
        assert results[0].loss == results[1].loss
        _equal(*trainers)
    assert trainers[0].state_bytes < trainers[1].state_bytes
    for name in ("grad: acc_out/w", "update: parameter_out", "update: exp_avg_out"):
        assert name not in trainers[0].refusals
        assert name in trainers[1].refusals


def test_an_unsafe_alias_is_refused_and_the_numbers_stay_right(bundle_maker, batches):
    """The bundle claims that acc may be overwritten, and a node of the graph reads it too late."""
    safe, planted = (_open(bundle_maker(unsafe=choice), accumulate=3) for choice in (False, True))
    assert "may run after" in planted.refusals["grad: acc_out/w"]
    assert "grad: acc_out/w" not in safe.refusals
    for batch in batches:
        for trainer in (safe, planted):
            trainer.micro_step(batch)
        _equal(safe, planted)


def test_a_micro_step_copies_no_state_and_reads_none(bundle, batches, monkeypatch):
    trainer = _open(bundle, accumulate=3)
    for batch in batches[:3]:
        trainer.micro_step(batch)
    import onnxruntime

    def numpy(_):
        raise AssertionError("a value was read")

    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", numpy)
    before = (transfers.reads, transfers.writes, transfers.bytes)
    results = [trainer.micro_step(batch) for batch in batches[3:9]]
    assert (transfers.reads, transfers.writes, transfers.bytes) == before
    assert results[-1].applied
    assert transfers.bytes == before[2] + 4 * len(REPORT)  # the report, when it is asked for


def test_a_batch_may_be_checked_ahead(bundle, batches):
    ahead, plain = _open(bundle), _open(bundle)
    checked = [ahead.checked(batch) for batch in batches[:3]]
    losses = [
        [one.micro_step(batch).loss for batch in given] for one, given in ((ahead, checked), (plain, batches[:3]))
    ]
    assert losses[0] == losses[1]
    for name, values in plain.parameters().items():
        np.testing.assert_array_equal(ahead.parameters()[name], values)
    with pytest.raises(DataError, match="lacks"):
        ahead.checked({})


def test_weights_are_optional_and_a_window_without_weight_changes_nothing(bundle, batches):
    plain, ones = _open(bundle), _open(bundle)
    for batch in batches[:3]:
        plain.micro_step({name: value for name, value in batch.items() if name != "weights"})
        ones.micro_step({**batch, "weights": np.ones(len(batch["x"]), np.float32)})
    _equal(plain, ones)
    before = _state(plain)
    result = plain.micro_step({**batches[3], "weights": np.zeros(len(batches[3]["x"]), np.float32)})
    assert result.report["empty"] == 1
    assert not result.applied
    assert not result.skipped
    after = _state(plain)
    for key in before:
        if not key.startswith(("gradient/", "window/")):
            np.testing.assert_array_equal(before[key], after[key], err_msg=key)


def test_batches_without_weight_do_not_choose_the_divisor_of_the_seed(bundle, batches):
    late, plain = _open(bundle, accumulate=2), _open(bundle, accumulate=1)
    empty = {**batches[0], "weights": np.zeros(len(batches[0]["x"]), np.float32)}
    late.micro_step(empty)
    assert _state(late)["scalars/seed_divisor"] == 0
    late.micro_step(batches[1])
    plain.micro_step(batches[1])
    assert _state(late)["scalars/seed_divisor"] == _state(plain)["scalars/seed_divisor"] == 8
    for name in late.parameters():
        np.testing.assert_array_equal(late.parameters()[name], plain.parameters()[name])


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_a_window_with_inf_leaves_no_trace(bundle, batches, bad, value):
    touched, clean = _open(bundle, accumulate=3), _open(bundle, accumulate=3)
    for batch in batches[:3]:
        touched.micro_step(batch)
        clean.micro_step(batch)
    for index, batch in enumerate(batches[3:6]):
        x = batch["x"].copy()
        if index == bad:
            x[0, 0] = value
        result = touched.micro_step({**batch, "x": x})
    assert result.skipped
    assert not result.applied
    assert ("the input 'x' holds 1 NaN, the first at [0, 0]" in str(result.cause)) == bool(np.isnan(value))
    assert ("the input 'x' holds 1 Inf, the first at [0, 0]" in str(result.cause)) == bool(np.isinf(value))
    assert touched.nonfinite_gradients()
    assert result.report["next_loss_scale"] == 2.0**15
    for batch in batches[6:9]:
        after = touched.micro_step(batch)
        clean.micro_step(batch)
    assert after.applied
    assert touched.step == clean.step == 2
    for name, value in clean.parameters().items():
        np.testing.assert_array_equal(value, touched.parameters()[name])
    np.testing.assert_array_equal(_state(clean)["momentum_buffer/w"], _state(touched)["momentum_buffer/w"])


def _repeat(trainer: Trainer, batch) -> None:
    for _ in range(60):
        trainer.micro_step(batch)


def test_a_run_that_cannot_go_on_stops_with_a_diagnosis(bundle_maker, batches):
    trainer = _open(bundle_maker(scale=DynamicLossScale(init_scale=4.0)))
    x = batches[0]["x"].copy()
    x[2, 1] = np.nan
    poisoned = {**batches[0], "x": x}
    with pytest.raises(DivergedError, match=r"50 windows in a row.*the input 'x' holds 1 NaN.*mend the data"):
        _repeat(trainer, poisoned)
    trainer = _open(bundle_maker(scale=DynamicLossScale(init_scale=4.0)))
    x[2, 1] = np.inf
    with pytest.raises(DivergedError, match=r"50 windows in a row.*the input 'x' holds 1 Inf.*mend the data"):
        _repeat(trainer, {**batches[0], "x": x})
    trainer = _open(bundle_maker(scale=DynamicLossScale(init_scale=4.0)))
    huge = {**batches[0], "x": np.full_like(x, 1e30)}
    with pytest.raises(DivergedError, match="the loss itself is not finite"):
        _repeat(trainer, huge)


def test_bad_batches_change_nothing(bundle, batches):
    trainer = _open(bundle)
    trainer.micro_step(batches[0])
    before = _state(trainer)
    for change in ({"x": np.ones((2, 4), np.float32)}, {"x": np.ones((0, 3), np.float32)}, {"y": np.ones(1)}):
        with pytest.raises(DataError):
            trainer.micro_step({**batches[1], **change})
    after = _state(trainer)
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])


@pytest.mark.parametrize("in_place", [True, False])
def test_checkpoints_at_every_micro_step_continue_bit_for_bit(bundle_maker, batches, tmp_path, in_place):
    whole = _open(bundle_maker(Adam(lr=0.01)), accumulate=3, in_place=in_place)
    path = tmp_path / "run.safetensors"
    cut = Trainer(bundle_maker(Adam(lr=0.01)), "cpu", 3, threads=1, in_place=in_place)
    for index, batch in enumerate(batches):
        cut.position = {"batch": index}
        cut.save(path)
        cut = Trainer.load(path, "cpu", threads=1, in_place=in_place)
        assert cut.position == {"batch": index}
        first, second = whole.micro_step(batch), cut.micro_step(batch)
        assert first.loss == second.loss
        assert first.report == second.report
        _equal(whole, cut)
    assert whole.step == 4


def test_a_checkpoint_of_another_bundle_is_refused(bundle_maker, tmp_path):
    trainer = _open(bundle_maker())
    trainer.save(tmp_path / "a.safetensors")
    other = bundle_maker(Adam(lr=0.01)).save(tmp_path / "other")
    with pytest.raises(ModelError, match="another bundle"):
        Trainer.load(tmp_path / "a.safetensors", "cpu", bundle=other)
    fresh = other.path / "state.safetensors"
    with pytest.raises(ModelError, match="fresh bundle"):
        Trainer.load(fresh)


def test_a_bundle_on_disk_is_found_beside_its_checkpoints_after_a_move(bundle, tmp_path):
    saved = bundle.save(tmp_path / "run" / "bundle")
    trainer = _open(saved.path)
    trainer.save(tmp_path / "run" / "checkpoints" / "a.safetensors")
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["a.safetensors"]
    os.rename(tmp_path / "run", tmp_path / "moved")
    moved = Trainer.load(tmp_path / "moved" / "checkpoints" / "a.safetensors", "cpu", threads=1)
    _equal(trainer, moved)


def test_evaluate_and_predict_use_the_parameters_of_now(bundle, batches):
    trainer = _open(bundle)
    for batch in itertools.islice(itertools.cycle(batches), 30):
        trainer.micro_step(batch)
    w, b = trainer.parameters()["w"], trainer.parameters()["b"]
    x, t, k = (np.concatenate([batch[name] for batch in batches]) for name in ("x", "labels", "weights"))
    expected = (k[:, None] * (x @ w + b - t) ** 2).sum() / k.sum()
    assert trainer.evaluate(batches)["loss"] == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(
        trainer.predict({"x": x, "ids": np.arange(len(x))})["y"], x @ w + b, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(trainer.predict(batches)["y"], x @ w + b, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="no moving average"):
        trainer.evaluate(batches, weights="ema")


def test_nan_in_what_is_only_looked_at_is_named_by_its_rows(bundle, batches, tmp_path, caplog):
    """Batch by batch the rows count on; data of a file say which file."""
    trainer, said = _open(bundle), "what is computed from them is not finite either."
    bad = [{**batch, "x": batch["x"].copy()} for batch in batches]
    firsts = np.cumsum([0, *(len(batch["x"]) for batch in batches)])
    bad[1]["x"][0, 1] = bad[3]["x"][:2, 0] = np.nan
    assert np.isnan(trainer.evaluate(bad)["loss"])
    assert np.isnan(trainer.predict(bad)["y"]).any()
    trainer.evaluate([trainer.checked(bad[3])])
    assert [record.getMessage() for record in caplog.records] == [
        *[f"The input 'x' holds 1 NaN in row {firsts[1]} of the data, and 1 more batch holds some: {said}"] * 2,
        f"The input 'x' holds 2 NaN, the first at [0, 0]: {said}",
    ]
    caplog.clear()
    whole = {name: np.concatenate([batch[name] for batch in bad]) for name in bad[0]}
    np.savez(tmp_path / "val.npz", **whole)
    history = trainer.fit(
        batches, epochs=2, batch_size=4, val=str(tmp_path / "val.npz"), val_batch_size=len(whole["x"])
    )
    assert np.isnan(history.values["val_loss"])
    rows = f"{firsts[1]}, {firsts[3]} and {firsts[3] + 1}"
    assert [record.getMessage() for record in caplog.records] == [
        f"The input 'x' holds 3 NaN in rows {rows} of {tmp_path}/val.npz: {said}"
    ]
    caplog.clear()
    for _ in ("the validation data", "the test data"):  # alike as they are, each is told of
        trainer.evaluate(bad[1])
    assert [record.getMessage() for record in caplog.records] == [
        f"The input 'x' holds 1 NaN in row 0 of the data: {said}"
    ] * 2
    caplog.clear()
    huge = {**batches[0], "x": np.full_like(batches[0]["x"], np.inf)}
    trainer.evaluate(huge)
    assert "holds" in caplog.text
    assert "Inf in rows 0, 1" in caplog.text


def test_metrics_weigh_rows_alike_whoever_has_checked_them(bundle, batches):
    """Without weights a metric gets none, and not the single 1 that the graph is fed with."""
    seen = []

    class Spy(Metric):
        name = "spy"

        def reset(self): ...

        def update(self, output, labels, weights=None):
            seen.append((len(labels), None if weights is None else len(weights)))

        def value(self):
            return 0.0

    trainer, rows = _open(bundle), len(batches[0]["x"])
    bare = {name: values for name, values in batches[0].items() if name != "weights"}
    for batch in (bare, trainer.checked(bare), batches[0], trainer.checked(batches[0])):
        trainer.evaluate([batch], metrics=[Spy()])
    assert seen == [(rows, None), (rows, None), (rows, rows), (rows, rows)]


def test_arguments_are_checked(bundle):
    with pytest.raises(UsageError, match="accumulate"):
        Trainer(bundle, "cpu", 0)
    with pytest.raises(UsageError, match="threads"):
        Trainer(bundle, "cpu", threads=-1)
    trainer = _open(bundle)
    with pytest.raises(UsageError, match="Unknown weights"):
        trainer.evaluate([], weights="best")
    assert trainer.flush() is None
    assert onnxamp.Trainer is Trainer


def test_more_threads_than_processors_are_not_started(bundle, batches, caplog, monkeypatch):
    monkeypatch.setattr("onnxamp.trainer.device.processors", lambda: 1)
    trainer = Trainer(bundle, "cpu", threads=999)
    assert "999 threads were asked for and this process may use 1 processors: it uses 1." in caplog.text
    assert trainer._config.threads == 1
    assert trainer.micro_step(batches[0]).applied
