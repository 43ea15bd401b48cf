"""Files that anyone may have written: each ends with the exit code that the docs promise and one line on stderr."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxamp
from onnxamp import cli

Run = Callable[..., tuple[int, str, str]]
HEADER = '<ir_version: 10, opset_import: ["": 17]> '
GRAPH = "g (float[2,4] x) => (float[2,4] y) { [mul] h = MatMul(x, w)  [cut] y = Relu(h) }"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> Run:
    """Run `onnxamp` with arguments in an empty folder; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onnxamp", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def model() -> onnx.ModelProto:
    proto = parser.parse_model(HEADER + GRAPH)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    return proto


def text(graph: str) -> bytes:
    return parser.parse_model(HEADER + graph).SerializeToString()


def truncated() -> bytes:
    return model().SerializeToString()[:-20]


def absurd_dimensions() -> bytes:
    proto = model()
    proto.graph.initializer[0].dims[:] = [1 << 62, 1 << 62]
    return proto.SerializeToString()


def external(**entries: object) -> Callable[[], bytes]:
    def make() -> bytes:
        proto = model()
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return proto.SerializeToString()

    return make


def recursive() -> bytes:
    body = [helper.make_node("Block", ["a"], ["b"], "again", domain="local")]
    function = helper.make_function("local", "Block", ["a"], ["b"], body, [helper.make_opsetid("local", 1)])
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Block", ["x"], ["y"], domain="local")], "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9).SerializeToString()


def future() -> bytes:
    proto = model()
    proto.opset_import[0].version = 1000
    return proto.SerializeToString()


FILES: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "truncated": (truncated, 3, "cut short"),
    "no protobuf": (lambda: b"<html>not found</html>", 3, ""),
    "empty": (lambda: b"", 3, "no graph"),
    "external data missing": (external(location="none.bin"), 3, "missing"),
    "external data short": (external(location="w.bin", offset=60), 3, "w.bin"),
    "external data outside": (external(location="../../etc/passwd"), 3, "outside"),
    "absurd dimensions": (absurd_dimensions, 3, "'w'"),
    "cycle": (lambda: text("g (float x) => (float y) { a = Add(x, b)  b = Relu(a)  y = Neg(b) }"), 3, "cycle"),
    "defined twice": (lambda: text("g (float x) => (float y) { y = Neg(x)  y = Relu(x) }"), 3, "twice"),
    "unknown domain": (lambda: text("g (float x) => (float y) { y = my.Op(x) }"), 3, "'my'"),
    "future opset": (future, 4, "1000"),
    "recursive function": (recursive, 4, "function"),
}


@pytest.mark.parametrize("name", FILES)
def test_broken_models(name: str, run: Run) -> None:
    make, code, words = FILES[name]
    pathlib.Path("w.bin").write_bytes(bytes(64))
    pathlib.Path("bad.onnx").write_bytes(make())
    commands = [["convert", "bad.onnx"], ["explain", "bad.onnx", "y"], ["emulate", "bad.onnx", "-o", "twin.onnx"]]
    if name != "recursive function":  # which `inspect` can describe
        commands += [["inspect", "bad.onnx"], ["diff", "bad.onnx", "bad.onnx"]]
    for arguments in commands:
        found, _, err = run(*arguments)
        assert (arguments[0], found) == (arguments[0], code)
        assert err.startswith("Error: ")
        assert err.count("\n") == 1
        assert words in err
    assert sorted(path.name for path in pathlib.Path().iterdir()) == ["bad.onnx", "w.bin"]


def test_the_table_breaks_a_good_file(run: Run) -> None:
    onnx.save(model(), "good.onnx")
    assert run("convert", "good.onnx")[0] == 0
    code, _, err = run("convert", "good.O2.fp16.onnx", "--level", "O1")
    assert code == 2
    assert "already converted" in err
    assert err.count("\n") == 1
    assert run("convert", "none.onnx")[0] == 2


BAD_NOTES = ["", "{", "null", "[]", '"text"', "[" * 100_000, '{"a": NaN}']
NODE_KEYS = ["precision", "code", "evidence", "operands", "cast", "source"]
MODEL_KEYS = ["version", "level", "dtype", "target", "summary"]
BAD_SUMMARIES = ["{}", '{"nodes": 1}', '{"nodes": {}, "more": 1}']


def set_note(entries: object, key: str, value: str | None) -> None:
    """Write one entry of the metadata anew; remove it where `value` is None."""
    others = [(entry.key, entry.value) for entry in entries if entry.key != f"onnxamp.{key}"]  # type: ignore[attr-defined]
    del entries[:]  # type: ignore[attr-defined]
    for name, content in [*others, *([] if value is None else [(f"onnxamp.{key}", value)])]:
        entries.add(key=name, value=content)  # type: ignore[attr-defined]


def test_notes_that_someone_changed(run: Run) -> None:
    """Nothing that stands in the metadata is a defect of onnxamp (exit code 70), whatever reads it."""
    onnx.save(model(), "source.onnx")
    onnxamp.convert("source.onnx").save("low.onnx")
    written = onnx.load("low.onnx")
    cases = [("node", key, value) for key in NODE_KEYS for value in (None, *BAD_NOTES)]
    cases += [("model", key, value) for key in MODEL_KEYS for value in (None, *BAD_NOTES)]
    whole = {entry.key: entry.value for entry in written.metadata_props}["onnxamp.summary"]
    fields = json.loads(whole)
    odd = [{**fields, name: value} for name in fields for value in (None, 1, {"a": {}}, [1], {"a": {"clamped": "x"}})]
    cases += [("model", "summary", value) for value in (*BAD_SUMMARIES, *map(json.dumps, odd))]
    refused = 0
    for place, key, value in cases:
        bad = onnx.ModelProto.FromString(written.SerializeToString())
        for entries in [bad.metadata_props] if place == "model" else [node.metadata_props for node in bad.graph.node]:
            set_note(entries, key, value)
        onnx.save(bad, "bad.onnx")
        for arguments in (
            ["convert", "bad.onnx", "--force", "-o", "again.onnx"],
            ["explain", "bad.onnx", "mul"],
            ["inspect", "bad.onnx", "--json"],
        ):
            code, _, err = run(*arguments)
            assert code in (0, 3), (place, key, value and value[:40], arguments, err)
            assert err.count("\n") == (code != 0)
            refused += code == 3
    assert len(cases) >= 100
    assert refused >= 30
    assert run("diff", "source.onnx", "bad.onnx")[0] in (0, 1)


def test_a_missing_summary_is_told(run: Run) -> None:
    onnx.save(model(), "source.onnx")
    onnxamp.convert("source.onnx").save("low.onnx")
    bad = onnx.load("low.onnx")
    set_note(bad.metadata_props, "summary", None)
    onnx.save(bad, "bad.onnx")
    code, _, err = run("convert", "bad.onnx", "-o", "again.onnx")
    assert (code, "onnxamp.summary" in err) == (3, True)
