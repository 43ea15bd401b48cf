"""Tensor data in blocks: reading, converting and writing weights of any size in bounded memory."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnxamp.dtypes import FloatType
from onnxamp.errors import ModelError
from onnxamp.model.half import to_half

# Few enough for a processor's cache: what is computed from a block finds it there.
BLOCK_BYTES = 512 << 10
_THREADS = min(4, os.cpu_count() or 1)
# Below this number of elements equal content says nothing.
_COPY_ELEMENTS = 64

T = TypeVar("T")


def byte_count(dtype: ir.DataType, dims: tuple[int, ...]) -> int:
    """Bytes of a tensor of `dims`, sub-byte types packed; exact for dimensions of any size."""
    return math.ceil(math.prod(dims) * dtype.bitwidth / 8)


def elements(tensor: ir.TensorProtocol) -> int:
    """The number of elements of `tensor`; its own `size` makes a new shape of a proto's dimensions each time."""
    return math.prod(_dims(tensor))


def nbytes(tensor: ir.TensorProtocol) -> int:
    """The bytes of `tensor`, of strings those of their texts; see `elements`."""
    if tensor.dtype == ir.DataType.STRING:  # of no fixed size
        return int(tensor.nbytes)
    return byte_count(tensor.dtype, _dims(tensor))


def _dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(tensor.raw.dims if isinstance(tensor, ir.serde.TensorProtoTensor) else tensor.shape)


