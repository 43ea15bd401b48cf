"""Verification: does a converted model still compute what its original does, and if not, where does it begin to differ.

The candidate is judged under strict emulation (`onnxamp.passes.emulate`), since a CPU hides overflow and rounding. Beside
that, the file itself is checked as users will meet it: `onnx.checker`, and loading and running in ONNX Runtime, in a
process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import BF16, BY_NAME, FP16
from onnxamp.errors import DataError, ModelError, UnsupportedError
from onnxamp.evidence import file_check
from onnxamp.evidence.inputs import Data, Sample, cast_sample
from onnxamp.evidence.locate import Divergence, first_divergence
from onnxamp.evidence.outputs import Comparison, OutputResult
from onnxamp.evidence.sampling import Model, Samples, choose, path_of
from onnxamp.evidence.tolerance import DEFAULTS, Tolerance
from onnxamp.files import jsonable
from onnxamp.model.preparation import prepared
from onnxamp.model.signatures import standard_opset
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate


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
    bounds, config = _bounds(tolerance, precision), SessionConfig(provider=provider)
    judged = [emulate(model) if precision_of(model) != "fp32" else model for model in (ours, theirs)]
    paths = [path_of(given) for given in (reference, candidate)]
    sessions = [open_session(model, config, name=name) for model, name in zip(judged, paths, strict=True)]
    feeds = choose(ours, sessions[0], data, dim=dim, count=count, seed=seed)
    comparison = Comparison(ours, judged, bounds, config)
    ran = _run_on(feeds, sessions, theirs, comparison)
    unsound: list[str] = []
    notes: list[str] = []
    if check_file and ran.first is not None:
        unsound, notes = file_check.run(reference, candidate, theirs, ran.first, provider)
    outputs = comparison.results()
    return VerifyResult(
        precision=precision,
        tolerance=bounds,
        outputs=tuple(outputs),
        samples=comparison.count,
        data=feeds.source,
        problems=(*ran.problems, *unsound),
        notes=(*comparison.notes(), *notes),
        divergence=_divergence(comparison, theirs, outputs, BY_NAME[precision].max),
        rows=ran.rows,
        made_up=feeds.made_up,
    )


@dataclasses.dataclass(frozen=True)
class _Ran:
    """What there is to say of the samples besides the differences.

    Attributes:
        first: The first one as the candidate takes it; None if there is none.
        rows: Rows of all together; None if the inputs of one differ in their first size.
        problems: Why the candidate did not take all of them.
    """

    first: Sample | None
    rows: int | None
    problems: tuple[str, ...] = ()


def _run_on(feeds: Samples, sessions: Sequence[Any], candidate: ir.Model, comparison: Comparison) -> _Ran:
    """Run both models on every sample, up to one that the candidate fails on, and compare their outputs.

    Raises:
        DataError: The reference does not run on a sample.
    """
    first: Sample | None = None
    rows: int | None = 0
    for sample in feeds:
        pair = (sample, cast_sample(sample, candidate))
        first = pair[1] if first is None else first
        try:
            expected = run(sessions[0], pair[0])
        except DataError as problem:
            raise DataError(f"The reference does not run on {feeds.source}: {problem}") from problem
        try:
            comparison.add(pair, expected, run(sessions[1], pair[1]))
        except DataError as problem:
            return _Ran(first, rows, (f"The candidate fails on sample {comparison.count}: {problem}",))
        sizes = {len(value) for value in sample.values() if isinstance(value, np.ndarray) and value.ndim}
        rows = rows + sizes.pop() if rows is not None and len(sizes) == 1 else None
    return _Ran(first, rows)


def _divergence(
    comparison: Comparison, candidate: ir.Model, outputs: Sequence[OutputResult], limit: float
) -> Divergence | None:
    """Where the outputs that fail begin to differ, on the sample that is worst for the first of them."""
    failing = [output.name for output in outputs if output.missed]
    if not failing:
        return None
    reference, emulated = comparison.judged
    feeds = comparison.failed_feeds(failing[0])
    return first_divergence(
        comparison.reference, reference, candidate, emulated, feeds, failing, comparison.config, limit
    )


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
