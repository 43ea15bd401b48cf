"""Verification: does a converted model still compute what its original does, and if not, where does it begin to differ.

The candidate is judged under strict emulation (`onnxamp.passes.emulate`), since a CPU hides overflow and rounding. Beside
that, the file itself is checked as users will meet it: `onnx.checker`, and loading and running in ONNX Runtime, in a
process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxamp.dtypes import BF16, BY_IR, BY_NAME, FP16, LOW
from onnxamp.errors import DataError, ModelError, UnsupportedError, one_line
from onnxamp.evidence.inputs import Data, Sample
from onnxamp.evidence.locate import Divergence, first_divergence
from onnxamp.evidence.metrics import Difference, difference, is_float, worse
from onnxamp.evidence.sampling import Model, choose, path_of
from onnxamp.evidence.ties import picking, unexplained
from onnxamp.evidence.tolerance import DEFAULTS, Tolerance
from onnxamp.evidence.values import Fetcher, matched
from onnxamp.files import jsonable
from onnxamp.model import io
from onnxamp.model.preparation import prepared
from onnxamp.model.signatures import standard_opset
from onnxamp.ort import worker
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate


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


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyResult:
    """What verification found.

    Attributes:
        precision: The least precise float type in the candidate: ``fp32``, ``fp16`` or ``bf16``.
        tolerance: The bounds that were applied.
        outputs: One verdict for each output.
        samples: How many samples were run.
        data: Where the samples came from, in words.
        problems: Why the file itself fails: invalid for `onnx.checker`, or refused by ONNX Runtime.
        notes: What to know besides.
        divergence: Where an output that fails begins to differ; None if all pass or no single node can be named.
        rows: Rows of all samples together, if the inputs of each have one first size; else None.
        made_up: Whether the samples were made up.
    """

    precision: str
    tolerance: Tolerance
    outputs: tuple[OutputResult, ...]
    samples: int
    data: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    divergence: Divergence | None = None
    rows: int | None = None
    made_up: bool = False

    @property
    def passed(self) -> bool:
        """Whether every output is within the tolerance and the file is sound."""
        return not self.problems and not any(output.missed for output in self.outputs)

    def verdict(self) -> str:
        """One sentence: the outcome, how it was computed, and on what."""
        failed = sum(bool(output.missed) for output in self.outputs)
        outcome = "PASSED" if self.passed else "FAILED"
        if failed:
            outcome += f" ({failed} of {len(self.outputs)} outputs)"
        how = f"{self.precision} emulated strictly" if self.precision != "fp32" else "fp32"
        count = f"{self.samples} sample" + ("s" if self.samples != 1 else "")
        if self.rows is not None and self.rows != self.samples:
            count += f" ({self.rows} rows)"
        source = self.data if self.made_up else f"{count} from {self.data}"
        return f"{outcome}: {how}, {source}."

    def __repr__(self) -> str:
        return f"<VerifyResult {self.verdict()}>"

    def __str__(self) -> str:
        missed = [
            f"output {output.name!r}, sample {output.sample}: {'; '.join(output.missed)}"
            for output in self.outputs
            if output.missed
        ]
        return "\n".join([self.verdict(), *missed, *self.problems])

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types; numbers that JSON lacks are strings (``"inf"``, ``"nan"``)."""
        fields = dataclasses.asdict(self)
        return {"passed": self.passed, **{name: jsonable(value) for name, value in fields.items()}}


