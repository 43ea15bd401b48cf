"""Plausible inputs made from a model alone: its input names, types, shapes, and the nodes that read them.

Random noise of any range drives networks to places where they never work, so: ids lie inside the table that a Gather looks
them up in, masks are open, positions count, pictures are smooth and in [0, 1], sound is quiet. It remains a guess, and
whoever prints numbers from it says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxamp.errors import UnsupportedError, UsageError
from onnxamp.evidence.inputs import Array, Input, Sample, model_inputs
from onnxamp.model.dimensions import FIRST_DIM, OTHER_DIM

# Sizes of free dimensions: the first of an input, others, and the past of a key-value cache.
FIRST, OTHER, PAST = FIRST_DIM, OTHER_DIM, 16

# Nodes through which an id reaches its table unchanged.
_PASS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Expand"})


def synthesize(
    model: ir.Model,
    count: int = 4,
    *,
    dim: Mapping[str, int] | None = None,
    seed: int = 0,
    other: int = OTHER,
    flags: bool = True,
) -> tuple[list[Sample], dict[str, int]]:
    """`count` samples, and the sizes that were chosen for free dimensions, by name.

    Args:
        model: The model to feed.
        count: How many samples.
        dim: Sizes of named dimensions.
        seed: Equal seeds give equal samples.
        other: Size of free dimensions that are not the first of an input.
        flags: Whether every second sample has other truth values: what one of them switches off may be what goes wrong.

    Raises:
        UnsupportedError: An input is a string, sequence or optional: only data can tell what belongs there.
        UsageError: `dim` names a dimension that no input has.
    """
    refuse(model)
    inputs = model_inputs(model)
    sizes = _sizes(inputs, dict(dim or {}), other)
    shapes = {item.name: _shape(item, sizes, other) for item in inputs}
    longest = max((shape[1] for shape in shapes.values() if len(shape) > 1), default=other)
    rng = np.random.default_rng(seed)
    made = [
        {item.name: _array(item, shapes[item.name], longest, rng, flags and index % 2 == 1) for item in inputs}
        for index in range(count)
    ]
    return made, sizes


def refuse(model: ir.Model) -> None:
    """Say so where inputs cannot be made up.

    Raises:
        UnsupportedError: An input is a string, sequence or optional: only data can tell what belongs there.
    """
    for item in model_inputs(model):
        if item.dtype is None or (item.dtype.kind not in "fiub" and item.value.dtype != ir.DataType.BFLOAT16):
            held = (
                "give --data."
                if item.dtype is not None
                else (
                    "no file of --data holds such a value, so call onnxamp.verify from Python with data=[{name: value}]."
                )
            )
            raise UnsupportedError(f"Inputs cannot be made up for {item}: {held}")


def _sizes(inputs: list[Input], given: dict[str, int], other: int) -> dict[str, int]:
    """A size for each free dimension; sums such as ``past + sequence`` are added up."""
    names: dict[str, int] = {}
    for item in inputs:
        for axis, dim in enumerate(item.shape or ()):
            if isinstance(dim, str) and dim not in names:
                of_past = "past" in dim.lower() and "total" not in dim.lower()
                names[dim] = PAST if of_past else FIRST if axis == 0 else other
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(f"No input has a dimension {', '.join(unknown)}; there is {', '.join(names) or 'none'}.")
    names.update(given)
    for name in names:
        parts = [part.strip() for part in name.split("+")]
        if name in given:
            continue
        if len(parts) > 1 and all(part in names or part.isdigit() for part in parts):
            names[name] = sum(names[part] if part in names else int(part) for part in parts)
        elif "total" in name.lower():
            others = {dim.lower(): size for dim, size in names.items() if dim != name}
            past = next((size for dim, size in others.items() if "past" in dim), 0)
            current = next((size for dim, size in others.items() if "seq" in dim and "past" not in dim), other)
            names[name] = past + current
    return names


def _shape(item: Input, sizes: Mapping[str, int], other: int) -> tuple[int, ...]:
    shape = []
    for axis, dim in enumerate(item.shape or ()):
        unnamed = FIRST if axis == 0 else other
        shape.append(unnamed if dim is None else sizes[dim] if isinstance(dim, str) else dim)
    return tuple(shape)


def _array(item: Input, shape: tuple[int, ...], longest: int, rng: np.random.Generator, other: bool) -> Array:
    assert item.dtype is not None
    if item.dtype.kind == "b":
        return _flags(item, shape, other)
    if item.dtype.kind in "iu":
        return _integers(item, shape, longest, rng).astype(item.dtype)
    return _floats(item, shape, rng).astype(item.dtype)


def _flags(item: Input, shape: tuple[int, ...], other: bool) -> Array:
    """Truth values: all the same, or the others. Of the others a longer row holds both, so that no mask shuts out all of it."""
    usual = "use_cache" not in item.name
    made = np.full(shape, usual)
    if other and shape and shape[-1] > 1:
        made[..., shape[-1] // 2 :] = not usual
    elif other:
        made = np.full(shape, not usual)
    return made


def _integers(item: Input, shape: tuple[int, ...], longest: int, rng: np.random.Generator) -> Array:
    name, rank = item.name.lower(), len(shape)
    if "mask" in name:
        return np.ones(shape, np.int64)
    if "position" in name or "pos_ids" in name:
        return np.broadcast_to(np.arange(shape[-1] if rank else 1).reshape((-1,) if rank else ()), shape)
    if re.search(r"token_type|segment", name):
        return np.zeros(shape, np.int64)
    if re.search(r"^sr$|sample_?rate|sampling_?rate", name):
        return np.full(shape, 16000, np.int64)
    if re.search(r"len(gth)?s?$|_len", name):
        return np.full(shape, longest, np.int64)
    if rank == 4 and item.dtype == np.uint8:
        return (_picture(shape, rng) * 255).round()
    rows = list(_tables(item.value))
    if rows:
        return rng.integers(0, max(1, min(rows)), shape)
    return rng.integers(0, 2, shape) if rank else np.ones(shape, np.int64)


def _tables(value: ir.Value) -> Iterator[int]:
    """Rows of each constant table that `value` is an index into."""
    seen, queue = {value}, [value]
    while queue:
        for node, index in queue.pop().uses():
            if node.op_type == "Gather" and index == 1:
                table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
                constant = ir.convenience.get_const_tensor(table) if table is not None else None
                if constant is not None and len(constant.shape) > axis:
                    yield int(constant.shape.numpy()[axis])
            elif node.op_type in _PASS and index == 0:
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        queue.append(output)


def _floats(item: Input, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    name, rank = item.name.lower(), len(shape)
    if "mask" in name:  # an additive mask is open at 0, a multiplied one at 1
        added = any(node.op_type == "Add" for node in item.value.consumers())
        return np.zeros(shape) if added else np.ones(shape)
    if re.search(r"audio|wave?|sound|speech|pcm|signal", name) and rank >= 1:
        time = np.arange(shape[-1]) / 16000
        tone = sum(130 / f * np.sin(2 * np.pi * f * time + rng.uniform(0, 2 * np.pi)) for f in (130.0, 260.0, 910.0))
        return 0.2 * np.broadcast_to(tone, shape) + 0.01 * rng.standard_normal(shape)
    if re.search(r"^[hc]_?\d?$|state|hidden|cache|past|memory", name):
        return 0.1 * rng.standard_normal(shape)
    if rank == 4 and (shape[1] in (1, 3, 4) or shape[3] in (1, 3, 4)):
        return _picture(shape, rng)
    if rank == 0 or (rank == 1 and shape[0] <= 4):
        return np.ones(shape)
    if any(node.op_type == "Cast" for node in item.value.consumers()) and (rows := list(_tables(item.value))):
        return rng.integers(0, max(1, min(rows)), shape).astype(np.float64)  # ids that travel as floats
    return rng.standard_normal(shape)


def _picture(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Smooth colours with a little noise, in [0, 1]; NCHW or NHWC by where the few channels are."""
    channels_last = shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4)
    n, c, h, w = (shape[0], shape[3], shape[1], shape[2]) if channels_last else shape
    y, x = np.linspace(0, 1, h)[:, None], np.linspace(0, 1, w)[None, :]
    phase, wave = rng.uniform(0, 2 * np.pi, (n, c, 1, 1)), rng.uniform(1, 6, (n, c, 1, 1, 2))
    picture = 0.5 + 0.35 * np.sin(2 * np.pi * (wave[..., 0] * x + wave[..., 1] * y) + phase)
    picture = np.clip(picture + 0.05 * rng.standard_normal((n, c, h, w)), 0, 1)
    return np.moveaxis(picture, 1, 3) if channels_last else picture


def describe(samples: list[Sample], sizes: Mapping[str, int]) -> str:
    """One sentence on what was made up, for whoever prints the numbers."""
    named = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{len(samples)} sample{'s' * (len(samples) != 1)} made up from names, types and shapes" + (
        f" ({named})" if named else ""
    )
