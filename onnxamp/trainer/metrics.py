"""The metrics that there are by name, over a whole data set, summed batch by batch in float64.

A metric sees the model's output and the labels of one batch after the other and gives one number at the end; batches of any size give
the number that one big batch gives.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from onnxamp.errors import UsageError
from onnxamp.trainer.classification import F1, Perplexity, Precision, Recall, TopK
from onnxamp.trainer.metric import Array, Metric
from onnxamp.trainer.regression import MAE, MSE, R2


class Function(Metric):
    """A user's `function(output, labels) -> float` per batch, averaged over the rows."""

    def __init__(self, function: Callable[[Array, Array], float], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", "metric"))
        super().__init__()

    def reset(self) -> None:
        self._sum = self._rows = 0.0

    def update(self, output: Array, labels: Array, weights: Array | None = None) -> None:
        self._sum += float(self.function(output, labels)) * len(labels)
        self._rows += len(labels)

    def value(self) -> float:
        return self._sum / self._rows if self._rows else math.nan


_MAKERS: dict[str, Callable[..., Metric]] = {
    "accuracy": TopK,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "precision-micro": functools.partial(Precision, "micro"),
    "recall-micro": functools.partial(Recall, "micro"),
    "f1-micro": functools.partial(F1, "micro"),
    "mse": MSE,
    "mae": MAE,
    "r2": R2,
    "perplexity": Perplexity,
}
NAMES = (*_MAKERS, "topK")


def metric(
    which: str | Metric | Callable[[Array, Array], float],
    *,
    ignore_index: int = -100,
    binary: bool = False,
    probabilities: bool = False,
    class_axis: int | None = None,
) -> Metric:
    """The metric meant: an object as it is, a function wrapped, a name looked up (`top5` is `TopK(5)`).

    Args:
        which: An object, a function `(output, labels) -> float`, or one of `NAMES`.
        ignore_index: Labels of this value do not count (classification by name).
        binary: Float labels of the output's shape are 0 and 1 each, not class probabilities (classification by name).
        probabilities: The output ends in a softmax or sigmoid (classification by name).
        class_axis: The class dimension of the output, that of the loss; None if no loss tells (classification by name).

    Raises:
        UsageError: No metric has this name, or it is something else.
    """
    if isinstance(which, Metric):
        return which
    if not isinstance(which, str):
        if isinstance(which, type) or not callable(which):
            raise UsageError(f"A metric is a name, a function of output and labels, or a Metric, not {which!r}.")
        return Function(which)
    top = re.fullmatch(r"top-?([1-9]\d*)", which)
    if top is None and which not in _MAKERS:
        near = difflib.get_close_matches(which, NAMES, 1)
        question = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"There is no metric {which!r}{question} Known: {', '.join(NAMES)}.")
    make = functools.partial(TopK, int(top[1])) if top else _MAKERS[which]
    if which in ("mse", "mae", "r2"):
        return make()
    return make(ignore_index=ignore_index, binary=binary, probabilities=probabilities, class_axis=class_axis)


def metrics_of(wanted: Iterable[str | Metric | Callable[[Array, Array], float]], **options: Any) -> list[Metric]:
    """The metrics meant, in their order; `options` as of `metric`.

    Raises:
        UsageError: One of them is none, or a name stands there by itself.
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise UsageError(f"Metrics are given as a list, not as {wanted!r}: write metrics=[{wanted!r}].")
    return [metric(which, **options) for which in wanted]
