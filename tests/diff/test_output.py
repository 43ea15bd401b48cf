"""Text, Markdown, JSON and the command."""

from __future__ import annotations

import json
import pathlib
from importlib import resources
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from onnxamp import convert, diff
from onnxamp.commands.diff import command
from onnxamp.comparison.records import Island, NodeRef
from onnxamp.comparison.schema import schema
from onnxamp.comparison.text import island_rows, size, to_markdown, to_text, verdict
from onnxamp.errors import AmpError

GPT = pathlib.Path(__file__).parents[2] / "models" / "gpt.onnx"
HOSTILE = '<img src=x onerror="alert(1)"> | `a` \x1b[31m\n# *b* </script>'


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("diff") / "gpt.O2.fp16.onnx"
    convert(GPT, target="any").save(path)
    return path


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(a) for a in args], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value or 0, result.stdout


def conforms(value: Any, kind: dict[str, Any], root: dict[str, Any]) -> bool:
    """The part of JSON Schema that the schema uses."""
    if "$ref" in kind:
        return conforms(value, root["$defs"][kind["$ref"].rsplit("/", 1)[1]], root)
    if "const" in kind:
        return value == kind["const"]
    if "enum" in kind:
        return value in kind["enum"]
    if "anyOf" in kind:
        return any(conforms(value, each, root) for each in kind["anyOf"])
    simple = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    if kind["type"] in simple:
        return isinstance(value, simple[kind["type"]]) and (kind["type"] == "boolean") == isinstance(value, bool)
    if kind["type"] == "array":
        if "prefixItems" in kind:
            return len(value) == len(kind["prefixItems"]) and all(
                map(lambda v, k: conforms(v, k, root), value, kind["prefixItems"])
            )
        return isinstance(value, list) and all(conforms(v, kind["items"], root) for v in value)
    if not isinstance(value, dict) or "properties" not in kind:
        return isinstance(value, dict)
    return set(value) == set(kind["required"]) and all(
        conforms(v, kind["properties"][k], root) for k, v in value.items()
    )


def test_the_schema_is_that_of_the_records() -> None:
    text = resources.files("onnxamp.comparison").joinpath("schema.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(schema()))


def test_json_conforms_to_the_schema(low: pathlib.Path) -> None:
    code, text = run(GPT, low, "--json")
    data = json.loads(text)
    assert code == 0
    assert conforms(data, schema(), schema())
    assert len(data["retyped"]) > 40
    assert data["others"] == 0
    assert not conforms({**data, "extra": 1}, schema(), schema())
    assert not conforms({**data, "matched": "1"}, schema(), schema())
    for only in ("casts", "islands", "constants", "nodes"):
        part = json.loads(run(GPT, low, "--json", "--only", only)[1])
        assert conforms(part, schema(), schema())
        lists = {k for k in ("retyped", "casts", "islands", "constants") if part[k]}
        assert lists == ({"retyped"} if only == "nodes" else {only})


def test_text(low: pathlib.Path) -> None:
    _, text = run(GPT, low)
    first, *rest = text.splitlines()
    assert first.startswith("gpt.onnx → gpt.O2.fp16.onnx: ")
    assert first.endswith("nothing else.")
    assert "fp32 islands" in text
    assert "AMP" in text
    assert "more (--all lists them)" in text
    assert max(map(len, rest)) < 400
    assert "more (--all" not in run(GPT, low, "--all")[1]
    assert run(GPT, GPT)[1] == "gpt.onnx and gpt.onnx are the same.\n"


def test_exit_code(low: pathlib.Path) -> None:
    assert run(GPT, low, "--exit-code")[0] == 1
    assert run(GPT, GPT, "--exit-code")[0] == 0
    assert run(GPT, low)[0] == 0


def test_files(low: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name, start in (("d.json", "{"), ("d.md", "**gpt"), ("d.html", "<!DOCTYPE html>"), ("d.txt", "gpt.onnx")):
        target = tmp_path / name
        run(GPT, low, "-o", target)
        assert target.read_text().startswith(start)
    with pytest.raises(AmpError, match=r"d\.json exists") as info:
        run(GPT, low, "-o", tmp_path / "d.json")
    assert info.value.exit_code == 2
    run(GPT, low, "-o", tmp_path / "d.json", "--force")


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (["--format", "html"], 2, "-o FILE.html"),
        (["--json", "--format", "text"], 2, "exclude each other"),
        (["--format", "html", "--only", "casts", "-o", "x.html"], 2, "--only"),
        (["-o", "/no/such/folder/d.txt"], 2, "no folder"),
        (["--data", "no.npz"], 2, "no.npz"),
    ],
)
def test_bad_arguments(args: list[str], exit_code: int, words: str) -> None:
    with pytest.raises(AmpError, match=words) as info:
        run(GPT, GPT, *args)
    assert info.value.exit_code == exit_code