def verify(
    reference: Model,
    candidate: Model,
    data: Data | None = None,
    tolerance: Tolerance | Mapping[str, float | None] | None = None,
    *,
    dim: Mapping[str, int] | None = None,
    count: int = 4,
    seed: int = 0,
    provider: str = "cpu",
    check_file: bool = True,
) -> VerifyResult:
    """Run both models on the same samples and compare every output.

    Args:
        reference: The original: a path, `ModelProto` or `ir.Model`.
        candidate: The converted model, in the same forms.
        data: Samples (see `onnxamp.evidence.inputs.samples`); made up from the model where None.
        tolerance: Bounds in place of the defaults for the candidate's precision; a mapping changes single ones.
        dim: Sizes of free dimensions of samples that are made up.
        count: How many samples to make up.
        seed: Seed of those.
        provider: Where to run the emulations, and the candidate as it is.
        check_file: Whether to check the candidate with `onnx.checker` and run it as it is, beside the emulation.

    Raises:
        UsageError: `count` is below 1, or `dim` names a dimension that no input has.
        ModelError: A model is invalid, or the two have other inputs or outputs.
        DataError: The data do not fit, or the reference cannot run on them.
        UnsupportedError: ONNX Runtime has no kernel for a node, or inputs cannot be made up.
        RuntimeMissingError: No ONNX Runtime, or not the provider.
    """
    ours, theirs = prepared(reference), prepared(candidate)
    _same_interface(ours, theirs)
    precision = precision_of(theirs)
    if precision != "fp32" and standard_opset(theirs) < 6:
        raise UnsupportedError(
            f"ONNX Runtime casts from opset 6 on and the candidate has {standard_opset(theirs)}: raise the opset of the original with "
            "onnx.version_converter and convert that."
        )
    bounds = _bounds(tolerance, precision)
    config = SessionConfig(provider=provider)
    judged = [emulate(model) if precision_of(model) != "fp32" else model for model in (ours, theirs)]
    paths = [path_of(given) for given in (reference, candidate)]
    sessions = [open_session(model, config, name=name) for model, name in zip(judged, paths, strict=True)]
    feeds = choose(ours, sessions[0], data, dim=dim, count=count, seed=seed)
    source = feeds.source
    comparison = Comparison(ours, judged, bounds, config)
    first: tuple[Sample, Sample] | None = None
    problems: list[str] = []
    notes: list[str] = []
    rows: int | None = 0
    for sample in feeds:
        pair = (sample, cast_sample(sample, theirs))
        first = first or pair
        try:
            expected = run(sessions[0], pair[0])
        except DataError as problem:
            raise DataError(f"The reference does not run on {source}: {problem}") from problem
        try:
            got = run(sessions[1], pair[1])
            comparison.add(pair, expected, got)
        except DataError as problem:
            problems.append(f"The candidate fails on sample {comparison.count}: {problem}")
            break
        sizes = {len(value) for value in sample.values() if isinstance(value, np.ndarray) and value.ndim}
        rows = rows + sizes.pop() if rows is not None and len(sizes) == 1 else None
    if check_file and first is not None:
        _check_file(reference, candidate, theirs, first[1], provider, problems, notes)
    outputs = comparison.results()
    divergence = None
    failing = [output for output in outputs if output.missed]
    if failing:
        names = [output.name for output in failing]
        divergence = first_divergence(
            ours,
            judged[0],
            theirs,
            judged[1],
            comparison.failed_feeds(names[0]),
            names,
            config,
            BY_NAME[precision].max,
        )
    return VerifyResult(
        precision=precision,
        tolerance=bounds,
        outputs=tuple(outputs),
        samples=comparison.count,
        data=source,
        problems=tuple(problems),
        notes=tuple(notes),
        divergence=divergence,
        rows=rows,
        made_up=feeds.made_up,
    )


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

    def add(self, feeds: tuple[Sample, Sample], expected: dict[str, Any], got: dict[str, Any]) -> None:
        """Compare the outputs of one sample."""
        for name, want in expected.items():
            try:
                found = difference(want, got[name], with_kl=self.tolerance.kl is not None)
            except DataError as problem:
                raise DataError(f"its output {name!r} does not fit: {problem}.") from problem
            if found.mismatches:
                found = dataclasses.replace(found, ties=self._ties(name, feeds, found.mismatches))
            missed = self.tolerance.missed(found)
            rank = (-len(missed), found.snr if found.snr == found.snr else 0.0, -float(found.mismatches))
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
        pairs = [pair for pair in matched(self.reference, self.judged[1]) if pair.node is node]
        partner = next((pair.partner for pair in pairs), None)
        scores = node.inputs[0]
        if partner is None or partner.inputs[0] is None or scores is None:
            return 0
        names = [
            (scores.name or "", pick.name or ""),
            (partner.inputs[0].name or "", partner.outputs[pick.index() or 0].name or ""),
        ]
        values = [
            Fetcher(model, pair, self.config)(sample, pair)
            for model, pair, sample in zip(self.judged, names, feeds, strict=True)
        ]
        (expected, got), picked = ((values[0][names[0][i]], values[1][names[1][i]]) for i in (0, 1))
        if self.tolerance.missed(difference(expected, got)):  # scores that are wrong altogether explain nothing
            return 0
        return max(0, mismatches - unexplained(node, (expected, got), picked))


