"""Every node test of onnx with fp32 tensors, converted as users do it and forced, judged without onnxamp's own checks."""

import dataclasses
import itertools
import os
import pathlib
import types
import warnings
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxamp

Run = Callable[[onnx.ModelProto, Mapping[str, object]], dict[str, object]]

LEVELS = ("O1", "O2", "O3")
DTYPES = ("fp16", "bf16")
TOLERANCE = {"fp16": 2e-2, "bf16": 1e-1}

# Results that a valid conversion cannot have, by the start of the test's name.
NOT_RUN = {
    "test_scatter_elements_with_duplicate_indices": "ONNX Runtime's CPU kernel reduces no fp16, which it says only when run",
    "test_scatter_elements_with_reduction": "the same",
    "test_scatternd_": "the same",
    "test_melweightmatrix": "ONNX Runtime runs it in fp32 and then misses that its attribute says fp16",
}
NOT_CLOSE = {
    "test_attention_4d_with_past_and_present_qk_matmul_bias": "an output holds fp32's lowest number where the mask is, which fp16 cannot",
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto
    feeds: dict[str, object]


def value(data: object) -> object:
    if isinstance(data, onnx.TensorProto):
        return numpy_helper.to_array(data)
    if isinstance(data, onnx.SequenceProto):
        return numpy_helper.to_list(data)
    if isinstance(data, onnx.OptionalProto):
        return numpy_helper.to_optional(data)
    return data if data is None or isinstance(data, list) else np.asarray(data)


def holds_floats(info: onnx.ValueInfoProto) -> bool:
    kind = info.type
    while (case := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, case).elem_type
    return bool(kind.tensor_type.elem_type == onnx.TensorProto.FLOAT)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    return [
        Case(
            case.name,
            case.model,
            {i.name: value(data) for i, data in zip(case.model.graph.input, case.data_sets[0][0], strict=False)},
        )
        for case in found
        if any(map(holds_floats, (*case.model.graph.input, *case.model.graph.output)))
    ]


def entry(name: str, table: dict[str, str]) -> str | None:
    return next((start for start in table if name.startswith(start)), None)


class Sweep:
    """Converts and judges cases; collects what is wrong, and how much was exercised."""

    def __init__(self, folder: pathlib.Path, judge: types.ModuleType, run_low: Run) -> None:
        self.folder = folder
        self.judge = judge
        self.run_low = run_low
        self.wrong: list[str] = []
        self.needed: set[str] = set()
        self.conversions = self.lowered = self.ran = self.compared = 0

    def convert(self, case: Case, level: str, dtype: str, **options: object) -> onnx.ModelProto | None:
        """The written file, checked; None if it is wrong."""
        label = f"{case.name} {level} {dtype}"
        path = self.folder / "out.onnx"
        try:
            result = onnxamp.convert(case.model, level=level, dtype=dtype, **options)  # type: ignore[arg-type]
            result.save(path, overwrite=True)
            if self.judge.valid(case.model):
                onnx.checker.check_model(os.fspath(path), full_check=True)
        except Exception as problem:
            self.wrong.append(f"{label}: {type(problem).__name__}: {' '.join(str(problem).split())[:200]}")
            return None
        self.conversions += 1
        self.lowered += sum(count for precision, count in result.summary.nodes.items() if precision != "fp32")
        written = onnx.load(path)
        before, after = self.judge.interface(case.model), self.judge.interface(written)
        if [v.name for v in before] != [v.name for v in after]:
            self.wrong.append(f"{label}: names of the interface changed")
        if "io" not in options and [v.type for v in before] != [v.type for v in after]:
            self.wrong.append(f"{label}: types of the interface changed")
        return written

    def run(self, case: Case, label: str, written: onnx.ModelProto) -> None:
        """Run a 16-bit file in the worker process, where ONNX Runtime has the kernels."""
        try:
            self.run_low(written, case.feeds)
            self.ran += 1
        except NotImplementedError:
            pass
        except Exception as problem:
            if start := entry(case.name, NOT_RUN):
                self.needed.add(start)
            else:
                self.wrong.append(f"{label}: does not run: {' '.join(str(problem).split())[:200]}")

    def compare(
        self, case: Case, label: str, written: onnx.ModelProto, expected: dict[str, object], tolerance: float
    ) -> None:
        """Compare under strict emulation, and look for 16-bit regions without purpose."""
        error = self.judge.error(expected, self.judge.evaluate(self.judge.strict(written), case.feeds))
        self.compared += 1
        if not error <= tolerance:
            if start := entry(case.name, NOT_CLOSE):
                self.needed.add(start)
            else:
                self.wrong.append(f"{label}: strict error {error:.3g}")
        if regions := self.judge.purposeless(written, case.model):
            self.wrong.append(f"{label}: 16-bit regions without purpose: {regions}")


def test_as_users_call_it(
    cases: list[Case], tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run, request: pytest.FixtureRequest
) -> None:
    sweep = Sweep(tmp_path, judge, run_low)
    combinations = list(itertools.product(LEVELS, DTYPES))
    for case in cases:
        every = request.config.getoption("--backend-all") or entry(case.name, NOT_CLOSE)
        chosen = combinations if every else [combinations[zlib.crc32(case.name.encode()) % 6]]
        try:
            expected = judge.run(case.model, case.feeds)
        except Exception:  # ONNX Runtime cannot run the source
            expected = None
        for level, dtype in chosen:
            written = sweep.convert(case, level, dtype)
            if written is None or expected is None:
                continue
            if dtype == "fp16":
                sweep.run(case, f"{case.name} {level} {dtype}", written)
            if level != "O3":
                sweep.compare(case, f"{case.name} {level} {dtype}", written, expected, TOLERANCE[dtype])
    print(
        f"{sweep.conversions} conversions, {sweep.lowered} nodes in 16 bits, {sweep.ran} ran, {sweep.compared} compared"
    )
    assert sweep.wrong == []
    assert set(NOT_CLOSE) - sweep.needed == set(), "these are close now: take them off the list"
    assert len(cases) >= 1400
    assert sweep.conversions >= len(cases)
    assert sweep.ran >= 500
    assert sweep.compared >= 700
    assert sweep.lowered >= 300


def test_forced(
    cases: list[Case], tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run, request: pytest.FixtureRequest
) -> None:
    sweep = Sweep(tmp_path, judge, run_low)
    for case in cases:
        every = request.config.getoption("--backend-all") or entry(case.name, NOT_RUN)
        chosen = DTYPES if every else [DTYPES[zlib.crc32(case.name.encode()) % 2]]
        for dtype in chosen:
            written = sweep.convert(case, "O2", dtype, io="low", lower="*", target="any")
            if written is not None and dtype == "fp16" and runs(case, judge):
                sweep.run(case, f"{case.name} forced {dtype}", written)
    print(f"{sweep.conversions} conversions, {sweep.lowered} nodes in 16 bits, {sweep.ran} ran")
    assert sweep.wrong == []
    assert set(NOT_RUN) - sweep.needed == set(), "these run now: take them off the list"
    assert sweep.lowered >= 3000
    assert sweep.ran >= 500


def runs(case: Case, judge: types.ModuleType) -> bool:
    try:
        judge.run(case.model, case.feeds)
    except Exception:
        return False
    return True
