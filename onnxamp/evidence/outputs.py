"""The outputs of a candidate against those of its reference, sample after sample, and what a tolerance says of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.errors import AmpError, DataError
from onnxamp.evidence.inputs import Sample
from onnxamp.evidence.locate import ancestors
from onnxamp.evidence.metrics import Difference, difference, is_float, worse
from onnxamp.evidence.ties import picked_by, picking, unexplained
from onnxamp.evidence.tolerance import Tolerance
from onnxamp.evidence.values import Fetcher, matched
from onnxamp.ort.session import SessionConfig


@dataclasses.dataclass(frozen=True)
class OutputResult:
    """The verdict on one output.

    Attributes:
        name: Name of the output.
        worst: The worst of all samples in each measure.
        sample: The first sample that misses the tolerance, else the one with the lowest SNR or most mismatches.
        missed: The bounds that are broken, in words; empty if none is.
    """

    name: str
    worst: Difference
    sample: int
    missed: tuple[str, ...]


def constant_outputs(expected: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each float output that is the same number everywhere in all samples: agreement on it says little."""
    found: dict[str, set[float]] = {}
    for outputs in expected:
        for name, value in outputs.items():
            found.setdefault(name, set()).update(_numbers(value))
    return [
        f"Output {name!r} of the reference is {numbers.pop():g} everywhere on these samples: agreement there says little; give samples "
        "on which it is not."
        for name, numbers in found.items()
        if len(numbers) == 1
    ]


def _numbers(value: Any) -> tuple[float, ...]:
    """The least and the greatest element of a float array of several; of what has no such, two numbers that differ."""
    if not isinstance(value, np.ndarray) or not is_float(value) or value.size < 2:
        return (0.0, 1.0)
    wide = value.astype(np.float64)
    return (float(wide.min()), float(wide.max())) if np.isfinite(wide).all() else (0.0, 1.0)


class Comparison:
    """The differences so far, sample after sample."""

    def __init__(
        self, reference: ir.Model, judged: list[ir.Model], tolerance: Tolerance, config: SessionConfig
    ) -> None:
        self.reference = reference
        self.judged = judged
        self.tolerance = tolerance
        self.config = config
        self.count = 0
        self._worst: dict[str, Difference] = {}
        self._sample: dict[str, tuple[tuple[float, ...], int]] = {}
        self._missed: dict[str, dict[str, None]] = {}
        self._feeds: dict[str, tuple[Sample, Sample]] = {}
        self._expected: list[dict[str, Any]] = []

    def add(self, feeds: tuple[Sample, Sample], expected: dict[str, Any], got: dict[str, Any]) -> None:
        """Compare the outputs of one sample."""
        self._expected.append({name: np.array(_numbers(value)) for name, value in expected.items()})
        for name, want in expected.items():
            try:
                found = difference(want, got[name], with_kl=self.tolerance.kl is not None)
            except DataError as problem:
                raise DataError(f"its output {name!r} does not fit: {problem}.") from problem
            if found.mismatches:
                found = dataclasses.replace(found, ties=self._ties(name, feeds, found.mismatches))
            missed = self.tolerance.missed(found)
            rank = (-len(missed), found.snr if found.snr == found.snr else -math.inf, -float(found.mismatches))
            if name not in self._worst or rank < self._sample[name][0]:
                self._sample[name] = (rank, self.count)
                self._feeds[name] = feeds
            self._worst[name] = worse(self._worst[name], found) if name in self._worst else found
            for text in missed:
                self._missed.setdefault(name, {}).setdefault(text.split()[0], None)
        self.count += 1

    def results(self) -> list[OutputResult]:
        """The verdicts."""
        result = []
        for name, worst in self._worst.items():
            broken = self._missed.get(name, {})
            # Counts add up over samples, so that a share that was missed once may look met in the sum.
            words = {text.split()[0]: text for text in self.tolerance.missed(worst)}
            missed = tuple(words.get(measure, f"{measure} in one sample") for measure in broken)
            result.append(OutputResult(name, worst, self._sample[name][1], missed))
        return result

    def notes(self) -> list[str]:
        """What to know of the verdicts: outputs that say little, and ties behind those that fail."""
        return constant_outputs(self._expected) + list(self._tied())

    def failed_feeds(self, name: str) -> tuple[Sample, Sample]:
        """The sample on which output `name` is worst."""
        return self._feeds[name]

    def _ties(self, name: str, feeds: tuple[Sample, Sample], mismatches: int) -> int:
        """How many of the unequal indices in output `name` a tie explains."""
        output = next(value for value in self.reference.graph.outputs if value.name == name)
        pick = picking(output)
        if pick is None:
            return 0
        node = pick.producer()
        assert node is not None
        found = self._picked(node, pick, feeds)
        # Scores that are wrong altogether explain nothing.
        if found is None or self.tolerance.missed(difference(*found[0])):
            return 0
        return max(0, mismatches - unexplained(node, *found))

    def _tied(self) -> Iterator[str]:
        """A sentence for each choice that ties decided otherwise on the way to outputs that fail: these come in another order."""
        needed = {name: ancestors(self.reference, [name]) for name in self._missed}
        for node in self.reference.graph:
            pick = picked_by(node)
            names = [name for name, nodes in needed.items() if node in nodes]
            if pick is None or not names:
                continue
            try:
                found = self._picked(node, pick, self._feeds[names[0]])
            except AmpError:  # inner values that the runtime cannot give
                continue
            if found is None or any(one.shape != other.shape for one, other in found):
                continue
            unequal = int(np.count_nonzero(found[1][0] != found[1][1]))
            if unequal and not self.tolerance.missed(difference(*found[0])) and not unexplained(node, *found):
                yield (
                    f"{node.op_type} {(node.name or pick.name)!r} chooses {unequal} indices otherwise, all where scores tie, and output "
                    f"{', '.join(map(repr, names))} follows it: the same results in another order are no defect of the conversion."
                )

    def _picked(
        self, node: ir.Node, pick: ir.Value, feeds: tuple[Sample, Sample]
    ) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
        """What an ArgMax, ArgMin or TopK reads and the indices that it gives, each in the reference and in the candidate."""
        pairs = [pair for pair in matched(self.reference, self.judged[1]) if pair.node is node]
        partner = next((pair.partner for pair in pairs), None)
        scores = node.inputs[0]
        if partner is None or partner.inputs[0] is None or scores is None:
            return None
        names = [
            (scores.name or "", pick.name or ""),
            (partner.inputs[0].name or "", partner.outputs[pick.index() or 0].name or ""),
        ]
        values = [
            Fetcher(model, pair, self.config)(sample, pair)
            for model, pair, sample in zip(self.judged, names, feeds, strict=True)
        ]
        scored, picked = ((values[0][names[0][i]], values[1][names[1][i]]) for i in (0, 1))
        return scored, picked
