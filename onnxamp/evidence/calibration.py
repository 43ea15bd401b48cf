"""Ranges of a model's values on many samples: what `convert --calibrate` decides with.

Batches stream: of every value only the running statistics stay, and values are fetched in parts of bounded size, so memory does not
grow with the number of samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from onnxamp.dtypes import BY_IR, low_type
from onnxamp.evidence.inputs import Data, Sample
from onnxamp.evidence.observe import Observed, observe
from onnxamp.evidence.sampling import Model, choose, path_of
from onnxamp.model.preparation import prepared
from onnxamp.model.units import all_nodes, bodies
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.passes.append import Appender
from onnxamp.passes.lift import Lift
from onnxamp.policy.options import HEADROOM


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        values: Statistics of every float value: graph inputs, what nodes make in order, then what nodes inside bodies make.
        dtype: The 16-bit type that they were measured against.
        samples: How many samples were run.
        source: Where they came from, in words.
        made_up: Whether they were made up.
        headroom: How far inside the type's range counts as ordinary, as a factor.
        unseen: Nodes whose bodies cannot be measured.
    """

    values: tuple[Observed, ...]
    dtype: str
    samples: int
    source: str
    made_up: bool
    headroom: float = HEADROOM
    unseen: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """The largest size that counts as ordinary: the type's largest number less headroom."""
        return low_type(self.dtype).max / self.headroom

    @property
    def beyond(self) -> list[Observed]:
        """Values that leave the ordinary range, in the order in which they are made."""
        return [row for row in self.values if row.absmax > self.limit]

    @property
    def ranges(self) -> dict[str, float]:
        """Largest finite size by value name, for `onnxamp.convert`.

        Inputs that were made up prove no value small: then only what leaves the ordinary range is listed.
        """
        rows = self.beyond if self.made_up else self.values
        return {row.value: row.absmax for row in rows if row.count}

    def warnings(self) -> list[str]:
        """What to know before believing it."""
        result = []
        if self.made_up:
            result.append(
                "The samples are made up: a value that grows only on real data is not seen. Give real samples."
            )
        if self.unseen:
            result.append(
                f"The values inside {', '.join(self.unseen)} were not measured: only If, Loop and Scan from opset 11 on can be."
            )
        wrong = [row for row in self.values if row.nan or (row.inf and not row.expected_inf)]
        if wrong:
            row = wrong[0]
            result.append(
                f"The model itself is not finite on these samples: {row.what()} in {row.value!r} ({row.op} {row.node!r})."
            )
        return result


def calibrate(
    model: Model,
    data: Data | None = None,
    *,
    dtype: str = "fp16",
    headroom: float = HEADROOM,
    dim: Mapping[str, int] | None = None,
    count: int = 4,
    seed: int = 0,
) -> Calibration:
    """Measure the range of every float value of `model`, those inside bodies of If, Loop and Scan included.

    Args:
        model: The FP32 model.
        data: Samples (see `onnxamp.evidence.inputs.samples`); made up where None.
        dtype: The 16-bit type that values are measured against: ``fp16`` or ``bf16``.
        headroom: How far inside that type's range counts as ordinary, as a factor.
        dim: Sizes of free dimensions of samples that are made up.
        count: How many samples to make up.
        seed: Seed of those.

    Raises:
        ModelError: The model is invalid.
        DataError: The data do not fit, or the model does not run on them.
        UnsupportedError: ONNX Runtime has no kernel for a node, or inputs cannot be made up.
    """
    ready = prepared(model)
    limits = low_type(dtype)
    session = open_session(ready, SessionConfig(provider="cpu"), name=path_of(model)) if data is None else None
    chosen = choose(ready, session, data, dim=dim, count=count, seed=seed)
    session = None  # its weights are not needed twice
    inputs = {
        value.name: Observed(value.name, value.name, "", backward=False, precision=BY_IR[value.dtype].name)
        for value in ready.graph.inputs
        if value.name and value.dtype in BY_IR and not value.is_initializer()
    }
    seen = 0

    def counted() -> Iterator[Sample]:
        nonlocal seen
        for sample in chosen:
            for name, row in inputs.items():
                if isinstance(sample.get(name), np.ndarray):
                    row.add(sample[name], limits, seen)
            seen += 1
            yield sample

    values = observe(ready, counted(), limits, name=path_of(model))
    reaches = Lift(Appender(ready, "onnxamp.calibrate")).reaches
    closed = [node for node in all_nodes(ready.graph) if not all(map(reaches, bodies(node)))]
    unseen = tuple(f"{node.op_type} {node.name or node.outputs[0].name!r}" for node in closed)
    return Calibration((*inputs.values(), *values), dtype, seen, chosen.source, chosen.made_up, headroom, unseen)
