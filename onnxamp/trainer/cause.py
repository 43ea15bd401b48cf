"""Why a window was skipped, or has lost micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Cause:
    """What went wrong in a window; as text it is a clause without a full stop.

    Attributes:
        kind: Values that are not finite came in by the ``data``, are the ``loss``'s, or are gradients only (``overflow``).
        what: What went wrong, in words.
        beside: What else is known. Infinities may be meant, and the gradient overflow without them.
    """

    kind: Literal["data", "loss", "overflow"]
    what: str
    beside: str | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, parameters: Sequence[str] = ()) -> str:
        """The clause; of an overflow it names the last of `parameters` whose gradient overflowed, that nearest to the output."""
        what = self.what
        if parameters and self.kind == "overflow":
            more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
            what = f"gradient of {parameters[-1]}{more} overflowed"
        return f"{what}; {self.beside}" if self.beside else what
