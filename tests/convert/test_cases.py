"""Small graphs that broke other converters, and real models, at every level and type."""

import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx.inliner
import pytest

import onnxamp
from onnxamp.conversion import mixed
from onnxamp.errors import UsageError
from onnxamp.model import io
from onnxamp.policy.plan import Options

FOLDER = pathlib.Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
_MODELS = pathlib.Path(__file__).parents[2] / "models"
# Not the conversions that README's command leaves there.
MODELS = sorted({*_MODELS.glob("*.onnx")} - {*_MODELS.glob("*.*.onnx")})
LEVELS = ("O1", "O2", "O3")
Run = Callable[[onnx.ModelProto, Mapping[str, object]], dict[str, object]]
TOLERANCE = {"fp16": 2e-2, "bf16": 1e-1}
FORCED = {"io": "low", "lower": "*", "target": "any"}


def feeds(name: str) -> dict[str, np.ndarray]:
    if name == "reducesum_100k":
        return {"x": np.random.default_rng(0).uniform(0.5, 1.5, (1, 100_000)).astype(np.float32)}
    return dict(np.load(FOLDER / f"{name}.npz"))


def convert(source: pathlib.Path, path: pathlib.Path, level: str, dtype: str, forced: bool) -> onnx.ModelProto:
    """Convert a file, check the result as its source, and read it back."""
    onnxamp.convert(source, level=level, dtype=dtype, **(FORCED if forced else {})).save(path)  # type: ignore[arg-type]
    onnx.checker.check_model(os.fspath(path), full_check=True)
    return onnx.load(path)


def test_the_cases_are_there() -> None:
    assert len(CASES) == 22
    assert len(MODELS) >= 5


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, tmp_path: pathlib.Path, judge: types.ModuleType, run_low: Run) -> None:
    source = FOLDER / f"{name}.onnx"
    inputs = feeds(name)
    original = onnx.load(source)
    expected = judge.run(original, inputs)
    heavy = np.zeros(2, int)
    for forced in (False, True):
        for level in LEVELS:
            for dtype in ("fp16", "bf16"):
                result = convert(source, tmp_path / f"{forced}{level}{dtype}.onnx", level, dtype, forced)
                before, after = judge.interface(original), judge.interface(result)
                assert [value.name for value in after] == [value.name for value in before]
                if not forced:
                    assert [judge.element(value.type) for value in after] == [
                        judge.element(value.type) for value in before
                    ]
                if dtype == "fp16":
                    run_low(result, inputs)
                    heavy += judge.heavy(result)
                loss = judge.error(expected, judge.evaluate(judge.strict(result), inputs))
                if not forced and level != "O3":
                    assert loss <= TOLERANCE[dtype], f"{level} {dtype}"
                    assert judge.purposeless(result, original) == []
    assert heavy[0] == heavy[1]  # every heavy node computes in 16 bits, and no case is left in fp32


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("level", ["O0", "OD", *LEVELS])
def test_models(path: pathlib.Path, level: str, tmp_path: pathlib.Path, judge: types.ModuleType) -> None:
    original = onnx.load(path)
    result = convert(path, tmp_path / "out.onnx", level, "fp16", False)
    low, total = judge.heavy(result)
    assert total > 0
    assert low == (0 if level == "O0" else total)
    if level in ("OD", "O1", "O2"):
        assert judge.purposeless(result, original) == []
    names = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    if level in ("O0", "OD", "O1"):  # weights stay fp32
        assert names == {tensor.name: tensor.data_type for tensor in original.graph.initializer}


