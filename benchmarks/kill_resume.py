"""Kill a training run at drawn moments and go on each time: does it end with the bits of an undisturbed run?

    python benchmarks/kill_resume.py [KILLS] [SEED]

Exactly KILLS moments are drawn, spread over as many runs as that takes, in turn inside a micro-step, while a checkpoint is written, and
just before or after its rename. The process dies there by SIGKILL. After each kill every checkpoint that has a name must be readable; each
run that comes to its end is compared with the undisturbed one, tensor by tensor.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

MODELS = Path(__file__).resolve().parents[1] / "models"
OPTIONS = "--loss cross_entropy --lr 1e-3 --epochs 3 --batch-size 32 --accumulate 2 --level O2 --save-every 3"
MOMENTS = ("step", "save", "rename")

# Runs the command line and dies in the Nth call of what MOMENT names, DELAY seconds after it began.
KILLED = """
import os, signal, sys, threading, time
moment, at, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
calls = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deadly(original, wanted):
    def call(*arguments, **named):
        global calls
        calls += wanted(*arguments)
        if calls != at or not wanted(*arguments):
            return original(*arguments, **named)
        if moment == "rename":
            if delay < 0.001:
                die()
            original(*arguments, **named)
            die()
        threading.Thread(target=lambda: (time.sleep(delay), die())).start()
        result = original(*arguments, **named)
        time.sleep(1)
        return result
    return call

def checkpoint(path, *_):
    name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
    return "/checkpoints/." in name and name.endswith(".tmp")

from onnxamp.trainer.trainer import Trainer
if moment == "step":
    Trainer.micro_step = deadly(Trainer.micro_step, lambda *_: True)
elif moment == "save":
    os.fsync = deadly(os.fsync, checkpoint)
else:
    os.replace = deadly(os.replace, checkpoint)
from onnxamp.cli import main
sys.argv = ["onnxamp", *sys.argv[4:]]
sys.exit(main())
"""


def main(kills: int, seed: int) -> int:
    """0 if every run ended with the tensors of the undisturbed one and no checkpoint was ever unreadable."""
    rng = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    counts = dict.fromkeys(MOMENTS, 0)
    runs, wrong = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed-0"
        train = ["train", str(MODELS / "cnn.onnx"), "--data", str(MODELS / "digits_train.npz"), *OPTIONS.split()]
        train += ["--val", str(MODELS / "digits_test.npz"), "--resume", "-o"]

        def run(where: Path, *before: str) -> int:
            command = [sys.executable, *(before or ("-m", "onnxamp")), *train, str(where)]
            return subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ).returncode

        assert run(whole) == 0
        wanted = load_file(sorted((whole / "checkpoints").glob("step-*"))[-1])
        while sum(counts.values()) < kills:
            moment = MOMENTS[sum(counts.values()) % len(MOMENTS)]
            at, delay = rng.randint(1, 40 if moment == "step" else 6), rng.uniform(0, 0.002)
            code = run(killed, "-c", KILLED, moment, str(at), str(delay))
            saved = sorted((killed / "checkpoints").glob("*.safetensors"))
            for path in saved:
                load_file(path)  # raises where a checkpoint is unreadable
            if code == -signal.SIGKILL:
                counts[moment] += 1
                last = saved[-1].name if saved else "nothing saved yet"
                print(f"killed {sum(counts.values())}: {moment} {at}, {1e3 * delay:.1f} ms; {last}", flush=True)
                if sum(counts.values()) < kills:
                    continue
                code = run(killed)
            assert code == 0, f"the run ended with {code}"
            found = load_file(sorted((killed / "checkpoints").glob("step-*"))[-1])
            same = found.keys() == wanted.keys() and all(found[k].tobytes() == wanted[k].tobytes() for k in wanted)
            runs, wrong = runs + 1, wrong + (not same)
            killed = Path(folder) / f"killed-{runs}"
    kinds = ", ".join(f"{count} in a {moment}" for moment, count in counts.items())
    print(f"{sum(counts.values())} kills ({kinds}) over {runs} runs; {wrong} of them ended with other bits")
    return int(bool(wrong))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(numbers + [20, 0][len(numbers) :])))
