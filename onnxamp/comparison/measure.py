"""`--data`: run both models under strict emulation and measure every value that they share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.comparison.compare import Comparison
from onnxamp.comparison.numbers import Numbers, ValueNumbers
from onnxamp.comparison.records import GraphDiff
from onnxamp.comparison.side import Side, node_name
from onnxamp.dtypes import BY_IR, LOW
from onnxamp.errors import DataError
from onnxamp.evidence.inputs import Data, cast_sample
from onnxamp.evidence.locate import DIVERGED_DB
from onnxamp.evidence.sampling import choose
from onnxamp.evidence.values import SideBySide, clamped
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.passes.emulate import emulate


@dataclasses.dataclass
class _Sums:
    """What is added up over samples for one value."""

    max_error: float = 0.0
    scale: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    nonfinite: int = 0
    elements: int = 0

    clamped: int = 0

    def add(self, want: np.ndarray, got: np.ndarray, limit: float) -> None:
        """Add a sample; elements that only a clamped constant explains (see `clamped`) are counted as such and as nothing else."""
        r, c = want.astype(np.float64), got.astype(np.float64)
        mask = clamped(r, c, limit)
        finite = np.isfinite(r) & np.isfinite(c) & ~mask
        same = finite | mask | (np.isnan(r) & np.isnan(c)) | (r == c)
        self.clamped += int(np.count_nonzero(mask))
        r, e = r[finite], r[finite] - c[finite]
        self.max_error = max(self.max_error, float(np.abs(e).max(initial=0.0)))
        self.scale = max(self.scale, float(np.abs(r).max(initial=0.0)))
        self.signal += float(np.sum(r * r))
        self.noise += float(np.sum(e * e))
        self.nonfinite += int(np.count_nonzero(~same))
        self.elements += want.size

    @property
    def snr(self) -> float | None:
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else None


def measured(
    comparison: Comparison,
    result: GraphDiff,
    data: Data | None,
    count: int = 4,
    step: Callable[[], object] = lambda: None,
) -> GraphDiff:
    """`result` with the numbers.

    Values of the main graphs are measured that are fp32, fp16 or bf16 in both models; what an If, Loop, Scan or function
    holds inside runs too, and shows in what it gives.

    Args:
        comparison: The two models; data are for the first one's inputs.
        result: Its diff.
        data: Samples as `onnxamp.evidence.inputs.samples` takes them, or None or ``"synthetic"`` to make them up.
        count: How many samples to make up.
        step: Called after each run of both models, which gives some of the values of one sample.

    Raises:
        DataError: The data do not fit the first model, or a model does not run on them.
        UnsupportedError: A kernel is missing, or inputs cannot be made up.
        RuntimeMissingError: ONNX Runtime is not installed.
    """
    a, b, match = comparison.a, comparison.b, comparison.match
    pairs = _pairs(comparison)
    config = SessionConfig(provider="cpu")
    ours, theirs = (emulate(side.model) if _low(side) else side.model for side in (a, b))
    given = None if data is None or (isinstance(data, str) and data == "synthetic") else data
    feeds = choose(a.model, open_session(ours, config) if given is None else None, given, count=count)
    both = SideBySide((ours, theirs), [(one.name or "", other.name or "") for one, other in pairs], config)
    partners = {
        other.name or "": one.name or "" for one in a.model.graph.inputs if (other := match.values.get(one)) is not None
    }
    limit = min((BY_IR[kind].max for side in (a, b) for kind in _low(side)), default=np.inf)
    sums = [_Sums() for _ in pairs]
    done = 0
    for sample in feeds:
        values = both((sample, _feeds(sample, b.model, partners)), step)
        for total, (want, got) in zip(sums, values, strict=True):
            if np.shape(want) == np.shape(got):  # another shape follows from values that already differ
                total.add(np.asarray(want), np.asarray(got), limit)
        done += 1
    records = tuple(_record(b, pair, total) for pair, total in zip(pairs, sums, strict=True) if total.elements)
    first = next((record.name for record in records if record.nonfinite or record.decibels < DIVERGED_DB), "")
    return dataclasses.replace(result, numbers=Numbers(feeds.source, done, records, first, DIVERGED_DB))


def _pairs(comparison: Comparison) -> list[tuple[ir.Value, ir.Value]]:
    """Matched float results of the main graphs, in the second model's order."""
    a, b = comparison.a, comparison.b
    found = []
    for node in b.at(b.model.graph).nodes:
        mine = comparison.match.nodes_back.get(node)
        if mine is None or b.is_cast(node) or a.scope[mine].path:
            continue
        for one, other in zip(mine.outputs, node.outputs, strict=False):
            if one.dtype in BY_IR and other.dtype in BY_IR and one.name and other.name:
                found.append((one, other))
    return found


def _low(side: Side) -> set[ir.DataType]:
    """The 16-bit types of a model's values."""
    values = [*side.model.graph.inputs, *side.constants, *(v for node in side.index for v in node.outputs)]
    return {value.dtype for value in values if value.dtype in LOW}


def _feeds(sample: Mapping[str, Any], model: ir.Model, partners: Mapping[str, str]) -> dict[str, Any]:
    """A sample of the first model under the names and in the types of the second one's inputs."""
    feeds: dict[str, Any] = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        name = value.name or ""
        key = name if name in sample else partners.get(name, "")
        if key not in sample:
            raise DataError(
                f"The second model's input {name!r} is none of the first model's, so the data do not feed it."
            )
        feeds[name] = sample[key]
    return cast_sample(feeds, model)


def _record(side: Side, pair: tuple[ir.Value, ir.Value], total: _Sums) -> ValueNumbers:
    one, other = pair
    node = other.producer()
    assert node is not None
    return ValueNumbers(
        name=one.name or "",
        counterpart=other.name or "",
        node=node_name(node),
        op=side.ref(node).op,
        max_error=total.max_error,
        scale=total.scale,
        snr=total.snr,
        nonfinite=total.nonfinite,
        elements=total.elements,
        clamped=total.clamped,
    )
