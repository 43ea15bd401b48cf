"""A bundle in memory and on disk: graphs, initial state, manifest and the model that they came from."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors
import safetensors.numpy

from onnxamp.autodiff.parameters import classify
from onnxamp.errors import ModelError, RuntimeMissingError, UsageError
from onnxamp.model import io
from onnxamp.model.tensors import byte_blocks
from onnxamp.training.choices import LOSS_MODEL
from onnxamp.training.manifest import ITEM_SIZE, Manifest

MANIFEST = "manifest.json"
STATE = "state.safetensors"
MODEL = "model.onnx"


@dataclasses.dataclass(frozen=True, repr=False)
class Bundle:
    """Everything that training needs; `docs/bundle.md` describes it.

    Attributes:
        graphs: ``grad``, ``reduce``, ``update``, ``eval``.
        state: Initial values by tensor key; what is absent starts as zeros.
        manifest: Names, types, shapes, places.
        model: The user's model, as it was given.
        path: The folder that it was read from or written to.
        loss_model: The user's loss model, as it was given, if the loss is one.
    """

    graphs: Mapping[str, ir.Model]
    state: Mapping[str, np.ndarray]
    manifest: Manifest
    model: ir.Model
    path: pathlib.Path | None = None
    loss_model: ir.Model | None = None

    @property
    def input_names(self) -> frozenset[str]:
        """The inputs of the user's model, those included that no graph of the bundle needs."""
        return frozenset(str(value.name) for value in self.model.graph.inputs)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Bundle:
        """Write the bundle as a folder, which is there whole or not at all; on the disk when this returns.

        A bundle that is replaced is set aside as ``.NAME.before`` until the new one is in its place. If the process dies in
        between, the next `save` puts it back first.

        Args:
            path: The folder.
            overwrite: Replace a bundle that is there. Any other folder that is not empty is left alone.

        Returns:
            The same bundle with its path.

        Raises:
            UsageError: The folder exists and may not be replaced.
            RuntimeMissingError: The disk is full or the folder may not be written.
        """
        target = pathlib.Path(path)
        parent = target.absolute().parent
        aside = parent / f".{target.name}.before"
        try:
            if aside.exists() and not target.exists():
                os.replace(aside, target)
            check_target(target, overwrite=overwrite)
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent, prefix=".bundle-") as scratch:
                fresh = pathlib.Path(scratch) / "bundle"
                fresh.mkdir()
                self._write(fresh)
                shutil.rmtree(aside, ignore_errors=True)
                replaces = target.exists()
                if replaces:
                    os.replace(target, aside)
                try:
                    os.replace(fresh, target)
                except BaseException:
                    if replaces:
                        os.replace(aside, target)
                    raise
                _flush(parent)
                shutil.rmtree(aside, ignore_errors=True)
        except OSError as problem:
            raise RuntimeMissingError(f"{os.fspath(path)!r} cannot be written: {problem.strerror}.") from None
        return dataclasses.replace(self, path=target)

    def _write(self, folder: pathlib.Path) -> None:
        """Write the files into an empty folder, and see them onto the disk."""
        (folder / MANIFEST).write_text(self.manifest.to_json(), encoding="utf-8")
        for name, graph in self.graphs.items():
            io.save(graph, folder / self.manifest.graphs[name].file)
        io.save(self.model, folder / MODEL)
        if self.loss_model is not None:
            io.save(self.loss_model, folder / LOSS_MODEL)
        state = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in self.state.items()}
        safetensors.numpy.save_file(state, folder / STATE)
        (folder / STATE).chmod((folder / MANIFEST).stat().st_mode & 0o777)  # that of any new file, not 0600
        for file in (MANIFEST, STATE):
            _flush(folder / file)
        _flush(folder)

    def summary(self) -> dict[str, Any]:
        """What the bundle holds, in numbers, for people and programs."""
        manifest = self.manifest
        masters = manifest.tensors_in("master")
        return {
            "level": manifest.level,
            "dtype": manifest.dtype if manifest.level != "O0" else "",
            "parameters": sum(tensor.size for tensor in masters),
            "trained_tensors": len(masters),
            "frozen_parameters": self._held(),
            "frozen_tensors": len(manifest.frozen),
            "adapters": len(manifest.adapters),
            "trained_bytes": sum(tensor.size for tensor in masters) * ITEM_SIZE["float32"],
            "low_copies": len(manifest.tensors_in("low")) if manifest.has_arena("low") else 0,
            "running_statistics": len(manifest.tensors_in("statistics")) if manifest.has_arena("statistics") else 0,
            "state_bytes": sum(arena.elements * ITEM_SIZE[arena.dtype] for arena in manifest.arenas),
            "nodes": {name: len(graph.graph) for name, graph in self.graphs.items()},
            "notes": list(manifest.notes),
        }

    def _held(self) -> int:
        """Elements of the model's parameters that would train, had they not been frozen by name, by a group or for adapters."""
        held = {name for name, why in self.manifest.frozen.items() if why.startswith(("frozen by", "only adapters"))}
        return sum(parameter.size for parameter in classify(self.model).trainable if parameter.name in held)

    def __repr__(self) -> str:
        manifest, numbers = self.manifest, self.summary()
        level = manifest.level if manifest.level == "O0" else f"{manifest.level} {manifest.dtype}"
        frozen = f" of {numbers['parameters'] + numbers['frozen_parameters']:,}" if numbers["frozen_parameters"] else ""
        nodes = ", ".join(f"{name} {count}" for name, count in numbers["nodes"].items())
        where = "in memory" if self.path is None else f"in {os.fspath(self.path)}"
        return f"<Bundle {level}: {numbers['parameters']:,}{frozen} parameters train; nodes: {nodes}; {where}>"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bundle:
        """Read a bundle's folder.

        Raises:
            UsageError: There is no such folder, or it is no bundle.
            ModelError: A file of the bundle is missing or broken.
        """
        folder = pathlib.Path(path)
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"{os.fspath(path)!r} is not a bundle: it has no {MANIFEST}.")
        manifest = Manifest.from_json((folder / MANIFEST).read_text(encoding="utf-8"))
        own_loss = manifest.options.get("loss", {}).get("name") == "loss_model"
        extra = [LOSS_MODEL] if own_loss else []
        for file in (*(graph.file for graph in manifest.graphs.values()), MODEL, STATE, *extra):
            if not (folder / file).is_file():
                raise ModelError(f"The bundle {os.fspath(path)!r} has lost {file}: build it again.")
        try:
            state = safetensors.numpy.load_file(folder / STATE)
        except (safetensors.SafetensorError, OSError, ValueError) as problem:
            raise ModelError(f"{os.fspath(folder / STATE)!r} is broken ({problem}): build the bundle again.") from None
        graphs = {name: io.load(folder / graph.file) for name, graph in manifest.graphs.items()}
        loss_model = io.load(folder / LOSS_MODEL) if own_loss else None
        return cls(graphs, state, manifest, io.load(folder / MODEL), folder, loss_model)


