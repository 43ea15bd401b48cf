"""Dropout with masks that depend on nothing but counters.

The bit of an element is a hash of (seed, applied step, node, row in the window, column in the row). So the masks of `k`
micro-batches are those of the one big batch, a skipped window does not shift later ones, and a resumed run sees the
masks that it would have seen.

No shift or exclusive or is used: ONNX Runtime has no CUDA kernels for them. Products and sums of unsigned integers wrap.

1. Row key: x ← rot₃₂(x·x + w) on 64 bits (the round of Widynski, "Squares: a fast counter-based RNG", arXiv:2004.06278), four rounds from
   the row, the seed and the step, once for all nodes, then two from the node. Column key: four rounds from node and column, which a
   runtime can compute once.
2. Element: u = row key + column key on 32 bits, v = u·(2u + 1), RC6's quadratic permutation, whose high bits depend on all bits of
   u. The element is dropped if v < p·2³².
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UnsupportedError
from onnxamp.training.fragment import INT64, Fragment

UINT32 = ir.DataType.UINT32
UINT64 = ir.DataType.UINT64

_HALF = 1 << 32
# Odd, without runs: the key of Widynski's paper and two words of the same construction.
_KEY = 0x548C9DECBCE65297
_STEP_KEY = 0x9E3779B97F4A7C15
_NODE_KEY = 0xD1342543DE82EF95


class Masks:
    """Appends dropout masks to a graph.

    Args:
        op: The graph.
        seed: int64 scalar.
        step: int64 scalar, applied steps.
        rows: The input whose first dimension counts the rows.
        dropped: Gives the micro-batches (``dropped``) or rows (``dropped_rows``) of the window that were left out, int64 scalars,
            so that those after them get the masks that they would have got without them; None where nothing ever is.

    Attributes:
        row_offset: The input that counts the rows of the window before this micro-batch, once it is needed.
        micro_step: The input that counts its micro-batches, likewise.
    """

    def __init__(
        self,
        op: Fragment,
        seed: ir.Value,
        step: ir.Value,
        rows: ir.Value,
        dropped: Callable[[str], ir.Value | None] = lambda field: None,
    ) -> None:
        self._op = op
        self._rows = rows
        self._dropped = dropped
        base = op.Add(op.Mul(self._long(seed), self._word(_KEY)), op.Mul(self._long(step), self._word(_STEP_KEY)))
        self._base = self._mixed(base, base)
        self.row_offset: ir.Value | None = None
        self.micro_step: ir.Value | None = None

    def dropped(self, x: ir.Value, node: str, probability: float) -> ir.Value:
        """Bool of the shape of `x`: true with `probability`."""
        op = self._op
        number = zlib.crc32(node.encode())
        rank = op.rank(x)
        if rank == 0:
            keys = op.Squeeze(self._row_keys(op.Unsqueeze(self._micro_step(), [0]), number), [0])
            return op.Less(op.Mul(keys, self._odd(keys)), self._threshold(probability))
        keys = self._row_keys(self._row_index(x), number)
        odd = self._odd(keys)
        if rank > 1:
            axes = list(range(1, rank))
            columns = self._column_keys(x, number)
            keys = op.Add(op.Unsqueeze(keys, axes), columns)
            odd = op.Add(op.Unsqueeze(odd, axes), op.Add(columns, columns))  # 2u + 1 too is of rows and of columns
        return op.Less(op.Mul(keys, odd), self._threshold(probability))

    def _row_index(self, x: ir.Value) -> ir.Value:
        """Position in the window of each index of the first dimension of `x`, int64."""
        op = self._op
        factor = self._indices_per_row(x)
        counted = (
            self._rows if factor == 1 else x
        )  # one size for all nodes whose first dimension is the rows: one chain of keys
        index = op.Range(op.constant(np.asarray(0)), self._size(counted), op.constant(np.asarray(1)))
        if factor is not None:
            offset = self._row_offset()
            return op.Add(index, offset if factor == 1 else op.Mul(offset, factor))
        # The first dimension does not count rows: no choice of keys gives the masks of the one big batch.
        return op.Add(index, op.Mul(self._micro_step(), op.constant(np.asarray(1 << 40))))

    def _indices_per_row(self, x: ir.Value) -> int | ir.Value | None:
        """How many indices of the first dimension of `x` belong to a row of the batch; None if it does not count rows.

        Named dimensions tell. Of fixed sizes a multiple of the rows is taken for theirs: `remarks` says so to the user.
        """
        op = self._op
        own, rows = op.dims(x)[0], op.dims(self._rows)[0]
        if own is not None and own == rows:
            return 1
        if isinstance(own, int) and isinstance(rows, int):
            return own // rows if rows and own % rows == 0 else None
        if isinstance(own, str) and isinstance(rows, str) and rows in _factors(own):
            total, count = (op.count(value, [0]) for value in (x, self._rows))
            assert isinstance(total, ir.Value)
            return op.Cast(op.Div(total, count), to=INT64)
        return None

    def _size(self, x: ir.Value) -> ir.Value:
        """Size of the first dimension as an int64 scalar."""
        op = self._op
        size = op.dims(x)[0]
        return op.constant(np.asarray(size)) if isinstance(size, int) else op.Squeeze(op.dim(x, 0), [0])

    def _row_keys(self, row: ir.Value, number: int) -> ir.Value:
        op = self._op
        counter = op.Mul(op.Add(self._long(row), self._base), self._word(_KEY))
        node = self._word((number * _NODE_KEY + _STEP_KEY) % (1 << 64))
        return self._high(self._mixed(op.Add(self._mixed(counter, self._base), node), node, rounds=2))

    def _column_keys(self, x: ir.Value, number: int) -> ir.Value:
        op = self._op
        dims = op.dims(x)[1:]
        static = all(isinstance(dim, int) for dim in dims)
        if static:
            count = op.constant(np.asarray(int(np.prod([int(dim or 0) for dim in dims]))))
            shape = op.constant(np.asarray(dims, np.int64))
        else:
            shape = op.shape_slice(x, 1, op.rank(x))
            count = op.emit("ReduceProd", [shape], {"keepdims": 0})[0]
        index = op.Range(op.constant(np.asarray(0)), count, op.constant(np.asarray(1)))
        word = (number * _KEY + _NODE_KEY) % (1 << 64)
        counter = op.Mul(op.Add(self._long(index), self._word(word)), self._word(_KEY))
        keys = self._high(self._mixed(counter, self._word(word)))
        return op.Reshape(keys, shape)

    def _mixed(self, x: ir.Value, y: ir.Value, rounds: int = 4) -> ir.Value:
        """Rounds of squaring, adding and rotating by half a word."""
        op = self._op
        z = op.Add(y, self._word(_KEY))
        for addend in (y, z, y, z)[:rounds]:
            x = op.Add(op.Mul(x, x), addend)
            x = op.Add(op.Div(x, self._word(_HALF)), op.Mul(x, self._word(_HALF)))
        return x

    def _odd(self, u: ir.Value) -> ir.Value:
        op = self._op
        return op.Add(op.Add(u, u), op.constant(np.asarray(1, np.uint32)))

    def _high(self, x: ir.Value) -> ir.Value:
        return self._op.Cast(self._op.Div(x, self._word(_HALF)), to=UINT32)

    def _long(self, value: ir.Value) -> ir.Value:
        return self._op.Cast(value, to=UINT64)

    def _word(self, value: int) -> ir.Value:
        return self._op.constant(np.asarray(value, np.uint64))

    def _threshold(self, probability: float) -> ir.Value:
        return self._op.constant(np.asarray(min(round(probability * _HALF), _HALF - 1), np.uint32))

    def _row_offset(self) -> ir.Value:
        if self.row_offset is None:
            self.row_offset = self._op.input("amp.row_offset", INT64)
        return self._without_dropped(self.row_offset, "dropped_rows")

    def _micro_step(self) -> ir.Value:
        if self.micro_step is None:
            self.micro_step = self._op.input("amp.micro_step", INT64)
        return self._without_dropped(self.micro_step, "dropped")

    def _without_dropped(self, count: ir.Value, field: str) -> ir.Value:
        dropped = self._dropped(field)
        return count if dropped is None else self._op.Sub(count, dropped)


def drop(op: Fragment, masks: Masks, node: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """What replaces a Dropout node: x/(1−p) where kept, else 0; and its mask, if the graph reads it.

    Raises:
        UnsupportedError: The ratio is computed in the graph, or is not in [0, 1).
    """
    x = node.inputs[0]
    assert x is not None
    probability = ratio(op, node)
    if not 0 <= probability < 1:
        raise UnsupportedError(f"Dropout {node.name!r} has ratio {probability}: it must be at least 0 and below 1.")
    op.section(node.name or str(node.outputs[0].name), dict(node.metadata_props))
    dropped = masks.dropped(x, node.name or str(node.outputs[0].name), probability)
    result = op.select(dropped, 0.0, op.Mul(x, 1 / (1 - probability)))
    wants_mask = len(node.outputs) > 1 and node.outputs[1].uses()
    return result, op.Not(dropped) if wants_mask else None


def remarks(graph: ir.Graph, rows: ir.Value) -> list[str]:
    """Where the masks of accumulated micro-batches are not those of the one big batch, or only if equal sizes mean rows.

    Args:
        graph: The graph in training form.
        rows: The input whose first dimension counts rows.
    """
    found = []
    count = rows.shape[0] if rows.shape else None
    for node in graph:
        x = node.inputs[0] if node.inputs else None
        if node.op_type != "Dropout" or node.domain != "" or x is None or x.shape is None:
            continue
        own = x.shape[0] if len(x.shape) else None
        if not _aligned(own, count):
            found.append(
                f"Dropout {node.name!r}: its first dimension ({own}) does not count rows ({count}), so accumulated micro-batches get "
                "other masks than one big batch."
            )
        elif isinstance(own, int):
            found.append(
                f"Dropout {node.name!r}: its first dimension ({own}) is taken for rows, as the fixed sizes agree."
            )
    return found


def _aligned(own: int | ir.SymbolicDim | None, rows: int | ir.SymbolicDim | None) -> bool:
    """Whether a first dimension is the rows or a multiple of them."""
    if own is None or rows is None:
        return False
    if isinstance(own, int) and isinstance(rows, int):
        return own == rows or (rows > 0 and own % rows == 0)
    if isinstance(own, int) or isinstance(rows, int) or own.value is None or rows.value is None:
        return False
    return str(rows.value) in _factors(str(own.value))


def _factors(expression: str) -> list[str]:
    return expression.replace("(", "").replace(")", "").split("*")


def ratio(op: Fragment, node: ir.Node) -> float:
    """The ratio of a Dropout node.

    Raises:
        UnsupportedError: It is computed in the graph.
    """
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return 0.5
    source = node.inputs[1]
    cast = source.producer()
    if cast is not None and cast.op_type == "Cast" and cast.inputs[0] is not None:  # the precision of the node
        source = cast.inputs[0]
    value = op.known(source)
    if value is None:
        raise UnsupportedError(f"The ratio of Dropout {node.name!r} is computed in the graph: make it a constant.")
    return float(value)
