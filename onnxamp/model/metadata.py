"""What onnxamp noted in a file, read back: anyone may have changed it since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onnxamp.errors import ModelError


def noted(metadata: Mapping[str, str], key: str, where: str) -> dict[str, Any]:
    """The JSON object under ``onnxamp.KEY``; empty if there is none.

    Args:
        metadata: The metadata of a node or model.
        key: ``evidence``, ``operands``, ...
        where: Whose metadata these are, for the message.

    Raises:
        ModelError: It is something else.
    """
    text = metadata.get(f"onnxamp.{key}", "{}")
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(
            f"The metadata onnxamp.{key} of {where} is no JSON object: convert the original model again, or remove the "
            f"onnxamp metadata."
        )
    return found


def _refuse(text: str) -> None:
    raise ValueError(text)