def content_digest(graphs: Mapping[str, ir.Model], state: Mapping[str, np.ndarray], model: ir.Model) -> str:
    """SHA-256 over everything in a bundle but its manifest: nodes, weights (frozen ones too) and initial state."""
    whole = hashlib.sha256()
    known: dict[int, bytes] = {}  # the graphs share the tensors of frozen parameters

    def add(*parts: object) -> None:
        whole.update(f"{parts}\n".encode())

    for name, graph in (*sorted(graphs.items()), ("model", model)):
        add(name)
        bare = graph.clone()
        for value in graph.graph.initializers.values():
            tensor = value.const_value
            add(value.name, str(value.type), str(value.shape))
            if tensor is not None:
                if id(tensor) not in known:
                    part = hashlib.sha256()
                    for block in byte_blocks(tensor):
                        part.update(block)
                    known[id(tensor)] = part.digest()
                whole.update(known[id(tensor)])
        bare.graph.initializers.clear()
        whole.update(ir.to_proto(bare).SerializeToString(deterministic=True))
    for key, array in sorted(state.items()):
        add(key, str(array.dtype), array.shape)
        whole.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def _flush(path: pathlib.Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Refuse a folder that `Bundle.save` could not write: anything that is there, but an empty folder or, on request, a bundle.

    Raises:
        UsageError: The folder may not be replaced.
    """
    target = pathlib.Path(path)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / MANIFEST).is_file():
        raise UsageError(f"{os.fspath(path)!r} exists and is not a bundle; choose another name.")
    if not overwrite:
        raise UsageError(f"{os.fspath(path)!r} exists already; choose another name or allow overwriting.")
