"""What values a graph really computes: range, NaN, Inf, overflow and underflow of every float value, batch by batch.

The graph runs under strict emulation, so a 16-bit value is rounded where a device would round it; what is measured is the
value just before its rounding, which still tells how far it is out of range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import BY_IR, BY_NAME, FloatType
from onnxamp.evidence.inputs import Array
from onnxamp.model import types
from onnxamp.model.units import all_nodes
from onnxamp.ort.session import SessionConfig, open_session, run
from onnxamp.passes.emulate import emulate
from onnxamp.passes.extremes import add_extremes

# Values of unknown size are fetched this many at a time, others up to this many bytes at a time.
_UNKNOWN_AT_A_TIME = 16
_BYTES_AT_A_TIME = 256 << 20


@dataclasses.dataclass
class Observed:
    """Statistics of one value over all batches.

    Attributes:
        value: Its name.
        node: Name of the node that makes it (of an inserted Cast: of the node whose value, or of the input, that it casts).
        op: Operator of that node.
        backward: Whether the node belongs to the backward half of a training graph.
        precision: `fp32`, `fp16` or `bf16`.
        count: Elements seen.
        absmax: Largest finite magnitude.
        absmin: Smallest magnitude above zero; infinite if all were zero.
        zeros: Elements equal to zero.
        nan: NaN elements.
        inf: Infinite elements.
        overflow: Finite elements that the 16-bit type rounds to infinity.
        subnormal: Elements that the 16-bit type holds with fewer digits, below its smallest normal value.
        flushed: Elements above zero that the 16-bit type rounds to zero.
        expected_inf: Infinities come from an infinite constant (a mask), not from arithmetic.
        batch: First batch in which NaN, Inf or an overflow was seen.
    """

    value: str
    node: str
    op: str
    backward: bool
    precision: str
    count: int = 0
    absmax: float = 0.0
    absmin: float = math.inf
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    overflow: int = 0
    subnormal: int = 0
    flushed: int = 0
    expected_inf: bool = False
    batch: int | None = None

    @property
    def bad(self) -> bool:
        """NaN, Inf or overflow in a value whose type really is what was measured against."""
        return bool(self.nan or (self.inf and not self.expected_inf) or (self.overflow and self.precision != "fp32"))

    @property
    def underflow(self) -> float:
        """Share of the elements other than zero that the 16-bit type flushes or holds with fewer digits."""
        there = self.count - self.zeros - self.nan
        return (self.flushed + self.subnormal) / there if there > 0 else 0.0

    def what(self) -> str:
        """What is wrong with it, in words."""
        parts = []
        if self.nan:
            parts.append(f"{self.nan} NaN")
        if self.inf and not self.expected_inf:
            parts.append(f"{self.inf} infinite")
        if self.overflow and self.precision != "fp32":
            parts.append(f"{self.overflow} beyond {self.precision} (largest {self.absmax:.4g})")
        return " and ".join(parts) + f" of {self.count} elements" if parts else "finite"

    def add_numbers(self, numbers: tuple[int, int, int, float], limits: FloatType, batch: int) -> None:
        """Count what a graph counted itself (`onnxamp.passes.extremes`): elements, NaN, infinite ones and the largest finite size.

        Of elements beyond the type only whether there are any is known: they count as one.
        """
        count, nan, inf, largest = numbers
        self.count, self.nan, self.inf = self.count + count, self.nan + nan, self.inf + inf
        self.absmax = max(self.absmax, largest)
        self.overflow += largest >= limits.max * (1 + limits.eps / 4)
        if self.bad and self.batch is None:
            self.batch = batch

    def add(self, array: Array, limits: FloatType, batch: int) -> None:
        """Count the elements of one batch against the limits of a 16-bit type."""
        values = np.abs(np.asarray(array, np.float32)).ravel()
        finite = values[np.isfinite(values)]
        self.count += values.size
        self.nan += (nan := int(np.isnan(values).sum()))
        self.inf += values.size - finite.size - nan
        # Rounding to nearest reaches infinity half a step above the largest value.
        self.overflow += int((finite >= limits.max * (1 + limits.eps / 4)).sum())
        above = finite[finite > 0]
        self.zeros += finite.size - above.size
        if above.size:
            self.absmax = max(self.absmax, float(above.max()))
            self.absmin = min(self.absmin, float(above.min()))
            flushed = int((above <= limits.smallest / 2).sum())
            self.flushed += flushed
            self.subnormal += int((above < limits.tiny).sum()) - flushed
        if self.bad and self.batch is None:
            self.batch = batch


def observe(
    model: ir.Model, batches: Iterable[Mapping[str, Any]], limits: FloatType, *, name: str | None = None
) -> list[Observed]:
    """Statistics of the float values that a model's nodes make, in the order in which they are made.

    Of values inside bodies of If, Loop and Scan the graph itself keeps the largest size and counts elements, NaN and infinities; in
    what else has a body (SequenceMap), and below opset 11, they are not seen.

    Args:
        model: A model, mixed or FP32.
        batches: Feeds.
        limits: The 16-bit type that FP32 values are measured against (16-bit values are measured against their own).
        name: What errors call the model.
    """
    model = model.clone()
    types.infer(model)
    rows, places = _points(model, list(model.graph))
    inner, inner_places = _points(model, [node for node in all_nodes(model.graph) if node.graph is not model.graph])
    emulated = emulate(model)
    graph = emulated.graph
    made = {value.name: value for node in graph for value in node.outputs}
    fed: dict[str, list[Observed]] = {}
    fetched: dict[str, list[Observed]] = {}
    inputs = {value.name for value in model.graph.inputs}
    for row in rows:
        if places[row.value] in inputs:
            fed.setdefault(places[row.value], []).append(row)
            continue
        # Before its rounding, if it is rounded: emulation keeps that value under this name.
        place = next((name for name in (f"{places[row.value]}/exact", places[row.value]) if name in made), None)
        if place is not None:
            fetched.setdefault(place, []).append(row)
    graph.outputs.clear()
    names = list(fetched)
    graph.outputs.extend(made[name] for name in names)
    counted = _count_inside(emulated, inner, inner_places)
    config = SessionConfig(provider="cpu", optimization="basic", memory_pattern=False)
    session = open_session(emulated, config, name=name)
    measured = {row.value: BY_NAME[row.precision] for row in (*rows, *inner) if row.precision != "fp32"}
    for index, feeds in enumerate(batches):
        for name in fed.keys() & feeds.keys():
            for row in fed[name]:
                row.add(np.asarray(feeds[name]), measured.get(row.value, limits), index)
        for part in _parts([made[name] for name in names], feeds):
            for name, array in run(session, feeds, part).items():
                if isinstance(array, np.ndarray):
                    for row in fetched[name]:
                        row.add(array, measured.get(row.value, limits), index)
        if counted:
            numbers = run(session, feeds, [name for _, names in counted for name in names])
            for row, (count, nan, inf, largest) in counted:
                found = int(numbers[count]), int(numbers[nan]), int(numbers[inf]), float(numbers[largest])
                row.add_numbers(found, measured.get(row.value, limits), index)
    rows += inner
    _mark_expected(model, rows)
    return [row for row in rows if row.count]


def _count_inside(
    emulated: ir.Model, rows: list[Observed], places: Mapping[str, str]
) -> list[tuple[Observed, tuple[str, str, str, str]]]:
    """Let the graph count the values inside bodies: each row with the outputs that tell.

    Bodies beside each other may use one name for two values: then they share a row.
    """
    made: dict[str, list[ir.Value]] = {}
    for node in all_nodes(emulated.graph):
        for value in node.outputs:
            if node.graph is not emulated.graph and value.name:
                made.setdefault(value.name, []).append(value)
    of_value = {
        value: row
        for row in rows
        for value in made.get(f"{places[row.value]}/exact") or made.get(places[row.value]) or ()
    }
    found = add_extremes(emulated, of_value)
    return [(of_value[value], dataclasses.astuple(names)) for value, names in found.items()]


def _points(model: ir.Model, nodes: Iterable[ir.Node]) -> tuple[list[Observed], dict[str, str]]:
    """One row per float value, and the value that shows it before its rounding: of a Cast to 16 bits its operand."""
    rows: list[Observed] = []
    places: dict[str, str] = {}
    for node in nodes:
        for value in node.outputs:
            if not value.name or value.dtype is None or value.dtype not in BY_IR or value.name in places:
                continue
            kind = BY_IR[value.dtype].name
            backward = "onnxamp.backward" in node.metadata_props
            rows.append(Observed(value.name, *_maker(node, value), backward, kind))
            source = node.inputs[0] if node.op_type == "Cast" and kind != "fp32" else None
            made = source is not None and (source.producer() is not None or source.is_graph_input())
            places[value.name] = (source.name or "") if made and source is not None else value.name
    return rows, places


def _maker(node: ir.Node, value: ir.Value) -> tuple[str, str]:
    """Name and operator of the node that makes a value, looked at through the Casts that onnxamp inserted behind it.

    Behind a Cast of a graph input there is no node: then it is the input's name.
    """
    while "onnxamp.cast" in node.metadata_props and (source := node.inputs[0]) is not None:
        producer = source.producer()
        if producer is None:
            return source.name or value.name or "", "Cast of input" if source.is_graph_input() else node.op_type
        node = producer
    return node.name or value.name or "", node.op_type


def _parts(values: list[ir.Value], feeds: Mapping[str, Any]) -> Iterable[list[str]]:
    """Names to fetch in one run, so that what is held at a time stays bounded."""
    rows = max((len(value) for value in feeds.values() if isinstance(value, np.ndarray) and value.ndim), default=1)
    part: list[str] = []
    size = 0.0
    for value in values:
        dims = None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape]
        if dims is None or None in dims[1:]:
            cost = _BYTES_AT_A_TIME / _UNKNOWN_AT_A_TIME
        else:
            cost = 4.0 * math.prod(rows if dim is None else dim for dim in dims)
        if part and size + cost > _BYTES_AT_A_TIME:
            yield part
            part, size = [], 0.0
        part.append(value.name or "")
        size += cost
    if part:
        yield part


# What lets a mask's infinity through: moves of data, and adding it to something.
_LETS_THROUGH = frozenset(
    [
        "Add",
        "Cast",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Expand",
        "Gather",
        "Identity",
        "Mul",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    ]
)


def _mark_expected(model: ir.Model, rows: list[Observed]) -> None:
    """Infinities that come from an infinite (or, in 16 bits, a too large) constant are meant: attention masks."""
    by_value = {row.value: row for row in rows}
    graphs = (model.graph, *model.graph.subgraphs())
    tainted = {value for graph in graphs for value in graph.initializers.values() if _infinite(value.const_value)}
    for node in all_nodes(model.graph):
        if node.op_type not in _LETS_THROUGH:
            continue
        attributes = [a.value for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR]
        scalar = node.attributes.get("value_float")
        source = any(_infinite(tensor) for tensor in attributes) or (
            scalar is not None and math.isinf(scalar.as_float())
        )
        if source or any(value in tainted for value in node.inputs):
            tainted.update(node.outputs)
            for value in node.outputs:
                if (row := by_value.get(value.name or "")) is not None and not row.nan:
                    row.expected_inf = True
                    if not row.bad:
                        row.batch = None


def _infinite(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype not in BY_IR or tensor.size > 1 << 24:
        return False
    return bool(np.isinf(np.asarray(tensor.numpy(), np.float32)).any())
