"""Where a failing output begins to differ: the first node whose value is not finite, or diverges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.errors import AmpError, DataError
from onnxamp.evidence.inputs import Sample
from onnxamp.evidence.metrics import difference
from onnxamp.evidence.values import Pair, clamped, matched, side_by_side
from onnxamp.model.metadata import noted
from onnxamp.model.units import bodies
from onnxamp.ort.session import SessionConfig

# A value counts as diverged when less than this is left of it.
DIVERGED_DB = 20.0


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first node at which a failing output goes wrong.

    Attributes:
        node: Name of the node (of its first result if it has none).
        op_type: Its operator.
        value: The result that differs.
        kind: ``non-finite``, ``diverges``, or ``lowest``: no value is off by much, and this one is off most.
        snr: Signal-to-noise ratio of the value in dB.
        largest: Largest finite size in the reference: beyond the type's range is overflow.
        precision: The node's precision as onnxamp decided it; empty without metadata.
        code: The reason's code; empty without metadata.
        evidence: The facts behind the decision.
    """

    node: str
    op_type: str
    value: str
    kind: str
    snr: float
    largest: float
    precision: str = ""
    code: str = ""
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


def first_divergence(
    reference: ir.Model,
    judged_reference: ir.Model,
    candidate: ir.Model,
    emulated: ir.Model,
    feeds: tuple[Sample, Sample],
    outputs: Sequence[str],
    config: SessionConfig,
    limit: float,
) -> Divergence | None:
    """The first node, in topological order, on the way to `outputs` that spoils them on this sample.

    A value that is not finite where the reference's is comes before one that merely diverges (SNR under `DIVERGED_DB`, or
    the lowest of all if none is that low). Elements of a mask that was clamped into the range of the 16-bit type, whose
    largest value is `limit`, do not count.
    """
    needed = ancestors(reference, outputs)
    pairs = [
        pair for pair in matched(reference, candidate) if pair.node in needed and _is_float(pair.node, pair.reference)
    ]
    lowest: Divergence | None = None
    diverged: Divergence | None = None
    try:
        for pair, want, got in side_by_side(judged_reference, emulated, pairs, feeds, config):
            try:
                found = difference(*_without_masks(want, got, limit))
            except DataError:  # a shape that depends on values that already differ
                continue
            if found.nonfinite:
                return _divergence(pair, "non-finite", found.snr, want)
            if found.snr < DIVERGED_DB and diverged is None:
                diverged = _divergence(pair, "diverges", found.snr, want)
            if lowest is None or found.snr < lowest.snr:
                lowest = _divergence(pair, "lowest", found.snr, want)
    except AmpError:  # inner values that the runtime cannot give; the verdict stands without a place
        return None
    return diverged or lowest


def _without_masks(want: Any, got: Any, limit: float) -> tuple[Any, Any]:
    """Both without the elements that only a clamped constant explains."""
    if not isinstance(want, np.ndarray) or not isinstance(got, np.ndarray) or want.shape != got.shape:
        return want, got
    r, c = want.astype(np.float64), got.astype(np.float64)
    mask = clamped(r, c, limit)
    return (want[~mask], got[~mask]) if mask.any() else (want, got)


def _divergence(pair: Pair, kind: str, snr: float, want: Any) -> Divergence:
    array = np.abs(np.asarray(want, np.float64))
    metadata = pair.partner.metadata_props
    return Divergence(
        node=pair.node.name or pair.reference,
        op_type=pair.node.op_type,
        value=pair.reference,
        kind=kind,
        snr=snr,
        largest=float(array[np.isfinite(array)].max(initial=0.0)),
        precision=metadata.get("onnxamp.precision", ""),
        code=metadata.get("onnxamp.code", ""),
        evidence=noted(metadata, "evidence", f"node {pair.partner.name!r}"),
    )


def _is_float(node: ir.Node, name: str) -> bool:
    value = next(value for value in node.outputs if value.name == name)
    return isinstance(value.type, ir.TensorType) and value.type.dtype.is_floating_point()


def ancestors(model: ir.Model, outputs: Sequence[str]) -> set[ir.Node]:
    """The top-level nodes that the named outputs depend on, captures of bodies included."""
    queue = [value.producer() for value in model.graph.outputs if value.name in outputs]
    found: set[ir.Node] = set()
    while queue:
        node = queue.pop()
        if node is None or node in found:
            continue
        found.add(node)
        inner = [node, *(n for graph in bodies(node) for n in graph.all_nodes())]
        queue += [
            value.producer() for n in inner for value in n.inputs if value is not None and value.graph is model.graph
        ]
    return found
