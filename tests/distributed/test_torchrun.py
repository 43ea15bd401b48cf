"""`torchrun -m onnxamp train` with two real processes (gloo), one of which is killed; then one process goes on alone."""

import signal

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxamp.cli import cli


def train(*arguments):
    result = CliRunner().invoke(cli, ["train", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_killed_rank_and_a_resume_on_one_process(mlp, rows, processes, tmp_path):
    pytest.importorskip("torch")
    onnx.save(mlp, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **rows(50))
    common = (tmp_path / "model.onnx", "--data", tmp_path / "data.npz", "--loss", "cross_entropy", "--level", "O0")
    common = (*common, "--lr", "0.01", "--epochs", "3", "--provider", "cpu")
    arguments = (*map(str, common), "--batch-size", "8", "-o", "run")
    code, told, _ = processes.train(tmp_path, 2, *arguments, kill=(1, 6))
    assert code
    assert f"exitcode  : {-signal.SIGKILL}" in told
    assert "[rank 0] Error: One of the 2 processes has ended or does not answer" in told
    assert "The run is saved up to run/checkpoints/step-00000005.safetensors" in told
    assert "Traceback" not in told.partition("torch.distributed.elastic")[0].partition("[rank 0]")[0]
    assert (tmp_path / "run" / "report.html").is_file()

    assert "now 2 micro-batches of 8 in each process" in train("--resume", "-o", tmp_path / "run")
    train(*common, "--batch-size", "16", "-o", tmp_path / "alone")
    for name, value in processes.parameters(tmp_path / "alone").items():
        found = processes.parameters(tmp_path / "run")[name]
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-6, err_msg=name)
