"""The modules of a framework that nodes and tensors come from, as PyTorch's exporters note them."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

# The second call of a module: the older exporter calls its nodes `/layers.0_1/MatMul`.
_CALL = re.compile(r"_\d+(?=\.|$)")


def scopes(node: ir.Node) -> tuple[str, ...]:
    """Module scopes from the exporter's metadata, outermost first: ``encoder``, ``encoder.layers.0``."""
    metadata = node.metadata_props
    return _scopes(metadata.get("pkg.torch.onnx.name_scopes", ""), metadata.get("namespace", ""))


@functools.lru_cache(maxsize=65536)
def _scopes(name_scopes: str, namespace: str) -> tuple[str, ...]:
    if name_scopes:
        try:
            listed = ast.literal_eval(name_scopes)
        except (ValueError, SyntaxError):
            return ()
        return tuple(str(scope) for scope in listed[:-1] if scope) if isinstance(listed, list | tuple) else ()
    parts = [part.partition(": ")[0].strip() for part in namespace.split("/")]
    parts = [part for part in parts if part]
    return tuple(".".join(parts[: i + 1]) for i in range(len(parts)))


def module_of_node(node: ir.Node) -> str:
    """The module whose code a node is; empty if nothing tells.

    It is in the metadata, or in the name: ``encoder.layers.0`` of ``/encoder/layers.0/MatMul``. What is in a Sequential repeats its name
    there: ``down.1`` of ``/down/down.1/Relu``.
    """
    if noted := scopes(node):
        return noted[-1]
    name = node.name or ""
    parts: list[str] = []
    for part in name.split("/")[1:-1] if name.startswith("/") else ():
        if parts and part.startswith(f"{_CALL.sub('', parts[-1])}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def around(path: str) -> Iterator[str]:
    """A module and those around it, innermost first: ``layers.0.linear``, ``layers.0``, ``layers``."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def owners(tensors: Collection[str]) -> frozenset[str]:
    """The modules that some of these tensors belong to by their names, and those around them."""
    return frozenset({module for name in tensors for module in around(name.rpartition(".")[0])})


def are_siblings(paths: Collection[str]) -> bool:
    """Whether paths differ in numbers only, as those of the layers in a list do: ``layers.0.linear`` and ``layers.1.linear``."""
    forms = {tuple("0" if part.isdigit() else part for part in path.split(".")) for path in paths}
    return len(forms) == 1 and len(set(paths)) > 1


def are_apart(paths: Collection[str], owned: frozenset[str]) -> bool:
    """Whether modules, each of which reads the same numbers, have parameters of their own, and not one of them those of another.

    1. A module has some if tensors have its name, or that of the layer that it is in, where the others are in other layers of a list.
    2. The second call of a module has none (``layers.0_1``), unless tensors have this name.

    Args:
        paths: The modules.
        owned: What `owners` gives for the tensors of the model.
    """
    different = set(paths)
    if len(different) < 2 or not all(different):
        return False
    for path in different - owned:
        others = different - {path}
        if any(_CALL.sub("", other) == _CALL.sub("", path) for other in others):
            return False
        if not all(_layer(path, other) in owned for other in others):
            return False
    return True


def _layer(path: str, other: str) -> str:
    """The part of `path` up to the number in which it differs from `other`; empty if it differs in something else first."""
    parts = path.split(".")
    for index, (part, against) in enumerate(itertools.zip_longest(parts, other.split("."))):
        if part != against:
            return ".".join(parts[: index + 1]) if part is not None and part.isdigit() else ""
    return ""
