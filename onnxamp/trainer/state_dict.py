"""Trained parameters under the names of the framework that the model came from.

Exporters rename weights (`onnx::MatMul_123`) and transpose them. Before training the values of an ONNX file equal
those of the framework's state dict, so the two are matched by value then, and the match is kept with the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from onnxamp.errors import DataError, ModelError
from onnxamp.model import io
from onnxamp.model.modules import are_siblings, module_of_node
from onnxamp.model.tensors import content_key, is_distinct
from onnxamp.passes.merged import RestoreTensors
from onnxamp.trainer.checkpoint import atomic, disk_error
from onnxamp.training.assembly import ONCE

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Names:
    """Which initializer holds which tensor of the framework.

    Attributes:
        original: The state dict that was matched (safetensors).
        tensors: Name in the state dict → (name in the model, whether it is transposed).
        absent: Names of the state dict that no initializer equals: folded into another, or not part of the model.
        copies: Groups of initializers with one content, transposed or not, that a tensor of the state dict has: an exporter that
            transposes a tied weight for one of its two uses writes it twice.
    """

    original: str
    tensors: Mapping[str, tuple[str, bool]]
    absent: tuple[str, ...]
    copies: tuple[tuple[str, ...], ...] = ()

    def parted(self, parameters: Mapping[str, Array]) -> tuple[str, ...]:
        """Which tensors of the state dict are no longer equal after training, a sentence each.

        Args:
            parameters: The trained values, by name in the model.
        """
        found = []
        for group in self.copies:
            names = [name for name, (inner, _) in self.tensors.items() if inner in group]
            if len(names) == len(group) and are_siblings(names):
                continue  # layers that were copied are equal only until they train
            places = [self.tensors[name] for name in names]
            values = [parameters[inner].T if turned else parameters[inner] for inner, turned in places]
            if len({content_key(value.reshape(-1)) for value in values}) > 1:
                found.append(
                    f"{' and '.join(names)} were equal and are not any more: the model holds them apart ({', '.join(group)}), and they "
                    f"trained apart. If PyTorch ties them, it keeps what is loaded last, which is another model. {ONCE}, or untie them."
                )
        return tuple(found)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        try:
            with atomic(path) as file:
                file.write(text.encode())
        except OSError as problem:
            raise disk_error(path, problem) from problem

    @classmethod
    def load(cls, path: Path) -> Names:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        tensors = {name: (str(inner), bool(turned)) for name, (inner, turned) in raw["tensors"].items()}
        return cls(raw["original"], tensors, tuple(raw["absent"]), tuple(map(tuple, raw.get("copies", ()))))


def initializers(model: ir.Model) -> dict[str, Array]:
    """The float initializers of a model's main graph, by name; those that its exporter merged are apart."""
    return {name: _array(value) for name, value in _floats(model).items()}


def names_of(model: ir.Model, original: str | os.PathLike[str]) -> Names:
    """`match` the initializers of `model` with a framework's state dict; the modules are those that its exporter notes."""
    floats = _floats(model)
    read = {name: {module_of_node(node) for node, _ in value.uses()} for name, value in floats.items()}
    modules = {name: next(iter(found)) for name, found in read.items() if len(found) == 1}
    return match({name: _array(value) for name, value in floats.items()}, original, modules)


