"""`--global-batch`: the largest micro-batch that fits into memory, and the accumulation that makes up for the rest."""

from __future__ import annotations

from collections.abc import Callable

from onnxamp.errors import AmpError, DataError, RuntimeMissingError, UsageError
from onnxamp.trainer.batches import Batches, bind
from onnxamp.trainer.collective import Collective, divided
from onnxamp.trainer.data import Arrays, open_data
from onnxamp.trainer.tracking import resident_memory
from onnxamp.trainer.trainer import Trainer
from onnxamp.training.bundle import Bundle

# The part of the free memory that one micro-step may take.
_SHARE = 0.7


def divisors(number: int) -> list[int]:
    """Divisors of `number`, largest first."""
    return sorted((d for d in range(1, number + 1) if number % d == 0), reverse=True)


def largest(global_batch: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    """The largest micro-batch that divides `global_batch` and fits, and how many make up the whole.

    Raises:
        RuntimeMissingError: Not even one row fits.
    """
    for size in divisors(global_batch):
        if fits(size):
            return size, global_batch // size
    raise RuntimeMissingError(
        "Not even a micro-batch of one row fits into memory; use a smaller model or another device."
    )


def micro_batch(
    bundle: Bundle, provider: str, data: object, columns: dict[str, str], global_batch: int, collective: Collective
) -> tuple[int, int]:
    """Size and number of the micro-batches of a window of `global_batch` rows.

    On a device with memory of its own sizes are tried from the largest down. On the CPU a step that is too large would be
    killed instead of failing, so the memory of two small steps is measured and extrapolated on a line.

    Args:
        bundle: What is trained; its state is not changed.
        provider: Where it runs.
        data: The training data.
        columns: Input name to column name.
        global_batch: Rows of a window, over all processes.
        collective: The processes that share the window, and those among them that share this machine's memory.

    Returns:
        Rows of a micro-batch of one process, and micro-batches in a window.

    Raises:
        UsageError: `global_batch` is below 1 or cannot be shared evenly, or the data come in batches of their own.
        RuntimeMissingError: Not even one row fits.
    """
    if global_batch < 1:
        raise UsageError(f"--global-batch must be at least 1, not {global_batch}.")
    divided(global_batch, collective.world_size, global_batch)
    global_batch //= collective.world_size
    trainer = Trainer(bundle, provider, accumulate=1 << 30)
    binding = bind(open_data(data), trainer.fields, columns=columns, optional=("weights",))
    if not isinstance(binding.data, Arrays):
        raise UsageError("--global-batch needs data with a known number of rows.")
    rows = binding.data.rows

    def step(size: int) -> None:
        trainer.micro_step(next(Batches(binding, min(size, rows), shuffle=False, prefetch=0).epoch()))

    if trainer.provider != "cpu":

        def tried(size: int) -> bool:
            try:
                step(size)
            except DataError:
                raise
            except (AmpError, MemoryError):
                return False
            return True

        return largest(global_batch, tried)
    small = min(8, global_batch, rows)
    step(small)
    before = resident_memory()
    free = available_memory()
    if before is None or free is None:
        raise UsageError("This system does not tell how much memory is free; give --batch-size and --accumulate.")
    large = min(4 * small, global_batch, rows)
    step(large)
    after = resident_memory() or before
    per_row = max(0.0, (after - before) / max(1, large - small))
    share = _SHARE * free / collective.local_world_size
    return largest(global_batch, lambda size: size <= large or per_row * (size - large) < share)


def available_memory() -> int | None:
    """Bytes that new allocations can have without swapping, within the limit of the container; None if unknown."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    found.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as first, open(used, encoding="ascii") as second:
                text = first.read().strip()
                if text.isdigit():
                    found.append(max(0, int(text) - int(second.read())))
        except OSError:
            continue
    return min(found) if found else None
