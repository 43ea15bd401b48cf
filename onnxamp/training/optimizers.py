"""Optimizers with the formulas, argument names and defaults of torch.optim, as pieces of reduce.onnx and update.onnx.

All arithmetic is FP32; powers of the betas are taken in FP64, once per step, in reduce.onnx.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import onnx_ir as ir

from onnxamp.errors import UsageError
from onnxamp.training.fragment import DOUBLE, FLOAT, Fragment

Values = dict[str, ir.Value]


class Optimizer(Protocol):
    """One step of an optimizer, elementwise."""

    lr: float
    weight_decay: float

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of its state arenas; they start as zeros."""

    def results(self, op: Fragment, step: ir.Value) -> Values:
        """Scalars that depend on `step`, the int64 number of the step being taken, from 1."""

    def update(
        self,
        op: Fragment,
        p: ir.Value,
        g: ir.Value,
        moments: Values,
        lr: ir.Value,
        decay: ir.Value | None,
        results: Values,
    ) -> tuple[ir.Value, Values]:
        """The new parameter and moments; `decay` is None where no group has weight decay."""


@dataclasses.dataclass(frozen=True)
class SGD:
    """g += λ·p; b = μ·b + (1−τ)·g (b = g in the first step); p −= lr·(g + μ·b if nesterov else b). torch.optim.SGD.

    Attributes:
        lr: Learning rate.
        momentum: μ.
        dampening: τ.
        weight_decay: λ.
        nesterov: Look ahead; needs momentum and no dampening.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _not_negative(
            "sgd", lr=self.lr, momentum=self.momentum, dampening=self.dampening, weight_decay=self.weight_decay
        )
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise UsageError("nesterov of sgd needs a momentum above 0 and no dampening.")

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    def results(self, op: Fragment, step: ir.Value) -> Values:
        """With dampening: the factor of g, which is 1 in the first step."""
        if not (self.momentum and self.dampening):
            return {}
        return {"fresh": op.select(op.Equal(step, 1), 1.0, 1 - self.dampening)}

    def update(
        self,
        op: Fragment,
        p: ir.Value,
        g: ir.Value,
        moments: Values,
        lr: ir.Value,
        decay: ir.Value | None,
        results: Values,
    ) -> tuple[ir.Value, Values]:
        """One step."""
        g = _decayed(op, p, g, decay)
        if not self.momentum:
            return op.Sub(p, op.Mul(g, lr)), {}
        fresh = op.Mul(g, results["fresh"]) if self.dampening else g
        buffer = op.Add(op.Mul(moments["momentum_buffer"], self.momentum), fresh)
        direction = op.Add(g, op.Mul(buffer, self.momentum)) if self.nesterov else buffer
        return op.Sub(p, op.Mul(direction, lr)), {"momentum_buffer": buffer}


@dataclasses.dataclass(frozen=True)
class Adam:
    """m = β₁·m + (1−β₁)·g; v = β₂·v + (1−β₂)·g²; p −= lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε). torch.optim.Adam.

    Attributes:
        lr: Learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ, added to the gradient as λ·p.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", _betas(self.betas))
        _not_negative(type(self).__name__.lower(), lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def moments(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def results(self, op: Fragment, step: ir.Value) -> Values:
        """√(1−β₂ᵗ)/(1−β₁ᵗ) and ε·√(1−β₂ᵗ): with them the bias corrections cost no pass over the parameters."""
        count = op.Cast(step, to=DOUBLE)
        first, second = (op.Sub(1.0, op.Pow(op.number(beta, DOUBLE), count)) for beta in self.betas)
        return {
            "step_factor": op.Cast(op.Div(op.Sqrt(second), first), to=FLOAT),
            "scaled_eps": op.Cast(op.Mul(op.Sqrt(second), op.number(self.eps, DOUBLE)), to=FLOAT),
        }

    def update(
        self,
        op: Fragment,
        p: ir.Value,
        g: ir.Value,
        moments: Values,
        lr: ir.Value,
        decay: ir.Value | None,
        results: Values,
    ) -> tuple[ir.Value, Values]:
        """One step."""
        return self._moved(op, p, _decayed(op, p, g, decay), moments, lr, results)

    def _moved(
        self, op: Fragment, p: ir.Value, g: ir.Value, moments: Values, lr: ir.Value, results: Values
    ) -> tuple[ir.Value, Values]:
        beta1, beta2 = self.betas
        m = op.Add(op.Mul(moments["exp_avg"], beta1), op.Mul(g, 1 - beta1))
        v = op.Add(op.Mul(moments["exp_avg_sq"], beta2), op.Mul(op.Mul(g, g), 1 - beta2))
        root = op.Add(op.Sqrt(v), results["scaled_eps"])
        step = op.Mul(op.Div(m, root), op.Mul(lr, results["step_factor"]))
        return op.Sub(p, step), {"exp_avg": m, "exp_avg_sq": v}


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """p −= lr·λ·p, then Adam without decay in the gradient. torch.optim.AdamW.

    Attributes:
        lr: Learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
    """

    weight_decay: float = 0.01

    def update(
        self,
        op: Fragment,
        p: ir.Value,
        g: ir.Value,
        moments: Values,
        lr: ir.Value,
        decay: ir.Value | None,
        results: Values,
    ) -> tuple[ir.Value, Values]:
        """One step."""
        shrunk = p if decay is None else op.Mul(p, op.Sub(1.0, op.Mul(lr, decay)))
        return self._moved(op, shrunk, g, moments, lr, results)


@dataclasses.dataclass(frozen=True)
class RMSprop:
    """v = α·v + (1−α)·g²; d = g / (√(v − ḡ²) + ε) with ḡ = 0 unless centered; p −= lr·d, or of μ·b + d. torch.optim.RMSprop.

    Attributes:
        lr: Learning rate.
        alpha: α.
        eps: ε.
        weight_decay: λ, added to the gradient as λ·p.
        momentum: μ.
        centered: Subtract the square of the running mean ḡ of the gradient.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        _not_negative(
            "rmsprop",
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
        )

    @property
    def moments(self) -> tuple[str, ...]:
        """Mean square, and what momentum and centering need."""
        return (
            "square_avg",
            *(("grad_avg",) if self.centered else ()),
            *(("momentum_buffer",) if self.momentum else ()),
        )

    def results(self, op: Fragment, step: ir.Value) -> Values:
        """None."""
        return {}

    def update(
        self,
        op: Fragment,
        p: ir.Value,
        g: ir.Value,
        moments: Values,
        lr: ir.Value,
        decay: ir.Value | None,
        results: Values,
    ) -> tuple[ir.Value, Values]:
        """One step."""
        g = _decayed(op, p, g, decay)
        square = op.Add(op.Mul(moments["square_avg"], self.alpha), op.Mul(op.Mul(g, g), 1 - self.alpha))
        new: Values = {"square_avg": square}
        spread = square
        if self.centered:
            mean = op.Add(op.Mul(moments["grad_avg"], self.alpha), op.Mul(g, 1 - self.alpha))
            new["grad_avg"] = mean
            spread = op.Sub(square, op.Mul(mean, mean))
        direction = op.Div(g, op.Add(op.Sqrt(spread), self.eps))
        if self.momentum:
            direction = op.Add(op.Mul(moments["momentum_buffer"], self.momentum), direction)
            new["momentum_buffer"] = direction
        return op.Sub(p, op.Mul(direction, lr)), new


OPTIMIZERS: dict[str, type] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop}


def _decayed(op: Fragment, p: ir.Value, g: ir.Value, decay: ir.Value | None) -> ir.Value:
    return g if decay is None else op.Add(g, op.Mul(p, decay))


def _betas(betas: tuple[float, float]) -> tuple[float, float]:
    pair = tuple(float(beta) for beta in betas)
    if len(pair) != 2 or not all(0.0 <= beta < 1.0 for beta in pair):
        raise UsageError(f"betas is {betas}: it must be two numbers of at least 0 and below 1.")
    return pair


def _not_negative(optimizer: str, **values: float) -> None:
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{name} of {optimizer} is {value}: it must be a finite number of at least 0.")
