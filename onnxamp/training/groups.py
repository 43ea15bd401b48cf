"""Parameter groups: which parameters train, and with which factor of the learning rate and which weight decay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from onnxamp.errors import UsageError
from onnxamp.policy.options import matches


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters whose names match a pattern.

    Attributes:
        match: Glob on the parameter's name, or a regular expression after ``re:``; several in a tuple.
        lr_factor: Factor of the learning rate.
        weight_decay: Weight decay; None: the optimizer's.
        frozen: Do not train them.
        name: Name in the manifest; None: the pattern.
    """

    match: str | tuple[str, ...]
    lr_factor: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            object.__setattr__(self, "match", tuple(self.match))
        for name, value in (("lr_factor", self.lr_factor), ("weight_decay", self.weight_decay or 0.0)):
            if not isinstance(value, int | float):
                raise UsageError(f"Group {self.title!r}: {name} must be a number, not {value!r}.")
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"Group {self.title!r}: {name} is {value}: it must be a finite number of at least 0.")

    @property
    def title(self) -> str:
        """The name of the group."""
        return self.name or (self.match if isinstance(self.match, str) else ",".join(self.match))

    def holds(self, parameter: str) -> bool:
        """Whether a parameter belongs to the group."""
        patterns = (self.match,) if isinstance(self.match, str) else self.match
        return any(matches(pattern, parameter) for pattern in patterns)


DEFAULT = Group("*", name="default")


def make_groups(specs: Sequence[Group | Mapping[str, object]] | None) -> tuple[Group, ...]:
    """Groups from instances or mappings with the same keys, closed by the default group.

    Raises:
        UsageError: A key is unknown, or two groups have one name.
    """
    groups: list[Group] = []
    for spec in specs or ():
        if isinstance(spec, Group):
            groups.append(spec)
            continue
        known = [field.name for field in dataclasses.fields(Group)]
        for key in spec:
            if key not in known:
                raise UsageError(f"A parameter group has no entry {key!r}: use {', '.join(known)}.")
        if "match" not in spec:
            raise UsageError("A parameter group needs match, a pattern of parameter names.")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.items()}
        groups.append(Group(**values))  # type: ignore[arg-type]  # Group checks them
    titles = [group.title for group in groups]
    for title in titles:
        if titles.count(title) > 1 or title == DEFAULT.title:
            raise UsageError(f"The group name {title!r} is taken twice: give the groups different names.")
    return (*groups, DEFAULT)


def group_of(parameter: str, groups: Sequence[Group]) -> Group:
    """The first group that holds a parameter."""
    return next(group for group in groups if group.holds(parameter))
