"""A row of a rule's table: one operator with its inputs. The rest of this folder imports it by this name (`pythonpath` of pytest)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Case:
    """One node. `inputs`: a shape is a float input to differentiate, an array a constant (float64: of the case's type), None an empty
    input.

    Attributes:
        low, high: Range of the sampled values. They are distinct multiples of a step, so that no kink is near.
        symbolic: Which dimensions get names in further variants, separated by blanks: all, batch (the first of the first
            input), space (batch and all from the third on), sequence (time and batch of recurrent operators); or none.
        outputs: Number of outputs that receive a seed, or a list of names with empty ones.
        frozen: Positions of float inputs that are not differentiated.
        ort: Also run the gradient graph in float32 on ONNX Runtime.
        seeded: The only output that receives a seed.
        runner: What evaluates in float64: the reference evaluator, or ONNX Runtime where the former cannot.
        oracle: The operator in PyTorch. Its float64 autograd replaces the differences where neither evaluator has the
            operator in float64 or gets it right; the gradient graph then runs in float32 only.
        shapes: Shapes of the outputs, for operators without shape inference.
    """

    op: str
    inputs: Sequence[Any]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0
    symbolic: str = "all"
    outputs: int | list[str] = 1
    frozen: Sequence[int] = ()
    opset: int = 18
    note: str = ""
    domain: str = ""
    ort: bool = True
    seeded: int | None = None
    runner: str = "reference"
    oracle: Callable[..., Any] | None = None
    shapes: Sequence[tuple[int, ...]] = ()

    @property
    def id(self) -> str:
        shapes = "_".join("x".join(map(str, i)) if isinstance(i, tuple) else "c" for i in self.inputs if i is not None)
        keys = ",".join(f"{key}={value}" for key, value in self.attributes.items())
        return f"{self.op}-{shapes}-{keys}{self.note}".replace(" ", "")


_OPTIONS = frozenset(field.name for field in dataclasses.fields(Case)) - {"op", "inputs", "attributes"}


def case(op: str, *inputs: Any, **options: Any) -> Case:
    """A row: what is no field of `Case` is an attribute of the node."""
    known = {name: options.pop(name) for name in _OPTIONS & options.keys()}
    return Case(op, inputs, options, **known)


def ints(*values: int) -> NDArray[np.int64]:
    """An integer input."""
    return np.asarray(values, np.int64)
