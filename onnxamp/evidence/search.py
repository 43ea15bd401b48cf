"""`convert --auto`: the lowest precision that meets a tolerance, found with few evaluations.

1. Evaluate the plan of level O2. An evaluation converts, emulates strictly, runs every sample and compares all outputs.
2. One instrumented run ranks the nodes (`onnxamp.evidence.sensitivity`).
3. Level and numerical rules let go of all nodes that do not overflow, and the minimum cut takes the plan of least traffic. If that misses
   the tolerance, the scores are weighed against traffic in the cut, more or less, until it is just met (`onnxamp.evidence.frontier`).

Everything is deterministic, and each evaluation is written to a journal at once: an interrupted search that is started again reads what it
knows and goes on to the same result.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxamp.conversion import ConvertResult, convert_with
from onnxamp.errors import AmpError, UsageError
from onnxamp.evidence.evaluation import Evaluation, Evaluator, Trial
from onnxamp.evidence.frontier import Frontier, Point
from onnxamp.evidence.inputs import Data
from onnxamp.evidence.journal import Journal
from onnxamp.evidence.sampling import Model
from onnxamp.evidence.sensitivity import Sensitivity, sensitivities
from onnxamp.evidence.space import LOWERABLE, Space
from onnxamp.evidence.tolerance import Tolerance
from onnxamp.model.preparation import prepared
from onnxamp.ort.session import SessionConfig
from onnxamp.policy import codes
from onnxamp.policy.options import Options
from onnxamp.policy.plan import Plan
from onnxamp.policy.user import label

Score = Callable[[Sequence[Mapping[str, Any]]], float]

# A plan that saves less than this share of the bytes of one that passes is not worth an evaluation.
_LITTLE = 0.0005
# Evaluations for what lies between two plans of the frontier.
_REFINEMENTS = 8
# Raised nodes of which all parts are tried: 16 at most.
_ENUMERATED = 4
# Why a node stays fp32 in the plan that is chosen.
RAISED = "raised to meet the tolerance"
COSTLY = "that would cost more bytes in Casts than 16 bits save"
MISSES = "that would miss the tolerance in 16 bits"
OVERFLOWS = "beyond the range of 16 bits on the samples"
UNSEEN = "run by no sample"
UNTRIED = "not tried, for want of evaluations"
NO_KERNEL = "without a 16-bit kernel on the target"
ILLEGAL = "without a 16-bit form, or at work on shapes"
KEPT = "kept by you"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What the search found.

    Attributes:
        result: The conversion with the policy found; the one that comes nearest where none meets the tolerance.
        policy: (node, ``fp32`` or ``low``) for what differs from level O2; with the same options it gives the same model.
        feasible: Whether it meets the tolerance.
        best: The trial that was chosen.
        trials: All evaluations, in order.
        weights: The measures when the weights alone are rounded as O2 rounds them, the arithmetic exact; None if O2 meets the tolerance.
        ranking: Sensitivities, the most sensitive first; empty where O2 meets the tolerance and leaves nothing to lower.
        remaining: How many nodes stay fp32 by reason, in words, the most frequent first; empty if none meets the tolerance.
        data: Where the samples came from, in words.
        notes: What to know besides.
    """

    result: ConvertResult
    policy: tuple[tuple[str, str], ...]
    feasible: bool
    best: Trial
    trials: tuple[Trial, ...]
    weights: Trial | None
    ranking: tuple[Sensitivity, ...]
    remaining: dict[str, int]
    data: str
    notes: tuple[str, ...]


