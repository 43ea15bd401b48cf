"""Loss scales against the frameworks' own rules, over sequences of good, bad and empty windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnxamp.errors import UsageError
from onnxamp.training import DynamicLossScale, FixedLossScale, choices
from onnxamp.training.fragment import BOOL, FLOAT, INT64
from onnxamp.training.scaler import PRESETS, ScaleState

GOOD, BAD, EMPTY = "good", "bad", "empty"


@pytest.fixture
def scales(prepare):
    """Scale before each event, and after the last."""

    def run(rule, events):
        def define(op):
            state = ScaleState(op.input("s", FLOAT), op.input("g", INT64), op.input("h", INT64))
            after = rule.next(op, state, op.input("bad", BOOL), op.input("empty", BOOL))
            return [after.scale, after.growth_tracker, after.hysteresis]

        update = prepare(define, 21)
        scale, tracker, hysteresis = rule.initial
        scale = np.float32(scale)
        seen = [float(scale)]
        for event in events:
            scale, tracker, hysteresis = update(
                s=scale, g=tracker, h=hysteresis, bad=event == BAD, empty=event == EMPTY
            )
            seen.append(float(scale))
        return seen

    return run


def _events(seed, count=60):
    """Runs of good windows with bad ones between, so that every branch is taken."""
    rng = np.random.default_rng(seed)
    return [BAD if rng.random() < 0.25 else GOOD for _ in range(count)]


def _pytorch(events, init, interval):
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen = [init]
    for event in events:
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.tensor([1.0, np.inf if event == BAD else 1.0])
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def _paddle(events, init, interval, shrink_after=1):
    """AmpScaler._update of Paddle 3.3."""
    scale, good, bad, seen = init, 0, 0, [init]
    for event in events:
        if event == BAD:
            good, bad = 0, bad + 1
            if bad == shrink_after:
                scale, bad = scale * 0.5, 0
        else:
            bad, good = 0, good + 1
            if good == interval:
                scale, good = scale * 2.0, 0
        seen.append(scale)
    return seen


def _mindspore(events, init, window):
    """DynamicLossScaler.adjust of MindSpore 2.10."""
    scale, counter, seen = init, 0, [init]
    for event in events:
        finite = event == GOOD
        if finite:
            scale = scale * 2 if counter == window - 1 and np.isfinite(np.float32(scale) * 2) else scale
        else:
            scale = max(1, scale / 2)
        counter = ((counter + 1) % window) * finite
        seen.append(scale)
    return seen


def _deepspeed(events, init, window, hysteresis, floor, consecutive=False):
    """DynamicLossScaler.update_scale of DeepSpeed."""
    scale, left, last, seen = init, hysteresis, -1, [init]
    for now, event in enumerate(events):
        if event == BAD:
            if left == 1:
                scale = max(scale / 2, floor)
            else:
                left -= 1
            last = now
        else:
            if consecutive:
                left = hysteresis
            since = now - last - 1
            if since > 0 and since % window == 0:
                if not consecutive:
                    left = hysteresis
                scale *= 2
        seen.append(scale)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_pytorch(scales, seed):
    events = _events(seed)
    rule = DynamicLossScale(init_scale=1024.0, growth_interval=3, floor=0.0, ceiling=None)
    assert scales(rule, events) == _pytorch(events, 1024.0, 3)


def test_pytorch_defaults():
    scaler = torch.amp.GradScaler("cpu")
    rule = PRESETS["pytorch"]
    assert rule.init_scale == scaler._init_scale
    assert rule.growth_factor == scaler.get_growth_factor()
    assert rule.backoff_factor == scaler.get_backoff_factor()
    assert rule.growth_interval == scaler.get_growth_interval()
    assert (rule.floor, rule.ceiling, rule.hysteresis) == (0.0, None, 1)


def test_pytorch_does_not_grow_beyond_fp32(scales):
    rule = DynamicLossScale(init_scale=2.0**126, growth_interval=1, floor=0.0, ceiling=None)
    assert scales(rule, [GOOD] * 3) == _pytorch([GOOD] * 3, 2.0**126, 1) == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


@pytest.mark.parametrize("shrink_after", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_paddle(scales, seed, shrink_after):
    events = _events(seed)
    rule = DynamicLossScale(2.0**16, growth_interval=4, floor=0.0, ceiling=None, hysteresis=shrink_after)
    assert rule.refill == PRESETS["paddle"].refill
    assert scales(rule, events) == _paddle(events, 2.0**16, 4, shrink_after)


@pytest.mark.parametrize("seed", range(2))
def test_mindspore(scales, seed):
    events = _events(seed) + [BAD] * 12
    rule = DynamicLossScale(2.0**8, growth_interval=3, floor=1.0, ceiling=None)
    result = scales(rule, events)
    assert result == _mindspore(events, 2.0**8, 3)
    assert result[-1] == 1.0
    assert (PRESETS["mindspore"].init_scale, PRESETS["mindspore"].floor) == (2.0**24, 1.0)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_deepspeed(scales, hysteresis, consecutive):
    events = _events(5, 80)
    refill = "good" if consecutive else "growth"
    rule = DynamicLossScale(
        2.0**12, growth_interval=4, floor=1.0, ceiling=None, hysteresis=hysteresis, refill=refill, delay=1
    )
    assert scales(rule, events) == _deepspeed(events, 2.0**12, 4, hysteresis, 1.0, consecutive)


def test_onnxamp_floor_and_ceiling(scales):
    rule = DynamicLossScale(init_scale=2.0, growth_interval=2, ceiling=8.0)
    events = [BAD, BAD, BAD] + [GOOD] * 10
    assert scales(rule, events) == [2, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 8]


def test_an_empty_window_is_no_window(scales):
    rule = DynamicLossScale(init_scale=8.0, growth_interval=3)
    events = [GOOD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD]
    mixed = [each for event in events for each in (EMPTY, event)]
    assert scales(rule, mixed)[2::2] == scales(rule, events)[1:]


def test_fixed_does_not_change(scales):
    assert scales(FixedLossScale(128.0), [BAD, GOOD, EMPTY]) == [128.0] * 4


@pytest.mark.parametrize(
    ("spec", "level", "dtype", "expected"),
    [
        ("auto", "O2", "fp16", DynamicLossScale()),
        ("auto", "OD", "fp16", DynamicLossScale()),
        ("auto", "O0", "fp16", FixedLossScale(1.0)),
        ("auto", "O3", "fp16", FixedLossScale(1.0)),
        ("auto", "O2", "bf16", FixedLossScale(1.0)),
        ("dynamic", "O0", "bf16", DynamicLossScale()),
        ("none", "O2", "fp16", FixedLossScale(1.0)),
        (None, "O2", "fp16", FixedLossScale(1.0)),
        ("1024", "O2", "fp16", FixedLossScale(1024.0)),
        (128, "O2", "fp16", FixedLossScale(128.0)),
        ("deepspeed", "O2", "fp16", PRESETS["deepspeed"]),
        ({"name": "dynamic", "init_scale": 4.0}, "O2", "fp16", DynamicLossScale(init_scale=4.0)),
    ],
)
def test_choice(spec, level, dtype, expected):
    scale = choices.loss_scale(spec, level, dtype)
    assert scale == expected
    assert choices.loss_scale(choices.to_json(scale), level, dtype) == expected


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DynamicLossScale(init_scale=0), "above 0"),
        (lambda: DynamicLossScale(growth_factor=1), "above 1"),
        (lambda: DynamicLossScale(backoff_factor=1), "between 0 and 1"),
        (lambda: DynamicLossScale(growth_interval=0), "at least 1"),
        (lambda: DynamicLossScale(refill="never"), "never"),
        (lambda: DynamicLossScale(init_scale=0.5), "between floor"),
        (lambda: DynamicLossScale.preset("apex"), "preset 'apex'"),
        (lambda: FixedLossScale(float("inf")), "above 0"),
        (lambda: choices.loss_scale("dynamc", "O2", "fp16"), "did you mean dynamic"),
        (lambda: choices.loss_scale(True, "O2", "fp16"), "neither True nor False"),
    ],
)
def test_bad_arguments(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()
