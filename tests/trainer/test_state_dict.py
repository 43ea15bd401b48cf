"""Framework names are found by value before training and given back after it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from onnxamp.errors import DataError, ModelError
from onnxamp.trainer.state_dict import Names, export, match

RNG = np.random.default_rng(0)


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3, bias=False)
    )
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    return net


def _state(net: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in net.state_dict().items()}


def test_renamed_and_transposed_weights_come_back(tmp_path):
    net = _net()
    state = _state(net)
    path = tmp_path / "original.safetensors"
    safetensors.numpy.save_file(state, path)
    model = {  # as an exporter leaves it
        "onnx::MatMul_17": np.ascontiguousarray(state["0.weight"].T),
        "0.bias": state["0.bias"],
        "1.weight": state["1.weight"],
        "1.bias": state["1.bias"],
        "1.running_mean": state["1.running_mean"],
        "1.running_var": state["1.running_var"],
        "val_3": np.ascontiguousarray(state["3.weight"].T),
    }
    names = match(model, path)
    assert names.tensors["0.weight"] == ("onnx::MatMul_17", True)
    assert names.absent == ("1.num_batches_tracked",)
    names.save(tmp_path / "names.json")
    assert Names.load(tmp_path / "names.json") == names
    trained = {name: value + RNG.normal(size=value.shape).astype(np.float32) for name, value in model.items()}
    export(names, trained, tmp_path / "out.safetensors")
    other = _net()
    other.load_state_dict(
        {k: torch.tensor(v) for k, v in safetensors.numpy.load_file(tmp_path / "out.safetensors").items()}
    )
    other.eval()
    x = RNG.normal(size=(5, 6)).astype(np.float32)
    hidden = x @ trained["onnx::MatMul_17"] + trained["0.bias"]
    hidden = (hidden - trained["1.running_mean"]) / np.sqrt(trained["1.running_var"] + 1e-5)
    hidden = np.maximum(hidden * trained["1.weight"] + trained["1.bias"], 0)
    with torch.no_grad():
        np.testing.assert_allclose(other(torch.tensor(x)).numpy(), hidden @ trained["val_3"], rtol=1e-4, atol=1e-5)


def test_tied_weights_have_two_names(tmp_path):
    weight = RNG.normal(size=(4, 4)).astype(np.float32)
    safetensors.numpy.save_file({"embed": weight, "head": weight.copy()}, tmp_path / "o.safetensors")
    names = match({"embed": weight}, tmp_path / "o.safetensors")
    assert names.tensors == {"embed": ("embed", False), "head": ("embed", False)}


def test_low_precision_originals(tmp_path):
    weight = RNG.normal(size=(4, 3)).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"w": weight}, tmp_path / "o.safetensors")
    names = match({"x": weight.T.astype(np.float32)}, tmp_path / "o.safetensors")
    export(names, {"x": 2 * weight.T.astype(np.float32)}, tmp_path / "n.safetensors")
    out = safetensors.numpy.load_file(tmp_path / "n.safetensors")["w"]
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), 2 * weight.astype(np.float32))


def test_a_single_number_keeps_its_shape(tmp_path):
    safetensors.numpy.save_file({"scale": np.array(0.07, np.float32)}, tmp_path / "o.safetensors")
    names = match({"scale": np.array(0.07, np.float32)}, tmp_path / "o.safetensors")
    export(names, {"scale": np.array(0.5, np.float32)}, tmp_path / "n.safetensors")
    out = safetensors.numpy.load_file(tmp_path / "n.safetensors")["scale"]
    assert (out.shape, out) == ((), 0.5)


def test_what_cannot_be_told_apart(tmp_path):
    ones = np.ones(4, np.float32)
    safetensors.numpy.save_file({"a.weight": ones}, tmp_path / "o.safetensors")
    with pytest.raises(DataError, match=r"'a.weight'.*several parameters of the model \(p, q\)"):
        match({"p": ones, "q": ones}, tmp_path / "o.safetensors")
    assert match({"a.weight": ones, "q": ones}, tmp_path / "o.safetensors").tensors == {"a.weight": ("a.weight", False)}
    with pytest.raises(DataError, match="No tensor"):
        match({"p": 2 * ones}, tmp_path / "o.safetensors")
    (tmp_path / "o.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="no readable safetensors"):
        match({"p": ones}, tmp_path / "o.safetensors")
