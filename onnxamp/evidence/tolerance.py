"""What a candidate may differ by, and the defaults by precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from onnxamp.errors import UsageError
from onnxamp.evidence.metrics import Difference


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds for every output of every sample; None leaves a measure unbounded.

    Raises:
        UsageError: A bound that the measure cannot reach.

    Attributes:
        cosine: Least cosine similarity.
        snr: Least signal-to-noise ratio in dB.
        max_abs: Largest absolute error.
        max_rel: Largest error as a share of the largest reference value.
        nonfinite: Most elements that are NaN or infinite on one side only.
        integers: Largest share of unequal elements of integer, boolean and string outputs that no tie explains.
        top1: Least share of rows with the largest element in the same place.
        kl: Largest mean Kullback-Leibler divergence of rows, in nats.
    """

    cosine: float | None = None
    snr: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    nonfinite: int | None = 0
    integers: float | None = 0.0
    top1: float | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            bound = getattr(self, name)
            if bound is not None and not low <= bound <= high:
                between = f"between {low:g} and {high:g}" if math.isfinite(high) else f"{low:g} or more"
                raise UsageError(f"The bound {name}={bound:.12g} says nothing: {name} is {between}.")

    def replaced(self, changes: Mapping[str, float | None]) -> Tolerance:
        """These bounds with some replaced.

        Raises:
            UsageError: An unknown measure, or a bound that it cannot reach.
        """
        for name in changes:
            if name not in MEASURES:
                raise UsageError(f"Unknown measure {name!r}: use one of {', '.join(MEASURES)}.")
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # floats by name

    @property
    def noise(self) -> float | None:
        """The largest noise-to-signal ratio that the bounds on cosine and SNR allow, to first order; None if there are none."""
        bounds = [2 * (1 - self.cosine)] if self.cosine is not None else []
        bounds += [10 ** (-self.snr / 10)] if self.snr is not None else []
        return min(bounds, default=None)

    def missed(self, found: Difference) -> list[str]:
        """The bounds that `found` breaks, in words."""
        share = (found.mismatches - found.ties) / max(1, found.elements)
        least = {"cosine": found.cosine, "snr": found.snr, "top1": found.top1}
        most: dict[str, float | None] = {
            "max_abs": found.max_abs,
            "max_rel": found.max_rel,
            "nonfinite": found.nonfinite,
            "integers": share,
        }
        most["kl"] = found.kl
        result = []
        for name, value in least.items():
            bound = getattr(self, name)
            if bound is not None and value is not None and not value >= bound:
                result.append(f"{name} {told(value, bound)} < {bound:.12g}")
        for name, value in most.items():
            bound = getattr(self, name)
            if bound is not None and value is not None and not value <= bound:
                result.append(f"{name} {told(value, bound)} > {bound:.12g}")
        return result

    def to_dict(self) -> dict[str, float | int | None]:
        """The bounds by name."""
        return dataclasses.asdict(self)


def told(value: float, bound: float) -> str:
    """`value` with as many digits as put it on its side of `bound`, and no fewer than 6."""
    texts = (f"{value:.{digits}g}" for digits in (6, 8, 10, 12))
    side = (value < bound, value > bound)
    return next((text for text in texts if (float(text) < bound, float(text) > bound) == side), f"{value:.17g}")


# What a measure can be.
_RANGES = {"cosine": (-1, 1), "top1": (0, 1), "integers": (0, 1)} | dict.fromkeys(
    ("max_abs", "max_rel", "kl", "nonfinite"), (0, math.inf)
)
MEASURES = tuple(field.name for field in dataclasses.fields(Tolerance))

# By the least precise float type in the candidate. A bfloat16 value has 8 bits: rounding the weights alone costs
# cosine 0.99 in some networks.
DEFAULTS = {
    "fp32": Tolerance(cosine=0.99999, snr=60.0),
    "fp16": Tolerance(cosine=0.999, snr=30.0),
    "bf16": Tolerance(cosine=0.99),
}


def parse(entries: Iterable[str]) -> dict[str, float | None]:
    """Bounds from entries such as ``cosine=0.999`` or ``snr=none``; one entry may hold several, with commas between.

    Raises:
        UsageError: An unknown measure, no number, or one that the measure cannot be.
    """
    changes: dict[str, float | None] = {}
    for entry in (part.strip() for text in entries for part in text.split(",")):
        name, _, text = entry.partition("=")
        try:
            if name not in MEASURES:
                raise ValueError
            changes[name] = None if text.lower() == "none" else float(text)
            if not math.isfinite(changes[name] or 0.0):
                raise ValueError
        except ValueError:
            raise UsageError(
                f"Tolerance {entry!r} is not MEASURE=NUMBER with one of {', '.join(MEASURES)}: write for example cosine=0.999."
            ) from None
    Tolerance().replaced(changes)
    return changes
