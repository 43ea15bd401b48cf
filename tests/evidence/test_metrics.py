"""Measures of difference against their formulas in numpy, and the bounds on them."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxamp.errors import DataError, UsageError
from onnxamp.evidence.metrics import difference, worse
from onnxamp.evidence.tolerance import DEFAULTS, Tolerance, parse


def test_formulas() -> None:
    rng = np.random.default_rng(0)
    r = rng.standard_normal((50, 7)).astype(np.float32)
    c = (r + 0.01 * rng.standard_normal(r.shape)).astype(np.float16)
    found = difference(r, c)
    a, b = r.astype(np.float64).ravel(), c.astype(np.float64).ravel()
    assert found.elements == 350
    assert found.max_abs == np.abs(a - b).max()
    assert math.isclose(found.max_rel, np.abs(a - b).max() / np.abs(a).max())
    assert math.isclose(found.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel_tol=1e-12)
    assert math.isclose(found.snr, 20 * np.log10(np.linalg.norm(a) / np.linalg.norm(a - b)), rel_tol=1e-12)
    assert found.top1 == np.mean(r.argmax(1) == c.argmax(1))
    assert found.nonfinite == found.mismatches == 0
    assert not found.exact


INF, NAN = math.inf, math.nan
COUNTS = [  # reference, candidate, (nan, inf, lost)
    ([1, 2], [1, 2], (0, 0, 0)),
    ([1, 2], [NAN, 2], (1, 0, 0)),
    ([1, 2], [INF, -INF], (0, 2, 0)),
    ([INF, 2], [INF, 2], (0, 0, 0)),
    ([INF, 2], [-INF, 2], (0, 1, 0)),
    ([NAN, 2], [NAN, 2], (0, 0, 0)),
    ([NAN, INF], [1, 1], (0, 0, 2)),
    ([INF, 2], [NAN, 2], (1, 0, 0)),
    ([NAN, 2], [INF, 2], (0, 0, 1)),
]


@pytest.mark.parametrize(("reference", "candidate", "want"), COUNTS)
def test_counts_of_what_is_not_finite(reference: list[float], candidate: list[float], want: tuple[int, ...]) -> None:
    found = difference(np.array(reference, np.float32), np.array(candidate, np.float32))
    assert (found.nan, found.inf, found.lost) == want
    assert found.exact == (sum(want) == 0)


@pytest.mark.parametrize(
    ("reference", "candidate", "cosine", "snr", "max_rel"),
    [
        ([0.0, 0], [0, 0], 1, INF, 0),
        ([0.0, 0], [1, 0], 0, -INF, INF),
        ([1.0, 0], [0, 0], 0, 0, 1),
        ([1.0, 1], [-1, -1], -1, 20 * math.log10(0.5), 2),
        ([], [], 1, INF, 0),
        ([1e200, 1e-200], [1e200, 0], 1, INF, 0),
        ([1e-30], [1.1e-30], 1, 20, 0.1),
    ],
)
def test_extremes(reference: list[float], candidate: list[float], cosine: float, snr: float, max_rel: float) -> None:
    found = difference(np.array(reference, np.float64), np.array(candidate, np.float64))
    assert found.cosine == pytest.approx(cosine)
    assert found.snr == pytest.approx(snr) or (snr == INF and found.snr > 1000)
    assert found.max_rel == pytest.approx(max_rel)


@pytest.mark.parametrize(
    ("reference", "candidate"), [([1, 2], [NAN, NAN]), ([INF, NAN], [1, 2]), ([1, NAN], [INF, NAN])]
)
def test_measures_over_no_element_are_met_by_nothing(reference: list[float], candidate: list[float]) -> None:
    found = difference(np.array([reference], np.float32), np.array([candidate], np.float32))
    measures = ("cosine", "snr", "max_abs", "max_rel")
    assert all(math.isnan(getattr(found, name)) for name in measures)
    assert not found.exact
    bounds = Tolerance(cosine=-1, snr=-1e9, max_abs=1e9, max_rel=1e9, nonfinite=None)
    assert [text.split()[0] for text in bounds.missed(found)] == ["cosine", "snr", "max_abs", "max_rel"]
    fine = difference(np.ones((1, 2)), np.ones((1, 2)))
    for worst in (worse(found, fine), worse(fine, found)):
        assert all(math.isnan(getattr(worst, name)) for name in measures)


def test_discrete_and_nested_results() -> None:
    assert difference(np.array([1, 2, 3]), np.array([1, 0, 0])).mismatches == 2
    assert difference(np.array(["a", "b"], object), np.array(["a", "c"], object)).mismatches == 1
    assert difference(np.array([True]), np.array([True])).discrete
    floats = [np.ones(3, np.float32), np.zeros(2, np.float32)]
    nested = difference([floats[0], floats[1]], [floats[0], floats[1] + 1])
    assert (nested.elements, nested.max_abs, nested.discrete) == (5, 1, False)
    maps = difference([{"a": 1.0, "b": 2.0}], [{"b": 2.5, "a": 1.0}])
    assert maps.max_abs == 0.5
    mixed = difference([np.array([1, 2]), floats[0]], [np.array([1, 3]), floats[0]])
    assert (mixed.mismatches, mixed.max_abs) == (1, 0)
    assert difference(None, None).exact
    bf16 = np.array([1.5], ml_dtypes.bfloat16)
    assert difference(np.array([1.0], np.float32), bf16).max_abs == 0.5


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(np.ones(2), np.ones(3)), (np.ones(2), np.ones(2, int)), ([np.ones(1)], []), (np.ones(1), [np.ones(1)])],
)
def test_other_structures(reference: Any, candidate: Any) -> None:
    with pytest.raises(DataError):
        difference(reference, candidate)


def test_the_worst_of_two() -> None:
    a = difference(np.array([[1.0, 2]]), np.array([[1.0, 2.5]]))
    b = difference(np.array([[1.0, 2]]), np.array([[np.nan, 1.9]]))
    both = worse(a, b)
    assert (both.max_abs, both.snr, both.nan, both.elements) == (0.5, min(a.snr, b.snr), 1, 4)
    assert both.top1 == min(a.top1, b.top1)


def test_tolerances() -> None:
    found = difference(np.array([[1.0, 2], [3, 4]]), np.array([[1.0, 2.1], [3, 4]]))
    assert not DEFAULTS["bf16"].missed(found)
    assert len(DEFAULTS["fp32"].missed(found)) == 2
    assert Tolerance(max_abs=0.05).missed(found) == ["max_abs 0.1 > 0.05"]
    assert not Tolerance(max_abs=0.2, max_rel=0.05, top1=1).missed(found)
    unequal = difference(np.arange(10), np.arange(10) * (np.arange(10) != 3))
    assert Tolerance().missed(unequal) == ["integers 0.1 > 0"]
    assert not Tolerance(integers=0.1).missed(unequal)
    bad = difference(np.array([1.0]), np.array([np.nan]))
    assert Tolerance().missed(bad) == ["nonfinite 1 > 0"]
    assert not Tolerance(nonfinite=None).missed(bad)


def test_a_value_beside_its_bound_is_told_from_it() -> None:
    near = difference(np.array([1.0, 0]), np.array([1.0, 1e-4]))
    assert Tolerance(cosine=0.9999999999).missed(near) == ["cosine 0.999999995 < 0.9999999999"]
    assert Tolerance(cosine=1).missed(near) == ["cosine 0.999999995 < 1"]
    (text,) = Tolerance(max_abs=0.1).missed(difference(np.array([1.0]), np.array([np.nextafter(1.1, 2)])))
    name, value, sign, bound = text.split()
    assert (name, sign, bound) == ("max_abs", ">", "0.1")
    assert float(value) > 0.1


def test_tolerances_as_text() -> None:
    assert parse(["cosine=0.99,snr=none", "max_abs=1e-3"]) == {"cosine": 0.99, "snr": None, "max_abs": 1e-3}
    changed = DEFAULTS["fp16"].replaced({"snr": None})
    assert (changed.cosine, changed.snr) == (0.999, None)
    for entry in ("cosine", "cosine=high", "kosine=1", "=1"):
        with pytest.raises(UsageError, match=r"cosine=0\.999"):
            parse([entry])
    for entry in (
        "cosine=1.5",
        "cosine=-2",
        "top1=-3",
        "top1=1.1",
        "integers=2",
        "kl=-1",
        "max_abs=-1e-9",
        "nonfinite=-1",
    ):
        with pytest.raises(UsageError, match=entry.partition("=")[0] + " is "):
            parse([entry])
        name, _, number = entry.partition("=")
        with pytest.raises(UsageError, match=f"{name} is "):
            Tolerance(**{name: float(number)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="kosine"):
        DEFAULTS["fp16"].replaced({"kosine": 1})


def test_divergence_of_distributions_and_of_logits() -> None:
    from scipy.special import rel_entr, softmax

    rng = np.random.default_rng(3)
    r = rng.standard_normal((5, 7))
    c = r + 0.1 * rng.standard_normal((5, 7))
    want = rel_entr(softmax(r, -1), softmax(c, -1)).sum(-1).mean()
    assert difference(r, c, with_kl=True).kl == pytest.approx(want)
    assert difference(softmax(r, -1), softmax(c, -1), with_kl=True).kl == pytest.approx(want, rel=1e-6)
    assert difference(r, c).kl is None
    assert difference(r[0], c[0], with_kl=True).kl is None


def test_divergence_with_masked_scores() -> None:
    """A score of -inf is a class with probability 0: it adds nothing, and infinity where only the candidate rules it out."""
    from scipy.special import rel_entr, softmax

    r, c = np.array([[-np.inf, 0.0, 1.0]]), np.array([[-3.0, 0.2, 1.0]])
    want = rel_entr(softmax(r, -1), softmax(c, -1)).sum()
    assert difference(r, c, with_kl=True).kl == pytest.approx(want)
    assert difference(r, r, with_kl=True).kl == 0
    assert difference(c, r, with_kl=True).kl == np.inf
    assert difference(c, np.full_like(c, np.nan), with_kl=True).kl == np.inf


def test_maps_with_other_keys_are_no_match() -> None:
    assert difference({1: np.float32(0.9), 2: np.float32(0.1)}, {2: np.float32(0.1), 1: np.float32(0.9)}).max_abs == 0
    with pytest.raises(DataError, match="different keys"):
        difference({1: np.float32(0.9)}, {7: np.float32(0.9)})