def precision_of(model: ir.Model) -> str:
    """The least precise float type that a value of `model` has."""
    kinds = {value.dtype for value in model.graph.inputs} | {value.dtype for value in model.graph.initializers.values()}
    kinds |= {value.dtype for node in model.graph.all_nodes() for value in node.outputs}
    return BF16.name if BF16.ir in kinds else FP16.name if FP16.ir in kinds else "fp32"


def _bounds(tolerance: Tolerance | Mapping[str, float | None] | None, precision: str) -> Tolerance:
    if isinstance(tolerance, Tolerance):
        return tolerance
    return DEFAULTS[precision].replaced(tolerance or {})


def _same_interface(reference: ir.Model, candidate: ir.Model) -> None:
    for what in ("inputs", "outputs"):
        sides = []
        for model in (reference, candidate):
            values = getattr(model.graph, what)
            sides.append({value.name for value in values if what == "outputs" or not value.is_initializer()})
        if sides[0] != sides[1]:
            missing, extra = sorted(sides[0] - sides[1]), sorted(sides[1] - sides[0])
            raise ModelError(
                f"The models have other {what}: the candidate lacks {missing or 'none'} and adds {extra or 'none'}; "
                "compare a model with its own conversion."
            )


def cast_sample(sample: Sample, candidate: ir.Model) -> Sample:
    """`sample` in the types of the candidate's inputs."""
    result = dict(sample)
    for value in candidate.graph.inputs:
        name, array = value.name or "", result.get(value.name or "")
        if isinstance(array, np.ndarray) and value.dtype in BY_IR and is_float(array):
            with np.errstate(over="ignore"):
                result[name] = array.astype(BY_IR[value.dtype].numpy, copy=False)
    return result


def _check_file(
    reference: Model,
    candidate: Model,
    model: ir.Model,
    sample: Sample,
    provider: str,
    problems: list[str],
    notes: list[str],
) -> None:
    """Check the candidate as it is, not its emulation, and as a program opens it that sets nothing but the provider."""
    if wrong := _checker(candidate):
        if _checker(reference):
            notes.append(f"onnx.checker refuses the candidate, and the reference too: {wrong}.")
        else:
            problems.append(f"onnx.checker refuses the candidate: {wrong}.")
    if not any(value.dtype in LOW for node in model.graph.all_nodes() for value in node.outputs):
        return
    answer = worker.shared().run(candidate, [sample], SessionConfig(provider=provider, optimization="all"))
    if answer.note:
        notes.append(answer.note)
    if answer.kind == UnsupportedError.__name__:
        notes.append(f"The file itself was not run, only its emulation: {answer.error}")
    elif answer.error:
        text = answer.error if answer.kind else f"ONNX Runtime crashes on it, {answer.error}."
        problems.append(f"The file does not run as it is: {text}")


def _checker(model: Model) -> str:
    """What `onnx.checker` says against a model; empty if nothing."""
    try:
        if isinstance(model, (str, os.PathLike)):
            onnx.checker.check_model(os.fspath(model), full_check=True)
        else:
            onnx.checker.check_model(
                model if isinstance(model, onnx.ModelProto) else io.to_proto(model), full_check=True
            )
    except Exception as problem:  # it raises many types, some from C++
        return one_line(problem, 200)
    return ""