def test_bad_files(tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x09\xff\xff\xff")
    with pytest.raises(AmpError) as info:
        run(GPT, broken)
    assert info.value.exit_code == 3
    with pytest.raises(AmpError) as info:
        run(GPT, tmp_path / "none.onnx")
    assert info.value.exit_code == 2


def test_data(low: pathlib.Path, tmp_path: pathlib.Path) -> None:
    inputs = {i.name: i for i in onnx.load(GPT).graph.input}
    assert set(inputs) == {"ids", "mask"}
    np.savez(tmp_path / "d.npz", ids=np.arange(16).reshape(2, 8) % 64, mask=np.ones((2, 8), np.int64))
    _, text = run(GPT, low, "--data", tmp_path / "d.npz", "--json")
    data = json.loads(text)
    assert conforms(data, schema(), schema())
    values = data["numbers"]["values"]
    assert len(values) > 40
    assert all(v["snr"] is None or v["snr"] > 40 for v in values)
    _, text = run(GPT, low, "--data", tmp_path / "d.npz")
    assert "Numbers, worst first" in text
    assert sum(v["clamped"] for v in values) > 0


def hostile(op: str) -> onnx.ModelProto:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [HOSTILE]) for n in ("x", "y")]
    node = helper.make_node(op, ["x"], ["y"], HOSTILE, doc_string=HOSTILE + op)
    node.metadata_props.add(key="onnxamp.code", value=HOSTILE)
    node.metadata_props.add(key="onnxamp.evidence", value='{"a": NaN, "' + "b" + '": "<b>"}')
    return helper.make_model(
        helper.make_graph([node], HOSTILE + op, info[:1], info[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )


def test_names_are_text_everywhere() -> None:
    result = diff(hostile("Relu"), hostile("Tanh"))
    assert result.others == 3
    text = to_text(result)
    assert "\x1b" not in text
    for line in to_markdown(result).splitlines():
        assert "<img" not in line
        assert not line.startswith("# ")
    rows = [line for line in to_markdown(result).splitlines() if line.startswith("|") and "onerror" in line]
    assert rows
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
    json.dumps(result.to_json(), allow_nan=False)


def test_sizes_as_text() -> None:
    cases = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        482404: "482 kB",
        999_700: "1 MB",
        10**7: "10 MB",
        3 * 10**12: "3 TB",
    }
    assert {count: size(count) for count in cases} == cases
    assert size(None) == "?"
    assert size(48, assumed=True) == "~48 B"


def test_verdict_names_models_in_memory() -> None:
    model = onnx.load(GPT)
    assert verdict(diff(model, model)) == "the first model and the second model are the same."


def test_advice_on_a_code_stands_once() -> None:
    """In the order of the islands; later ones refer to the first."""

    def island(node: str) -> Island:
        ref = NodeRef("", 0, node, "Exp")
        return Island("added", ref, (ref,), (), (), 0, (("AMP101", 1),), (f"AMP101 ({node}): Keep it.",))

    rows = island_rows([island("a"), island("b")])
    assert [row[-1] for row in rows] == ["AMP101 (a): Keep it.", "AMP101 (b): as for the island of a"]