def _floats(model: ir.Model) -> dict[str, ir.Value]:
    model = io.load(model)
    RestoreTensors()(model)
    return {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.dtype.is_floating_point()
    }


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The tensors of a safetensors file.

    Raises:
        ModelError: It cannot be read.
    """
    try:
        return safetensors.numpy.load_file(os.fspath(path))
    except (safetensors.SafetensorError, OSError) as problem:
        raise ModelError(f"{os.fspath(path)} is no readable safetensors file ({problem}).") from problem


def match(
    parameters: Mapping[str, Array], original: str | os.PathLike[str], modules: Mapping[str, str] | None = None
) -> Names:
    """Match the initializers of a model with a framework's state dict, by value.

    A tensor is taken by its own name if the values agree, else by its value, straight or transposed, if that and the module that
    reads it leave one choice only; a vector also from [C, 1, 1], as exporters write those of channels. Values are compared in the
    type of the model (a state dict in 16 bits is widened).

    Args:
        parameters: The model's float initializers before training.
        original: The state dict.
        modules: The module that reads a tensor, where there is one and it is known.

    Raises:
        DataError: A value fits several initializers and no name tells them apart, or nothing matches at all.
    """
    wanted = read_state_dict(original)
    by_value: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for name, value in parameters.items():
        by_value[content_key(value)].append((name, False))
        if value.ndim == 2:
            by_value[content_key(value.T)].append((name, True))
        if value.ndim > 1 and value.size == max(value.shape):
            by_value[content_key(value.reshape(-1))].append((name, False))
    tensors: dict[str, tuple[str, bool]] = {}
    open_names: dict[str, list[tuple[str, bool]]] = {}
    for name, value in wanted.items():
        found = by_value.get(content_key(value), []) if value.dtype.kind in "fV" else []
        own = [place for place in found if place[0] == name]
        if own:
            tensors[name] = min(own, key=lambda place: place[1])
        elif found:
            open_names[name] = found
    used = {place[0] for place in tensors.values()}
    for name, found in open_names.items():
        # Tied weights have two names for one initializer, so one that is taken still counts where nothing else fits.
        free = [place for place in found if place[0] not in used]
        if not free and len({place[0] for place in found}) > 1 and (wanted[name] == wanted[name].flat[0]).all():
            continue  # zeros or ones whose like have names of their own: the exporter has left out what does nothing
        free = free or found
        has_name_each = sum(other == found for other in open_names.values()) >= len({place[0] for place in found})
        if has_name_each:
            free = [place for place in free if name.startswith(f"{(modules or {}).get(place[0], '')}.")] or free
        if len({place[0] for place in free}) > 1:
            several = ", ".join(sorted({place[0] for place in free}))
            if is_distinct(wanted[name]):
                raise DataError(
                    f"{name!r} of {os.fspath(original)} is in the model several times ({several}), as exporters write a tied weight "
                    f"that they transpose for one of its uses; they would train apart, and PyTorch has one tensor for all. {ONCE}."
                )
            raise DataError(
                f"{name!r} of {os.fspath(original)} equals several parameters of the model ({several}); use a trained state dict, or "
                "export the model with its names kept."
            )
        tensors[name] = min(free, key=lambda place: place[1])
    if not tensors:
        raise DataError(
            f"No tensor of {os.fspath(original)} equals a parameter of the model; is it of another training?"
        )
    absent = tuple(name for name in wanted if name not in tensors)
    copies = {
        tuple(dict.fromkeys(place[0] for place in by_value[content_key(value)])): None
        for name, value in wanted.items()
        if name in tensors and is_distinct(value)
    }
    return Names(
        os.path.abspath(original),
        {name: tensors[name] for name in wanted if name in tensors},
        absent,
        tuple(group for group in copies if len(group) > 1),
    )


def export(names: Names, parameters: Mapping[str, Array], path: str | os.PathLike[str]) -> None:
    """Write the trained values under the framework's names, with its shapes and types.

    Tensors that the model does not hold are copied from the original.

    Args:
        names: The match made before training.
        parameters: The trained values, by name in the model.
        path: The safetensors file to write.

    Raises:
        ModelError: The original cannot be read any more.
    """
    original = read_state_dict(names.original)
    result = {}
    for name, value in original.items():
        if name in names.tensors:
            inner, turned = names.tensors[name]
            trained = parameters[inner].T if turned else parameters[inner]
            # A vector may be stored as [C, 1, 1]; a head that was replaced has another shape than the original's.
            # `asarray`, as `ascontiguousarray` makes [1] of a single number.
            result[name] = np.asarray(trained.reshape(-1) if value.ndim == 1 else trained, dtype=value.dtype, order="C")
        else:
            result[name] = value
    target = Path(path)
    try:
        with atomic(target) as file:
            file.write(safetensors.numpy.save(result))
    except OSError as problem:
        raise disk_error(target, problem) from problem
