"""The journal of a search: one JSON line an evaluation, written at once, so that an interrupted search goes on where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

from onnxamp import files
from onnxamp.errors import RuntimeMissingError
from onnxamp.evidence.evaluation import Evaluation
from onnxamp.evidence.metrics import Difference
from onnxamp.evidence.tolerance import Tolerance


class Journal:
    """Evaluations by what was raised and lowered, kept in a file of one search.

    A journal of another model, data, options or tolerance is begun anew.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, question: Mapping[str, object], tolerance: Tolerance
    ) -> None:
        self._path = None if path is None else pathlib.Path(path)
        self._known: dict[str, Evaluation] = {}
        self._head = json.dumps({**question, "tolerance": tolerance.to_dict()}, sort_keys=True)
        if self._path is not None and self._path.is_file():
            self._read(self._path.read_text(encoding="utf-8", errors="replace").splitlines())

    def _read(self, lines: list[str]) -> None:
        if not lines or lines[0] != self._head:
            return
        for line in lines[1:]:
            try:
                fields = json.loads(line)
                evaluation = Evaluation(Difference(**fields["worst"]), tuple(fields["missed"]), fields["score"])
                self._known[fields["policy"]] = evaluation
            except (ValueError, KeyError, TypeError):  # the line that was being written at the interruption
                break

    def find(self, raised: tuple[str, ...], lowered: tuple[str, ...]) -> Evaluation | None:
        """The evaluation of this policy, if the journal has it."""
        return self._known.get(_key(raised, lowered))

    def add(self, raised: tuple[str, ...], lowered: tuple[str, ...], evaluation: Evaluation) -> None:
        """Keep an evaluation.

        Raises:
            RuntimeMissingError: The file cannot be written.
        """
        self._known[_key(raised, lowered)] = evaluation
        if self._path is None:
            return
        lines = [self._head]
        lines += [json.dumps({"policy": key, **dataclasses.asdict(found)}) for key, found in self._known.items()]
        try:
            # Whole: also the first line of a journal that is begun anew.
            files.write(self._path, ("\n".join(lines) + "\n").encode())
        except OSError as problem:
            raise RuntimeMissingError(f"{self._path} cannot be written: {problem.strerror}.") from problem

    def close(self) -> None:
        """Remove the file: the search is over."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _key(raised: tuple[str, ...], lowered: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps([sorted(raised), sorted(lowered)]).encode()).hexdigest()[:32]