def test_the_modelled_traffic_is_that_of_the_file(
    tmp_path: pathlib.Path, judge: types.ModuleType, counter: types.ModuleType
) -> None:
    """A counter that reads only the written file agrees with the model that chose the assignment, bodies included."""
    counted = bodies = costly = 0
    for path in (*MODELS, *(FOLDER / f"{name}.onnx" for name in CASES)):
        source = onnx.load(path)
        if path.parent == FOLDER:
            inputs = feeds(path.stem)
        else:
            for value in source.graph.input:
                for dim in value.type.tensor_type.shape.dim:
                    if not dim.HasField("dim_value"):
                        dim.dim_value = 2
            inputs = judge.zeros(source)
        source = onnx.inliner.inline_local_functions(source)
        shapes = counter.observe(source, inputs)
        sized, dims = counter.annotated(source, shapes)
        bodies += len(shapes) - 1
        for level in ("OD", *LEVELS):
            for dtype in ("fp16", "bf16"):
                result = onnxamp.convert(sized, level=level, dtype=dtype, dim=dims)
                result.save(tmp_path / "out.onnx", overwrite=True)
                moved = counter.moved_bytes(onnx.load(tmp_path / "out.onnx"), source, shapes)
                traffic = result.summary.traffic
                assert moved == traffic["result"], f"{path.stem} {level} {dtype}"
                counted += 1
                if level == "O2":
                    costly += dtype == "fp16" and traffic["result"] > traffic["source"]
                    # Only the Casts to and from the heavy nodes cost; what is free to choose never adds to that.
                    assert traffic["result"] <= traffic["source"] or traffic["cut"] <= least(sized, dtype, dims)
                    assert (traffic["result"] > traffic["source"]) == any("more bytes" in w for w in result.warnings)
                if dtype == "fp16":  # no opset is raised for it
                    assert counter.moved_bytes(source, source, shapes) == traffic["source"], path.stem
    assert counted >= 8 * (5 + 22)
    assert bodies >= 6
    assert costly == 3  # a single heavy node of a few bytes each


def least(source: onnx.ModelProto, dtype: str, dims: dict[str, int]) -> int:
    """Modelled traffic with heavy nodes alone in 16 bits."""
    options = Options(level="OD", dtype=dtype, dim=tuple(sorted(dims.items())), weights="convert")
    return mixed(io.load(source), options).summary.traffic["result"]


def test_level_0_changes_no_tensor() -> None:
    for path in (*MODELS, *(FOLDER / f"{name}.onnx" for name in CASES)):
        source = onnx.load(path)
        result = io.to_proto(onnxamp.convert(path, level="O0").model)
        assert [n.op_type for n in result.graph.node] == [n.op_type for n in source.graph.node]
        assert result.graph.initializer == source.graph.initializer
        assert result.graph.input == source.graph.input
        assert result.graph.output == source.graph.output


@pytest.mark.parametrize("level", ["O0", "OD", *LEVELS])
def test_converting_twice_gives_the_same_bytes(level: str, tmp_path: pathlib.Path) -> None:
    sources = [*MODELS, *(FOLDER / f"{name}.onnx" for name in CASES)]
    for number, source in enumerate(sources):
        once, twice = tmp_path / f"{number}.once.onnx", tmp_path / f"{number}.twice.onnx"
        first = onnxamp.convert(source, level=level)
        first.save(once)
        second = onnxamp.convert(once, level=level)
        second.save(twice)
        assert once.read_bytes() == twice.read_bytes()
        assert second.summary == first.summary
        again = onnxamp.convert(source, level=level)
        again.save(tmp_path / f"{number}.again.onnx")
        assert once.read_bytes() == (tmp_path / f"{number}.again.onnx").read_bytes()
    assert len(sources) >= 27


def test_bytes_do_not_depend_on_the_process(tmp_path: pathlib.Path) -> None:
    script = "import sys, onnxamp; [onnxamp.convert(p).save(f'{sys.argv[1]}/{i}') for i, p in enumerate(sys.argv[2:])]"
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        arguments = [sys.executable, "-c", script, os.fspath(folder), *map(os.fspath, MODELS)]
        subprocess.run(arguments, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    for number in range(len(MODELS)):
        assert (tmp_path / "1" / str(number)).read_bytes() == (tmp_path / "2" / str(number)).read_bytes()


OTHERS = [{"level": "O3"}, {"dtype": "bf16"}, {"io": "low"}, {"target": "any"}, {"keep_op": ("Conv",)}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_converted_model_is_not_converted_otherwise(other: dict[str, object]) -> None:
    result = onnxamp.convert(MODELS[0])
    with pytest.raises(UsageError, match=r"level O2, fp16.*convert the original, .*--to fp32"):
        onnxamp.convert(result.model, **other)  # type: ignore[arg-type]


def test_the_argument_is_not_changed() -> None:
    for path in MODELS:
        source = onnx.load(path)
        before = source.SerializeToString(deterministic=True)
        for level in LEVELS:
            onnxamp.convert(source, level=level)
            assert source.SerializeToString(deterministic=True) == before
