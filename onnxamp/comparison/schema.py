"""The JSON schema of a diff, made from the records so that the two cannot part."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from onnxamp.comparison import records

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of `GraphDiff.to_json`; `schema.json` beside this file is its text."""
    definitions: dict[str, Any] = {}
    root = _object(records.GraphDiff, definitions)
    root["properties"] = {
        "format": {"const": "onnxamp-diff/1"},
        "empty": {"type": "boolean"},
        "others": {"type": "integer"},
        **root["properties"],
    }
    root["required"] = list(root["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "onnxamp diff",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    properties = {field.name: _type(hints[field.name], definitions) for field in dataclasses.fields(kind)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is types.UnionType:
        return {"anyOf": [_type(arg, definitions) for arg in args]}
    if origin is dict:
        return {"type": "object"}
    if origin is tuple and args[-1] is Ellipsis:
        return {"type": "array", "items": _type(args[0], definitions)}
    if origin is tuple:
        items = [_type(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}
        definitions[hint.__name__] = _object(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}
