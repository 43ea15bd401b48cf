"""A bundle written by hand, so that the trainer is tested apart from everything that makes bundles, and a trainer that only counts, so
that the loop is tested apart from the trainer."""

import dataclasses
import io
import json
import math
import re
import types
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onnxamp.trainer.cause import Cause
from onnxamp.trainer.collective import SingleProcess
from onnxamp.trainer.data import Field
from onnxamp.training import steps
from onnxamp.training.bundle import Bundle
from onnxamp.training.groups import DEFAULT
from onnxamp.training.layout import Parameter, make_layout
from onnxamp.training.manifest import GraphPorts, Labels, Manifest, Port
from onnxamp.training.optimizers import SGD, Adam
from onnxamp.training.scaler import DynamicLossScale
from onnxamp.training.schedules import Constant

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

# y = x·w + b, loss = Σ rows·(y − labels)², summed over a row's two outputs; the gradients are written out.
FORWARD = """
    p = MatMul(x, w)
    y = Add(p, b)
    e = Sub(y, labels)
    s = Mul(e, e)
    rows = Cast<to=1>(ids)
    one = Mul(rows, zero)
    ones = Add(one, unit)
    each = Mul(ones, weights)
    column = Unsqueeze(each, axis1)
    ws = Mul(s, column)
    total = ReduceSum<keepdims=0>(ws)
    weight = ReduceSum<keepdims=0>(each)
"""
BACKWARD = """
    factor = Div(amp_loss_scale, amp_seed_divisor)
    two = Mul(factor, doubled)
    ge = Mul(e, column)
    gy = Mul(ge, two)
    xt = Transpose<perm=[1, 0]>(x)
    gw = MatMul(xt, gy)
    gb = ReduceSum<keepdims=0>(gy, axis0)
    aw = Add(acc_w, gw)
    acc_out_w = Where(amp_first, gw, aw)
    ab = Add(acc_b, gb)
    acc_out_b = Where(amp_first, gb, ab)
    n = ReduceSum<keepdims=0>(ones)
    finite = LessOrEqual(total, largest)
    bad = Where(finite, zero, unit)
    w1 = Reshape(weight, flat)
    l1 = Reshape(total, flat)
    n1 = Reshape(n, flat)
    b1 = Reshape(bad, flat)
    sums = Concat<axis=0>(w1, l1, n1, unit1, b1, rest)
    added = Add(amp_window, sums)
    amp_window_out = Where(amp_first, sums, added)
    safe = Max(weight, tiny)
    amp_loss = Div(total, safe)
"""
CONSTANTS = {
    "zero": np.array(0, np.float32),
    "unit": np.array(1, np.float32),
    "unit1": np.array([1], np.float32),
    "doubled": np.array(2, np.float32),
    "largest": np.array(3.4e38, np.float32),
    "tiny": np.array(1e-30, np.float32),
    "rest": np.zeros(11, np.float32),
    "axis0": np.array([0]),
    "axis1": np.array([1]),
    "flat": np.array([1]),
}
DATA = (
    Port("x", "float32", ("n", 3), "data"),
    Port("ids", "int64", ("n",), "data"),
    Port("labels", "float32", ("n", 2), "labels"),
    Port("weights", "float32", ("n",), "weights"),
)
PARAMETERS = (
    Port("w", "float32", (3, 2), "tensor", "master/w"),
    Port("b", "float32", (2,), "tensor", "master/b"),
)


def _model(inputs: str, outputs: str, body: str, constants=CONSTANTS) -> ir.Model:
    proto = onnx.parser.parse_model(f"{HEAD}g ({inputs}) => ({outputs}) {{\n{body}\n}}")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = re.sub("^(acc_out|acc)_", r"\1/", (value.name or "").replace("amp_", "amp."))
    return model


