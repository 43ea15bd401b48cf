"""Peak memory and time of calibration on 10, 100 and 1,000 batches: the statistics stream, so memory must not grow.

    python benchmarks/calibration_memory.py MODEL [--dim NAME=N] [--batches 10,100,1000]

Each count runs in a process of its own, on copies of 16 made-up samples, one after the other. Peak: VmHWM, the most memory that the
process ever held. Beside it the bytes of the batches and of all values that were measured, which a calibration that kept them would hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np


def one(path: str, dims: dict[str, int], count: int) -> str:
    """Calibrate, and what it took, as a row of the table."""
    from onnxamp.evidence.calibration import calibrate
    from onnxamp.evidence.synthesis import synthesize
    from onnxamp.model.preparation import prepared

    made = synthesize(prepared(path), 16, dim=dims)[0]
    given = 0

    def stream() -> Iterator[dict[str, np.ndarray]]:
        nonlocal given
        for sample in itertools.islice(itertools.cycle(made), count):
            fresh = {name: np.array(value) for name, value in sample.items()}
            given += sum(value.nbytes for value in fresh.values())
            yield fresh

    started = time.process_time()
    found = calibrate(path, stream())
    seconds = time.process_time() - started
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    values = 4 * sum(row.count for row in found.values) / 2**20
    return f"| {count:,} | {peak:.0f} | {given / 2**20:.1f} | {values:,.0f} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--batches", default="10,100,1000")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            one(
                options.model,
                {name: int(size) for name, size in (text.split("=") for text in options.dim)},
                options.one,
            )
        )
        return
    print("| batches | peak MiB | MiB of inputs | MiB of values measured | CPU s |\n" + "|---" * 5 + "|")
    for count in options.batches.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", count]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
