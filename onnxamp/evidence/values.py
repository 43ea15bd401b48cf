"""Values inside two models, side by side: the same tensor in a reference and in a candidate's emulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.ort.session import SessionConfig, open_session, run

# Values fetched by one run: bounds memory, at the price of running again for the next ones.
_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """One result of a node and its counterpart.

    Attributes:
        node: The reference's node.
        partner: The candidate's node.
        reference: Name of the value in the reference.
        candidate: Name of the value in the candidate; its emulation holds it, rounded, under the same name.
    """

    node: ir.Node
    partner: ir.Node
    reference: str
    candidate: str


def matched(reference: ir.Model, candidate: ir.Model) -> list[Pair]:
    """The results of the top-level nodes that both models have, in the reference's order.

    Nodes go together by name, and by the name of their first result where they have none; the operator must be the same.
    """
    by_name = {node.name: node for node in candidate.graph if node.name}
    by_value = {value.name: node for node in candidate.graph for value in node.outputs if value.name}
    result = []
    for node in reference.graph:
        partner = by_name.get(node.name) if node.name else None
        if partner is None and node.outputs:
            partner = by_value.get(node.outputs[0].name or "")
        if partner is None or partner.op_type != node.op_type or len(partner.outputs) != len(node.outputs):
            continue
        for value, other in zip(node.outputs, partner.outputs, strict=True):
            if value.name and other.name:
                result.append(Pair(node, partner, value.name, other.name))
    return result


def clamped(want: np.ndarray, got: np.ndarray, limit: float) -> np.ndarray:
    """Which elements are beyond `limit`, the range of the 16-bit type, in the reference and near its edge in the candidate.

    Arithmetic that leaves the range gives an infinity; only a constant that was clamped (to half the range by onnxamp, to 1e4 by
    others) looks like this. Both arrays are float64.
    """
    size = np.abs(got)
    near = (size <= limit) & (size >= limit / 8) & (np.signbit(want) == np.signbit(got))
    return np.asarray((np.abs(want) > limit) & near)


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of `model` that gives the top-level values called `names` too."""
    result = model.clone()
    have = {value.name for value in result.graph.outputs}
    wanted = dict.fromkeys(name for name in names if name not in have)
    for value in (*result.graph.inputs, *(value for node in result.graph for value in node.outputs)):
        if value.name in wanted:
            result.graph.outputs.append(value)
    return result


class Fetcher:
    """A session on `model` that gives inner values of it."""

    def __init__(self, model: ir.Model, names: Sequence[str], config: SessionConfig) -> None:
        self._session = open_session(with_outputs(model, names), config)

    def __call__(self, sample: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The values of `names` for one sample."""
        return run(self._session, sample, list(dict.fromkeys(names)))


class SideBySide:
    """A session on each of two models that gives values of both, for one sample after the other.

    Args:
        models: Both models; what holds 16-bit types emulated.
        names: A value of the first with its counterpart in the second, as many as are wanted.
        config: Session options. Optimizations that fuse values away are off.
    """

    def __init__(
        self, models: tuple[ir.Model, ir.Model], names: Sequence[tuple[str, str]], config: SessionConfig
    ) -> None:
        self._names = names
        config = dataclasses.replace(config, optimization="basic")
        self._fetch = [Fetcher(model, [pair[k] for pair in names], config) for k, model in enumerate(models)]

    def __call__(
        self, feeds: tuple[Mapping[str, Any], Mapping[str, Any]], step: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[Any, Any]]:
        """Each pair of values, in the order of the names.

        Args:
            feeds: The sample as the first and as the second model takes it.
            step: Called after each run of both models.
        """
        for start in range(0, len(self._names), _AT_ONCE):
            group = self._names[start : start + _AT_ONCE]
            left, right = (self._fetch[k](feeds[k], [pair[k] for pair in group]) for k in (0, 1))
            step()
            for one, other in group:
                yield left[one], right[other]


def side_by_side(
    reference: ir.Model,
    emulated: ir.Model,
    pairs: Sequence[Pair],
    feeds: tuple[Mapping[str, Any], Mapping[str, Any]],
    config: SessionConfig | None = None,
) -> Iterator[tuple[Pair, Any, Any]]:
    """Each pair with its value in the reference and in the candidate's emulation, for one sample.

    Args:
        reference: A model that ONNX Runtime's arithmetic is right for (fp32, or emulated).
        emulated: ``emulate(candidate)``.
        pairs: From `matched(reference, candidate)`, as many as are wanted.
        feeds: The sample in the types of the reference and of the candidate.
        config: Session options; the CPU where None.
    """
    names = [(pair.reference, pair.candidate) for pair in pairs]
    both = SideBySide((reference, emulated), names, config or SessionConfig(provider="cpu"))
    for pair, (want, got) in zip(pairs, both(feeds), strict=True):
        yield pair, want, got