def blocks(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """The elements of `tensor`, flat and in order, in arrays of at most 512 KiB of what is stored.

    External data are read with plain reads, so that the pages of the file do not add up in memory.

    Raises:
        ModelError: The file with the external data ended early or cannot be read.
    """
    return mapped(tensor, lambda block: block)


def mapped(tensor: ir.TensorProtocol, function: Callable[[np.ndarray], T]) -> Iterator[T]:
    """`function` of each of `blocks`, in order; of a large tensor, several are read and computed at a time."""
    pieces = _pieces(tensor)
    if nbytes(tensor) <= 2 * BLOCK_BYTES:
        for piece in pieces:
            yield function(piece())
        return
    # Memory of a size that was freed once, glibc keeps for the next block, where else it would give it back and fetch it page by page.
    np.empty(32 * BLOCK_BYTES, np.uint8)
    ahead: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for piece in pieces:
            ahead.append(threads.submit(lambda piece: function(piece()), piece))
            if len(ahead) > 2 * _THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _pieces(tensor: ir.TensorProtocol) -> Iterator[Callable[[], np.ndarray]]:
    """Functions that give the blocks of `tensor`, in order."""
    if isinstance(tensor, ConvertedTensor):
        for piece in _pieces(tensor.source):
            yield functools.partial(lambda piece: tensor.convert(piece()), piece)
    elif isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8:
        size = tensor.size * tensor.dtype.numpy().itemsize
        for start in range(0, size, BLOCK_BYTES):
            yield functools.partial(_read, tensor, start, min(BLOCK_BYTES, size - start))
    else:
        flat = tensor.numpy().reshape(-1)
        step = max(1, BLOCK_BYTES // max(1, flat.itemsize))
        for start in range(0, flat.size, step):
            yield functools.partial(flat.__getitem__, slice(start, start + step))


def _read(tensor: ir.ExternalTensor, start: int, size: int) -> np.ndarray:
    """The elements from byte `start` of the data of `tensor` on."""
    with open_external(tensor) as file:
        file.seek((tensor.offset or 0) + start)
        data = file.read(size)
    if len(data) < size:
        raise ModelError(f"{tensor.path} ended before the data of tensor {tensor.name!r} did; restore the file.")
    return np.frombuffer(data, tensor.dtype.numpy().newbyteorder("<"))


def open_external(tensor: ir.ExternalTensor) -> Any:
    """The open file of an external tensor.

    Raises:
        ModelError: It cannot be opened.
    """
    try:
        return open(tensor.path, "rb")
    except OSError as problem:
        raise ModelError(
            f"The data of tensor {tensor.name!r} cannot be read from {os.fspath(tensor.path)}: {problem.strerror}; "
            "put the file back beside the model."
        ) from None


def byte_blocks(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """The bytes of `tensor` as ONNX stores them, in pieces of at most 512 KiB."""
    if tensor.dtype.bitwidth < 8:
        yield tensor.tobytes()
        return
    yield from mapped(tensor, _little)


def _little(block: np.ndarray) -> memoryview:
    """The bytes of a block, the least significant one of each number first."""
    ordered = np.ascontiguousarray(block.astype(block.dtype.newbyteorder("<"), copy=False))
    return ordered.view(np.uint8).data


class ConvertedTensor(ir.LazyTensor):
    """A float tensor in another precision, converted when it is read.

    Rounds to nearest, ties to even; subnormal results and signed zeros are kept. The source is shared, not copied.

    Args:
        source: A float tensor.
        kind: The precision wanted.
        limit: Finite elements are clipped to [-limit, limit] (the clamp of a mask's constant); None changes none.
    """

    def __init__(self, source: ir.TensorProtocol, kind: FloatType, limit: float | None = None) -> None:
        shape = source.shape
        assert isinstance(shape, ir.Shape)
        super().__init__(
            lambda: ir.Tensor(self.convert(source.numpy()), dtype=kind.ir),
            kind.ir,
            shape,
            name=source.name,
            doc_string=source.doc_string,
            metadata_props=dict(source.metadata_props),
        )
        self.source = source
        self.kind = kind
        self.limit = limit

    def convert(self, array: np.ndarray) -> np.ndarray:
        """`array` in this tensor's precision."""
        if self.limit is not None:
            bound = np.asarray(self.limit, array.dtype)
            array = np.where(np.isfinite(array), np.clip(array, -bound, bound), array)
        if self.kind.numpy == np.float16 and array.dtype == np.float32:
            return to_half(array)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return array.astype(self.kind.numpy)

    def tobytes(self) -> bytes:
        """The bytes as ONNX stores them."""
        return b"".join(byte_blocks(self))

    def tofile(self, file: Any) -> None:
        """Write the bytes block by block."""
        for block in byte_blocks(self):
            file.write(block)


def is_distinct(array: np.ndarray) -> bool:
    """Whether another tensor of the same content must be a copy: it is neither small nor a vector of ones or so."""
    return array.size >= _COPY_ELEMENTS and not bool((array == array.reshape(-1)[0]).all())


def content_key(array: np.ndarray) -> str:
    """The same text for float arrays of one shape and, as FP32, one content."""
    data = np.ascontiguousarray(array, np.float32)
    return f"{data.shape}{hashlib.sha256(data.tobytes()).hexdigest()}"


def stored(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """The tensor whose elements lie somewhere, behind conversions of it."""
    while isinstance(tensor, ConvertedTensor):
        tensor = tensor.source
    return tensor


def is_external(tensor: ir.TensorProtocol | None) -> bool:
    """Whether the data lie (or lay, before a conversion) in a file of their own."""
    return isinstance(stored(tensor), ir.ExternalTensor)


def cast_target(node: ir.Node) -> ir.DataType | None:
    """The type that a Cast casts to; before opset 6 it is given by name. None if it is open or unknown."""
    attribute = node.attributes.get("to")
    if attribute is None or attribute.is_ref():
        return None
    if attribute.type == ir.AttributeType.STRING:
        return ir.DataType.__members__.get(attribute.as_string().upper())
    try:
        return ir.DataType(attribute.as_int())
    except ValueError:
        return None


def cast_attribute(kind: ir.DataType, opset: int) -> ir.Attr:
    """The attribute of a Cast to `kind` in that version of ai.onnx."""
    return ir.AttrString("to", kind.name) if opset < 6 else ir.AttrInt64("to", kind.value)
