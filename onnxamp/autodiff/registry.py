"""The table of gradient rules: one function for each operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx_ir as ir

Gradients = Sequence[ir.Value | None]
RuleFunction = Callable[..., Gradients]
_F = TypeVar("_F", bound=RuleFunction)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one operator is differentiated.

    Attributes:
        function: ``function(op, node, *gradients)``: the builder, the forward node, the gradient of each of its outputs
            (None where an output has none); returns the gradient of each input, None for those that have none.
        inputs: Positions of the inputs that can have a gradient; None means all float inputs.
        zero: Positions of float inputs whose derivative is zero wherever it exists. Any other float input that is not among
            `inputs` has no gradient *rule*: a gradient with respect to what it depends on is refused.
        broadcast: The operator broadcasts its inputs; the rule returns gradients of the output's shape, and the walk
            sums them back to the inputs' shapes.
    """

    function: RuleFunction
    inputs: frozenset[int] | None = None
    broadcast: bool = False
    zero: frozenset[int] = frozenset()

    def lacks(self, position: int) -> bool:
        """Whether a float input at `position` may have a gradient that the rule does not give."""
        return self.inputs is not None and position not in self.inputs and position not in self.zero


RULES: dict[tuple[str, str], Rule] = {}

#: Operators whose derivative is zero or undefined wherever it exists: nothing flows back through them.
ZERO_GRADIENT: set[tuple[str, str]] = {
    ("", name)
    for name in [
        "And",
        "ArgMax",
        "ArgMin",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "Ceil",
        "ConstantOfShape",
        "Equal",
        "EyeLike",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Hardmax",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "NonMaxSuppression",
        "NonZero",
        "Not",
        "Or",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "Round",
        "Shape",
        "Sign",
        "Size",
        "Xor",
        "Multinomial",
        "QuantizeLinear",
        "StringNormalizer",
    ]
}


def gradient(
    op: str,
    domain: str = "",
    *,
    inputs: Sequence[int] | None = None,
    broadcast: bool = False,
    zero: Sequence[int] = (),
) -> Callable[[_F], _F]:
    """Register the decorated function as the gradient rule of an operator; a later rule replaces an earlier one.

    The function is called as ``rule(op, node, *gradients)``: `op` is the builder (`op.Mul(a, b)` appends a node and
    gives its output), `node` the forward node, then one gradient per output (None where an output has none). It returns
    one gradient per input, None where there is none, and may return fewer entries than there are inputs.

    Args:
        op: Operator type, such as ``"MatMul"``.
        domain: Its domain; empty for standard operators.
        inputs: Positions that can have a gradient; all float inputs when None. A gradient that would have to go through another
            float input is refused, never left out.
        zero: Positions of float inputs through which nothing flows, because the derivative is zero wherever it exists.
        broadcast: Set it when the operator broadcasts its inputs and the rule returns gradients of the output's shape.

    Example::

        @onnxamp.autodiff.gradient("Cube", domain="com.example")
        def cube(op, node, g):
            \"\"\"d(x³) = 3·x²·dx.\"\"\"
            x = node.inputs[0]
            return [op.Mul(op.Mul(g, 3.0), op.Mul(x, x))]
    """

    def register(function: _F) -> _F:
        positions = None if inputs is None else frozenset(inputs)
        RULES[_key(domain, op)] = Rule(function, positions, broadcast, frozenset(zero))
        return function

    return register


def _key(domain: str, op_type: str) -> tuple[str, str]:
    return ("" if domain == "ai.onnx" else domain, op_type)


def rule_of(node: ir.Node) -> Rule | None:
    """The rule of a node's operator, or None."""
    return RULES.get(_key(node.domain, node.op_type))


def stops(node: ir.Node) -> bool:
    """Whether the operator's derivative is zero wherever it exists."""
    return _key(node.domain, node.op_type) in ZERO_GRADIENT
