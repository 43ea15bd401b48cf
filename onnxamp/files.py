"""Writing files in one step: what stands under a name is the old content or all of the new, whatever happens between.

And what JSON can hold.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import pathlib
import tempfile
from types import TracebackType
from typing import Any, Self

# What is written in one go before the disk is asked to begin.
_BURST = 64 << 20


class Unfinished:
    """A file without a name yet, to be filled in a ``with`` block; one that was not published is gone at its end.

    Attributes:
        file: What to write to.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Open a file in the folder of `path`, so that it can be renamed to `path`."""
        handle, self._name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
        self.file = os.fdopen(handle, "wb")
        self._disk = concurrent.futures.ThreadPoolExecutor(1)
        self._sync: concurrent.futures.Future[None] | None = None
        self._burst = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write to `file`, while the disk already takes what was written before; so that `publish` has little to wait for."""
        self.file.write(data)
        self._burst += len(data)
        if self._burst >= _BURST and (self._sync is None or self._sync.done()):
            self._settle()
            self._burst = 0
            self._sync = self._disk.submit(os.fsync, self.file.fileno())

    def publish(self, path: pathlib.Path) -> None:
        """Give the file its name, in place of what has it, readable as any new file.

        A link of that name is replaced by the file: external data are looked for beside the name, not beside what it links to.

        Raises:
            OSError: The disk refused something; the name stays with what has it.
        """
        self.file.flush()
        self._settle()
        os.fsync(self.file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(self._name, 0o666 & ~mask)
        os.replace(self._name, path)
        with contextlib.suppress(OSError):  # not every file system can flush a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _settle(self) -> None:
        """Wait for what the disk already takes. It tells an error of writing once, so one that came here must be raised here."""
        if self._sync is not None:
            self._sync.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disk.shutdown()
        try:
            self.file.close()
        finally:
            pathlib.Path(self._name).unlink(missing_ok=True)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` whole or not at all; into a pipe or device as it comes.

    Raises:
        OSError: The file system refuses it; what was there before is still there.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with Unfinished(path) as unfinished:
        unfinished.file.write(data)
        unfinished.publish(path)


def jsonable(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities, which JSON lacks, as strings that `float` reads, tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value
