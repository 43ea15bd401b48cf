"""What a bundle's graphs take and give, and where its state lives: the contract between a bundle and whoever runs it.

`docs/bundle.md` tells the same in prose. Nothing here knows an operator or a runtime. All classes are frozen and go to
JSON and back without loss.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from onnxamp.errors import ModelError

VERSION = 5
ALIGNMENT = 64
"""Bytes; every tensor of an arena starts at a multiple of it."""
PARAMETER_ALIGNMENT = 32
"""Elements; so that a parameter and its 16-bit copy are both aligned."""
BLOCK = 1024
"""Elements; parameter arenas are padded to a multiple of it (the norm is summed block by block)."""

WINDOW = ("weight_sum", "loss_sum", "rows", "micro_steps", "bad_losses", "dropped", "dropped_rows")
"""Fields of the `window` tensor, in this order; the rest of its 16 elements is zero."""
WINDOW_SIZE = 16
REPORT = (
    "loss",
    "weight_sum",
    "gradient_norm",
    "clip_coefficient",
    "learning_rate",
    "loss_scale",
    "next_loss_scale",
    "ok",
    "empty",
    "found_inf",
    "rows",
    "micro_steps",
    "bad_losses",
    "step",
    "skipped",
    "stuck",
    "dropped",
)
"""Fields of reduce's `report` output, in this order."""

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}

Shape = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Port:
    """One input or output of a graph.

    Attributes:
        name: Name in the graph.
        dtype: ``float32``, ``float16``, ``bfloat16``, ``int64``, ``bool``, or what the model's own inputs have.
        shape: Sizes, or names of sizes that are free.
        kind: Where the value comes from or goes to:

            * ``data``: an input of the user's model; ``labels``, ``weights``: what the loss reads;
            * ``host``: a scalar that the driving program sets (``first``, ``row_offset``, ``micro_step``);
            * ``tensor``: the state tensor with key `ref` (``arena/name``);
            * ``arena``: the whole arena `ref`;
            * ``slice``: the elements ``[a, b)`` of arena `ref`, the same for all slices of one run (update.onnx);
            * ``segment``: the scalar `ref` of the segment that is being updated;
            * ``result``: a value that reduce.onnx gives and update.onnx takes, or one for the driving program;
            * ``output``: an output of the user's model.
        ref: See `kind`; else the empty string.
        alias: For an output: the input that it may overwrite, written by an elementwise node. Still to be proved on the
            graph that the runtime really executes. None: give it memory of its own.
    """

    name: str
    dtype: str
    shape: Shape
    kind: str
    ref: str = ""
    alias: str | None = None


