"""Rules that keep a node in fp32, each a function that puts marks; in the order in which they claim a node."""

from __future__ import annotations

from collections.abc import Callable

from onnxamp.policy.marks import Marks
from onnxamp.policy.rules.carried import carried_constants
from onnxamp.policy.rules.constants import lossy_weights, out_of_range
from onnxamp.policy.rules.detection import boxes, long_reductions
from onnxamp.policy.rules.distances import distances
from onnxamp.policy.rules.ids import float_ids
from onnxamp.policy.rules.norms import norms
from onnxamp.policy.rules.quantized import integer_sums, quantized_heavy
from onnxamp.policy.rules.sensitive import sensitive
from onnxamp.policy.rules.shapes import shape_arithmetic
from onnxamp.policy.rules.small import epsilons
from onnxamp.policy.rules.softmax import mask_sums, softmaxes
from onnxamp.policy.rules.spread import expanded, large_factors, observed_ranges, user_islands

Rule = Callable[[Marks], None]

# Legality in the wider sense: no user and no level goes against them.
BINDING: tuple[Rule, ...] = (shape_arithmetic, quantized_heavy, integer_sums, out_of_range, carried_constants)
# Everything else.
NUMERICAL: tuple[Rule, ...] = (
    observed_ranges,
    norms,
    softmaxes,
    distances,
    epsilons,
    float_ids,
    boxes,
    long_reductions,
    lossy_weights,
    mask_sums,
    large_factors,
    user_islands,
    sensitive,
    expanded,
)
