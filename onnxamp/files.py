"""Writing files in one step: what stands under a name is the old content or all of the new, whatever happens between."""

from __future__ import annotations

import os
import pathlib
import tempfile
from types import TracebackType
from typing import Self


class Unfinished:
    """A file without a name yet, to be filled in a ``with`` block; one that was not published is gone at its end.

    Attributes:
        file: What to write to.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Open a file in the folder of `path`, so that it can be renamed to `path`."""
        handle, self._name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
        self.file = os.fdopen(handle, "wb")

    def publish(self, path: pathlib.Path) -> None:
        """Give the file its name, in place of what has it, readable as any new file.

        A link of that name is replaced by the file: external data are looked for beside the name, not beside what it links to.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(self._name, 0o666 & ~mask)
        os.replace(self._name, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
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
