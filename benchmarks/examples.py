"""Run the README's training commands and every example, as written, in a fresh environment made from a clean clone.

    python benchmarks/examples.py [--only README regression ...] [--json FILE]

Clones this repository (what is committed), makes a virtual environment as the README says, and runs the blocks of its section "Train":
first the commands, then the Python. Then `pip install -e '.[examples]'` into the same environment, and each script of `examples/` in a
folder of its own. An example asserts the result that it states; of the README the line "above X" in a block is compared with the last
accuracy printed.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Writes the file that keras_regression.py reads; needs TensorFlow.
MAKERS = {"export_keras"}


@dataclasses.dataclass
class Outcome:
    """How one of them went."""

    name: str
    passed: bool
    seconds: float
    said: str


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, float]:
    """Exit code, what it printed, seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout, time.perf_counter() - started


def readme_blocks(clone: Path) -> list[tuple[str, str]]:
    """Language and text of each block of the README's section on training."""
    section = (clone / "README.md").read_text(encoding="utf-8").split("\n## Train\n")[1].split("\n## ")[0]
    return re.findall(r"```(bash|python)\n(.*?)```", section, re.DOTALL)


def readme(clone: Path, environment: dict[str, str], scratch: Path) -> list[Outcome]:
    """Run the blocks where their paths start: in the clone."""
    found = []
    for language, text in readme_blocks(clone):
        script = scratch / f"readme.{language}"
        script.write_text(text, encoding="utf-8")
        command = ["bash", "-eu", str(script)] if language == "bash" else ["python", str(script)]
        code, out, seconds = run(command, clone, environment)
        stated = [float(number) for number in re.findall(r"above (0\.\d+)", text)]
        reached = [float(number) for number in re.findall(r"accuracy\D{1,4}(\d\.\d+|1)\b", out)]
        passed = code == 0 and bool(stated) and bool(reached) and reached[-1] > stated[0]
        said = f"accuracy {reached[-1]:g}, stated: above {stated[0]:g}" if stated and reached else out.strip()[-300:]
        found.append(Outcome(f"README, {language}", passed, seconds, said))
        print(found[-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="README, or names of examples")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnxamp-examples-") as folder:
        scratch = Path(folder)
        clone = scratch / "onnxamp"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(clone / ".venv")], check=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        environment |= {"PATH": f"{clone / '.venv/bin'}:{os.environ['PATH']}", "ORT_DISABLE_TELEMETRY": "1"}

        def install(extra: str) -> None:
            subprocess.run(["pip", "install", "-q", "-e", f".[{extra}]"], cwd=clone, env=environment, check=True)

        outcomes = []
        if not options.only or "README" in options.only:
            install("cpu")
            outcomes += readme(clone, environment, scratch)
        scripts = sorted(path for path in (clone / "examples").glob("*.py") if path.stem not in MAKERS)
        scripts = [path for path in scripts if not options.only or path.stem in options.only]
        if scripts:
            install("examples")
        for script in scripts:
            place = scratch / script.stem
            place.mkdir()
            code, out, seconds = run(["python", str(script)], place, environment)
            lines = out.strip().splitlines() or [""]
            outcomes.append(Outcome(script.stem, code == 0, seconds, lines[-1][:300]))
            shutil.rmtree(place)
            print(outcomes[-1], flush=True)
    print()
    for one in outcomes:
        print(f"{'passed' if one.passed else 'FAILED'}  {one.name:20} {one.seconds:6.1f} s  {one.said}")
    if options.json:
        options.json.write_text(
            json.dumps([dataclasses.asdict(one) for one in outcomes], indent=2) + "\n", encoding="utf-8"
        )
    return int(not all(one.passed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