def make_bundle(optimizer=None, scale=None, *, unsafe: bool = False) -> Bundle:
    """The bundle; `unsafe` plants a reader of an accumulator that may run after it is overwritten."""
    optimizer = optimizer or SGD(lr=0.05, momentum=0.9)
    scale = scale or DynamicLossScale()
    recipe = steps.Recipe(optimizer, Constant(), scale, decays=False)
    layout = make_layout(
        [Parameter("w", (3, 2), DEFAULT, False), Parameter("b", (2,), DEFAULT, False)],
        (),
        groups=[DEFAULT],
        moments=optimizer.moments,
        weight_decay=0.0,
        low=None,
        ema=False,
        stored_low=False,
    )
    batch = "float[n,3] x, int64[n] ids, float[n,2] labels, float[k] weights, float[3,2] w, float[2] b"
    state = "float[3,2] acc_w, float[2] acc_b, float[16] amp_window, float amp_loss_scale, float amp_seed_divisor"
    results = "float[3,2] acc_out_w, float[2] acc_out_b, float[16] amp_window_out, float amp_loss"
    backward = BACKWARD
    if unsafe:
        # The old accumulator is read again after the new one was written: its memory must not be shared.
        backward = backward.replace("amp_loss = Div(total, safe)", "")
        backward += "k0 = Sub(acc_out_w, acc_w)\nk1 = ReduceSum<keepdims=0>(k0)\nk2 = Mul(k1, zero)\n"
        backward += (
            "k3 = Div(total, safe)\nk4 = ReduceSum<keepdims=0>(acc_w)\nk5 = Add(k3, k4)\namp_loss = Add(k5, k2)\n"
        )
    grad = _model(f"{batch}, {state}, bool amp_first", results, FORWARD + backward)
    evaluate = _model(
        batch, "float[n,2] y, float amp_loss_sum, float amp_weight_sum",
        FORWARD + "amp_loss_sum = Identity(total)\namp_weight_sum = Identity(weight)",
    )  # fmt: skip
    reduce, reduce_ports = steps.reduce_graph(recipe, layout)
    update, update_ports = steps.update_graph(recipe, reduce_ports)
    graphs = {
        "grad": GraphPorts(
            "grad.onnx",
            (
                *DATA,
                *PARAMETERS,
                Port("acc/w", "float32", (3, 2), "tensor", "gradient/w"),
                Port("acc/b", "float32", (2,), "tensor", "gradient/b"),
                Port("amp.window", "float32", (16,), "tensor", "window/window"),
                Port("amp.loss_scale", "float32", (), "tensor", "scalars/loss_scale"),
                Port("amp.seed_divisor", "float32", (), "tensor", "scalars/seed_divisor"),
                Port("amp.first", "bool", (), "host", "first"),
            ),
            (
                Port("acc_out/w", "float32", (3, 2), "tensor", "gradient/w", "acc/w"),
                Port("acc_out/b", "float32", (2,), "tensor", "gradient/b", "acc/b"),
                Port("amp.window_out", "float32", (16,), "tensor", "window/window", "amp.window"),
                Port("amp.loss", "float32", (), "result", "loss"),
            ),
        ),
        "reduce": reduce_ports,
        "update": update_ports,
        "eval": GraphPorts(
            "eval.onnx",
            (*DATA, *PARAMETERS),
            (
                Port("y", "float32", ("n", 2), "output"),
                Port("amp.loss_sum", "float32", (), "result", "loss_sum"),
                Port("amp.weight_sum", "float32", (), "result", "weight_sum"),
            ),
        ),
    }
    manifest = Manifest(
        level="O0",
        dtype="fp16",
        graphs=graphs,
        arenas=layout.arenas,
        tensors=layout.tensors,
        segments=tuple(dataclasses.replace(s, scalars={"lr_factor": 1.0}) for s in layout.segments),
        labels=(Labels("float32", ("n", 2)),),
        rows="x",
        limits={"floor": scale.lowest, "patience": 50},
    )
    rng = np.random.default_rng(1)
    values = {
        "master/w": rng.standard_normal((3, 2), np.float32),
        "master/b": np.zeros(2, np.float32),
        "scalars/loss_scale": np.array(scale.initial[0], np.float32),
        "counters/growth_tracker": np.array(scale.initial[1], np.int64),
        "counters/hysteresis": np.array(scale.initial[2], np.int64),
    }
    weights = {name: values[f"master/{name}"] for name in "wb"}
    user = _model("float[n,3] x", "float[n,2] y", "p = MatMul(x, w)\ny = Add(p, b)", weights)
    models = {"grad": grad, "reduce": reduce, "update": update, "eval": evaluate}
    return Bundle(models, values, manifest, user)


