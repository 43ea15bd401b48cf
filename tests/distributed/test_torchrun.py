"""`torchrun -m onnxamp train` with two real processes (gloo), one of which is killed; then one process goes on alone."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxamp.cli import cli

# The command, with a hook that kills rank 1 without warning in its sixth micro-step.
WORKER = """
    import os, signal, sys
    from onnxamp.cli import main
    from onnxamp.trainer.trainer import Trainer

    step, taken = Trainer.micro_step, []

    def micro_step(self, batch, rows=None):
        taken.append(rows)
        if os.environ["RANK"] == "1" and len(taken) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch, rows)

    Trainer.micro_step = micro_step
    main()
"""


def parameters(folder):
    model = onnx.load(folder / "model.onnx")
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def train(*arguments):
    result = CliRunner().invoke(cli, ["train", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_killed_rank_and_a_resume_on_one_process(mlp, rows, tmp_path):
    pytest.importorskip("torch")
    onnx.save(mlp, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **rows(50))
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    common = (tmp_path / "model.onnx", "--data", tmp_path / "data.npz", "--loss", "cross_entropy", "--level", "O0")
    common = (*common, "--lr", "0.01", "--epochs", "3", "--provider", "cpu")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(tmp_path / "worker.py"), "train", *map(str, common), "--batch-size", "8", "-o", "run"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode, done.stdout
    assert f"exitcode  : {-signal.SIGKILL}" in done.stderr
    assert "[rank 0] Error: One of the 2 processes has ended or does not answer" in done.stderr
    assert "The run is saved up to run/checkpoints/step-00000005.safetensors" in done.stderr
    assert "Traceback" not in done.stderr.partition("torch.distributed.elastic")[0].partition("[rank 0]")[0]
    assert (tmp_path / "run" / "report.html").is_file()

    assert "now 2 micro-batches of 8 in each process" in train("--resume", "-o", tmp_path / "run")
    train(*common, "--batch-size", "16", "-o", tmp_path / "alone")
    for name, value in parameters(tmp_path / "alone").items():
        np.testing.assert_allclose(parameters(tmp_path / "run")[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