@dataclasses.dataclass(frozen=True)
class GraphPorts:
    """A file of the bundle with its inputs and outputs, in graph order."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def of_kind(self, *kinds: str) -> tuple[Port, ...]:
        """The inputs of these kinds, in graph order."""
        return tuple(port for port in self.inputs if port.kind in kinds)


@dataclasses.dataclass(frozen=True)
class Arena:
    """One flat buffer, zero where no tensor lies; it is also the role of the tensors in it.

    Attributes:
        name: ``master``, ``low``, ``gradient``, ``window``, the optimizer's moments, ``ema``, ``statistics``,
            ``statistics_work``, ``scalars``, ``counters``.
        dtype: Type of all its elements.
        elements: Its length.
        after: The arena that it must follow directly in memory (``window`` follows ``gradient``: one all-reduce), or None.
        saved: Part of a checkpoint (all are, except the low copy, which is the rounded master).
    """

    name: str
    dtype: str
    elements: int
    after: str | None = None
    saved: bool = True


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor in an arena.

    Attributes:
        name: For parameters and statistics the name of the initializer in the user's model.
        arena: The arena, and so the role and type.
        shape: Its shape.
        offset: First element in the arena.
    """

    name: str
    arena: str
    shape: tuple[int, ...]
    offset: int

    @property
    def key(self) -> str:
        """``arena/name``: unique, and its name in `state.safetensors` and in checkpoints."""
        return f"{self.arena}/{self.name}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A range of the parameter arenas that is updated with the same scalars.

    The same range ``[start, stop)`` is meant in `master`, `gradient`, every moment and `ema`. A runtime may cut it into
    pieces at multiples of `PARAMETER_ALIGNMENT`: the update is elementwise.

    Attributes:
        group: Name of the parameter group.
        start: First element.
        stop: One past the last element.
        low_start: Where the same range begins in the `low` arena; None if it has no low copy (then update.onnx's output
            for the low copy, if there is one, goes to scratch memory).
        scalars: Values of the ports of kind ``segment``.
    """

    group: str
    start: int
    stop: int
    low_start: int | None
    scalars: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Labels:
    """What the loss expects of an input of kind ``labels``, so that a program can check data before it runs them.

    Attributes:
        dtype: Type of the labels.
        shape: Shape with named free sizes.
        classes: Number of classes for index labels, else None.
        ignore_index: Index that is no class and counts nothing, or None.
        name: Name of the input.
    """

    dtype: str
    shape: Shape
    classes: int | None = None
    ignore_index: int | None = None
    name: str = "labels"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: the weight is W + scale·A·B, in the form that `form` says.

    Attributes:
        weight: Name of W in the user's model; it does not train.
        a: Name of A among the parameters.
        b: Name of B.
        form: ``matmul``: A is [inputs, rank], B [rank, outputs], and W [inputs, outputs] or `transposed`. ``conv``: A is [groups·rank,
            channels / groups, ...], B [outputs, rank, 1...], and W is the sum over rank of B·A, group by group.
        transposed: W is [outputs, inputs].
        groups: Of a convolution.
        scale: alpha / rank.
    """

    weight: str
    a: str
    b: str
    form: str
    transposed: bool = False
    groups: int = 1
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything a program must know to run a bundle.

    Attributes:
        level: O0, OD, O1, O2 or O3.
        dtype: The low type, ``fp16`` or ``bf16``; at O0 unused.
        graphs: ``grad``, ``reduce``, ``update``, ``eval``.
        arenas: All arenas, in allocation order.
        tensors: All state tensors.
        segments: Partition of the parameter arenas.
        labels: What the loss expects of each input of kind ``labels``; empty if the model computes its own loss.
        rows: Name of the input whose first size is the number of rows of a micro-batch.
        frozen: Float parameters that stay as they are, with the reason.
        options: The arguments of `build` in canonical JSON form: loss, optimizer, schedule, loss_scale, groups, ...
        limits: ``floor`` (lowest loss scale) and ``patience`` (windows skipped in a row at the floor before a run should
            stop).
        notes: Sentences a user should see (logits used instead of a final Softmax, parameters without gradient, ...).
        adapters: Low-rank adapters of weights that do not train.
        content: SHA-256 of graphs, state and model, so that the manifest stands for the whole bundle.
        version: Format version.
    """

    level: str
    dtype: str
    graphs: Mapping[str, GraphPorts]
    arenas: tuple[Arena, ...]
    tensors: tuple[StateTensor, ...]
    segments: tuple[Segment, ...]
    labels: tuple[Labels, ...]
    rows: str
    frozen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    content: str = ""
    version: int = VERSION

    def arena(self, name: str) -> Arena:
        """The arena called `name`; KeyError if there is none."""
        for arena in self.arenas:
            if arena.name == name:
                return arena
        raise KeyError(name)

    def has_arena(self, name: str) -> bool:
        """Whether this bundle has that arena (``low``, ``ema``, ``statistics`` may be absent)."""
        return any(arena.name == name for arena in self.arenas)

    def tensors_in(self, arena: str) -> tuple[StateTensor, ...]:
        """The tensors of one arena, by offset."""
        return tuple(sorted((t for t in self.tensors if t.arena == arena), key=lambda tensor: tensor.offset))

    def tensor(self, key: str) -> StateTensor:
        """The tensor with that key (``arena/name``); KeyError if there is none."""
        for tensor in self.tensors:
            if tensor.key == key:
                return tensor
        raise KeyError(key)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the whole bundle: of this manifest, which holds that of the rest."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest as JSON text, the same text for the same manifest."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read `to_json`'s text.

        Raises:
            ModelError: The text is no manifest of this version.
        """
        try:
            raw = json.loads(text)
            version = raw["version"]
            if version != VERSION:
                raise ModelError(
                    f"The bundle was made by another version of onnxamp (format version {version}; this one reads {VERSION}): "
                    "build it again."
                )
            return cls(
                level=raw["level"],
                dtype=raw["dtype"],
                graphs={name: _graph(graph) for name, graph in raw["graphs"].items()},
                arenas=tuple(Arena(**arena) for arena in raw["arenas"]),
                tensors=tuple(StateTensor(**{**t, "shape": tuple(t["shape"])}) for t in raw["tensors"]),
                segments=tuple(Segment(**segment) for segment in raw["segments"]),
                labels=tuple(Labels(**{**labels, "shape": tuple(labels["shape"])}) for labels in raw["labels"]),
                rows=raw["rows"],
                frozen=raw["frozen"],
                options=raw["options"],
                limits=raw["limits"],
                notes=tuple(raw["notes"]),
                adapters=tuple(Adapter(**adapter) for adapter in raw["adapters"]),
                content=raw["content"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ModelError(
                f"manifest.json is not a bundle's manifest ({type(problem).__name__}: {problem}), or was made by another version of "
                "onnxamp: build the bundle again."
            ) from problem


def _port(raw: dict[str, Any]) -> Port:
    return Port(**{**raw, "shape": tuple(raw["shape"])})


def _graph(raw: dict[str, Any]) -> GraphPorts:
    return GraphPorts(raw["file"], tuple(map(_port, raw["inputs"])), tuple(map(_port, raw["outputs"])))
