"""`--verify` of a command that has written a file: what was found, or why nothing could be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxamp.errors import AmpError
    from onnxamp.evidence import VerifyResult


@dataclasses.dataclass(frozen=True)
class Verified:
    """What became of a verification.

    Attributes:
        outcome: The result, or the error that kept the models from being compared.
    """

    outcome: VerifyResult | AmpError

    def to_dict(self) -> dict[str, Any]:
        """The outcome in JSON types."""
        from onnxamp.errors import AmpError

        if isinstance(self.outcome, AmpError):
            return {"passed": None, "error": str(self.outcome)}
        return self.outcome.to_dict()

    def show(self) -> None:
        """Print the result below what was printed before, if there is one."""
        from onnxamp import console
        from onnxamp.commands.verify import show
        from onnxamp.errors import AmpError

        if not isinstance(self.outcome, AmpError):
            console.show("")
            show(self.outcome)

    def failed(self) -> bool:
        """Whether the models differ; to be asked when everything else is said.

        Raises:
            AmpError: They could not be compared.
        """
        from onnxamp.errors import AmpError

        if isinstance(self.outcome, AmpError):
            raise self.outcome
        return not self.outcome.passed


def compare(reference: str | ir.Model, candidate: str, data: str | None, dim: Mapping[str, int]) -> Verified:
    """Verify with `onnxamp verify`'s defaults. An error is kept: the file itself is written, and what is said of it is due."""
    from onnxamp import console
    from onnxamp.errors import AmpError
    from onnxamp.evidence import verify

    try:
        with console.progress("verifying"):
            return Verified(verify(reference, candidate, data, dim=dim))
    except AmpError as problem:
        return Verified(problem)
