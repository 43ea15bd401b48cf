"""The folder of a run: where everything lies, how it is begun, gone on with and read.

RUN/.onnxamp-run         says that the folder is a run's, so that its files may be replaced; written before any of them
RUN/config.toml          the effective options; `onnxamp train --config RUN/config.toml -o NEW` does it again
RUN/bundle/              the graphs and the state at the start
RUN/checkpoints/         step-N.safetensors (the newest ones) and best.safetensors
RUN/metrics.jsonl        one line per window and per evaluation
RUN/tensorboard/         the same as TensorBoard events, if asked for
RUN/model.onnx           the trained model
RUN/report.html          curves and key figures
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxamp import config
from onnxamp.errors import ModelError, UsageError
from onnxamp.trainer.callbacks import checkpoints
from onnxamp.trainer.checkpoint import disk_error, read, write_text
from onnxamp.trainer.tracking import read_metrics
from onnxamp.training.bundle import MANIFEST

logger = logging.getLogger("onnxamp")

_MARKER = ".onnxamp-run"
_FORMAT = "onnxamp-run/1"  # first line of the marker: which files a run has, and what they mean
_OURS = (
    "config.toml",
    "bundle",
    "checkpoints",
    "metrics.jsonl",
    "tensorboard",
    "model.onnx",
    "report.html",
    "diagnosis.html",
)


class Run:
    """A run's folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.config_path = self.folder / "config.toml"
        self.bundle_path = self.folder / "bundle"
        self.checkpoint_folder = self.folder / "checkpoints"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.tensorboard_folder = self.folder / "tensorboard"
        self.model_path = self.folder / "model.onnx"
        self.report_path = self.folder / "report.html"
        self.names_path = self.bundle_path / "names.json"
        self._marker = self.folder / _MARKER

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """An existing run.

        Raises:
            UsageError: The folder is no run.
        """
        run = cls(folder)
        if not run.exists:
            raise UsageError(f"{run.folder} is no folder of a run; `onnxamp train ... -o {run.folder}` makes one.")
        return run

    @property
    def ours(self) -> bool:
        """Whether `create` of this format made the folder, so that the files of a run in it may be replaced."""
        try:
            return self._marker.read_text(encoding="utf-8").partition("\n")[0] == _FORMAT
        except (OSError, UnicodeDecodeError):
            return False

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run that was begun."""
        return self.config_path.is_file() and (self.bundle_path / MANIFEST).is_file()

    def check_whole(self) -> None:
        """Find out whether a run that made something has lost what it takes to go on.

        Raises:
            ModelError: It has checkpoints, records or a model, and no configuration or no bundle.
        """
        needed = (self.config_path, self.bundle_path / MANIFEST)
        lost = [os.fspath(path.relative_to(self.folder)) for path in needed if not path.is_file()]
        made = [path.name for path in (self.metrics_path, self.model_path) if path.exists()]
        made += [path.name for path in checkpoints(self.checkpoint_folder)][-1:]
        if self.ours and lost and made:
            raise ModelError(
                f"{self.folder} has {', '.join(made)}, but no {' and no '.join(lost)} to go on with. Put back what is missing; "
                "or begin anew, with --force instead of --resume (which replaces this run) or in another folder."
            )

    def create(self, inputs: Iterable[str | os.PathLike[str]] = (), *, force: bool = False) -> None:
        """Make the folder for a new run.

        Files are only ever deleted in a folder that `create` marked as a run's before it wrote anything into it.

        Args:
            inputs: What the run is made from: files and folders that must not be among those replaced.
            force: Delete the run that is there; other files of the folder stay.

        Raises:
            UsageError: There is a run and `force` is not given; the folder holds anything else; or an input is in the run
                that would be replaced.
            RuntimeMissingError: The folder cannot be written.
        """
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise UsageError(f"{self.folder} is a file; name a folder for the run.")
            if self.folder.is_dir() and any(self.folder.iterdir()):
                if not self.ours:
                    raise UsageError(
                        f"{self.folder} is not empty and no run (it has no {_MARKER} of {_FORMAT}): name another folder for the run."
                    )
                if not force:
                    raise UsageError(
                        f"{self.folder} holds a run: give --resume to go on, --force to replace it, or another folder."
                    )
                self._keep_off(inputs)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(
                f"{_FORMAT}\nA run of onnxamp, which may replace its own files here.\n", encoding="utf-8"
            )
            for name in _OURS:
                path = self.folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self.checkpoint_folder.mkdir()
        except OSError as problem:
            raise disk_error(self.folder, problem) from problem

    def _keep_off(self, inputs: Iterable[str | os.PathLike[str]]) -> None:
        """Refuse inputs that `create` would delete: files of the run, or the run itself."""
        ours = [(self.folder / name).resolve() for name in _OURS]
        for given in inputs:
            path = Path(given).resolve()
            if path == self.folder.resolve() or any(path.is_relative_to(file) for file in ours):
                raise UsageError(
                    f"{os.fspath(given)} is in the run that would be replaced: name another folder for the new one."
                )

    def write_config(self, options: Mapping[str, Any]) -> None:
        """Save the effective options; with them and the bundle the folder counts as a run."""
        write_text(self.config_path, config.write(options))

    def read_config(self) -> dict[str, Any]:
        """The options that the run was begun with."""
        return config.read(self.config_path)

    def newest(self) -> Path | None:
        """The newest checkpoint that can be read; None if there is none."""
        saved = checkpoints(self.checkpoint_folder)
        for path in reversed(saved):
            try:
                read(path)
            except ModelError as problem:
                logger.warning("%s%s", problem, "" if path == saved[0] else " Trying the one before.")
            else:
                return path
        return None

    def resumable(self) -> Path | None:
        """The checkpoint to go on from; None if the run was interrupted before it saved its first one.

        Raises:
            ModelError: The run had checkpoints, and none of them can be read: to begin it anew would overwrite what it made.
        """
        path = self.newest()
        if path is not None or not (made := self._made()):
            return path
        tried = [file.name for file in reversed(checkpoints(self.checkpoint_folder))]
        state = f"none can be read (tried {', '.join(tried)})" if tried else "there is none"
        raise ModelError(
            f"{self.folder} has {made}, but no checkpoint to go on from: in {self.checkpoint_folder} {state}. Put one back; or "
            "begin anew, with --force instead of --resume (which replaces this run) or in another folder."
        )

    def _made(self) -> str:
        """What shows that the run has had a checkpoint, in words; empty if nothing does."""
        if self.model_path.exists():
            return f"a {self.model_path.name}"
        windows = [entry for entry in self.metrics() if entry["kind"] == "window"]
        every = self.read_config().get("save-every")
        # A window is recorded before it is saved, so the last one that was due may be missing without any loss.
        if windows and (windows[-1]["window"] > every if every else windows[-1]["epoch"] > 0):
            return f"records of {int(windows[-1]['window'])} windows"
        if any(self.checkpoint_folder.glob("*.safetensors")):
            return "files of checkpoints"
        return ""

    def checkpoint(self, which: str | None = None) -> Path:
        """The checkpoint meant: `best` (also None; the newest where nothing was evaluated), `last`, or a file.

        Raises:
            UsageError: There is no such file, or the run has no checkpoint yet.
        """
        best = self.checkpoint_folder / "best.safetensors"
        if which not in (None, "best", "last"):
            if not Path(str(which)).is_file():
                raise UsageError(
                    f"There is no checkpoint {which}; use best, last or a file of {self.checkpoint_folder}."
                )
            return Path(str(which))
        path = best if which != "last" and best.is_file() else self.newest()
        if path is None:
            raise UsageError(f"{self.folder} has no checkpoint yet; train it first.")
        return path

    def metrics(self) -> list[dict[str, Any]]:
        """What was recorded so far."""
        return list(read_metrics(self.metrics_path))