@pytest.fixture
def bundle() -> Bundle:
    """SGD with momentum and a dynamic loss scale."""
    return make_bundle()


@pytest.fixture
def bundle_maker():
    """`make_bundle`, for tests that need another optimizer, scale or a planted defect."""
    return make_bundle


@pytest.fixture
def adam() -> Bundle:
    """Adam with a dynamic loss scale."""
    return make_bundle(Adam(lr=0.01))


@pytest.fixture
def batches():
    """Twelve micro-batches of different sizes, with weights."""
    rng = np.random.default_rng(2)
    result = []
    for size in (4, 7, 1, 5, 4, 4, 3, 8, 2, 6, 4, 4):
        x = rng.standard_normal((size, 3), np.float32)
        result.append(
            {
                "x": x,
                "ids": np.arange(size),
                "labels": (x @ np.array([[1, -2], [0.5, 0], [3, 1]], np.float32) + 0.25).astype(np.float32),
                "weights": rng.uniform(0.5, 2, size).astype(np.float32),
            }
        )
    return result


def _export(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    buffer = io.BytesIO()
    names = list(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(torch.from_numpy(value) for value in inputs.values()),
            buffer,
            input_names=names,
            output_names=["y"],
            dynamo=False,
            opset_version=17,
            dynamic_axes={name: {0: "batch"} for name in names},
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    return onnx.load_from_string(buffer.getvalue())


@pytest.fixture(scope="session")
def exporter():
    """Exports a PyTorch module in training form, with a free batch size."""
    return _export


class Counter:
    """A trainer in outline: its state is the list of the rows of every applied window."""

    fields = (
        Field("x", np.dtype(np.float32), ("batch", 1)),
        Field("labels", np.dtype(np.int64), ("batch",)),
        Field("weights", np.dtype(np.float32), ("batch",)),
    )

    metric_options: dict = {}  # noqa: RUF012
    collective = SingleProcess()

    def __init__(self, accumulate: int = 1, bad: tuple[int, ...] = ()) -> None:
        self.accumulate = accumulate
        self.bad = bad
        self.position: dict = {}
        self.seen: list[list[int]] = []
        self.window: list[list[int]] = []
        self.windows = 0
        self.scale = 65536.0

    def checked(self, batch, locate=None):
        return batch

    def micro_step(self, batch):
        self.window.append(batch["labels"].tolist())
        return self.flush() if len(self.window) == self.accumulate else _result(None)

    def flush(self):
        if not self.window:
            return None
        ok = self.windows not in self.bad
        if ok:
            self.seen += self.window
        scale, self.scale = self.scale, self.scale * (1 if ok else 0.5)
        rows = sum(map(len, self.window))
        self.window = []
        self.windows += 1
        report = {
            "loss": 1 / self.windows if ok else math.nan,
            "ok": ok,
            "empty": False,
            "found_inf": not ok,
            "dropped": 0,
            "rows": rows,
            "weight_sum": rows,
            "learning_rate": 0.1,
            "gradient_norm": 1.0 if ok else math.inf,
            "loss_scale": scale,
            "next_loss_scale": self.scale,
        }
        return _result(report, None if ok else Cause("overflow", "a gradient overflowed"))

    def nonfinite_gradients(self):
        return ["conv.weight", "fc.weight"]

    def evaluate(self, data, metrics=()):
        rows = sum(len(batch["labels"]) for batch in data)
        return {"loss": 1 / (1 + len(self.seen)), "rows": rows}

    def save(self, path):
        Path(path).write_text(json.dumps([self.position, self.seen, self.window, self.windows, self.scale]))

    @classmethod
    def load(cls, path, accumulate=1):
        trainer = cls(accumulate)
        trainer.position, trainer.seen, trainer.window, trainer.windows, trainer.scale = json.loads(path.read_text())
        return trainer


def _result(report, cause=None):
    return types.SimpleNamespace(report=report, cause=cause)


@pytest.fixture(scope="session")
def counter():
    """A trainer for the loop alone, as a class."""
    return Counter
