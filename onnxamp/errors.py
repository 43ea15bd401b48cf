"""The errors that a user can meet: each is one sentence and knows the exit code of the command that it ends.

The sentence says what is wrong, where (node, tensor, file) and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class AmpError(Exception):
    """Base of all errors that onnxamp raises on purpose."""

    exit_code = 70


class FindingError(AmpError):
    """A comparison or tolerance was not met."""

    exit_code = 1


class DivergedError(FindingError):
    """A training run cannot go on: its gradients are not finite whatever the loss scale."""


class UsageError(AmpError):
    """The arguments contradict each other or name something that does not exist."""

    exit_code = 2


class ModelError(AmpError):
    """The model file is broken, incomplete or not what its format says."""

    exit_code = 3


class DataError(AmpError):
    """The data do not fit the model: names, types, shapes or values.

    Attributes:
        row: The row of the batch that does not, if it is one.
    """

    exit_code = 3
    row: int | None = None


class UnsupportedError(AmpError):
    """The input is valid, and onnxamp cannot do this with it."""

    exit_code = 4


class RuntimeMissingError(AmpError):
    """The environment lacks something: a runtime, a provider, disk space, a permission."""

    exit_code = 5


class RankLostError(AmpError):
    """Another process of a training run has ended or does not answer."""

    exit_code = 5


class InternalError(AmpError):
    """A defect of onnxamp itself."""

    exit_code = 70


def one_line(message: object, limit: int = 300) -> str:
    """What a foreign exception or log says, as part of a sentence: on one line, `limit` characters at most, no full stop; an exception
    that says nothing by its type."""
    text = str(message) or (type(message).__name__ if isinstance(message, BaseException) else "")
    return " ".join(text.split())[:limit].rstrip(". ")


def few(names: Sequence[str], most: int = 5) -> str:
    """Several names, as part of a sentence: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cause(problem: BaseException) -> str:
    """The innermost message of a chain of exceptions, as `one_line`."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    return one_line(problem)
