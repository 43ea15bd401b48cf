"""Sizes for unknown dimensions: names, and the expressions that shape inference writes, ``2*floor(height/2 - 1/2) + 2``."""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

_NAME = re.compile(r"[A-Za-z_][\w.]*")
# With the number of arguments; None for two or more.
_FUNCTIONS: dict[str, tuple[Callable[..., float], int | None]] = {
    "floor": (math.floor, 1),
    "ceiling": (math.ceil, 1),
    "Max": (max, None),
    "Min": (min, None),
    "Mod": (operator.mod, 2),
    "Abs": (abs, 1),
}
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # in floats, which overflow: a file may ask for 9**9**9
}

FIRST_DIM, OTHER_DIM = 1, 64
# For others where the usual size does not do: a window that is longer, or a fixed one.
ALTERNATIVES = (512, 224, 1024, 16, 4096)


class Sizes:
    """Sizes for the dimensions of one model, each name one number.

    Attributes:
        dims: Sizes by name. A name not given is added when first seen: 1 if it then leads a shape, else `other`. Expressions of names
            are evaluated.
        other: The size of unknown dimensions that lead no shape.
    """

    def __init__(self, given: Mapping[str, int] | None = None, other: int = OTHER_DIM) -> None:
        self.dims = dict(given or {})
        self.other = other

    def size(self, dim: int | ir.SymbolicDim, axis: int) -> int:
        """The size of a dimension at position `axis` of a shape."""
        if isinstance(dim, int) and dim >= 0:
            return dim
        default = FIRST_DIM if axis == 0 else self.other
        if isinstance(dim, int) or dim.value is None:  # some exporters write -1 for a dimension that they do not know
            return default
        for name in names(dim.value):
            self.dims.setdefault(name, default)
        return evaluate(dim.value, self.dims, default)

    def elements(self, shape: Iterable[int | ir.SymbolicDim]) -> int:
        """The number of elements of a tensor of this shape."""
        return math.prod(self.size(dim, axis) for axis, dim in enumerate(shape))


def known(values: Iterable[ir.Value]) -> set[str]:
    """The names in the shapes of values: those that a size can be given for."""
    dims = (dim.value for value in values for dim in value.shape or () if not isinstance(dim, int))
    return {name for dim in dims if dim is not None for name in names(dim)}


def fitting(values: Iterable[ir.Value], given: Mapping[str, int] | None = None) -> Sizes:
    """Sizes with which no value is empty: the usual ones, else the first of `ALTERNATIVES` with which the fewest dimensions are.

    A sound of 64 samples, say, is shorter than the window of the first convolution, and every size behind it would be below 1.
    """
    free = dict.fromkeys(
        (dim.value, axis)
        for value in values
        for axis, dim in enumerate(value.shape or ())
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    )
    empty: dict[int, int] = {}
    for other in (OTHER_DIM, *ALTERNATIVES):
        sizes = Sizes(given, other)
        empty[other] = sum(sizes.size(ir.SymbolicDim(text), axis) == 0 for text, axis in free)
        if not empty[other]:
            break
    return Sizes(given, min(empty, key=empty.__getitem__))


@functools.lru_cache(maxsize=4096)
def names(expression: str) -> tuple[str, ...]:
    """The dimension names in an expression; a text that is no expression is a name itself."""
    if _tree(expression) is None:
        return (expression,)
    return tuple(dict.fromkeys(name for name in _NAME.findall(expression) if name not in _FUNCTIONS))


def evaluate(expression: str, sizes: Mapping[str, int], default: int) -> int:
    """The size of a dimension, at least 0, given those of its names; `default` for an expression that has no value."""
    tree = _tree(expression)
    if tree is None:
        return sizes[expression]
    try:
        return max(0, int(_value(tree, {_key(name): size for name, size in sizes.items()})))
    except (ArithmeticError, ValueError, KeyError, RecursionError):
        return default


@functools.lru_cache(maxsize=4096)
def _tree(expression: str) -> ast.expr | None:
    """The parsed expression, or None if the text is a plain name or something else."""
    text = _NAME.sub(lambda match: match[0] if match[0] in _FUNCTIONS else _key(match[0]), expression)
    try:
        tree = ast.parse(text, mode="eval").body
        return tree if not isinstance(tree, ast.Name) and _understood(tree) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last from a parser whose stack is full
        return None


def _key(name: str) -> str:
    return f"d_{name.replace('.', '_dot_')}"


def _understood(tree: ast.expr) -> bool:
    if isinstance(tree, ast.BinOp):
        if isinstance(tree.op, ast.Div) and isinstance(tree.right, ast.Name):
            return False  # a name with slashes
        return type(tree.op) in _OPERATIONS and _understood(tree.left) and _understood(tree.right)
    if isinstance(tree, ast.UnaryOp):
        return isinstance(tree.op, ast.USub) and _understood(tree.operand)
    if isinstance(tree, ast.Call):
        if not isinstance(tree.func, ast.Name) or tree.func.id not in _FUNCTIONS or tree.keywords:
            return False
        _, count = _FUNCTIONS[tree.func.id]
        fits = len(tree.args) == count if count is not None else len(tree.args) > 1
        return fits and all(_understood(argument) for argument in tree.args)
    return isinstance(tree, ast.Name) or (isinstance(tree, ast.Constant) and isinstance(tree.value, int | float))


def _value(tree: ast.expr, sizes: Mapping[str, float]) -> float:
    if isinstance(tree, ast.BinOp):
        return _OPERATIONS[type(tree.op)](_value(tree.left, sizes), _value(tree.right, sizes))
    if isinstance(tree, ast.UnaryOp):
        return -_value(tree.operand, sizes)
    if isinstance(tree, ast.Call):
        assert isinstance(tree.func, ast.Name)
        function, _ = _FUNCTIONS[tree.func.id]
        return function(*[_value(argument, sizes) for argument in tree.args])
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    assert isinstance(tree, ast.Constant)
    assert isinstance(tree.value, int | float)
    return tree.value
