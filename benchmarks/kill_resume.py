"""Kill a training run at drawn moments and go on each time: does it end with the bits of an undisturbed run?

python benchmarks/kill_resume.py [KILLS] [SEED]
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

MODELS = Path(__file__).resolve().parents[1] / "models"
OPTIONS = "--loss cross_entropy --lr 1e-3 --epochs 3 --batch-size 32 --accumulate 2 --level O2 --metric accuracy --save-every 3"


def main(kills: int, seed: int) -> int:
    """0 if all tensors of the last checkpoint are equal."""
    rng = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        command = [
            sys.executable,
            "-m",
            "onnxamp",
            "train",
            str(MODELS / "cnn.onnx"),
            "--data",
            str(MODELS / "digits_train.npz"),
        ]
        command += ["--val", str(MODELS / "digits_test.npz"), *OPTIONS.split(), "--resume", "-o"]
        began = time.monotonic()
        subprocess.run([*command, whole], check=True, env=environment, stdout=subprocess.DEVNULL)
        length = time.monotonic() - began
        done = 0
        while done < kills:
            process = subprocess.Popen([*command, killed], env=environment, stdout=subprocess.DEVNULL)
            try:
                process.wait(rng.uniform(0.2, 0.9) * length)
                break  # it came to its end between two kills
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                done += 1
                saved = sorted(path.name for path in (killed / "checkpoints").glob("*")) if killed.exists() else []
                print(f"killed {done}: {', '.join(saved) or 'nothing saved yet'}", flush=True)
        subprocess.run([*command, killed], check=True, env=environment, stdout=subprocess.DEVNULL)
        first, second = (load_file(sorted((run / "checkpoints").glob("step-*"))[-1]) for run in (whole, killed))
        different = [key for key in first if first[key].tobytes() != second[key].tobytes()]
        print(f"{done} kills, {len(first)} tensors, {len(different)} different: {different}")
        return int(first.keys() != second.keys() or bool(different))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(numbers + [20, 0][len(numbers) :])))