def search(
    model: Model,
    options: Options,
    tolerance: Tolerance,
    data: Data | None = None,
    *,
    max_evals: int = 30,
    score: Score | None = None,
    least: float = 0.0,
    dim: Mapping[str, int] | None = None,
    count: int = 4,
    seed: int = 0,
    journal: str | None = None,
    config: SessionConfig | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> SearchResult:
    """The plan of least modelled traffic that the search finds within the tolerance.

    Args:
        model: The FP32 model.
        options: Level O2, dtype, target, and what the user keeps or lowers: such nodes are left alone.
        tolerance: Bounds for every output of every sample.
        data: Samples (see `onnxamp.evidence.inputs.samples`); made up where None. They are kept in memory.
        max_evals: Most evaluations.
        score: A measure of your own, such as the accuracy on a task: takes the outputs of all samples, in order.
        least: The least that `score` must give.
        dim: Sizes of free dimensions of samples that are made up.
        count: How many samples to make up.
        seed: Seed of those.
        journal: File that keeps the evaluations; None keeps none.
        config: Session options; the CPU where None.
        on_trial: Called after each evaluation.

    Raises:
        UsageError: Options that leave nothing to search.
        DataError: The data do not fit, or the reference does not run on them.
    """
    if options.level != "O2":
        raise UsageError(f"--auto starts from level O2, not {options.level}: leave --level out.")
    if max_evals < 1:
        raise UsageError("--max-evals is at least 1.")
    config = config or SessionConfig(provider="cpu")
    evaluator = Evaluator(model, tolerance, data, score, least, dim, count, seed, config)
    book = Journal(
        journal,
        {
            "reference": evaluator.digest,
            "options": options.to_json(),
            "score": [least, getattr(score, "__name__", None)],
        },
        tolerance,
    )
    space = Space(prepared(model), options)
    return _Search(model, space, evaluator, book, max_evals, on_trial).run()


class _Search:
    """One search.

    Attributes:
        found: The sensitivities by name.
        why: Why nodes that may be lowered are not, as far as the search knows.
        reused: How many evaluations an interrupted search had made before.
    """

    def __init__(
        self,
        source: Model,
        space: Space,
        evaluator: Evaluator,
        book: Journal,
        max_evals: int,
        on_trial: Callable[[Trial], None],
    ) -> None:
        self.source = source
        self.space = space
        self.evaluator = evaluator
        self.book = book
        self.left = max_evals
        self.on_trial = on_trial
        self.trials: list[Trial] = []
        self.known: dict[tuple[tuple[str, ...], tuple[str, ...]], Trial] = {}
        self.notes: list[str] = list(evaluator.notes)
        self.found: dict[str, Sensitivity] = {}
        self.why: dict[str, str] = {}
        self.reused = 0

    def run(self) -> SearchResult:
        """O2 first, then what is better."""
        base = self.trial("O2", (), ())
        assert base is not None
        if not base.passed or self.space.lowerable:  # else there is nothing to choose
            self.rank()
        weights = None if base.passed else self.weights()
        best = self.choose(base)
        options = self.space.options_of(best.raised, best.lowered)
        result = convert_with(self.source, options)
        self.book.close()
        if self.reused:
            self.notes.append(f"An interrupted search went on: {self.reused} of its evaluations were there already.")
        return SearchResult(
            result,
            options.policy,
            best.passed,
            best,
            tuple(self.trials),
            weights,
            tuple(sorted(self.found.values(), key=lambda item: (-item.score, item.node))),
            self.remaining(result.plan, set(best.raised)) if best.passed else {},
            self.evaluator.source,
            tuple(self.notes),
        )

    def rank(self) -> None:
        """Measure the sensitivities."""
        try:
            self.found = sensitivities(self.space.all_low, self.evaluator.samples, self.evaluator.config)
        except AmpError as problem:
            self.notes.append(f"The instrumented run failed, so that all nodes count alike: {problem}")

    def score(self, name: str) -> float:
        """The sensitivity of a node; 0 where it is not known."""
        return self.found[name].score if name in self.found else 0.0

    def trial(self, step: str, raised: tuple[str, ...], lowered: tuple[str, ...]) -> Trial | None:
        """Evaluate a policy; None if there is no such plan, or no evaluation is left."""
        key = (raised, lowered)
        if key in self.known:
            return self.known[key]
        plan = self.space.plan(raised, lowered) if self.left else None
        if plan is None:
            return None
        self.left -= 1
        kept = self.kept(raised, lowered)
        if kept is None:
            candidate = convert_with(self.source, self.space.options_of(raised, lowered)).model
            kept = self.evaluator.evaluate(candidate)
            self.book.add(raised, lowered, kept)
        trial = Trial(step, raised, lowered, self.space.share(plan), plan.traffic.result, kept)
        self.known[key] = trial
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def kept(self, raised: tuple[str, ...], lowered: tuple[str, ...]) -> Evaluation | None:
        """What the journal of an interrupted search has of a policy."""
        found = self.book.find(raised, lowered)
        self.reused += found is not None
        return found

    def weights(self) -> Trial:
        """Round the constants that O2 reads in 16 bits, and nothing else."""
        kept = self.kept(("weights",), ("weights",))
        if kept is None:
            kept = self.evaluator.evaluate(self.space.rounded_weights())
            self.book.add(("weights",), ("weights",), kept)
        base = self.space.base
        trial = Trial("weights alone", (), (), self.space.share(base), base.traffic.result, kept)
        self.on_trial(trial)
        return trial

    def noise(self) -> dict[str, float]:
        """The scores of the nodes that may be turned; what overflows in 16 bits, or no sample ran, stays as rules have it.

        Nodes that the instrumented run could not measure count as much as the middle one of the others.
        """
        result = {}
        known = [item.score for item in self.found.values() if math.isfinite(item.score)]
        middle = statistics.median(known) if known else 1.0
        for name in (*self.space.raisable, *self.space.lowerable):
            item = self.found.get(name)
            if name in self.space.lowerable and item is not None and not (item.seen and math.isfinite(item.score)):
                self.why[name] = OVERFLOWS if item.seen else UNSEEN
            else:
                result[name] = item.score if item is not None else middle
        return result

    def choose(self, base: Trial) -> Trial:
        """The trial of least traffic that passes, on the frontier from no regard to noise to regard to nothing else.

        If none passes, the nearest one.
        """
        noise = self.noise()
        frontier = Frontier(self.space, noise)
        best = base
        noisy = frontier.at(0.0)  # fails, or is not known to pass
        quiet = frontier.at(math.inf)  # passes, or moves no less than what passes, or is not known
        point: Point | None = noisy
        if not base.passed:  # nor does what has more noise
            start = Point(
                0.0, (), (), math.fsum(noise[name] for name in self.space.raisable if math.isfinite(noise[name]))
            )
            point = frontier.between(noisy, quiet, self.aim(start, base.result.error, noisy, quiet, 0)) or quiet
        for turn in itertools.count(1):
            if point is None or not self.left:
                break
            plan = self.space.plan(point.raised, point.lowered)
            trial = None
            if plan is not None and best.passed and plan.traffic.result >= best.traffic:
                quiet = point
            else:
                trial = self.trial(_step(point.raised, point.lowered), point.raised, point.lowered)
                if trial is not None and trial.passed:
                    best, quiet = trial, point
                else:
                    noisy = point
                    if trial is not None and not best.passed and trial.result.error < best.result.error:
                        best = trial
            if quiet.weight == 0 or math.isinf(noisy.weight) or _saved(best, self.space, noisy) < _LITTLE:
                break
            error = trial.result.error if trial is not None else math.nan
            point = frontier.between(noisy, quiet, self.aim(point, error, noisy, quiet, turn))
            if not best.passed and (point is None or self.left == 1):
                point = quiet
        if best.passed and not 0 <= _saved(best, self.space, noisy) < _LITTLE:
            best = self.enumerated(self.refined(best, noise))
        self.explain(best, noise)
        return best

    def refined(self, best: Trial, noise: Mapping[str, float]) -> Trial:
        """Turn to 16 bits what still may be of those that save traffic: halves, then parts of them, the quietest first.

        In a small model the plans of the frontier lie far apart.
        """
        saving = [name for name in self.space.cheapest(noise, 0.0)[1] if name not in best.lowered]
        pending = _halves(sorted((*best.raised, *saving), key=lambda name: (noise.get(name, 0.0), name)))
        reserve = max(0, self.left - _REFINEMENTS)
        while pending and self.left > reserve:
            chunk = set(pending.pop())
            raised = tuple(name for name in best.raised if name not in chunk)
            lowered = self.space.ordered([*best.lowered, *(name for name in self.space.lowerable if name in chunk)])
            plan = self.space.plan(raised, lowered)
            if plan is not None and plan.traffic.result <= (1 - _LITTLE) * best.traffic:
                trial = self.trial(_step(raised, lowered), raised, lowered)
                if trial is not None and trial.passed:
                    best = trial
                    continue
            pending += _halves(sorted(chunk, key=lambda name: (noise.get(name, 0.0), name)))
        return best

    def enumerated(self, best: Trial) -> Trial:
        """Where few nodes are raised, the cheapest part of them that is enough: a share of rows, say, does not go with noise."""
        if len(best.raised) > _ENUMERATED:
            return best
        parts = [part for count in range(len(best.raised)) for part in itertools.combinations(best.raised, count)]
        plans = [(plan.traffic.result, part) for part in parts if (plan := self.space.plan(part, best.lowered))]
        for traffic, part in sorted(plans):
            if traffic > (1 - _LITTLE) * best.traffic:
                break
            trial = self.trial(_step(part, best.lowered), part, best.lowered)
            if trial is not None and trial.passed:
                return trial
        return best

    def aim(self, point: Point, error: float, noisy: Point, quiet: Point, turn: int) -> float:
        """How much noise to try next: what the tolerance allows if error goes with noise, every other time the middle."""
        limit = self.evaluator.tolerance.noise
        if math.isinf(error) and point.weight == 0:  # first without what overflows
            return noisy.noise
        if limit is not None and error > 0 and turn % 2 == 0:
            allowed = point.noise * limit / error
            if quiet.noise < allowed < noisy.noise:
                return allowed
        return math.sqrt(quiet.noise * noisy.noise) if quiet.noise else min(point.noise, noisy.noise) / 4

    def explain(self, best: Trial, noise: Mapping[str, float]) -> None:
        """Note why nodes are not lowered: the plan without regard to noise lowers what saves traffic at all."""
        saving = set(self.space.cheapest(noise, 0.0)[1])
        for name in self.space.lowerable:
            if name in noise and name not in best.lowered:
                self.why[name] = COSTLY if name not in saving else MISSES if self.left else UNTRIED

    def remaining(self, plan: Plan, raised: set[str]) -> dict[str, int]:
        """How many nodes are fp32 in a plan, by reason."""
        count: collections.Counter[str] = collections.Counter()
        for node, decision in plan.nodes.items():
            if decision.precision != "fp32":
                continue
            name, code = label(node), decision.code
            if code == codes.POLICY_FILE and name in raised:
                count[RAISED] += 1
            elif code in LOWERABLE and name in self.why:
                count[self.why[name]] += 1
            elif code in (codes.KEEP, codes.POLICY_FILE, codes.USER_ISLAND):
                count[KEPT] += 1
            elif code.startswith("AMP3"):
                count[NO_KERNEL] += 1
            elif code in LOWERABLE or code.startswith("AMP2"):
                count[ILLEGAL] += 1
            else:
                count[COSTLY] += 1
        return dict(count.most_common())


def _saved(best: Trial, space: Space, noisy: Point) -> float:
    """The share of bytes that a plan which fails would save of one that passes; all of them if none passes yet."""
    plan = space.plan(noisy.raised, noisy.lowered)
    return 1 - plan.traffic.result / best.traffic if best.passed and plan is not None else 1.0


def _step(raised: Sequence[str], lowered: Sequence[str]) -> str:
    """A plan in words."""
    parts = [
        f"{what} {len(names)} node{'s' * (len(names) != 1)}"
        for what, names in (("raise", raised), ("lower", lowered))
        if names
    ]
    return ", ".join(parts) or "O2"


def _halves(chunk: list[str]) -> list[list[str]]:
    """Both halves of a chunk, the first one last, so that it is taken next; none of a single element."""
    middle = len(chunk) // 2
    return [chunk[middle:], chunk[:middle]] if middle else []
