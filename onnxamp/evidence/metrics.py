"""How far one array is from another, in the measures that verification speaks of."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxamp.errors import DataError

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The candidate's values against the reference's; float measures are over elements that are finite in both.

    Where no element is finite in both and the two differ, these are over nothing: NaN, which misses every bound.

    Attributes:
        elements: Number of elements.
        max_abs: max |r − c|.
        max_rel: max |r − c| / max |r|: the largest error as a share of the largest value.
        cosine: Σrc / √(Σr² Σc²); 1 where both are zero everywhere.
        snr: 10 log₁₀(Σr² / Σ(r − c)²) in dB; inf where they are equal.
        nan: Elements that are NaN in the candidate only.
        inf: Elements that are infinite in the candidate only, or of the other sign.
        lost: Elements that are not finite in the reference only.
        mismatches: Unequal elements of an integer, boolean or string output.
        ties: Those of them that a tie in the reference's scores explains (see `onnxamp.evidence.ties`).
        discrete: The output holds integers, booleans or strings: only `mismatches` and `ties` say something.
        top1: Share of rows (last axis) whose largest element is in the same place; None where there are no rows.
        kl: Mean over rows of Σ p log(p / q) in nats, where p and q are the rows of both if they are distributions, else their softmax; None
            if not asked for or where there are no rows.
    """

    elements: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    snr: float = math.inf
    nan: int = 0
    inf: int = 0
    lost: int = 0
    mismatches: int = 0
    ties: int = 0
    discrete: bool = False
    top1: float | None = None
    kl: float | None = None

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite on one side only."""
        return self.nan + self.inf + self.lost

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return not (self.max_abs or self.nonfinite or self.mismatches)


def difference(reference: Any, candidate: Any, *, with_kl: bool = False) -> Difference:
    """Compare two results of a session: arrays, or (nested) lists and maps of them.

    Args:
        reference: The reference's.
        candidate: The candidate's.
        with_kl: Whether to compute `Difference.kl` too, where both are single arrays.

    Raises:
        DataError: The structures or shapes differ.
    """
    pairs = list(_leaves(reference, candidate))
    parts = [_compare(*pair) for pair in pairs]
    if len(parts) == 1:
        return dataclasses.replace(parts[0], kl=_kl(*pairs[0])) if with_kl and is_float(pairs[0][0]) else parts[0]
    floats = [(r, c) for r, c in pairs if is_float(r)]
    joined = (
        _compare(*(np.concatenate([np.ravel(side) for side in sides]) for sides in zip(*floats, strict=True)))
        if floats
        else Difference(0, discrete=bool(parts))
    )
    return dataclasses.replace(
        joined,
        elements=sum(part.elements for part in parts),
        mismatches=sum(part.mismatches for part in parts),
        top1=None,
    )


def is_float(array: Array) -> bool:
    """Whether `array` holds floats, bfloat16 and the like included."""
    return array.dtype.kind == "f" or (array.dtype.kind == "V" and array.dtype.names is None)


def _leaves(reference: Any, candidate: Any) -> Iterator[tuple[Array, Array]]:
    if isinstance(reference, dict) and isinstance(candidate, dict):
        if reference.keys() != candidate.keys():
            raise DataError("reference and candidate give maps with different keys")
        reference, candidate = ([side[key] for key in reference] for side in (reference, candidate))
    if isinstance(reference, list) or isinstance(candidate, list):
        if not (isinstance(reference, list) and isinstance(candidate, list)) or len(reference) != len(candidate):
            raise DataError("reference and candidate give sequences of different length")
        for pair in zip(reference, candidate, strict=True):
            yield from _leaves(*pair)
        return
    if reference is None and candidate is None:
        return
    r, c = np.asarray(reference), np.asarray(candidate)
    if r.shape != c.shape:
        raise DataError(f"the reference's shape is {list(r.shape)}, the candidate's {list(c.shape)}")
    if is_float(r) != is_float(c):
        raise DataError(f"the reference's type is {r.dtype}, the candidate's {c.dtype}")
    yield r, c


def _compare(reference: Array, candidate: Array) -> Difference:
    if not is_float(reference):
        return Difference(reference.size, mismatches=int(np.count_nonzero(reference != candidate)), discrete=True)
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    fine_r, fine_c = np.isfinite(r), np.isfinite(c)
    nan = inf = lost = 0
    if not (fine_r.all() and fine_c.all()):
        nan = int(np.count_nonzero(np.isnan(c) & ~np.isnan(r)))
        inf = int(np.count_nonzero(np.isinf(c) & (r != c) & ~np.isnan(r)))
        lost = int(np.count_nonzero(fine_c & ~fine_r)) + int(np.count_nonzero(np.isinf(c) & np.isnan(r)))
        both = fine_r & fine_c
        rf, cf = r[both], c[both]
        if not rf.size and nan + inf + lost:
            measures = dict.fromkeys(("max_abs", "max_rel", "cosine", "snr"), math.nan)
            return Difference(r.size, **measures, top1=_top1(r, c), nan=nan, inf=inf, lost=lost)  # type: ignore[arg-type]
    else:
        rf, cf = np.ravel(r), np.ravel(c)
    error = rf - cf
    max_abs = float(np.abs(error).max(initial=0.0))
    largest = float(np.abs(rf).max(initial=0.0))
    return Difference(
        elements=r.size,
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else (0.0 if max_abs == 0 else math.inf),
        cosine=_cosine(rf, cf),
        snr=_snr(rf, error),
        top1=_top1(r, c),
        nan=nan,
        inf=inf,
        lost=lost,
    )


def _cosine(r: Array, c: Array) -> float:
    # Scaled first: squares of float64 values near the ends of their range would overflow or vanish.
    scale_r, scale_c = (float(np.abs(side).max(initial=0.0)) for side in (r, c))
    if scale_r == 0 or scale_c == 0:
        return 1.0 if scale_r == scale_c else 0.0
    r, c = r / scale_r, c / scale_c
    return float(np.clip(r @ c / math.sqrt(float(r @ r) * float(c @ c)), -1, 1))


def _snr(r: Array, error: Array) -> float:
    scale_r, scale_e = (float(np.abs(side).max(initial=0.0)) for side in (r, error))
    if scale_e == 0:
        return math.inf
    if scale_r == 0:
        return -math.inf
    r, error = r / scale_r, error / scale_e
    scales = 20 * (math.log10(scale_r) - math.log10(scale_e))
    return scales + 10 * math.log10(float(r @ r) / float(error @ error))


def _top1(r: Array, c: Array) -> float | None:
    if r.ndim < 2 or r.shape[-1] < 2 or not r.size:
        return None
    # The largest of a row with a NaN is that: no match for a row without.
    same = (r.argmax(-1) == c.argmax(-1)) & (np.isnan(r).any(-1) == np.isnan(c).any(-1))
    return float(np.mean(same))


def _kl(reference: Array, candidate: Array) -> float | None:
    if reference.ndim < 2 or reference.shape[-1] < 2 or not reference.size:
        return None
    rows = [side.astype(np.float64).reshape(-1, side.shape[-1]) for side in (reference, candidate)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return _divergence(*rows)


def _divergence(reference: Array, candidate: Array) -> float:
    rows = [reference, candidate]
    if (reference >= 0).all() and np.allclose(reference.sum(-1), 1, atol=1e-3):
        # Rounding may leave a probability at zero, whose logarithm would say nothing of how small it is.
        p, q = (np.maximum(side, np.finfo(np.float32).tiny) for side in rows)
        logs = [np.log(side / side.sum(-1, keepdims=True)) for side in (p, q)]
    else:
        shifted = [side - side.max(-1, keepdims=True) for side in rows]
        logs = [side - np.log(np.exp(side).sum(-1, keepdims=True)) for side in shifted]
    if any(np.isnan(side).any() for side in logs):  # NaN or +inf among the scores: there is no distribution
        return math.inf
    p, q = logs
    possible = p > -np.inf  # a class with probability 0 (a masked score) adds nothing
    terms = np.where(possible, np.exp(p) * (np.where(possible, p, 0) - np.where(possible, q, 0)), 0)
    return max(0.0, float(terms.sum(-1).mean()))


def worse(a: Difference, b: Difference) -> Difference:
    """The worst of both in every measure: what a summary over samples says."""
    rows = [part.top1 for part in (a, b) if part.top1 is not None]
    diverged = [part.kl for part in (a, b) if part.kl is not None]
    return Difference(
        elements=a.elements + b.elements,
        max_abs=float(np.maximum(a.max_abs, b.max_abs)),  # numpy's pass NaN on
        max_rel=float(np.maximum(a.max_rel, b.max_rel)),
        cosine=float(np.minimum(a.cosine, b.cosine)),
        snr=float(np.minimum(a.snr, b.snr)),
        nan=a.nan + b.nan,
        inf=a.inf + b.inf,
        lost=a.lost + b.lost,
        mismatches=a.mismatches + b.mismatches,
        ties=a.ties + b.ties,
        discrete=a.discrete and b.discrete,
        top1=min(rows) if rows else None,
        kl=max(diverged) if diverged else None,
    )


def worst_of(found: Iterable[Difference]) -> Difference:
    """The worst of several outputs: float measures of those that hold floats, counts of all.

    Raises:
        ValueError: There are none.
    """
    found = list(found)
    floats = [part for part in found if not part.discrete] or found
    total = functools.reduce(worse, floats)
    return dataclasses.replace(
        total, mismatches=sum(part.mismatches for part in found), ties=sum(part.ties for part in found)
    )
