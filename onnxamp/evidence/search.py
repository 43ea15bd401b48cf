"""`convert --auto`: the lowest precision that meets a tolerance, found with few evaluations.

1. Evaluate the plan of level O2. An evaluation converts, emulates strictly, runs every sample and compares all outputs.
2. One instrumented run ranks the nodes (`onnxamp.evidence.sensitivity`).
3. If O2 misses the tolerance, raise nodes to fp32 in the order of their scores, as many as the scores say, then twice as many and so on
   until it is met; then look between what failed and what passed for the fewest.
4. Lower what the tolerance allows: raised nodes that were not needed, then nodes that rules keep in fp32. They are set free all at once,
   and the minimum cut takes those that save traffic; if that misses the tolerance, a half at a time, the least sensitive first.

Everything is deterministic, and each evaluation is written to a journal at once: an interrupted search that is started again reads what it
knows and goes on to the same result.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxamp.conversion import ConvertResult, convert_with
from onnxamp.errors import AmpError, UsageError
from onnxamp.evidence.evaluation import Evaluator, Trial
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

# Why a node stays fp32 in the plan that is chosen.
RAISED = "were raised to meet the tolerance"
COSTLY = "would cost more bytes in Casts than 16 bits save"
MISSES = "would miss the tolerance in 16 bits"
OVERFLOWS = "overflow in 16 bits on the samples"
UNSEEN = "are run by no sample"
UNTRIED = "were not tried, for want of evaluations"
NO_KERNEL = "have no 16-bit kernel on the target"
ILLEGAL = "have no 16-bit form, or work on shapes"
KEPT = "are kept by you"


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
        ranking: Sensitivities, the most sensitive first.
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

    def run(self) -> SearchResult:
        """Raise, then lower."""
        base = self.trial("O2", (), ())
        assert base is not None
        self.rank()
        best, weights = base, None
        if not base.passed:
            weights = self.weights()
            best = self.raised(base)
        if best.passed:
            best = self.reverted(best)
            best = self.lowered(best)
        options = self.space.options_of(best.raised, best.lowered)
        result = convert_with(self.source, options)
        self.book.close()
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
            self.notes.append(f"The instrumented run failed, so that nodes are taken in graph order: {problem}")

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
        kept = self.book.find(raised, lowered)
        if kept is None:
            candidate = convert_with(self.source, self.space.options_of(raised, lowered)).model
            kept = self.evaluator.evaluate(candidate)
            self.book.add(raised, lowered, kept)
        trial = Trial(step, raised, lowered, self.space.share(plan), plan.traffic.result, kept)
        self.known[key] = trial
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def weights(self) -> Trial:
        """Round the constants that O2 reads in 16 bits, and nothing else."""
        kept = self.book.find(("weights",), ("weights",))
        if kept is None:
            kept = self.evaluator.evaluate(self.space.rounded_weights())
            self.book.add(("weights",), ("weights",), kept)
        base = self.space.base
        trial = Trial("weights alone", (), (), self.space.share(base), base.traffic.result, kept)
        self.on_trial(trial)
        return trial

    def raised(self, base: Trial) -> Trial:
        """The trial with the fewest first nodes of the ranking in fp32 that passes; the nearest one if none does."""
        order = sorted(self.space.raisable(), key=lambda name: -self.score(name))
        forecast = _Forecast([self.score(name) for name in order], self.evaluator.tolerance.noise)
        failing, best = 0, base
        step = forecast.enough(0, base.result.error) or max(1, sum(math.isinf(self.score(name)) for name in order))
        while True:
            size = min(step, len(order))
            trial = self.trial(f"raise {_nodes(size)}", tuple(order[:size]), ())
            if trial is None:
                return best
            if trial.passed:
                best = trial
                break
            failing = size
            if trial.result.error < best.result.error:
                best = trial
            if size == len(order):
                return best
            # The last evaluations go to what is sure to be the most that raising can do.
            expected = forecast.enough(size, trial.result.error)
            step = max(2 * size, expected or 4 * size) if self.left > 2 else len(order)
        for turn in itertools.count():
            if size - failing <= 1:
                break
            middle = (failing + size) // 2
            if turn % 2 == 0 and (expected := forecast.enough(size, best.result.error)):
                middle = min(max(expected, failing + 1), size - 1)
            trial = self.trial(f"raise {_nodes(middle)}", tuple(order[:middle]), ())
            if trial is None:
                break
            if trial.passed:
                best, size = trial, middle
            else:
                failing = middle
        return best

    def reverted(self, best: Trial) -> Trial:
        """Take back raised nodes that were not needed, the least sensitive first, with half of what is left."""
        reserve = self.left // 2
        pending = [sorted(best.raised, key=self.score)]
        while pending and self.left > reserve:
            chunk = pending.pop()
            rest = tuple(name for name in best.raised if name not in set(chunk))
            trial = self.trial(f"take back {_nodes(len(chunk))}", rest, best.lowered)
            if trial is not None and trial.passed and trial.traffic <= best.traffic:
                best = trial
                continue
            pending += _halves(chunk)
        return best

    def lowered(self, best: Trial) -> Trial:
        """Set free what rules keep in fp32, as much as passes; what overflows, or what no sample ran, stays as rules have it."""
        for name in self.space.lowerable:
            item = self.found.get(name)
            if item is not None and not item.seen:
                self.why[name] = UNSEEN
            elif item is not None and math.isinf(item.score):
                self.why[name] = OVERFLOWS
        able = [name for name in self.space.lowerable if name not in self.why]
        # The more is free, the more the cut takes: what it leaves now, it leaves in every part.
        saving = self.space.lowest(best.raised, set(able)) if able else ()
        groups = sorted(self.space.connected(set(saving)), key=lambda group: max(map(self.score, group)))
        free = set(able) - set(saving)
        pending = [groups] if groups else []
        while pending and self.left:
            chunk = pending.pop()
            wanted = free.union(*chunk)
            names = self.space.lowest(best.raised, wanted)
            if names == best.lowered:
                free = wanted
                continue
            trial = self.trial(f"lower {_nodes(len(names))}", best.raised, names)
            if trial is not None and trial.passed and trial.traffic < best.traffic:
                best, free = trial, wanted
            elif len(chunk) > 1:
                pending += _halves(chunk)
            else:  # the nodes of one group, after all other groups
                parts = _halves(sorted(chunk[0], key=self.score))
                pending[:0] = [[tuple(part)] for part in parts]
        self.why |= dict.fromkeys(able, MISSES) | dict.fromkeys(free, COSTLY)
        self.why |= {name: UNTRIED for chunk in pending for group in chunk for name in group}
        return best

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


class _Forecast:
    """How many nodes to raise, from the scores: the error goes with the sum of the scores of those that stay 16-bit.

    Args:
        scores: Of the nodes in the order in which they are raised.
        limit: The noise-to-signal ratio that the tolerance allows; None if it does not say.
    """

    def __init__(self, scores: Sequence[float], limit: float | None) -> None:
        self.limit = limit
        self.rest = [0.0]
        for score in reversed(scores):
            self.rest.append(self.rest[-1] + score)
        self.rest.reverse()

    def enough(self, size: int, error: float) -> int:
        """The fewest that meet the tolerance if `size` have this error; 0 if there is no telling."""
        if self.limit is None or not all(math.isfinite(number) and number > 0 for number in (self.rest[size], error)):
            return 0
        scale = error / self.rest[size]
        return next((count for count, rest in enumerate(self.rest) if rest * scale <= self.limit), len(self.rest) - 1)


def _nodes(count: int) -> str:
    return f"{count} node" + "s" * (count != 1)


def _halves(chunk: list[Any]) -> list[list[Any]]:
    """Both halves of a chunk, the first one last, so that it is taken next; none of a single element."""
    middle = len(chunk) // 2
    return [chunk[middle:], chunk[:middle]] if middle else []
