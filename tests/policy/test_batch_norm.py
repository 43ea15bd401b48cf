"""BatchNormalization between convolutions: 16-bit where it is one line a channel that 16 bits hold, else an fp32 island."""

from __future__ import annotations

import numpy as np
import pytest

TEXT = """g (float[1,2,4,4] x) => (float[1,2,4,4] y)
<float[2,2,1,1] w = {{1,2,3,4}}, float[2] s = {{{scale}}}, float[2] b = {{0.5,-0.5}}, float[2] m = {{{mean}}}, float[2] v = {{{variance}}}>
{{ h = Conv(x, w)  n = BatchNormalization <epsilon = {epsilon}{more}> (h, s, b, m, v)  y = Conv(n, w) }}"""
PLAIN = {"scale": "1.3,0.7", "mean": "0.1,-0.2", "variance": "0.9,1.7", "epsilon": "0.00001", "more": ""}


@pytest.mark.parametrize(
    ("changed", "options", "expected"),
    [
        ({}, {}, "fp16"),
        ({}, {"level": "O1"}, "fp16"),
        ({}, {"opset": 9}, "fp16"),
        ({}, {"target": "any", "dtype": "bf16", "opset": 22}, "bf16"),
        ({"variance": "0.000001,1.7", "epsilon": "0.001"}, {}, "fp16"),
        ({"scale": "0.00001,0.7"}, {}, "fp16"),  # a pruned channel
        ({"variance": "0.000001,1.7", "epsilon": "0.000000001"}, {}, "fp32"),
        ({"variance": "98000000.0,1.7"}, {}, "fp32"),
        ({"mean": "70000.0,0.1"}, {}, "fp32"),
        ({}, {"level": "OD"}, "fp32"),
        ({}, {"weights": "cast"}, "fp32"),  # the parameters are about to be trained
        ({}, {"target": "ort-cpu"}, "fp32"),
        ({}, {"keep_op": ("BatchNormalization",)}, "fp32"),
    ],
)
def test_what_a_batch_normalization_becomes(codes_of, changed, options, expected):
    precision, _ = codes_of(TEXT.format(**PLAIN | changed), **options)["n"]
    assert precision == expected


def test_batch_statistics_stay_fp32(codes_of):
    """In training form the statistics are reductions: an attribute says so from opset 14 on, further results do before."""
    text = TEXT.format(**PLAIN | {"more": ", training_mode = 1"})
    assert codes_of(text.replace("n = Batch", "n, rm, rv = Batch"), target="any")["n"] == ("fp32", "AMP101")
    text = TEXT.format(**PLAIN)
    for results in ("n, rm, rv", "n, rm, rv, sm, sv"):
        assert codes_of(text.replace("n = Batch", f"{results} = Batch"), opset=9)["n"] == ("fp32", "AMP101")


def test_rounding_moves_a_line_less_than_two_steps():
    """The bound that the rule allows is what rounding four ordinary parameters can do."""
    low, eps = np.float16, 2.0**-10
    rng = np.random.default_rng(0)
    scale, mean = rng.normal(size=(2, 4096))
    variance = rng.uniform(0.01, 10, 4096)
    slope = scale / np.sqrt(variance + 1e-5)
    rounded = scale.astype(low) / np.sqrt(variance.astype(low).astype(float) + 1e-5)
    assert np.all(np.abs(rounded - slope) <= 2 * eps * np.abs(slope) + 1e-7)
    assert np.max(np.abs(rounded - slope) / np.abs(slope)) > eps / 2  # and not far less
    assert np.all(np.abs(rounded * mean.astype(low) - slope * mean) <= 2 * eps * np.abs(slope * mean) + 1e-7)
