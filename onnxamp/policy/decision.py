"""The decision of one unit: a precision, the code of its reason, and the numbers behind it."""

from __future__ import annotations

import dataclasses
import functools

from onnxamp.dtypes import BY_IR
from onnxamp.model.units import Unit
from onnxamp.policy import codes


@dataclasses.dataclass(frozen=True)
class Decision:
    """A precision with its reason.

    Attributes:
        precision: ``fp32``, ``fp16`` or ``bf16``.
        code: ``AMPnnn``; `onnxamp.policy.pages.page` explains it.
        evidence: The facts behind it, of JSON types.
    """

    precision: str
    code: str
    evidence: dict[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_source(cls, unit: Unit) -> Decision:
        """The unit keeps the 16-bit type that it has in the source."""
        return _source(BY_IR[unit.dtype].name)


@functools.cache
def _source(precision: str) -> Decision:
    return Decision(precision, codes.SOURCE, {})
