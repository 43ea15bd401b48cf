"""One full evaluation of a candidate: strict emulation on every sample, all outputs compared with the reference's."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp import __version__
from onnxamp.errors import DataError, UsageError
from onnxamp.evidence.inputs import Data, cast_sample
from onnxamp.evidence.metrics import Difference, worst_of
from onnxamp.evidence.outputs import Comparison, constant_outputs
from onnxamp.evidence.sampling import Model, choose, path_of
from onnxamp.evidence.tolerance import Tolerance, told
from onnxamp.model import io
from onnxamp.model.preparation import prepared
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The measures of one candidate.

    Attributes:
        worst: The worst of all outputs and samples in each measure.
        missed: The bounds that are broken, each with its output, in words.
        score: What the user's measure gives; None without one.
    """

    worst: Difference
    missed: tuple[str, ...]
    score: float | None = None

    @property
    def error(self) -> float:
        """Noise-to-signal ratio of the worst output, to say which of two candidates comes nearer; infinite if not finite."""
        if self.worst.nonfinite:
            return math.inf
        return max(1 - self.worst.cosine, 10 ** (-self.worst.snr / 10)) if not math.isnan(self.worst.snr) else math.inf


@dataclasses.dataclass(frozen=True)
class Trial:
    """One step of a search.

    Attributes:
        step: What was tried, in words.
        raised: Nodes that were fp32 by the search.
        lowered: Nodes that were 16-bit by the search.
        share: 16-bit share of what nodes read and write.
        traffic: Modelled bytes of one run.
        result: The measures.
    """

    step: str
    raised: tuple[str, ...]
    lowered: tuple[str, ...]
    share: float
    traffic: int
    result: Evaluation

    @property
    def passed(self) -> bool:
        """Whether the tolerance is met."""
        return not self.result.missed


class Evaluator:
    """The reference on its samples, run once; candidates are compared with what it gave.

    Attributes:
        samples: The samples.
        source: Where they came from, in words.
        digest: Hash of the model, the samples, the reference's outputs and onnxamp's version: the same for the same question.
        notes: What to know besides.
    """

    def __init__(
        self,
        model: Model,
        tolerance: Tolerance,
        data: Data | None,
        score: Callable[[Sequence[Mapping[str, Any]]], float] | None,
        least: float,
        dim: Mapping[str, int] | None,
        count: int,
        seed: int,
        config: SessionConfig,
    ) -> None:
        self.config = config
        self.tolerance = tolerance
        self._score, self._least = score, least
        self._reference = prepared(model)
        session = open_session(self._reference, config, name=path_of(model))
        self.samples = choose(self._reference, session, data, dim=dim, count=count, seed=seed).kept()
        self.source = self.samples.source
        digest = hashlib.sha256(f"onnxamp {__version__}, model {io.digest(self._reference)}".encode())
        self._expected: list[dict[str, Any]] = []
        for sample in self.samples:
            try:
                self._expected.append(run(session, sample))
            except DataError as problem:
                raise DataError(f"The reference does not run on {self.source}: {problem}") from problem
            _add(digest, (sample, self._expected[-1]))
        if score is not None and not (own := float(score(self._expected))) >= least:
            raise UsageError(
                f"The model itself, in fp32, has score {told(own, least)}, less than the {least:.12g} asked for: ask for less, or see "
                "whether metric, data and model belong together."
            )
        self.digest = digest.hexdigest()
        made_up = f"Judged on {self.source}: the tolerance is met on those, which says little of real data."
        self.notes = ((made_up,) if self.samples.made_up else ()) + tuple(constant_outputs(self._expected))

    def evaluate(self, candidate: ir.Model) -> Evaluation:
        """Run `candidate`, emulated, on every sample."""
        judged = emulate(candidate)
        comparison = Comparison(self._reference, [self._reference, judged], self.tolerance, self.config)
        outputs: list[dict[str, Any]] = []
        try:
            session = open_session(judged, self.config)
            for sample, expected in zip(self.samples, self._expected, strict=True):
                feeds = cast_sample(sample, candidate)
                got = run(session, feeds)
                comparison.add((sample, feeds), expected, got)
                if self._score is not None:
                    outputs.append(got)
        except DataError as problem:
            return Evaluation(Difference(0, cosine=0.0, snr=-math.inf, nan=1), (str(problem),))
        found = comparison.results()
        missed = [f"{output.name}: {text}" for output in found for text in output.missed]
        score = None
        if self._score is not None:
            score = float(self._score(outputs))
            if not score >= self._least:
                missed.append(f"score {told(score, self._least)} < {self._least:.12g}")
        total = worst_of(output.worst for output in found) if found else Difference(0)
        return Evaluation(total, tuple(missed), score)


def _add(digest: hashlib._Hash, value: Any) -> None:
    """Add a value that a model takes or gives: an array, or nested sequences and maps of them. No two values add the same bytes."""
    if isinstance(value, Mapping):
        digest.update(b"map %d\n" % len(value))
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(b"sequence %d\n" % len(value))
        for item in value:
            _add(digest, item)
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        digest.update(f"array {array.dtype} {array.shape}\n".encode())
        if array.dtype.hasobject:  # of strings, of which the memory holds the addresses
            _add(digest, array.reshape(-1).tolist())
        else:
            digest.update(np.ascontiguousarray(array).tobytes())
    else:  # a string, a number, or None for an optional that is empty
        text = repr(value).encode()
        digest.update(b"%s %d\n" % (type(value).__name__.encode(), len(text)) + text)
