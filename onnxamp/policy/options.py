"""What the caller of a conversion asks for."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import re
from typing import Any, Literal, get_args

from onnxamp.dtypes import FloatType, low_type
from onnxamp.errors import UsageError

Level = Literal["O0", "OD", "O1", "O2", "O3"]
Target = Literal["ort-cuda", "ort-cpu", "tensorrt", "openvino", "cann", "any"]

LEVELS: tuple[str, ...] = get_args(Level)
TARGETS: tuple[str, ...] = get_args(Target)
# A calibrated range counts as ordinary if it is this far inside the type's.
HEADROOM = 8.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices that determine a plan; two equal ones give the same plan for the same model.

    Attributes:
        level: ``O0``, ``OD``, ``O1``, ``O2``, ``O3``; ``auto`` is ``O1``.
        dtype: The 16-bit type, ``fp16`` or ``bf16``.
        io: ``keep``, ``low``, or patterns ``GLOB=TYPE`` for graph inputs and outputs; of several that match, the last decides.
        target: Whose kernels the result must have.
        keep: Patterns of nodes that stay fp32 (glob on the node's name or its module scope, ``re:`` before a regular expression).
        keep_op: Operators that stay fp32.
        lower: Patterns of nodes that become 16-bit where it is legal.
        lower_op: Operators that become 16-bit where it is legal.
        dim: Sizes of named dimensions for the traffic model, as (name, size) pairs.
        policy: Decisions read from a policy file, as (node pattern, ``fp32`` or ``low``) pairs.
        headroom: How far inside the type's range a calibrated range must be to count as ordinary, as a factor.
        weights: ``convert`` puts 16-bit weights into the file, ``cast`` keeps fp32 ones with a Cast at use; ``auto`` casts at OD and O1.
    """

    level: str = "O2"
    dtype: str = "fp16"
    io: str | tuple[str, ...] = "keep"
    target: str = "ort-cuda"
    keep: tuple[str, ...] = ()
    keep_op: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()
    lower_op: tuple[str, ...] = ()
    dim: tuple[tuple[str, int], ...] = ()
    policy: tuple[tuple[str, str], ...] = ()
    weights: str = "auto"
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        if self.level == "auto":
            object.__setattr__(self, "level", "O1")
        _choice("level", self.level, LEVELS)
        _choice("target", self.target, TARGETS)
        _choice("weights", self.weights, ("auto", "convert", "cast"))
        low_type(self.dtype)
        for name in ("keep", "keep_op", "lower", "lower_op"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
            else:
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.io, str):
            if self.io not in ("keep", "low"):
                object.__setattr__(self, "io", (self.io,))
        else:
            io = tuple(self.io)
            object.__setattr__(self, "io", io[0] if io in (("keep",), ("low",)) else io or "keep")
        for entry in self.io if isinstance(self.io, tuple) else ():
            glob, _, kind = entry.rpartition("=")
            if not glob or kind not in ("fp32", "low", self.dtype):
                raise UsageError(
                    f"io {entry!r} is neither keep, low nor GLOB=TYPE with TYPE one of fp32, low, {self.dtype}: "
                    f"write for example past_*={self.dtype}."
                )
        for pattern, precision in self.policy:
            if precision not in ("fp32", "low"):
                raise UsageError(f"The policy makes {pattern!r} {precision!r}: use fp32 or low.")
        if not 1 <= self.headroom < math.inf:
            raise UsageError(f"The headroom is {self.headroom:g}: give a factor of at least 1.")
        for name, size in self.dim:
            if size < 1:
                raise UsageError(f"Dimension {name!r} has size {size}: give a size of at least 1.")
        if self.level == "O0" and (self.lower or self.lower_op or self.io != "keep"):
            raise UsageError("Level O0 changes no tensor, but lower or io asks for a change: use another level.")

    @property
    def low(self) -> FloatType:
        """The 16-bit type."""
        return low_type(self.dtype)

    @property
    def casts_weights(self) -> bool:
        """Whether weights stay fp32 in the file and are cast at use."""
        return self.weights == "cast" or (self.weights == "auto" and self.level in ("OD", "O1"))

    def interface_type(self, name: str, source: str) -> str:
        """The precision of the graph input or output `name`, whose source type is `source`."""
        if isinstance(self.io, str):
            return self.dtype if self.io == "low" and source == "fp32" else source
        chosen = source
        for entry in self.io:
            glob, _, kind = entry.rpartition("=")
            if matches(glob, name):
                chosen = self.dtype if kind == "low" else kind
        return chosen

    def to_json(self) -> str:
        """Canonical JSON: equal options give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The options that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        return cls(**fields)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob, or a regular expression after ``re:``, matches the whole of `name`."""
    return _compiled(pattern).fullmatch(name) is not None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except re.error as problem:
        raise UsageError(f"{pattern!r} is no valid regular expression: {problem}.") from None


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"Unknown {name} {value!r}: use one of {', '.join(allowed)}.")
