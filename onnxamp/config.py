"""TOML files: read with clear errors, checked against the names that exist, written so that they read back equal."""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnxamp.errors import UsageError


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UsageError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"Cannot read {os.fspath(path)}: {problem.strerror or problem}.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UsageError(f"{os.fspath(path)} is not valid TOML: {problem}.") from problem


def check_names(found: Iterable[str], valid: Iterable[str], where: str, *, listing: str = "") -> None:
    """Refuse the first name that is not valid, and offer the nearest one that is.

    Args:
        found: The names given.
        valid: The names that exist.
        where: Where they were given.
        listing: Where the valid names can be read, if there are too many to list.

    Raises:
        UsageError: A name is not valid.
    """
    known = list(valid)
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else listing or f"valid are {', '.join(sorted(known))}."
            raise UsageError(f"Unknown key {name!r} in {where}; {remedy}")


def write(values: Mapping[str, Any]) -> str:
    """TOML text of `values`: strings, numbers, booleans, lists of them, and mappings as tables. None is left out.

    `read` gives the same values back.

    Raises:
        TypeError: A value has no place in TOML.
    """
    return "".join(_table(values, ()))


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {name: value for name, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"\n[{'.'.join(map(_key, path))}]\n"] if path and (plain or not values) else []
    lines += [f"{_key(name)} = {_value(value)}\n" for name, value in plain.items()]
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += _table(value, (*path, name))
    return lines


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else toml_string(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | os.PathLike):
        return toml_string(os.fspath(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"a {type(value).__name__} has no place in TOML")


def toml_string(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
