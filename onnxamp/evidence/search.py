"""`convert --auto`: the lowest precision that meets a tolerance, found with few evaluations.

1. Evaluate the plan of level O2. An evaluation converts, emulates strictly, runs every sample and compares all outputs.
2. One instrumented run ranks the nodes (`onnxamp.evidence.sensitivity`).
3. If O2 misses the tolerance, raise nodes to fp32 in the order of their scores: 1, 4, 16, ... until it is met, then bisect for the fewest.
4. Lower again what the tolerance allows, cheapest first: single raised nodes, then islands that rules keep in fp32, each a connected group
   of nodes. A chunk that fails is halved. A step counts only if it moves fewer bytes in the traffic model.

Everything is deterministic, and each evaluation is written to a journal at once: an interrupted search that is started again reads what it
knows and goes on to the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxamp.conversion import ConvertResult, convert_with
from onnxamp.dtypes import BY_IR
from onnxamp.errors import AmpError, UsageError
from onnxamp.evidence.evaluation import Evaluator, Trial
from onnxamp.evidence.inputs import Data
from onnxamp.evidence.journal import Journal
from onnxamp.evidence.sampling import Model
from onnxamp.evidence.sensitivity import Sensitivity, sensitivities
from onnxamp.evidence.tolerance import Tolerance
from onnxamp.model.preparation import prepared
from onnxamp.model.traffic import Traffic
from onnxamp.model.units import TypeGraph
from onnxamp.ort.session import SessionConfig
from onnxamp.passes.emulate import moves_data
from onnxamp.policy import codes
from onnxamp.policy.options import Options
from onnxamp.policy.plan import Plan, make_plan
from onnxamp.policy.raising import plan_at_best_opset
from onnxamp.policy.user import label

# Decisions that the search may turn: of the level, and of the numerical rules.
_RAISABLE = frozenset({codes.HEAVY, codes.CUT_LOW, codes.TIED})
_LOWERABLE = frozenset(
    value for name, value in vars(codes).items() if name.isupper() and str(value).startswith("AMP1")
) - {codes.USER_ISLAND}
Score = Callable[[Sequence[Mapping[str, Any]]], float]


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
    space = _Space(prepared(model), options)
    return _Search(model, space, evaluator, book, max_evals, on_trial).run()


class _Space:
    """The plans that the search chooses from, over one type graph."""

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.options = options
        self.base = plan_at_best_opset(model, options)
        self.graph: TypeGraph = self.base.graph
        self.traffic = Traffic(self.graph, dict(options.dim))
        self.all_low = make_plan(self.graph, dataclasses.replace(options, level="O3"))
        self.given = {pattern for pattern, _ in options.policy}
        self._position = {label(node): index for index, node in enumerate(self.graph.of)}

    def options_of(self, raised: Iterable[str], lowered: Iterable[str]) -> Options:
        """The options with a policy entry for each node that is raised or lowered, in the order of the graph."""
        entries = [(name, "fp32") for name in raised] + [(name, "low") for name in lowered]
        entries.sort(key=lambda entry: self._position[entry[0]])
        return dataclasses.replace(self.options, policy=(*self.options.policy, *entries))

    def plan(self, raised: Iterable[str], lowered: Iterable[str]) -> Plan:
        """The plan for these."""
        return make_plan(self.graph, self.options_of(raised, lowered))

    def share(self, plan: Plan) -> float:
        """16-bit share of what fp32 nodes of the source read and write, in elements."""
        counts = [(unit, count) for unit, count in self.traffic.of_unit.items() if BY_IR[unit.dtype].name == "fp32"]
        total = sum(count for _, count in counts)
        low = sum(count for unit, count in counts if plan.decisions[unit].precision != "fp32")
        return low / total if total else 0.0

    def raisable(self) -> list[str]:
        """Nodes that are 16-bit at O2 by the level and do more than move data."""
        return list(
            dict.fromkeys(
                label(node)
                for node, decision in self.base.nodes.items()
                if decision.precision != "fp32" and decision.code in _RAISABLE and not moves_data(node) and label(node)
            )
        )

    def islands(self) -> list[list[str]]:
        """Connected groups of nodes that rules keep in fp32 and that could be 16-bit."""
        members = {
            node
            for node, decision in self.base.nodes.items()
            if decision.code in _LOWERABLE
            and decision.precision == "fp32"
            and self.all_low.nodes[node].precision != "fp32"
            and label(node)
        }
        groups: list[list[str]] = []
        done: set[ir.Node] = set()
        for start in self.base.nodes:
            if start not in members or start in done:
                continue
            group, pending = {start}, [start]
            while pending:
                node = pending.pop()
                near = [value.producer() for value in node.inputs if value is not None]
                near += [user for value in node.outputs for user, _ in value.uses()]
                for other in near:
                    if other in members and other not in group:
                        group.add(other)
                        pending.append(other)
            done |= group
            groups.append(sorted({label(node) for node in group}, key=self._position.__getitem__))
        return groups


class _Search:
    """One search."""

    def __init__(
        self,
        source: Model,
        space: _Space,
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

    def run(self) -> SearchResult:
        """Raise, then lower."""
        base = self.trial("O2", (), ())
        assert base is not None
        found, ranking = self.rank()
        best, weights = base, None
        if not base.passed:
            weights = self.weights()
            best = self.raised(base, sorted(self.space.raisable(), key=lambda name: -_score(found, name)))
        if best.passed:
            best = self.reverted(best, found)
            best = self.lowered(best, found)
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
            tuple(ranking),
            self.evaluator.source,
            tuple(self.notes),
        )

    def rank(self) -> tuple[dict[str, Sensitivity], list[Sensitivity]]:
        """The sensitivities by name, and in order."""
        try:
            found = sensitivities(self.space.all_low, self.evaluator.samples, self.evaluator.config)
        except AmpError as problem:
            self.notes.append(f"The instrumented run failed, so that nodes are taken in graph order: {problem}")
            return {}, []
        return found, sorted(found.values(), key=lambda item: (-item.score, item.node))

    def trial(self, step: str, raised: tuple[str, ...], lowered: tuple[str, ...]) -> Trial | None:
        """Evaluate a policy; None if no evaluation is left."""
        key = (raised, lowered)
        if key in self.known:
            return self.known[key]
        if self.left == 0:
            return None
        self.left -= 1
        plan = self.space.plan(raised, lowered)
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
            kept = self.evaluator.evaluate(_rounded_weights(self.space.base))
            self.book.add(("weights",), ("weights",), kept)
        trial = Trial("weights alone", (), (), self.space.share(self.space.base), self.space.base.traffic.result, kept)
        self.on_trial(trial)
        return trial

    def raised(self, base: Trial, order: list[str]) -> Trial:
        """The trial with the fewest first nodes of `order` in fp32 that passes; the nearest one if none does."""
        failing, size, step = 0, 1, 1
        best = base
        while True:
            size = min(step, len(order))
            trial = self.trial(f"raise {size}", tuple(order[:size]), ())
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
            step = step * 4 if self.left > 2 else len(order)
        while size - failing > 1:
            middle = (failing + size) // 2
            trial = self.trial(f"raise {middle}", tuple(order[:middle]), ())
            if trial is None:
                break
            if trial.passed:
                best, size = trial, middle
            else:
                failing = middle
        return best

    def reverted(self, best: Trial, found: dict[str, Sensitivity]) -> Trial:
        """Take back raised nodes that were not needed, the least sensitive first, with half of what is left."""
        reserve = self.left // 2
        pending = [sorted(best.raised, key=lambda name: _score(found, name))]
        while pending and self.left > reserve:
            chunk = pending.pop()
            rest = tuple(name for name in best.raised if name not in set(chunk))
            trial = self.trial(f"take back {len(chunk)}", rest, best.lowered)
            if trial is not None and trial.passed and trial.traffic <= best.traffic:
                best = trial
                continue
            pending += _halves(chunk)
        return best

    def lowered(self, best: Trial, found: dict[str, Sensitivity]) -> Trial:
        """Lower islands, the least sensitive first, as many as pass; what no sample ran stays as rules have it."""
        unseen = {name for name, item in found.items() if not item.seen}
        islands = [
            (max(_score(found, name) for name in group), group)
            for group in self.space.islands()
            if unseen.isdisjoint(group)
        ]
        groups = [group for score, group in sorted(islands, key=lambda item: item[0]) if score != float("inf")]
        pending = [groups] if groups else []
        while pending and self.left:
            chunk = pending.pop()
            names = (*best.lowered, *(name for group in chunk for name in group))
            lowered = tuple(sorted(names, key=self.space._position.__getitem__))
            if self.space.plan(best.raised, lowered).traffic.result < best.traffic:
                trial = self.trial(f"lower {len(chunk)} islands", best.raised, lowered)
                if trial is not None and trial.passed:
                    best = trial
                    continue
            pending += _halves(chunk)
        return best


def _halves(chunk: list[Any]) -> list[list[Any]]:
    """Both halves of a chunk, the first one last, so that it is taken next; none of a single element."""
    middle = len(chunk) // 2
    return [chunk[middle:], chunk[:middle]] if middle else []


def _score(found: dict[str, Sensitivity], name: str) -> float:
    return found[name].score if name in found else 0.0


def _rounded_weights(plan: Plan) -> ir.Model:
    """The model of `plan` with every constant rounded that some 16-bit unit reads; all types stay."""
    low = {
        read.value.name
        for unit, decision in plan.decisions.items()
        if decision.precision != "fp32"
        for read in unit.reads
    }
    model = plan.graph.model.clone()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.name in low and value.dtype == ir.DataType.FLOAT and value.const_value is not None:
                value.const_value = _round(value.const_value, plan)
        for node in graph:
            attribute = node.attributes.get("value") if node.op_type == "Constant" else None
            if attribute is None or node.outputs[0].name not in low or attribute.value.dtype != ir.DataType.FLOAT:
                continue
            node.attributes["value"] = ir.AttrTensor("value", _round(attribute.value, plan))
    return model


def _round(tensor: ir.TensorProtocol, plan: Plan) -> ir.TensorProtocol:
    array = tensor.numpy()
    return ir.Tensor(array.astype(plan.options.low.numpy).astype(array.dtype), name=tensor.name)
