"""The modules of a framework that nodes and tensors come from, as PyTorch's exporters note them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

# What PyTorch's newer exporter notes: the modules around a node, and what a tensor was (PARAMETER, BUFFER or CONSTANT_TENSOR;
# torch.export.graph_signature.InputKind).
SCOPES = "pkg.torch.onnx.name_scopes"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
# The second call of a module: the older exporter calls its nodes `/layers.0_1/MatMul`.
_CALL = re.compile(r"_\d+(?=\.|$)")


def scopes(node: ir.Node) -> tuple[str, ...]:
    """Module scopes from the exporter's metadata, outermost first: ``encoder``, ``encoder.layers.0``."""
    metadata = node.metadata_props
    return _scopes(metadata.get(SCOPES, ""), metadata.get("namespace", ""))


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


def are_siblings(paths: Collection[str]) -> bool:
    """Whether paths differ in numbers only, as those of the layers in a list do: ``layers.0.linear`` and ``layers.1.linear``."""
    forms = {tuple("0" if part.isdigit() else part for part in path.split(".")) for path in paths}
    return len(forms) == 1 and len(set(paths)) > 1


def numbers(path: str) -> tuple[int, ...]:
    """The numbers in a path: (0, 3) of ``layers.0.blocks.3``."""
    return tuple(int(part) for part in path.split(".") if part.isdigit())


def is_second_call(path: str, other: str) -> bool:
    """Whether two paths may be two calls of one module: ``layers.0`` and ``layers.0_1``."""
    return path != other and _CALL.sub("", path) == _CALL.sub("", other)


def apart_from(path: str, other: str) -> str:
    """The outermost part of `path` that is not around `other`: ``layers.0`` of ``layers.0.norm`` beside ``layers.1.norm``."""
    parts, against = path.split("."), other.split(".")
    same = next((index for index, (a, b) in enumerate(zip(parts, against, strict=False)) if a != b), len(against))
    return ".".join(parts[: same + 1])
