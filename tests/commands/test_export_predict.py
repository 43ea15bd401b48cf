"""`onnxamp export` and `onnxamp predict`: what comes out of a run."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

import onnxamp
from onnxamp.ort.session import open_session
from onnxamp.ort.session import run as run_session
from onnxamp.passes.emulate import emulate
from onnxamp.training import build


def test_export_and_predict(run, place, call):
    folder, _, _ = run
    code, out, _ = call("export", folder, "-o", place / "fp32.onnx")
    assert (code, out.split(",")[0]) == (0, f"{place}/fp32.onnx: FP32")
    source, exported = onnx.load(place / "mlp.onnx").graph, onnx.load(place / "fp32.onnx").graph
    assert [(n.name, n.op_type) for n in exported.node] == [(n.name, n.op_type) for n in source.node]
    assert [t.name for t in exported.initializer] == [t.name for t in source.initializer]
    assert call("export", folder, "-o", place / "fp16.onnx", "--level", "O2")[0] == 0
    assert call("export", folder, "-o", place / "ema.onnx", "--weights", "ema", "--checkpoint", "last")[0] == 0
    assert call("export", folder, "-o", place / "int8.onnx", "--int8", "--data", place / "train.npz")[0] == 0
    labels = np.load(place / "test.npz")["labels"]
    accuracy = {}
    for name in ("fp32", "fp16", "ema", "int8"):
        code, out, err = call(
            "predict", place / f"{name}.onnx", "--data", place / "test.npz", "-o", place / "p.npz", "--force"
        )
        assert (code, out, err) == (0, f"{place}/p.npz: logits [360, 10]\n", "not used: labels\n")
        accuracy[name] = (np.load(place / "p.npz")["logits"].argmax(1) == labels).mean()
    assert accuracy["fp32"] > 0.85
    assert accuracy["fp16"] == pytest.approx(accuracy["fp32"], abs=0.01)
    assert accuracy["int8"] >= accuracy["fp32"] - 0.02
    call("predict", folder, "--data", place / "test.npz", "-o", place / "r.npz")
    call("predict", place / "fp32.onnx", "--data", place / "test.npz", "-o", place / "p.npz", "--force")
    np.testing.assert_array_equal(np.load(place / "r.npz")["logits"], np.load(place / "p.npz")["logits"])


def test_predictions_are_measured(run, place, call, tmp_path):
    folder, _, _ = run
    code, out, err = call("predict", folder, "--data", place / "test.npz", "--metric", "accuracy", "--metric", "f1")
    assert (code, err) == (0, "")
    assert out.endswith("  (360 rows)\n")
    code, out, _ = call("predict", folder, "--data", place / "test.npz", "--metric", "accuracy", "--json")
    measured = json.loads(out)
    assert measured.keys() == {"rows", "accuracy"}
    assert measured["rows"] == 360
    call("export", folder, "-o", tmp_path / "m.onnx")
    test = dict(np.load(place / "test.npz"))
    np.savez(tmp_path / "y.npz", image=test["image"], y=test["labels"])
    arguments = ("predict", tmp_path / "m.onnx", "--data", tmp_path / "y.npz", "--column", "labels=y")
    code, out, _ = call(*arguments, "--metric", "accuracy", "--json", "-o", tmp_path / "p.npz")
    assert json.loads(out) == measured
    logits = np.load(tmp_path / "p.npz")["logits"]
    assert measured["accuracy"] == pytest.approx((logits.argmax(1) == test["labels"]).mean())
    code, _, err = call("predict", tmp_path / "m.onnx", "--data", tmp_path / "y.npz", "--metric", "accuracy")
    assert code == 3
    assert "has no column 'labels' to compare 'logits' with; it has image, y" in err
    code, _, err = call(*arguments, "--metric", "accuracy", "--column", "weights=typo")
    assert (code, "has no column 'typo' to weigh rows by" in err) == (3, True)
    code, _, err = call(*arguments, "-o", tmp_path / "q.npz")
    assert (code, "The model has no input 'labels'" in err) == (3, True)
    np.savez(tmp_path / "more.npz", **test, imgae=test["image"])
    code, _, err = call("predict", folder, "--data", tmp_path / "more.npz", "--metric", "accuracy")
    assert (code, err) == (0, "not used: imgae\n")
    code, _, err = call("predict", folder, "--data", place / "test.npz")
    assert (code, "Give -o FILE.npz, --metric NAME, or both" in err) == (2, True)
    code, _, err = call("predict", folder, "--data", place / "test.npz", "--metric", "acuracy")
    assert (code, "did you mean 'accuracy'" in err) == (2, True)


def test_export_opens_no_session(run, place, call, monkeypatch):
    """It only reads files: no provider, no proof, no remark on the machine that trained."""
    folder, _, _ = run

    def forbidden(*_, **__):
        raise AssertionError("a session")

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", forbidden)
    code, _, err = call("export", folder, "-o", place / "read.onnx", "--checkpoint", "last", "--weights", "ema")
    assert (code, err) == (0, "")


def test_a_file_on_which_the_runtime_crashes_is_told(run, mlp, call, tmp_path, monkeypatch, caplog):
    """What `crash_on_cpu` finds is among the warnings of convert and export; an FP32 file is not looked at."""
    said = "On the CPU ONNX Runtime ends its process"
    for place in ("onnxamp.evidence.opening", "onnxamp.trainer.inference"):
        monkeypatch.setattr(f"{place}.crash_on_cpu", lambda model, path: said)
    code, out, _ = call("convert", mlp(tmp_path / "m.onnx"), "-o", tmp_path / "c.onnx", "--report", tmp_path / "r.json")
    assert (code, said in out) == (0, True)
    assert said in json.loads((tmp_path / "r.json").read_text())["warnings"]
    assert call("export", run[0], "-o", tmp_path / "e.onnx")[0] == 0
    assert not caplog.records
    assert call("export", run[0], "-o", tmp_path / "f.onnx", "--level", "O2")[0] == 0
    assert caplog.messages == [f"{tmp_path}/f.onnx: {said}"]


def test_framework_names_come_back(run, place, call):
    folder, _, _ = run
    code, out, _ = call("export", folder, "--state-dict", place / "tuned.safetensors", "-o", place / "s.onnx")
    assert code == 0
    assert "4 tensors trained" in out
    tuned = load_file(place / "tuned.safetensors")
    values = {t.name: numpy_helper.to_array(t) for t in onnx.load(place / "s.onnx").graph.initializer}
    np.testing.assert_array_equal(tuned["fc2.weight"], values["MatMul_7"].T)
    np.testing.assert_array_equal(tuned["fc1.weight"], values["fc1.weight"])
    assert not np.array_equal(tuned["fc1.weight"], load_file(place / "original.safetensors")["fc1.weight"])


def test_a_state_dict_is_the_model_that_was_trained(call, tmp_path):
    """GroupNorm, whose vectors are [C, 1, 1] in the file; and a tensor that the framework has no name for."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.GroupNorm(4, 8), torch.nn.Flatten(), torch.nn.Linear(32, 2)
    )
    for vector in (net[1].weight, net[1].bias):
        torch.nn.init.normal_(vector)
    source, images = tmp_path / "gn.onnx", torch.randn(16, 1, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter is the old one
        names = {"input_names": ["image"], "output_names": ["y"], "dynamic_axes": {"image": [0]}}
        torch.onnx.export(net, (images,), source, dynamo=False, **names)
    save_file({name: value.numpy() for name, value in net.state_dict().items()}, tmp_path / "o.safetensors")
    np.savez(tmp_path / "d.npz", image=images.numpy(), labels=np.arange(16) % 2)
    trained = ["train", source, "--data", tmp_path / "d.npz", "--loss", "cross_entropy", "--lr", "0.01", "--batch-size", "8",
               "--level", "O0", "--like", tmp_path / "o.safetensors"]  # fmt: skip
    assert call(*trained, "-o", tmp_path / "run")[0] == 0
    code, out, _ = call(
        "export", tmp_path / "run", "--state-dict", tmp_path / "t.safetensors", "-o", tmp_path / "t.onnx"
    )
    assert code == 0
    assert "6 tensors trained" in out
    before = net[1].weight.clone()
    net.load_state_dict({name: torch.tensor(value) for name, value in load_file(tmp_path / "t.safetensors").items()})
    assert not torch.equal(before, net[1].weight)
    found = run_session(open_session(tmp_path / "t.onnx"), {"image": images.numpy()})["y"]
    np.testing.assert_allclose(found, net(images).detach().numpy(), rtol=1e-4, atol=1e-5)
    code, *_ = call(*trained, "--trainable", "*", "-o", tmp_path / "all")
    assert code == 0
    written = ("--state-dict", tmp_path / "a.safetensors", "-o", tmp_path / "a.onnx")
    code, _, err = call("export", tmp_path / "all", *written)
    assert (code, "equalled no tensor of" in err) == (3, True)
    lacking = err.partition(" of ")[0].removeprefix("Error: ").split(", ")
    assert lacking
    assert err.endswith(f"or train with {' '.join(f'--frozen {name}' for name in lacking)}.\n")
    assert call("export", tmp_path / "run", "--adapter", tmp_path / "a.safetensors", *written[2:])[0] == 2
    (tmp_path / "o.safetensors").unlink()
    code, _, err = call("export", tmp_path / "run", *written)
    assert (code, "o.safetensors, which" in err) == (3, True)
    assert not (tmp_path / "a.safetensors").exists()
    assert not (tmp_path / "a.onnx").exists()  # a command that fails leaves nothing


class Tied(torch.nn.Module):
    """A language model in outline, whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.mix = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.tokens(ids))))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folds", [True, False])
def test_tied_weights_that_a_file_holds_twice_are_told(call, tmp_path, folds):
    """PyTorch's exporters transpose the weight of the head, if they fold; what trained apart is no state dict of the tied module."""
    torch.manual_seed(0)
    net, ids = Tied(), torch.randint(0, 32, (8, 5))
    how = (
        {"dynamo": True, "optimize": True, "verbose": False, "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
        if folds
        else {"dynamo": False, "do_constant_folding": False, "input_names": ["ids"], "dynamic_axes": {"ids": [0]}}
    )
    torch.onnx.export(net, (ids,), tmp_path / "m.onnx", **how)
    state = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    save_file(state, tmp_path / "both.safetensors")
    for name in ("head.weight", "tokens.weight"):  # safetensors keeps one name of a tensor that is shared
        save_file({key: value for key, value in state.items() if key != name}, tmp_path / f"no {name}.safetensors")
    np.savez(tmp_path / "d.npz", ids=ids.numpy(), labels=np.random.default_rng(0).integers(0, 32, (8, 5)))
    for name in ("both", "no head.weight", "no tokens.weight"):
        folder, target = tmp_path / name, tmp_path / f"{name}.t.safetensors"
        code, out, err = call(
            "train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--loss", "cross_entropy", "--lr", 0.1, "--level", "O0",
            "--class-axis", 2, "--like", tmp_path / f"{name}.safetensors", "-o", folder,
        )  # fmt: skip
        if folds and name == "no head.weight":
            assert (code, "'tokens.weight' of" in err, "is in the model several times (head.weight, val_2)" in err) == (
                3,
                True,
                True,
            )
            assert "with optimize=False" in err
            continue
        assert code == 0, err
        assert ("head.weight and val_2 hold the same numbers, and train apart" in out) == folds
        code, out, err = call("export", folder, "--state-dict", target, "-o", tmp_path / f"{name}.onnx")
        if folds and name == "no tokens.weight":
            assert (code, "val_2 of" in err, "trained apart from head.weight" in err) == (3, True, True)
            assert "with optimize=False" in err
            continue
        assert code == 0, err
        assert ("head.weight and tokens.weight were equal and are not any more" in out) == folds
        net.load_state_dict(
            {key: torch.tensor(value) for key, value in load_file(target).items()}, strict=name == "both"
        )
        (found,) = run_session(open_session(tmp_path / f"{name}.onnx"), {"ids": ids.numpy()}).values()
        assert np.allclose(found, net(ids).detach().numpy(), atol=1e-4) == (not folds)


@pytest.mark.parametrize(("level", "dtype"), [("O0", "fp16"), ("O2", "fp16"), ("O2", "bf16")])
def test_an_export_gives_what_evaluation_at_its_level_gives(place, level, dtype):
    model = place / "mlp.onnx"
    data = dict(np.load(place / "train.npz"))
    trainer = onnxamp.Trainer(build(model, loss="cross_entropy", optimizer="adamw", level=level, dtype=dtype), "cpu")
    trainer.fit(data, epochs=1, batch_size=64)
    exported = emulate(trainer.inference_model(level, dtype))
    assert not [name for node in exported.graph for name in node.metadata_props if name == "onnxamp.backward"]
    (logits,) = run_session(open_session(exported), {"image": data["image"]}).values()
    tolerance = 1e-5 if level == "O0" else 2 * (2**-10 if dtype == "fp16" else 2**-7)
    wanted = trainer.predict({"image": data["image"]})["logits"]
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
    assert trainer.evaluate(data)["loss"] == pytest.approx(trainer.evaluate(data, level=level)["loss"], rel=tolerance)
    loss = trainer.evaluate(data, level=level)["loss"]
    picked = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(data["labels"]))
    assert float(picked) == pytest.approx(loss, rel=tolerance)
